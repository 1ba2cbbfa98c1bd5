"""The broker's mind: a stimulus comes in, the effects that follow go out. Start reading here.

Nothing below touches a socket, a clock, a thread or the data. It orders the parts; the rules are in the modules named
after them: ``reception`` (requests), ``sampling`` (drawing), ``production`` (generations, tickets, publication),
``workforce`` (workers and their failures), ``answers`` (what the state says about itself).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ods_async.core.production import ProductionDesk
from ods_async.core.reception import Reception
from ods_async.core.reports import AttemptFailed, ServiceBeat, ShutDown
from ods_async.core.requests import Done, Stop
from ods_async.core.run import Run
from ods_async.core.sampling import SamplingDesk
from ods_async.core.settings import BrokerSettings
from ods_async.core.states import OnlineDataEngineState as State
from ods_async.core.stimuli import (
    Announce,
    AnswerLost,
    AskedFor,
    BufferFailed,
    BufferReady,
    ConnectionRefused,
    Effect,
    EndService,
    FrameGathered,
    Instant,
    Malformed,
    Reported,
    RolloutArrived,
    RolloutWritten,
    Stimulus,
    Tick,
)
from ods_async.core.workforce import Workforce
from ods_async.errors import ClosedError

__all__ = ["BrokerState"]

AFTERGLOW_SECONDS = 2.0
TICK_SECONDS = 0.05
SLEEP_SHARE = 0.25


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
        self.reception = Reception(self)
        self._beat_at = now.seconds
        self._stop_deadline = float("inf")
        self._stop_answered = False
        self._end_at = float("inf")
        self._ended = False
        self._stimuli: dict[type, Callable[[Any], None]] = {
            AskedFor: self.reception.asked,
            Reported: self._reported,
            RolloutArrived: self._rollout_arrived,
            RolloutWritten: self._rollout_written,
            FrameGathered: self._frame_gathered,
            AnswerLost: self._answer_lost,
            Malformed: self._malformed,
            ConnectionRefused: self._connection_refused,
            BufferReady: self._buffer_ready,
            BufferFailed: self._buffer_failed,
            Tick: self._tick,
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
        self._look_at_own_sleep(now)
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

    def _look_at_own_sleep(self, now: Instant) -> None:
        """Time in which this process did not run (it was stopped, or its machine slept) is held against nobody else.

        What workers said meanwhile still lies in the sockets, and a tick may well come first.
        """
        asleep = now.seconds - self.run.now.seconds
        if asleep > self.run.settings.heartbeat_timeout * SLEEP_SHARE:
            self.run.roster.excuse(asleep)
            self.run.tickets.excuse(asleep)

    # --- the end ----------------------------------------------------------------------------------------------------

    def stop(self, grace: float, reason: str) -> None:
        """End production: revoke tickets, ask workers to end, refuse who waits. Quiet at the latest after ``grace``."""
        run = self.run
        if self._stop_deadline != float("inf"):
            return
        self._stop_deadline = run.now.seconds + max(0.0, grace)
        if run.alive:
            run.end_production(reason, grace)
            run.change_state(State.STOPPED, reason)
        self.production.refuse_waiting()
        for parked in run.parking.take(lambda entry: not isinstance(entry.request, Stop)):
            run.refuse(parked.peer, parked.request_id, ClosedError(f"{reason}", what="service"))

    @property
    def quiet(self) -> bool:
        """Whether a stop has been answered: nothing is half-way any more."""
        return self._stop_answered

    def end_now(self) -> None:
        """Skip the time in which a stopped service can still be asked."""
        self._end_at = self.run.now.seconds
        self.look_at_stop()

    def look_at_stop(self) -> None:
        """Answer the stop once all workers have left and no rollout is half-way, or when the grace is over."""
        run = self.run
        now = run.now.seconds
        if self._stop_deadline == float("inf") or self._ended:
            return
        over = run.roster.present == 0 and self.production.idle
        if not self._stop_answered and (over or now >= self._stop_deadline):
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
        self.look_at_stop()

    def _rollout_arrived(self, arrived: RolloutArrived) -> None:
        self.workforce.heard(arrived.rollout.worker_id)
        self.production.arrived(arrived.rollout)

    def _rollout_written(self, written: RolloutWritten) -> None:
        was = self.production.completed
        self.production.written(written.job_id, written.error, written.runs)
        self.production.advance()
        if self.run.state is State.READY:
            self.sampling.wake()
            if self.production.completed != was:
                self.reception.generation_completed()
        self.look_at_stop()

    def _frame_gathered(self, gathered: FrameGathered) -> None:
        self.sampling.gathered(gathered.lease_id, gathered.error)

    def _answer_lost(self, lost: AnswerLost) -> None:
        self.sampling.lost(lost.answer, lost.peer.identity)

    def _connection_refused(self, refused: ConnectionRefused) -> None:
        self.run.refuse_connection(refused.socket, refused.reason, refused.address, refused.key)

    def _malformed(self, malformed: Malformed) -> None:
        self.run.reject(malformed.socket, malformed.reason)
        if malformed.ticket_id is not None:
            self.production.malformed(malformed.worker_id, malformed.ticket_id, malformed.reason)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _buffer_ready(self, ready: BufferReady) -> None:
        self.production.buffer = ready.description
        self.reception.buffer_ready(ready.description)
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
        self.reception.refuse_expired()
        self.look_at_stop()
        if now >= self._beat_at:
            self._beat_at = now + run.settings.heartbeat_interval
            run.do(Announce(ServiceBeat(run.run_id, run.events.next, run.state.value)))
            if not run.alive:
                # A worker may have missed the first one: PUB keeps nothing for who is not there yet.
                run.do(Announce(ShutDown(f"the run is {run.state.value}", max(0.0, self._stop_deadline - now))))
