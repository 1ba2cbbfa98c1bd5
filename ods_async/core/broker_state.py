"""The broker's mind: a stimulus comes in, the effects that follow go out. Start reading here.

Nothing below touches a socket, a clock, a thread or the data. Orders the parts; the rules are in the modules named
after them: ``sampling`` (drawing), ``production`` (generations, tickets, publication), ``workforce`` (workers and their
failures), ``answers`` (looking at it).
"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest
from typing import Any

import numpy as np

from ods_async.core import answers
from ods_async.core.parking import Parked
from ods_async.core.production import ProductionDesk
from ods_async.core.reports import AttemptFailed, ServiceBeat, ShutDown
from ods_async.core.requests import (
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
from ods_async.core.run import Run
from ods_async.core.sampling import SamplingDesk
from ods_async.core.sessions import Sessions
from ods_async.core.settings import BrokerSettings
from ods_async.core.states import OnlineDataEngineState as State
from ods_async.core.stimuli import (
    Announce,
    AnswerLost,
    AskedFor,
    BufferFailed,
    BufferReady,
    Effect,
    EndService,
    FrameGathered,
    Instant,
    Malformed,
    Peer,
    Reported,
    RolloutArrived,
    RolloutWritten,
    Stimulus,
    Tick,
)
from ods_async.core.workforce import Workforce
from ods_async.errors import (
    ArgumentError,
    ClosedError,
    LimitExceededError,
    OdsError,
    OwnerOnlyError,
    RequestTimeoutError,
    SessionLostError,
    StateError,
)

__all__ = ["BrokerState"]

AFTERGLOW_SECONDS = 2.0
TICK_SECONDS = 0.05


class BrokerState:
    """One run of the service, from its start to :class:`~ods_async.core.stimuli.EndService`.

    Args:
        settings: validated settings.
        run_id: positive, below 2**63, fresh for every run.
        owner_token: the secret that the owner's verbs must carry.
        rng: draws batches that bring no seed of their own.
        now: the instant of birth.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        run_id: int,
        owner_token: bytes,
        rng: np.random.Generator,
        now: Instant,
    ) -> None:
        self.run = Run(settings, run_id, owner_token, rng, now)
        self.production = ProductionDesk(self.run)
        self.sampling = SamplingDesk(self.run)
        self.workforce = Workforce(self.run, self.production)
        self.sessions = Sessions(settings.limits.sessions)
        self._beat_at = now.seconds
        self._stop_deadline = float("inf")
        self._stop_answered = False
        self._end_at = float("inf")
        self._ended = False
        self._stimuli: dict[type, Callable[[Any], None]] = {
            AskedFor: self._asked,
            Reported: self._reported,
            RolloutArrived: self._rollout_arrived,
            RolloutWritten: self._rollout_written,
            FrameGathered: self._frame_gathered,
            AnswerLost: self._answer_lost,
            Malformed: self._malformed,
            BufferReady: self._buffer_ready,
            BufferFailed: self._buffer_failed,
            Tick: self._tick,
        }
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
            GetStats: lambda asked: self._reply(asked, answers.stats(self)),
            GetStatus: lambda asked: self._reply(asked, answers.status(self)),
            GetFlow: self._flow,
            GetBudget: self._budget,
            CheckHealth: self._check_health,
        }
        self.production.request("start")

    @property
    def state(self) -> State:
        """Where in its life the run is."""
        return self.run.state

    @property
    def ended(self) -> bool:
        """Whether :class:`EndService` has been given out."""
        return self._ended

    def handle(self, stimulus: Stimulus, now: Instant) -> list[Effect]:
        """What follows from ``stimulus`` at ``now``. Never raises for anything a peer can send."""
        self.run.now = now
        self._stimuli[type(stimulus)](stimulus)
        if self.production.restless:
            self.production.advance()
        return self.run.take_effects()

    def next_deadline(self, now: Instant) -> float:
        """Seconds until a :class:`Tick` is due; the caller may come earlier."""
        parked = self.run.parking.next_deadline()
        due = min(self._beat_at, now.seconds + TICK_SECONDS, parked if parked is not None else float("inf"))
        return max(0.001, due - now.seconds)

    # --- consumers --------------------------------------------------------------------------------------------------

    def _asked(self, asked: AskedFor) -> None:
        request = asked.request
        if type(request) is Release:
            self.sampling.release(request, asked.peer.identity)
            return
        if type(request) is Cancel:
            self._cancel(asked.peer)
            return
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
        self._reply(asked, answers.welcome(self))

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
        self._reply(asked, answers.drained(self, asked.request.limit))
        self.production.advance()

    def _replay(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, Replay)
        self._reply(asked, answers.replayed(self, asked.request))

    def _language(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, GetLanguage)
        self._reply(asked, answers.language(self, asked.request))

    def _flow(self, asked: AskedFor) -> None:
        self._need_ready("get_flow_status")
        self._reply(asked, answers.flow(self))

    def _budget(self, asked: AskedFor) -> None:
        if self.run.failure is not None:
            raise self.run.failure.copy()
        self._reply(asked, self.run.budget.snapshot())

    def _check_health(self, asked: AskedFor) -> None:
        self._need_ready("check_health")
        self._reply(asked, Done())

    def _cancel(self, peer: Peer) -> None:
        for parked in self.run.parking.take(lambda entry: entry.peer.identity == peer.identity):
            error = RequestTimeoutError("cancelled by its asker", operation="cancel", timeout=0.0, missing="")
            self.run.refuse(parked.peer, parked.request_id, error)

    # --- owner ------------------------------------------------------------------------------------------------------

    def _report_exit(self, asked: AskedFor) -> None:
        assert isinstance(asked.request, ReportExit)
        self._need_owner(asked.request.owner, "report_exit")
        self.workforce.exited(asked.request)
        self._reply(asked, Done())
        self._look_at_stop()

    def _stop(self, asked: AskedFor) -> None:
        """First time: end production, answer when all is quiet. Again: end at once."""
        assert isinstance(asked.request, Stop)
        run = self.run
        self._need_owner(asked.request.owner, "stop")
        if self._stop_answered:
            self._reply(asked, Done())
            self._end_at = run.now.seconds
            self._look_at_stop()
            return
        self.stop(asked.request.grace, "the owner stopped the service")
        if not self._stop_answered:
            self._park(asked, forced=True)
        self._look_at_stop()

    def stop(self, grace: float, reason: str) -> None:
        """End production: revoke tickets, ask workers to end, refuse who waits. Quiet at the latest after ``grace``."""
        run = self.run
        if self._stop_deadline != float("inf"):
            return
        self._stop_deadline = run.now.seconds + max(0.0, grace)
        if run.alive:
            run.end_production(reason, grace)
            run.change_state(State.STOPPED, reason)
        for parked in run.parking.take(lambda entry: not isinstance(entry.request, Stop)):
            run.refuse(parked.peer, parked.request_id, ClosedError(f"{reason}", what="service"))

    def _look_at_stop(self) -> None:
        """Answer the stop once all workers have left and no rollout is half-way, or when the grace is over."""
        run = self.run
        now = run.now.seconds
        if self._stop_deadline == float("inf") or self._ended:
            return
        quiet = run.roster.present == 0 and self.production.idle
        if not self._stop_answered and (quiet or now >= self._stop_deadline):
            self._stop_answered = True
            self._end_at = min(self._end_at, now + AFTERGLOW_SECONDS)
            for parked in run.parking.take(lambda entry: isinstance(entry.request, Stop)):
                if run.failure is not None:
                    run.refuse(parked.peer, parked.request_id, run.failure.copy())
                else:
                    run.answer(parked.peer, parked.request_id, Done())
        if self._stop_answered and now >= self._end_at:
            self._ended = True
            run.do(EndService(failed=run.state is State.FAILED, reason=str(run.failure or "stopped")))

    # --- workers ----------------------------------------------------------------------------------------------------

    def _reported(self, reported: Reported) -> None:
        report = reported.report
        if isinstance(report, AttemptFailed):
            self.workforce.heard(report.worker_id)
            self.production.attempt_failed(report)
        else:
            self.workforce.reported(report)
        self._look_at_stop()

    def _rollout_arrived(self, arrived: RolloutArrived) -> None:
        self.workforce.heard(arrived.rollout.worker_id)
        self.production.arrived(arrived.rollout)

    def _rollout_written(self, written: RolloutWritten) -> None:
        was = self.production.completed
        self.production.written(written.job_id, written.error)
        self.production.advance()
        if self.run.state is State.READY:
            self.sampling.wake()
            if self.production.completed != was:
                self._wake_waiters()
        self._look_at_stop()

    def _wake_waiters(self) -> None:
        completed = self.production.completed

        def arrived(parked: Parked) -> bool:
            request = parked.request
            return isinstance(request, WaitReady) or (
                isinstance(request, WaitGeneration) and request.generation <= completed
            )

        for parked in self.run.parking.take(arrived):
            self.run.answer(parked.peer, parked.request_id, Done())

    def _frame_gathered(self, gathered: FrameGathered) -> None:
        self.sampling.gathered(gathered.lease_id, gathered.error)

    def _answer_lost(self, lost: AnswerLost) -> None:
        self.sampling.lost(lost.answer, lost.peer.identity)

    def _malformed(self, malformed: Malformed) -> None:
        self.run.reject(malformed.socket, malformed.reason)
        if malformed.ticket_id is not None:
            self.production.malformed(malformed.worker_id, malformed.ticket_id, malformed.reason)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _buffer_ready(self, ready: BufferReady) -> None:
        self.production.buffer = ready.description
        for parked in self.run.parking.take(lambda entry: isinstance(entry.request, Describe)):
            self.run.answer(parked.peer, parked.request_id, ready.description)
        self.production.advance()

    def _buffer_failed(self, failed: BufferFailed) -> None:
        self.run.fail(failed.error)

    # --- time -------------------------------------------------------------------------------------------------------

    def _tick(self, _: Tick) -> None:
        run = self.run
        now = run.now.seconds
        self.sampling.expire()
        self.workforce.look_for_silence()
        if run.alive:
            self.production.look_at_deadlines()
        self.production.advance()
        self.sampling.wake()
        for parked in run.parking.take_expired(now):
            run.refuse(parked.peer, parked.request_id, self._missed(parked))
        self._look_at_stop()
        if now >= self._beat_at:
            self._beat_at = now + run.settings.heartbeat_interval
            run.do(Announce(ServiceBeat(run.run_id, run.events.next, run.state.value)))
            if not run.alive:
                # A worker may have missed the first one: PUB keeps nothing for who is not there yet.
                run.do(Announce(ShutDown(f"the run is {run.state.value}", max(0.0, self._stop_deadline - now))))

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
        if not self.run.parking.park(parked, forced=forced):
            limit = self.run.settings.limits.parked_per_session
            raise LimitExceededError(
                f"this connection has {limit} requests waiting already; await their answers first",
                what="parked_per_session",
                size=limit + 1,
                limit=limit,
            )

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
