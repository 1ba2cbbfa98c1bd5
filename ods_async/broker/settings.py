"""From the user's settings to those that the broker's rules need."""

from __future__ import annotations

from collections.abc import Sequence

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.requests import Limits
from ods_async.core.settings import BrokerSettings
from ods_async.version import __version__
from ods_async.wire.messages import PROTOCOL

__all__ = ["settings_of"]

# What every client and worker is told; nothing that is secret, and nothing large.
_TOLD = (
    "name",
    "buffer_size",
    "include_provenance",
    "state_dim",
    "action_dim",
    "action_semantics",
    "refill_policy",
    "refill_threshold",
    "max_generation_attempts",
    "language_buffer_bytes",
    "episode_sample_budget",
    "episode_sample_hard_limit",
    "samples_per_insert",
    "shutdown_timeout",
)


def settings_of(cfg: OnlineDataEngineCfg, supervised: Sequence[str] = ()) -> BrokerSettings:
    """The broker's settings.

    Args:
        cfg: the user's. A ``worker_failure`` of None means ``tolerate``, as for a standing broker.
        supervised: names of the workers whose processes someone watches.
    """
    described: dict[str, object] = {name: getattr(cfg, name) for name in _TOLD}
    described |= {"max_episode_steps": cfg.steps, "num_envs": cfg.num_envs}
    if "id" in cfg.gym_config:
        described["environment"] = str(cfg.gym_config["id"])
    return BrokerSettings(
        buffer_size=cfg.buffer_size,
        max_episode_steps=cfg.steps,
        num_envs=cfg.num_envs,
        spare_rows=cfg.spare,
        refill_policy=cfg.refill_policy,
        refill_threshold=cfg.refill_threshold,
        samples_per_insert=cfg.samples_per_insert,
        max_generation_attempts=cfg.max_generation_attempts,
        language_buffer_bytes=cfg.language_buffer_bytes,
        include_provenance=cfg.include_provenance,
        episode_sample_budget=cfg.episode_sample_budget,
        episode_sample_hard_limit=cfg.episode_sample_hard_limit,
        lifecycle_event_capacity=cfg.lifecycle_event_capacity,
        worker_failure=cfg.worker_failure or "tolerate",
        max_worker_restarts=cfg.max_worker_restarts,
        supervised=tuple(supervised),
        lease_seconds=cfg.lease_seconds,
        ticket_start_timeout=cfg.ticket_start_timeout,
        ticket_finish_timeout=cfg.ticket_finish_timeout,
        heartbeat_interval=cfg.heartbeat_interval,
        heartbeat_timeout=cfg.heartbeat_timeout,
        event_history=cfg.event_history,
        server_version=__version__,
        protocol=PROTOCOL,
        limits=Limits(**cfg.limits),
        described=described,
    )
