"""What a consumer can ask, and what it can be answered. Plain values; ``wire`` knows how they look as bytes.

Every request gets exactly one answer, an error included. The two *notices* (:class:`Release`, :class:`Cancel`) get
none: they are sent on the way and must never cost a round trip.

Types used in fields are limited to what the codec carries: int, float, str, bytes, bool, None, tuples of these, nested
dataclasses of this package, and ``dict[str, …]`` of plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "Answer",
    "Batch",
    "BudgetRow",
    "BudgetSnapshot",
    "BufferDescription",
    "Cancel",
    "CheckHealth",
    "Connect",
    "Describe",
    "Done",
    "Drain",
    "FieldDescription",
    "FlowStatus",
    "GenerationPromise",
    "GetBudget",
    "GetFlow",
    "GetLanguage",
    "GetStats",
    "GetStatus",
    "LanguageEntries",
    "Limits",
    "Plan",
    "Plans",
    "Records",
    "Refill",
    "Release",
    "Replay",
    "ReportExit",
    "Request",
    "Sample",
    "ServiceStatus",
    "Stats",
    "Stop",
    "WaitGeneration",
    "WaitReady",
    "Welcome",
    "WorkerStatus",
]

# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """First words of every client and worker. ``via`` is the endpoint it dialled, so that the answer fits it."""

    via: str
    role: str  # "consumer" | "owner" | "worker" | "observer"
    name: str
    protocol: int


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask for the buffer's schema and memory; parked until the first worker has said what it records."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw ``count`` batches of ``batch_size`` windows.

    Chunks: ``length`` steps each, ``history == 0``. Contexts: ``history`` and ``horizon`` at least 1, and ``length`` is
    ``history + horizon - 1``. ``frame=True`` asks for the bytes themselves instead of a plan (``count`` must be 1).
    ``release`` lists leases that are done with; ``undelivered`` those whose batch nobody received (budget returns).
    ``spare`` says how many more plans the asker could use soon: up to so many follow those asked for, where it makes no
    difference whether they are drawn now or later.
    """

    batch_size: int
    length: int
    mode: str = "episode"  # "episode" | "segment" | "boundary"
    history: int = 0
    horizon: int = 0
    generations: tuple[int, ...] = ()
    seed: int | None = None
    count: int = 1
    frame: bool = False
    release: tuple[int, ...] = ()
    undelivered: tuple[int, ...] = ()
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Refill:
    """Owner only: request the next generation."""

    owner: bytes = b""


@dataclass(frozen=True, slots=True)
class WaitGeneration:
    """Parked until ``generation`` is complete."""

    generation: int


@dataclass(frozen=True, slots=True)
class WaitReady:
    """Parked until the first generation is published."""


@dataclass(frozen=True, slots=True)
class GetStats:
    """Counters of production and sampling."""


@dataclass(frozen=True, slots=True)
class GetStatus:
    """State, workers, last failure, counters of faults."""


@dataclass(frozen=True, slots=True)
class GetFlow:
    """The few counters a training loop steers by; needs READY."""


@dataclass(frozen=True, slots=True)
class GetBudget:
    """The per-episode budget audit."""


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Needs READY; a worker's failure comes back as the error."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Owner only: read the pending lifecycle records, oldest first.

    Records leave the log only when they were received: those with a sequence number below ``received`` leave now, and
    the answer holds the oldest that stay. So an answer that gets lost costs nothing, and asking again is harmless.
    """

    owner: bytes = b""
    limit: int = 4096
    received: int = 0


@dataclass(frozen=True, slots=True)
class Replay:
    """Events from sequence number ``since`` on, as far as the broker still holds them, at most ``limit``."""

    since: int
    limit: int = 1024


@dataclass(frozen=True, slots=True)
class GetLanguage:
    """Dictionary entries of ``kind`` ("task" or "subtask") from index ``since`` on."""

    kind: str
    since: int


@dataclass(frozen=True, slots=True)
class ReportExit:
    """Owner only: a local worker's process ended (``exit_code`` negative: by that signal).

    ``pid`` tells the process from its successor of the same name, which may have said hello already; 0: not known.
    """

    worker_id: str
    exit_code: int
    will_restart: bool
    owner: bytes = b""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """Owner only: end the run; answered when workers were told and the last rollout was judged."""

    owner: bytes = b""
    grace: float = 5.0


@dataclass(frozen=True, slots=True)
class Release:
    """Notice without an answer: leases that are done with, and those whose batch was never delivered."""

    leases: tuple[int, ...] = ()
    undelivered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Notice without an answer: whatever this peer still has parked is no longer wanted.

    ``request_id`` is the request that was given up before its answer was seen; 0: the last one that arrived.
    """

    request_id: int = 0


Request = (
    Connect
    | Describe
    | Sample
    | Refill
    | WaitGeneration
    | WaitReady
    | GetStats
    | GetStatus
    | GetFlow
    | GetBudget
    | CheckHealth
    | Drain
    | Replay
    | GetLanguage
    | ReportExit
    | Stop
    | Release
    | Cancel
)

# --- answers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What the broker takes; told to every peer so that a sender refuses an oversize message itself. Bytes, counts."""

    header_bytes: int = 4 * 1024 * 1024
    rollout_bytes: int = 4 * 1024 * 1024 * 1024
    batch_bytes: int = 2 * 1024 * 1024 * 1024
    batch_windows: int = 65_536
    plans_per_request: int = 64
    parked_per_session: int = 4
    sessions: int = 1024
    schema_fields: int = 1024
    nesting: int = 16
    text_bytes: int = 65_536
    episodes_per_rollout: int = 65_536
    leases_per_session: int = 256


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to :class:`Connect`. Endpoints are complete for ipc; for tcp the host is the one the client dialled."""

    run_id: int
    protocol: int
    server: str  # package version
    state: str
    tickets: str
    rollouts: str
    events: str
    heartbeat_interval: float
    heartbeat_timeout: float
    lease_seconds: float
    limits: Limits
    settings: dict[str, object]  # buffer_size, max_episode_steps, num_envs, include_provenance, action_dim, …


@dataclass(frozen=True, slots=True)
class FieldDescription:
    """A :class:`~ods_async.core.schema.FieldSpec` in words the wire carries, with its offset in the segment."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    pad: int
    offset: int


@dataclass(frozen=True, slots=True)
class BufferDescription:
    """The buffer's schema and memory. ``segment`` is the path of the mapped file, or None when there is none."""

    fields: tuple[FieldDescription, ...]
    rows: int
    steps: int
    segment: str | None
    segment_bytes: int
    token: bytes
    stamps_offset: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Which windows one batch holds.

    ``rows`` int32, ``starts`` int32 (may be negative), ``first`` and ``last`` int32 (the half-open run of real steps in
    the row; empty bytes for chunks, where every step is real), each little-endian, one per window. ``stamps`` int64,
    one per window: what the row's stamp must still be after copying.
    """

    lease_id: int
    batch_size: int
    length: int
    history: int  # 0 for chunks
    rows: bytes
    starts: bytes
    first: bytes
    last: bytes
    stamps: bytes


@dataclass(frozen=True, slots=True)
class Plans:
    """Answer to :class:`Sample` with ``frame=False``. ``language`` is the size of the task and subtask dictionaries.

    ``edition`` is the one of the buffer that the plans were drawn from. As long as the segment shows the same number, a
    draw would find what these found.
    """

    plans: tuple[Plan, ...]
    language: tuple[int, int]
    edition: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Answer to :class:`Sample` with ``frame=True``; the one payload frame is laid out as ``BatchLayout`` says.

    No row is leased any more. ``lease_id`` is what a :class:`Release` may still say of it, within the time of a lease:
    received, or never delivered to anyone, which gives the windows back to their episodes' budgets.
    """

    batch_size: int
    length: int
    history: int
    payload_bytes: int
    language: tuple[int, int]
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class GenerationPromise:
    """The generation to wait for."""

    generation: int


@dataclass(frozen=True, slots=True)
class Done:
    """Yes."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters, see B47; ``extra`` holds what is beyond the original's (faults, bytes, waiting)."""

    run_id: int
    requested_generation: int
    completed_generation: int
    successful_episodes: int
    failed_episodes: int
    generated_frames: int
    production_seconds: float
    sampled_chunks: int
    valid_frames: int
    extra: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the broker sees it. ``state``: starting, idle, busy, stalled, gone."""

    worker_id: str
    state: str
    rollouts: int
    failures: int
    restarts: int
    silent_for: float


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The service at a glance."""

    run_id: int
    state: str
    requested_generation: int
    completed_generation: int
    episodes: int
    slots: int
    waiting: str  # what the service waits for, in words; empty when nothing
    last_failure: str
    workers: tuple[WorkerStatus, ...]
    malformed_messages: int
    refused_rollouts: int
    open_leases: int


@dataclass(frozen=True, slots=True)
class FlowStatus:
    """B47; the last two are None when budgets are off."""

    requested_generation: int
    completed_generation: int
    successful_episodes: int
    unlocked_remaining_chunks: int | None
    total_delivered_chunks: int | None


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """Budget of one retained episode."""

    run_id: int
    episode_id: int
    generation: int
    slot: int
    assigned: int
    delivered: int
    remaining: int
    locked: bool


@dataclass(frozen=True, slots=True)
class BudgetSnapshot:
    """B38."""

    enabled: bool
    rows: tuple[BudgetRow, ...]
    unlocked_remaining_chunks: int | None
    total_delivered_chunks: int | None
    episode_sample_budget: int | None
    episode_sample_hard_limit: int | None
    clock_origin_monotonic_ns: int | None


@dataclass(frozen=True, slots=True)
class Records:
    """Answer to :class:`Drain` and :class:`Replay`: encoded events (see ``core.events``), oldest first.

    ``oldest`` is the oldest sequence number still held, ``next`` the one the next event will get: a replay that starts
    later than asked has lost ``oldest - since`` events for good.
    """

    events: tuple[dict[str, object], ...]
    oldest: int
    next: int


@dataclass(frozen=True, slots=True)
class LanguageEntries:
    """Answer to :class:`GetLanguage`."""

    kind: str
    since: int
    entries: tuple[str, ...]


Answer = (
    Welcome
    | BufferDescription
    | Plans
    | Batch
    | GenerationPromise
    | Done
    | Stats
    | ServiceStatus
    | FlowStatus
    | BudgetSnapshot
    | Records
    | LanguageEntries
)
