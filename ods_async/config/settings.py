"""Every setting of the service in one place: its default, its rule, and where it may come from (B1–B5).

A configuration is a value. It is checked when it is made, before any process, socket or segment exists; it travels to
the broker and to local workers as JSON, so that what it holds must be plain data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from ods_async.config.files import read_settings
from ods_async.config.rules import RULES, bad, check_together, plain_copy, refuse_unknown
from ods_async.errors import ConfigError

__all__ = ["OnlineDataEngineCfg"]


@dataclass(frozen=True)
class OnlineDataEngineCfg:
    """Settings of a broker, its buffer and its workers.

    Attributes:
        buffer_size: episodes kept at once (slots).
        max_episode_steps: steps a row can hold, unless ``gym_config["max_episode_steps"]`` says otherwise (B2).
        state_dim: width of the state, or None to take the environment's (B4).
        action_dim: width of the recorded action, or None to take the environment's (B4).
        buffer_device: always ``"cpu"``; a consumer's ``device=`` moves batches (B5).
        gym_config: which environment to make: ``id``, ``num_envs``, ``kwargs``, ``max_episode_steps``, ``policy``
            ("module:attribute"), ``policy_kwargs``, ``tasks``, ``instruction``, ``accept``, ``vectorization``,
            ``imports``, ``next_obs``, ``allow_nonfinite`` (see ``worker.environments``). Plain data only.
        action_config: further keyword arguments of the environment that describe its actions. Plain data only.
        refill_threshold: windows drawn per slot before ``sample_threshold`` asks for the next generation.
        refill_policy: ``sample_threshold``, ``manual`` or ``continuous``.
        max_generation_attempts: tries per rollout before the worker fails.
        initialization_timeout: seconds that the first generation may take.
        shutdown_timeout: seconds that workers have to end by themselves before they are ended by force.
        language_buffer_bytes: UTF-8 bytes of all task and subtask texts of a run.
        include_provenance: stamp run, episode, generation and times on every step.
        episode_sample_budget: windows that may be delivered of each episode, or None.
        episode_sample_hard_limit: the ceiling of that budget; given together with it.
        lifecycle_event_capacity: records the owner's log holds, 0 for no log.
        action_semantics: ``expert_controller_command`` or ``policy_request``.
        action_contracts: ordered contract ids, for ``policy_request`` only.
        num_workers: worker processes on this machine.
        max_worker_restarts: how often each local worker is started anew after a failure.
        worker_failure: ``fail``, ``tolerate``, or None: ``fail`` for an engine, ``tolerate`` for a standing broker.
        endpoint: where consumers connect (``tcp://host:port`` or ``ipc://path``), or None for a private ipc socket.
        extra_endpoints: further addresses that answer as well.
        allow_insecure_bind: bind beyond this machine although nothing is encrypted or authenticated.
        server_keys: path of the broker's CURVE key file, or of the folder that ``ods-async keygen`` made: what comes
            by tcp is encrypted then, and only listed clients are served.
        allowed_clients: folder of those clients' public keys, or None: ``clients`` beside the key file.
        client_keys: path of a client's key file or of its folder, for a worker that connects by tcp.
        shared_memory: ``auto``, ``on`` (refuse to start without) or ``off``.
        spare_rows: rows beside the slots for episodes being written, or None: ``max(2 * num_envs, 2)``.
        lease_seconds: how long a consumer may take to copy a planned batch.
        ticket_start_timeout: seconds after which an order that no worker began is given to another.
        ticket_finish_timeout: seconds after which an order that was begun is given to another.
        heartbeat_interval: seconds between two signs of life.
        heartbeat_timeout: seconds of silence after which a peer counts as stalled.
        event_history: events the broker keeps for replay.
        seed: seed of the broker's draws and of the workers' episodes, or None.
        samples_per_insert: windows drawn per episode published, for ``continuous``; None: no bound.
        limits: what the broker takes from its peers, by the names of ``DEFAULT_LIMITS``; others keep their default.
        name: name of the service, part of its default address.

    Raises:
        ConfigError: a bad value; the message has the field, the value and the rule.
    """

    buffer_size: int = 16
    max_episode_steps: int = 300
    state_dim: int | None = None
    action_dim: int | None = None
    buffer_device: str = "cpu"
    gym_config: dict[str, Any] = field(default_factory=dict)
    action_config: dict[str, Any] = field(default_factory=dict)
    refill_threshold: int = 50
    refill_policy: Literal["sample_threshold", "manual", "continuous"] = "sample_threshold"
    max_generation_attempts: int = 3
    initialization_timeout: float = 300.0
    shutdown_timeout: float = 5.0
    language_buffer_bytes: int = 1024 * 1024
    include_provenance: bool = False
    episode_sample_budget: int | None = None
    episode_sample_hard_limit: int | None = None
    lifecycle_event_capacity: int = 0
    action_semantics: Literal["expert_controller_command", "policy_request"] = "expert_controller_command"
    action_contracts: tuple[str, ...] | None = None
    num_workers: int = 1
    max_worker_restarts: int = 0
    worker_failure: Literal["fail", "tolerate"] | None = None
    endpoint: str | None = None
    extra_endpoints: tuple[str, ...] = ()
    allow_insecure_bind: bool = False
    server_keys: str | None = None
    allowed_clients: str | None = None
    client_keys: str | None = None
    shared_memory: Literal["auto", "on", "off"] = "auto"
    spare_rows: int | None = None
    lease_seconds: float = 5.0
    ticket_start_timeout: float = 2.0
    ticket_finish_timeout: float = 600.0
    heartbeat_interval: float = 0.5
    heartbeat_timeout: float = 5.0
    event_history: int = 8192
    seed: int | None = None
    samples_per_insert: float | None = None
    limits: dict[str, int] = field(default_factory=dict)
    name: str = "default"

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            object.__setattr__(self, name, rule(name, getattr(self, name)))
        check_together(self)

    # --- derived ---

    @property
    def num_envs(self) -> int:
        """Episodes made together in one rollout."""
        return int(self.gym_config.get("num_envs", 1))

    @property
    def steps(self) -> int:
        """Steps that a row can hold (B2)."""
        return int(self.gym_config.get("max_episode_steps") or self.max_episode_steps)

    @property
    def spare(self) -> int:
        """Rows beside the slots."""
        return self.spare_rows if self.spare_rows is not None else max(2 * self.num_envs, 2)

    @property
    def rows(self) -> int:
        """All rows of the buffer: slots and spare ones."""
        return self.buffer_size + self.spare

    @property
    def rollouts_per_generation(self) -> int:
        """Rollouts that turn the buffer over once."""
        return -(-self.buffer_size // self.num_envs)

    # --- making others ---

    def replace(self, **changes: Any) -> Self:
        """A new configuration with ``changes``, checked again. Unknown names are refused with a suggestion."""
        refuse_unknown(changes, tuple(RULES), "a setting")
        return type(self)(**({f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | changes))

    def copy(self, **changes: Any) -> Self:
        """The same as :meth:`replace`; without changes, an equal configuration that shares no dict with this one."""
        return self.replace(**changes)

    def validate(self) -> None:
        """Check every rule again (the dicts inside could have been edited).

        Raises:
            ConfigError: the first rule that is broken.
        """
        self.replace()

    def require_environment(self) -> None:
        """Refuse a configuration from which no worker could be started.

        Raises:
            ConfigError: ``gym_config`` has no ``id``.
        """
        if "id" not in self.gym_config:
            raise bad(
                'gym_config["id"]',
                None,
                'must name the environment, as in {"id": "ods_async/Counting-v0"}, before workers can be started',
            )

    def to_dict(self) -> dict[str, Any]:
        """Every setting as plain data (JSON's kinds); ``from_dict`` of it gives an equal configuration."""
        return {f.name: plain_copy(getattr(self, f.name), f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A configuration from a mapping of settings.

        Raises:
            ConfigError: an unknown key (with the nearest known one), or a bad value.
        """
        if not isinstance(values, Mapping):
            raise bad("configuration", values, "must be a mapping of settings")
        refuse_unknown(values, tuple(RULES), "a setting")
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """A configuration from a ``.yaml``, ``.yml``, ``.json`` or ``.toml`` file.

        Raises:
            ConfigError: another suffix, a file that cannot be parsed, an unknown key, a bad value.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_dict(read_settings(Path(path)))
        except ConfigError as error:
            error.add_note(f"in {path}")
            raise
