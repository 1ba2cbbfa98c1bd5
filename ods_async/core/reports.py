"""What workers are told, and what they report. Plain values; ``wire`` knows how they look as bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ods_async.core.requests import FieldDescription

__all__ = [
    "AttemptFailed",
    "EpisodeReport",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "Report",
    "RevokeTickets",
    "RolloutReport",
    "SegmentReport",
    "ServiceBeat",
    "ShutDown",
    "Ticket",
    "TicketStarted",
    "Verdict",
    "WorkerFailed",
]

# --- broker -> worker, PUSH -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ticket:
    """Make one rollout. A ticket that is handed out again gets a new id; the old one is revoked."""

    ticket_id: int
    generation: int
    rollout: int
    run_id: int


# --- broker -> everyone, PUB ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a rollout. ``outcome``: accepted, duplicate, refused.

    Two ticket ids that are none speak of the worker itself: -1 refuses its hello, -2 asks for it again (unknown).
    """

    ticket_id: int
    worker_id: str
    outcome: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RevokeTickets:
    """Do not start these."""

    ticket_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShutDown:
    """End between two environment steps; ``reason`` in words."""

    reason: str
    grace: float


@dataclass(frozen=True, slots=True)
class ServiceBeat:
    """The broker lives; ``next_sequence`` lets a subscriber see that it missed something."""

    run_id: int
    next_sequence: int
    state: str


# --- worker -> broker, PUSH -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker is ready (or, with ``fields == ()``, still making its environment)."""

    worker_id: str
    pid: int
    host: str
    num_envs: int
    fields: tuple[FieldDescription, ...]  # offsets 0; recorded fields only
    environment: str
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent from a thread of its own, so that a slow simulator step does not look like death."""

    worker_id: str
    phase: str
    ticket_id: int | None
    steps: int


@dataclass(frozen=True, slots=True)
class TicketStarted:
    """The worker began this ticket."""

    worker_id: str
    ticket_id: int


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """A :class:`~ods_async.core.episode.Segment` on the wire."""

    name: str
    start: int
    end: int
    instruction: str | None
    accepted: bool
    target: str | None


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """One episode of a rollout: its length, and where each field lies in the payload."""

    length: int
    offsets: tuple[int, ...]  # bytes from the payload's start, one per recorded field in schema order
    segments: tuple[SegmentReport, ...]
    instruction: str | None
    metadata: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Header of a rollout; the one payload frame holds every field of every episode, each 64-byte aligned."""

    worker_id: str
    ticket_id: int
    attempts: int
    production_seconds: float
    payload_bytes: int
    fields: tuple[FieldDescription, ...]  # what the worker recorded; must equal the schema
    episodes: tuple[EpisodeReport, ...]


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """One try failed; the worker tries again. ``episodes`` counts what is thrown away."""

    worker_id: str
    ticket_id: int
    attempt: int
    episodes: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker's last words before it ends: the cause, never pickled."""

    worker_id: str
    ticket_id: int | None
    module: str
    type_name: str
    message: str
    traceback_text: str
    phase: str
    step: int | None


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The worker leaves in good order."""

    worker_id: str
    reason: str


Report = Hello | Heartbeat | TicketStarted | RolloutReport | AttemptFailed | WorkerFailed | Goodbye
