"""The settings that the broker's rules need, already validated (see ``config``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ods_async.core.requests import Limits

__all__ = ["BrokerSettings"]


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Everything :class:`~ods_async.core.broker_state.BrokerState` decides by. Times are in seconds.

    ``supervised`` names the workers whose processes someone watches and reports with ``ReportExit``: their silence is
    no death. ``max_worker_restarts`` is what that someone will do after a failure.
    """

    buffer_size: int = 16
    max_episode_steps: int = 300
    num_envs: int = 1
    spare_rows: int = 2
    refill_policy: str = "sample_threshold"
    refill_threshold: int = 50
    samples_per_insert: float | None = None
    max_generation_attempts: int = 3
    language_buffer_bytes: int = 1024 * 1024
    include_provenance: bool = False
    episode_sample_budget: int | None = None
    episode_sample_hard_limit: int | None = None
    lifecycle_event_capacity: int = 0
    worker_failure: str = "tolerate"
    max_worker_restarts: int = 0
    supervised: tuple[str, ...] = ()
    lease_seconds: float = 5.0
    ticket_start_timeout: float = 2.0
    ticket_finish_timeout: float = 600.0
    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 5.0
    event_history: int = 8192
    server_version: str = ""
    protocol: int = 1
    limits: Limits = field(default_factory=Limits)
    described: dict[str, object] = field(default_factory=dict)
    """What :class:`~ods_async.core.requests.Welcome` tells every client about the configuration."""

    @property
    def rollouts_per_generation(self) -> int:
        """Rollouts that turn the whole buffer over once."""
        return math.ceil(self.buffer_size / self.num_envs)

    @property
    def rows(self) -> int:
        """Physical rows: one a slot, and the spare ones that new episodes are written into."""
        return self.buffer_size + self.spare_rows
