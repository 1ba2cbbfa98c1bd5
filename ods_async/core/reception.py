"""Consumers and the owner at the desk: every request gets exactly one answer, an error or a place to wait."""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

from ods_async.core import answers
from ods_async.core.parking import Parked
from ods_async.core.requests import (
    BufferDescription,
    Cancel,
    CheckHealth,
    Connect,
    Describe,
    Done,
    Drain,
    GenerationPromise,
    GetBudget,
    GetFlow,
    GetLanguage,
    GetStats,
    GetStatus,
    Refill,
    Release,
    Replay,
    ReportExit,
    Sample,
    Stop,
    WaitGeneration,
    WaitReady,
)
from ods_async.core.sessions import Sessions
from ods_async.core.states import OnlineDataEngineState as State
from ods_async.core.stimuli import AskedFor, Peer
from ods_async.errors import (
    ArgumentError,
    ClosedError,
    OdsError,
    OwnerOnlyError,
    RequestTimeoutError,
    SessionLostError,
    StateError,
)

if TYPE_CHECKING:
    from ods_async.core.broker_state import BrokerState

__all__ = ["Reception"]


class Reception:
    """Hears requests, answers or parks them, and wakes those whose time has come."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self.run = state.run
        self.production = state.production
        self.sampling = state.sampling
        self.sessions = Sessions(self.run.settings.limits.sessions)
        self._requests: dict[type, Callable[[AskedFor], None]] = {
            Sample: self._sample,
            Connect: self._connect,
            Describe: self._describe,
            Refill: self._refill,
            WaitGeneration: self._wait_generation,
            WaitReady: self._wait_ready,
            Drain: self._drain,
            Replay: self._replay,
            GetLanguage: self._language,
            ReportExit: self._report_exit,
            Stop: self._stop,
            GetStats: lambda asked: self._reply(asked, answers.stats(state)),
            GetStatus: lambda asked: self._reply(asked, answers.status(state)),
            GetFlow: self._flow,
            GetBudget: self._budget,
            CheckHealth: self._check_health,
        }

    def asked(self, asked: AskedFor) -> None:
        """Someone asks."""
        request = asked.request
        if type(request) is Release:
            self.sampling.release(request, asked.peer.identity)
            return
        if type(request) is Cancel:
            self._cancel(asked.peer, request)
            return
        self.sampling.heard(asked.peer.identity)
        try:
            if type(request) is not Connect and not self.sessions.known(asked.peer.identity):
                raise SessionLostError(
                    "the broker does not know this connection (it was restarted, or has forgotten it); connect again"
                )
            self._requests[type(request)](asked)
        except OdsError as error:
            self.run.refuse(asked.peer, asked.request_id, error)

    def _reply(self, asked: AskedFor, answer: Any) -> None:
        self.run.answer(asked.peer, asked.request_id, answer)

    def _connect(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, Connect)
        self.sessions.add(asked.peer.identity, asked.request)
        self._reply(asked, answers.welcome(self._state))

    def _describe(self, asked: AskedFor) -> None:
        if self.production.buffer is not None:
            self._reply(asked, self.production.buffer)
        else:
            self._need_life("describe")
            self._park(asked)

    def _sample(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, Sample)
        self.sampling.ask(asked.peer, asked.request_id, asked.request, asked.timeout)

    def _refill(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, Refill)
        self._need_owner(asked.request.owner, "request_refill")
        self._need_ready("request_refill")
        self._reply(asked, GenerationPromise(self.production.request("manual")))

    def _wait_generation(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, WaitGeneration)
        generation = asked.request.generation
        if self.run.failure is not None:
            raise self.run.failure.copy()
        if not 1 <= generation <= self.production.requested:
            raise ArgumentError(
                f"generation {generation} was never requested; the newest requested one is "
                f"{self.production.requested}: wait for a number that request_refill() returned",
                argument="generation",
                value=str(generation),
                rule=f"1 to {self.production.requested}",
            )
        if self.production.completed >= generation:
            self._reply(asked, Done())
        else:
            self._need_life("wait_for_generation")
            self._park(asked)

    def _wait_ready(self, asked: AskedFor) -> None:
        self._need_life("wait_ready")
        if self.run.state is State.READY:
            self._reply(asked, Done())
        else:
            self._park(asked)

    def _drain(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, Drain)
        self._need_owner(asked.request.owner, "drain_lifecycle_events")
        self._reply(asked, answers.drained(self._state, asked.request))
        self.production.advance()

    def _replay(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, Replay)
        self._reply(asked, answers.replayed(self._state, asked.request))

    def _language(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, GetLanguage)
        self._reply(asked, answers.language(self._state, asked.request))

    def _flow(self, asked: AskedFor) -> None:
        self._need_ready("get_flow_status")
        self._reply(asked, answers.flow(self._state))

    def _budget(self, asked: AskedFor) -> None:
        if self.run.failure is not None:
            raise self.run.failure.copy()
        self._reply(asked, self.run.budget.snapshot())

    def _check_health(self, asked: AskedFor) -> None:
        self._need_ready("check_health")
        self._reply(asked, Done())

    def _cancel(self, peer: Peer, cancel: Cancel) -> None:
        self.sampling.cancelled(peer.identity, cancel.request_id)
        for parked in self.run.parking.take(lambda entry: entry.peer.identity == peer.identity):
            error = RequestTimeoutError("cancelled by its asker", operation="cancel", timeout=0.0, missing="")
            self.run.refuse(parked.peer, parked.request_id, error)

    # --- owner ------------------------------------------------------------------------------------------------------

    def _report_exit(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, ReportExit)
        self._need_owner(asked.request.owner, "report_exit")
        self._state.workforce.exited(asked.request)
        self._reply(asked, Done())
        self._state.look_at_stop()

    def _stop(self, asked: AskedFor) -> None:
        """First time: end production, answer when all is quiet. Again: end at once."""
        assert isinstance(asked.request, Stop)
        self._need_owner(asked.request.owner, "stop")
        if self._state.quiet:
            self._reply(asked, Done())
            self._state.end_now()
            return
        self._state.stop(asked.request.grace, "the owner stopped the service")
        self._park(asked, forced=True)
        self._state.look_at_stop()

    # --- waking -----------------------------------------------------------------------------------------------------

    def buffer_ready(self, description: BufferDescription) -> None:
        """The buffer exists: tell who waited to hear about it."""
        for parked in self.run.parking.take(lambda entry: isinstance(entry.request, Describe)):
            self.run.answer(parked.peer, parked.request_id, description)

    def generation_completed(self) -> None:
        """A generation is complete: tell who waited for it."""
        completed = self.production.completed

        def arrived(parked: Parked) -> bool:
            request = parked.request
            return isinstance(request, WaitReady) or (
                isinstance(request, WaitGeneration) and request.generation <= completed
            )

        for parked in self.run.parking.take(arrived):
            self.run.answer(parked.peer, parked.request_id, Done())

    def refuse_expired(self) -> None:
        """Answer those whose deadline has passed, saying what they waited for in vain."""
        for parked in self.run.parking.take_expired(self.run.now.seconds):
            self.run.refuse(parked.peer, parked.request_id, self._missed(parked))

    def _missed(self, parked: Parked) -> OdsError:
        if isinstance(parked.request, Sample):
            return self.sampling.missed(parked)
        waited_for = {
            Describe: "a worker to say what it records",
            WaitReady: "the first generation",
            WaitGeneration: f"generation {getattr(parked.request, 'generation', 0)}",
            Stop: "workers to end",
        }[type(parked.request)]
        missing = self.run.holdings() + (f", {self.production.pause}" if self.production.pause else "")
        return RequestTimeoutError(
            f"waited {parked.timeout:g} s for {waited_for}: {missing}",
            operation=type(parked.request).__name__,
            timeout=parked.timeout,
            missing=missing,
        )

    # --- conditions -------------------------------------------------------------------------------------------------

    def _park(self, asked: AskedFor, *, forced: bool = False) -> None:
        now = self.run.now.seconds
        parked = Parked(asked.peer, asked.request_id, asked.request, now, now + asked.timeout)
        self.run.park(parked, forced=forced)

    def _need_owner(self, token: bytes, operation: str) -> None:
        if not compare_digest(token, self.run.owner_token):
            raise OwnerOnlyError(
                f"{operation} is for the owner of the service only; call it on the engine that started it, or give the "
                "owner's token",
                operation=operation,
            )

    def _need_life(self, operation: str) -> None:
        if self.run.failure is not None:
            raise self.run.failure.copy()
        if not self.run.alive:
            raise ClosedError(f"{operation}: the service has stopped; start a new run", what="service")

    def _need_ready(self, operation: str) -> None:
        self._need_life(operation)
        if self.run.state is not State.READY:
            raise StateError(
                f"{operation}() needs the state READY, found {self.run.state.value}: {self.run.holdings()}",
                operation=operation,
                required="READY",
                current=self.run.state.value,
            )
