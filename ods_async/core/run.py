"""What the parts of the broker's state share: the books, the effects in the making, and the run's fate."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from ods_async.core.budget import SamplingBudget
from ods_async.core.events import ClientRefused, Event, MessageRejected, StateChanged, WorkerFailure
from ods_async.core.language import LanguageRegistry
from ods_async.core.lifecycle import EventLog, LifecycleLog
from ods_async.core.parking import Parked, ParkingLot
from ods_async.core.refill import RefillRule
from ods_async.core.reports import RevokeTickets, ShutDown
from ods_async.core.roster import Roster
from ods_async.core.schema import EpisodeSchema
from ods_async.core.settings import BrokerSettings
from ods_async.core.states import OnlineDataEngineState as State
from ods_async.core.stimuli import Announce, AnswerRequest, Effect, Instant, MarkEdition, Peer, RefuseRequest
from ods_async.core.store import TrajectoryStore
from ods_async.core.tickets import TicketBook
from ods_async.core.windows import RunIndex
from ods_async.errors import LimitExceededError, OdsError

__all__ = ["Run"]

_E = TypeVar("_E", bound=Event)

REJECTION_EVENTS_PER_SECOND = 5
FAILURE_TEXT_CHARACTERS = 16_384


class Run:
    """One run of the broker. Holds the books; the rules live in the modules named after them."""

    def __init__(
        self, settings: BrokerSettings, run_id: int, owner_token: bytes, rng: np.random.Generator, now: Instant
    ) -> None:
        self.settings = settings
        self.run_id = run_id
        self.owner_token = owner_token
        self.rng = rng
        self.now = now
        self.state = State.STARTING
        self.failure: OdsError | None = None
        self.failure_text = ""
        self.edition = 0
        self.schema: EpisodeSchema | None = None  # of the buffer, annotations included
        self.recorded: EpisodeSchema | None = None  # of what workers hand in
        self.store = TrajectoryStore(settings.buffer_size, settings.rows)
        self.index = RunIndex(settings.rows, settings.max_episode_steps)
        self.budget = SamplingBudget(
            settings.episode_sample_budget,
            settings.episode_sample_hard_limit,
            settings.rows,
            run_id=run_id,
            clock_origin_ns=now.monotonic_ns,
        )
        self.language = LanguageRegistry(settings.language_buffer_bytes)
        self.log = LifecycleLog(settings.lifecycle_event_capacity)
        self.events = EventLog(settings.event_history)
        self.tickets = TicketBook(
            run_id,
            1 + int(rng.integers(1 << 40)) * (1 << 20),
            settings.ticket_start_timeout,
            settings.ticket_finish_timeout,
        )
        self.roster = Roster(settings.heartbeat_timeout)
        self.parking = ParkingLot(settings.limits.parked_per_session)
        self.refill = RefillRule(
            settings.refill_policy, settings.refill_threshold, settings.buffer_size, settings.samples_per_insert
        )
        self.malformed = 0
        self.refused_connections = 0
        self._told: dict[type[Event], tuple[int, int]] = {}
        self._effects: list[Effect] = []

    # --- effects ----------------------------------------------------------------------------------------------------

    def do(self, effect: Effect) -> None:
        """Have this done."""
        self._effects.append(effect)

    def take_effects(self) -> list[Effect]:
        """What has come together since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def answer(self, peer: Peer, request_id: int, answer: Any) -> None:
        """Answer a request."""
        self._effects.append(AnswerRequest(peer, request_id, answer))

    def park(self, parked: Parked, *, forced: bool = False) -> None:
        """Keep a request until it can be answered.

        Raises:
            LimitExceededError: too many wait already, of this session or of all (unless ``forced``).
        """
        limits = self.settings.limits
        most = limits.sessions * limits.parked_per_session
        if not forced and len(self.parking) >= most:
            raise LimitExceededError(
                f"{most} requests of all connections are waiting already, all that {limits.sessions} sessions may have",
                what="sessions",
                size=most + 1,
                limit=most,
            )
        if not self.parking.park(parked, forced=forced):
            limit = limits.parked_per_session
            raise LimitExceededError(
                f"this connection has {limit} requests waiting already; await their answers first",
                what="parked_per_session",
                size=limit + 1,
                limit=limit,
            )

    def refuse(self, peer: Peer, request_id: int, error: OdsError) -> None:
        """Answer a request with an error."""
        self._effects.append(RefuseRequest(peer, request_id, error))

    def emit(self, cls: type[_E], **values: Any) -> Event:
        """Number an event and tell everyone."""
        number = self.events.next
        return self.tell(cls(sequence=number, run_id=self.run_id, monotonic_ns=self.now.monotonic_ns, **values))

    def tell(self, event: Event) -> Event:
        """Tell everyone of an event that is numbered already: ``events.next``."""
        event = self.events.append(event)
        self._effects.append(Announce(event))
        return event

    # --- fate -------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether episodes are made and drawn (or will be soon)."""
        return self.state in (State.STARTING, State.READY)

    def change_state(self, state: State, reason: str) -> None:
        """Enter ``state`` and say so."""
        self.new_edition()
        previous, self.state = self.state, state
        self.emit(StateChanged, previous=previous.value, state=state.value, reason=reason)

    def new_edition(self) -> None:
        """What can be drawn changes, or whether anything can: plans that nobody has used yet are out of date.

        To be called before whatever tells a peer of the change.
        """
        self.edition += 1
        self._effects.append(MarkEdition(self.edition))

    def fail(self, error: OdsError) -> None:
        """The run is over: everyone who waits, now or later, gets this error."""
        if not self.alive:
            return
        self.failure = error
        self.end_production(f"the run failed: {error}")
        self.change_state(State.FAILED, str(error)[:FAILURE_TEXT_CHARACTERS])
        for parked in self.parking.take(lambda _: True):
            self.refuse(parked.peer, parked.request_id, error.copy())

    def end_production(self, reason: str, grace: float = 0.0) -> None:
        """Revoke every ticket and ask every worker to end."""
        revoked = self.tickets.cancel_all()
        if revoked:
            self.do(Announce(RevokeTickets(revoked)))
        self.do(Announce(ShutDown(reason[:FAILURE_TEXT_CHARACTERS], grace)))

    def report_worker_failure(self, worker_id: str, phase: str, step: int | None, error: OdsError) -> None:
        """Publish a worker's failure. It does not decide whether the run fails."""
        fields = error.fields
        self.failure_text = f"{worker_id}: {error}"[:FAILURE_TEXT_CHARACTERS]
        self.emit(
            WorkerFailure,
            worker_id=worker_id,
            module=str(fields.get("module", "ods_async.errors")),
            type_name=str(fields.get("type_name", type(error).__name__)),
            message=str(error)[:FAILURE_TEXT_CHARACTERS],
            traceback_text=str(fields.get("traceback_text", ""))[-FAILURE_TEXT_CHARACTERS:],
            phase=phase,
            step=step,
        )

    def reject(self, socket: str, reason: str) -> None:
        """Count bytes that are no message; the events about it are limited in rate, the count is not."""
        self.malformed += 1
        if self._may_tell(MessageRejected):
            self.emit(MessageRejected, socket=socket, reason=reason[:500], total=self.malformed)

    def refuse_connection(self, socket: str, reason: str, address: str, key: str) -> None:
        """Count a connection whose keys were not good; the events about it are limited in rate, the count is not."""
        self.refused_connections += 1
        if self._may_tell(ClientRefused):
            self.emit(
                ClientRefused,
                socket=socket,
                address=address[:100],
                key=key[:100],
                reason=reason[:500],
                total=self.refused_connections,
            )

    def _may_tell(self, kind: type[Event]) -> bool:
        now = int(self.now.seconds)
        second, told = self._told.get(kind, (now, 0))
        told = told + 1 if second == now else 1
        self._told[kind] = now, told
        return told <= REJECTION_EVENTS_PER_SECOND

    # --- words ------------------------------------------------------------------------------------------------------

    def holdings(self) -> str:
        """What there is, for messages: ``3 of 16 episodes, workers: 2 starting, last failure: …``."""
        words = f"{self.index.published} of {self.settings.buffer_size} episodes, {self.roster.in_words()}"
        if self.failure_text:
            words += f", last failure: {self.failure_text[:300]}"
        return words
