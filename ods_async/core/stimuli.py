"""What can happen to the broker (stimuli) and what follows from it (effects). ``BrokerState`` maps one to the other.

The state decides; it never touches a socket, a clock, a thread or an array of the buffer. Effects that take time
(:class:`CreateBuffer`, :class:`WriteRollout`, :class:`GatherFrame`) come back as a stimulus when they are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ods_async.core.episode import Rollout
from ods_async.core.events import Event
from ods_async.core.reports import Report, RevokeTickets, ServiceBeat, ShutDown, Ticket, Verdict
from ods_async.core.requests import Answer, BufferDescription, Plan, Request
from ods_async.core.schema import EpisodeSchema
from ods_async.core.windows import RowRuns
from ods_async.errors import OdsError

__all__ = [
    "Announce",
    "AnswerLost",
    "AnswerRequest",
    "AskedFor",
    "BufferFailed",
    "BufferReady",
    "ConnectionRefused",
    "CreateBuffer",
    "Effect",
    "EndService",
    "FrameGathered",
    "GatherFrame",
    "Instant",
    "Malformed",
    "MarkEdition",
    "Peer",
    "PushTicket",
    "RefuseRequest",
    "Reported",
    "RolloutArrived",
    "RolloutWritten",
    "Stimulus",
    "Tick",
    "WriteRollout",
]


class Peer(NamedTuple):
    """Where an answer goes: the asker's socket identity (its session), and the frames to send back in between."""

    identity: bytes
    envelope: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Instant:
    """Now, by the broker's clocks. Durations and deadlines use only the monotonic one."""

    monotonic_ns: int
    unix_ns: int

    @property
    def seconds(self) -> float:
        """Monotonic seconds."""
        return self.monotonic_ns * 1e-9


# --- stimuli --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskedFor:
    """A consumer asks. ``peer`` is the address to answer to; ``timeout`` is how long it will wait, in seconds."""

    peer: Peer
    request_id: int
    request: Request
    timeout: float


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker reports anything but a rollout."""

    report: Report


@dataclass(frozen=True, slots=True)
class RolloutArrived:
    """A whole rollout is in memory (its arrays are views of the received frame), already checked against its header."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are no message arrived on ``socket``. ``ticket_id`` and ``worker_id`` where they could be read."""

    socket: str
    reason: str
    worker_id: str = ""
    ticket_id: int | None = None


@dataclass(frozen=True, slots=True)
class ConnectionRefused:
    """A connection to ``socket`` was not let in: its ``key`` is not listed, or only one end has keys.

    ``address`` is where it came from, and ``key`` its public key, as far as they are known (else empty).
    """

    socket: str
    reason: str
    address: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class BufferReady:
    """The buffer of :class:`CreateBuffer` exists."""

    description: BufferDescription


@dataclass(frozen=True, slots=True)
class BufferFailed:
    """The buffer cannot be made."""

    error: OdsError


@dataclass(frozen=True, slots=True)
class RolloutWritten:
    """The data of ``job_id`` is in its rows, which can be published; with an ``error`` it is not.

    ``runs`` has one entry an episode: what ``write_rollout`` returned.
    """

    job_id: int
    error: str = ""
    runs: tuple[RowRuns, ...] = ()


@dataclass(frozen=True, slots=True)
class FrameGathered:
    """The gather for ``lease_id`` is over and the answer on its way (``error`` empty), or it failed."""

    lease_id: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class AnswerLost:
    """An answer could not be sent, because its asker is gone: nobody received it."""

    peer: Peer
    request_id: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: look at deadlines."""


Stimulus = (
    AskedFor
    | Reported
    | RolloutArrived
    | Malformed
    | ConnectionRefused
    | BufferReady
    | BufferFailed
    | RolloutWritten
    | FrameGathered
    | AnswerLost
    | Tick
)

# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """Send this answer."""

    peer: Peer
    request_id: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Send this error as the answer."""

    peer: Peer
    request_id: int
    error: OdsError


@dataclass(frozen=True, slots=True)
class GatherFrame:
    """Gather ``plan`` into a frame in a thread, send it as the answer, then say :class:`FrameGathered`."""

    peer: Peer
    request_id: int
    plan: Plan
    language: tuple[int, int]


@dataclass(frozen=True, slots=True)
class MarkEdition:
    """Show ``edition`` in the buffer's memory, before anything else is done that lets a peer know of the change."""

    edition: int


@dataclass(frozen=True, slots=True)
class PushTicket:
    """Deal out this ticket."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Announce:
    """Send to all subscribers."""

    what: Event | Verdict | RevokeTickets | ShutDown | ServiceBeat


@dataclass(frozen=True, slots=True)
class CreateBuffer:
    """Make the memory: ``rows`` rows of ``steps`` steps of ``schema`` (annotations included)."""

    schema: EpisodeSchema
    rows: int
    steps: int


@dataclass(frozen=True, slots=True)
class WriteRollout:
    """Write each episode into its row, annotations and provenance included, in a thread; then :class:`RolloutWritten`.

    ``rows`` are spare and stay so until then. The writer first sets the rows' stamps to ``dirty_stamps`` (so that a
    reader who slept past its lease notices), then the data, then ``stamps``. ``task_indices`` has one entry an episode,
    ``subtask_indices`` one a segment of it plus the fallback for steps outside segments (last).
    ``provenance`` values are per episode: ``(run_id, episode_id, generation, accepted_at_ns, published_monotonic_ns)``.
    """

    job_id: int
    rollout: Rollout
    rows: tuple[int, ...]
    dirty_stamps: tuple[int, ...]
    stamps: tuple[int, ...]
    task_indices: tuple[int, ...]
    subtask_indices: tuple[tuple[int, ...], ...]
    provenance: tuple[tuple[int, int, int, int, int], ...] | None


@dataclass(frozen=True, slots=True)
class EndService:
    """Nothing is left to do: close sockets and memory. ``failed`` tells the exit code."""

    failed: bool
    reason: str


Effect = (
    AnswerRequest
    | RefuseRequest
    | GatherFrame
    | MarkEdition
    | PushTicket
    | Announce
    | CreateBuffer
    | WriteRollout
    | EndService
)
