"""Numbered events: what a dashboard, a log or a flow controller can know about the run.

Every event carries ``sequence``, run-wide and without gaps, ``run_id`` and ``monotonic_ns`` (the broker's clock).
:func:`to_plain` shows an event to people and programs (``--json``, drained records), :func:`to_record` is what travels
in answers: it holds runs of steps where the former holds every step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Final

__all__ = [
    "KINDS",
    "AttemptDiscarded",
    "ClientRefused",
    "EpisodeEvicted",
    "EpisodePublished",
    "Event",
    "GenerationCompleted",
    "GenerationRequested",
    "MessageRejected",
    "RolloutRefused",
    "Runs",
    "StateChanged",
    "TicketReissued",
    "WorkerExited",
    "WorkerFailure",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerRestarted",
    "WorkerReturned",
    "WorkerStalled",
    "to_plain",
    "to_record",
]


Runs = tuple[tuple[int, int], ...]
"""Half-open runs of steps, ``(start, end)`` each, in order and apart: an episode of any length in a few numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Common part of all events."""

    kind: ClassVar[str] = ""
    sequence: int
    run_id: int
    monotonic_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _EpisodeEvent(Event):
    episode_id: int
    generation: int
    slot: int
    valid_runs: Runs
    anchor_runs: Runs
    valid_frames: int
    eligible_anchors: int

    @property
    def valid_frame_indices(self) -> tuple[int, ...]:
        """The valid steps, in order; written out anew at every reading."""
        return _steps_of(self.valid_runs)

    @property
    def eligible_anchor_indices(self) -> tuple[int, ...]:
        """The steps a context may be anchored at, in order; written out anew at every reading."""
        return _steps_of(self.anchor_runs)


def _steps_of(runs: Runs) -> tuple[int, ...]:
    return tuple(chain.from_iterable(range(start, end) for start, end in runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePublished(_EpisodeEvent):
    """An episode can be sampled from now on."""

    kind: ClassVar[str] = "published"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEvicted(_EpisodeEvent):
    """An episode was replaced."""

    kind: ClassVar[str] = "evicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequested(Event):
    """``reason``: start, manual, threshold, continuous."""

    kind: ClassVar[str] = "generation_requested"
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCompleted(Event):
    """All rollouts of a generation are published; ``seconds`` since it was requested."""

    kind: ClassVar[str] = "generation_completed"
    generation: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged(Event):
    """The service's state (B6)."""

    kind: ClassVar[str] = "state_changed"
    previous: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined(Event):
    """A worker said hello and is ready."""

    kind: ClassVar[str] = "worker_joined"
    worker_id: str
    host: str
    pid: int
    environment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft(Event):
    """A worker left in good order."""

    kind: ClassVar[str] = "worker_left"
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStalled(Event):
    """Nothing was heard of a worker for ``silent_for`` seconds; its ticket goes to someone else."""

    kind: ClassVar[str] = "worker_stalled"
    worker_id: str
    silent_for: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReturned(Event):
    """A stalled worker is heard again."""

    kind: ClassVar[str] = "worker_returned"
    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRestarted(Event):
    """The supervisor starts the worker anew."""

    kind: ClassVar[str] = "worker_restarted"
    worker_id: str
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(Event):
    """A local worker's process ended; ``exit_code`` negative: by that signal."""

    kind: ClassVar[str] = "worker_exited"
    worker_id: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure(Event):
    """A worker failed, with its cause."""

    kind: ClassVar[str] = "worker_failed"
    worker_id: str
    module: str
    type_name: str
    message: str
    traceback_text: str
    phase: str
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketReissued(Event):
    """A ticket missed its start or finish, or its worker is gone."""

    kind: ClassVar[str] = "ticket_reissued"
    generation: int
    rollout: int
    ticket_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDiscarded(Event):
    """A worker threw away what it made and tries again: it failed, or held NaN or infinity; ``reason`` says which."""

    kind: ClassVar[str] = "attempt_discarded"
    worker_id: str
    ticket_id: int
    attempt: int
    episodes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRefused(Event):
    """A rollout was refused, and why."""

    kind: ClassVar[str] = "rollout_refused"
    worker_id: str
    ticket_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRejected(Event):
    """Bytes that are no message arrived; ``total`` counts them (events are limited in rate, the count is not)."""

    kind: ClassVar[str] = "message_rejected"
    socket: str
    reason: str
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRefused(Event):
    """A connection to ``socket`` was not let in, since its keys are not good (or missing).

    ``address`` and ``key`` (its public key, as it would stand in the allow-list) are empty where they are not known.
    ``total`` counts such connections (events are limited in rate, the count is not).
    """

    kind: ClassVar[str] = "client_refused"
    socket: str
    address: str
    key: str
    reason: str
    total: int


KINDS: Final[dict[str, type[Event]]] = {
    cls.kind: cls
    for cls in (
        EpisodePublished,
        EpisodeEvicted,
        GenerationRequested,
        GenerationCompleted,
        StateChanged,
        WorkerJoined,
        WorkerLeft,
        WorkerStalled,
        WorkerReturned,
        WorkerRestarted,
        WorkerExited,
        WorkerFailure,
        TicketReissued,
        AttemptDiscarded,
        RolloutRefused,
        MessageRejected,
        ClientRefused,
    )
}
"""Every event there is, by its kind."""

_SHOWN: Final = {"valid_runs": "valid_frame_indices", "anchor_runs": "eligible_anchor_indices"}


def to_record(event: Event) -> dict[str, Any]:
    """The event's fields as they are, ``kind`` included: what ``wire.codec.event_from_record`` takes back."""
    return {"kind": event.kind} | {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}


def to_plain(event: Event) -> dict[str, Any]:
    """The event as a user sees it, ``kind`` included: every valid step and every anchor by its number (B39)."""
    names = [_SHOWN.get(f.name, f.name) for f in dataclasses.fields(event)]
    return {"kind": event.kind} | {name: getattr(event, name) for name in names}
