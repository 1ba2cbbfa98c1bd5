"""Making: generations become tickets, rollouts become published episodes.

A rollout that arrived waits here until there are spare rows (and room in the owner's log), is written by an effect, and
is published when the effect reports back: as a whole or not at all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from ods_async.core.episode import Rollout
from ods_async.core.events import (
    AttemptDiscarded,
    EpisodeEvicted,
    EpisodePublished,
    GenerationCompleted,
    GenerationRequested,
    RolloutRefused,
    TicketReissued,
)
from ods_async.core.provenance import provenance_of
from ods_async.core.reports import AttemptFailed, RevokeTickets, Verdict
from ods_async.core.requests import BufferDescription
from ods_async.core.run import Run
from ods_async.core.states import OnlineDataEngineState as State
from ods_async.core.stimuli import Announce, PushTicket, WriteRollout
from ods_async.core.store import Occupant
from ods_async.core.tickets import Reissue, Unit
from ods_async.core.windows import RowRuns
from ods_async.errors import ArgumentError, LanguageCapacityError, OdsError, SchemaMismatchError

__all__ = ["ProductionDesk"]

REMEMBERED_VERDICTS = 4096
MOST_WAITING = 2  # rollouts behind the one being written, from when on no more should be received


@dataclass(frozen=True, slots=True)
class _Waiting:
    rollout: Rollout
    unit: Unit


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: int
    rollout: Rollout
    unit: Unit
    rows: tuple[int, ...]


class ProductionDesk:
    """Generations, tickets, rollouts and their publication."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.buffer: BufferDescription | None = None
        self.requested = 0
        self.completed = 0
        self._rollouts_done: dict[int, int] = {}
        self._requested_at: dict[int, float] = {}
        self._waiting: deque[_Waiting] = deque()
        self._job: _Job | None = None  # one at a time, so that ids, rows and events keep one order
        self._jobs_begun = 0
        self._next_episode_id = 0
        self._in_pipeline: set[int] = set()
        self._verdicts: OrderedDict[int, Verdict] = OrderedDict()
        self.successful_episodes = 0
        self.failed_episodes = 0
        self.generated_frames = 0
        self.valid_frames = 0
        self.production_seconds = 0.0
        self.refused_rollouts = 0
        self.duplicate_rollouts = 0

    # --- generations ------------------------------------------------------------------------------------------------

    def request(self, reason: str) -> int:
        """Request the next generation, or say which one is outstanding."""
        run = self._run
        if reason == "manual":
            run.refill.insist()  # whoever asks by hand may be the very one whose draws the producers wait for
        if self.requested > self.completed:
            return self.requested
        self.requested += 1
        self._rollouts_done[self.requested] = 0
        self._requested_at[self.requested] = run.now.seconds
        run.refill.requested()
        run.tickets.ask(self.requested, run.settings.rollouts_per_generation)
        run.emit(GenerationRequested, generation=self.requested, reason=reason)
        return self.requested

    @property
    def pause(self) -> str:
        """Why nothing is being published although rollouts are there, in words; empty when that is not so."""
        if self._waiting and not self._run.log.room_for(self._records_for(self._waiting[0].rollout)):
            return (
                f"the lifecycle log is full ({len(self._run.log)} of {self._run.log.capacity} records): drain it, or "
                "set lifecycle_event_capacity=0"
            )
        if self._waiting and self._job is None and self._run.store.spare < len(self._waiting[0].rollout.episodes):
            return f"consumers still lease {self._run.store.retired} replaced rows"
        return self._run.refill.production_pause

    @property
    def trouble(self) -> str:
        """Which rollout was refused so often that the next try has to wait, in words; empty when there is none."""
        now = self._run.now.seconds
        unit = self._run.tickets.postponed(now) if self._run.alive else None
        if unit is None:
            return ""
        return (
            f"rollout {unit.rollout} of generation {unit.generation} was refused {unit.refusals} times; the next try "
            f"begins in {unit.not_before - now:.1f} s"
        )

    @property
    def idle(self) -> bool:
        """Whether no rollout is on its way to publication."""
        return not self._waiting and self._job is None

    @property
    def crowded(self) -> bool:
        """Whether rollouts arrive faster than they are written: it passes with the write that is under way."""
        return self._job is not None and len(self._waiting) >= MOST_WAITING

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def arrived(self, rollout: Rollout) -> None:
        """A whole rollout is here: judge it, and line it up for publication."""
        run = self._run
        ticket_id = rollout.ticket_id
        record = run.roster.get(rollout.worker_id)
        if record is not None and record.ticket_id == ticket_id:
            record.ticket_id = None
        if ticket_id in self._in_pipeline:
            return
        known = self._verdicts.get(ticket_id)
        if known is not None:
            run.do(Announce(known))
            return
        if run.tickets.unit_of(ticket_id) is None:
            self._refuse(rollout, f"ticket {ticket_id} is none of this run's")
            return
        if not run.alive:
            self._refuse(rollout, f"the run is {run.state.value}")
            return
        unit, siblings = run.tickets.settle(ticket_id)
        if siblings:
            run.do(Announce(RevokeTickets(siblings)))
        if unit is None:
            self.duplicate_rollouts += 1
            self._judge(Verdict(ticket_id, rollout.worker_id, "duplicate", "another worker was first"))
            return
        try:
            self._check(rollout)
        except OdsError as error:
            self._no_good(rollout, unit, error)
            return
        self._in_pipeline.add(ticket_id)
        self._waiting.append(_Waiting(rollout, unit))

    def refuse_waiting(self) -> None:
        """The run has ended: what waits for room will never be published, and its workers wait for the verdict."""
        while self._waiting:
            rollout = self._waiting.popleft().rollout
            self._in_pipeline.discard(rollout.ticket_id)
            self._refuse(rollout, f"the run is {self._run.state.value}")

    def malformed(self, worker_id: str, ticket_id: int, reason: str) -> None:
        """A rollout whose bytes are no good, from someone who could be read that far: refused like any other."""
        run = self._run
        if ticket_id in self._in_pipeline or ticket_id in self._verdicts or run.tickets.unit_of(ticket_id) is None:
            return
        unit, _ = run.tickets.settle(ticket_id)
        if unit is not None:
            error = SchemaMismatchError(f"the rollout cannot be read: {reason}", field="", expected="", found="")
            self._no_good(Rollout(ticket_id, worker_id, ()), unit, error)

    def attempt_failed(self, report: AttemptFailed) -> None:
        """A worker threw an attempt away and tries again."""
        episodes = min(report.episodes, self._run.settings.limits.episodes_per_rollout)
        self.failed_episodes += episodes
        self._run.emit(
            AttemptDiscarded,
            worker_id=report.worker_id,
            ticket_id=report.ticket_id,
            attempt=report.attempt,
            episodes=episodes,
            reason=report.reason[:2000],
        )

    def written(self, job_id: int, error: str, runs: tuple[RowRuns, ...]) -> None:
        """The effect is done: publish the rollout, or make it again when its data could not be written.

        ``runs`` holds those of every episode (unless there is an ``error``); finding them is not for this thread.
        """
        run = self._run
        job = self._job
        if job is None or job.job_id != job_id:
            return
        self._job = None
        self._in_pipeline.discard(job.rollout.ticket_id)
        if error or not run.alive:
            run.store.give_back(job.rows)
            self._no_good(job.rollout, job.unit, OdsError(error or f"the run is {run.state.value}"))
            return
        run.new_edition()
        gone: list[int] = []
        for row, episode, found in zip(job.rows, job.rollout.episodes, runs, strict=True):
            anchors = tuple((start, end) for start, end in found.episode.tolist())
            occupant = Occupant(self._next_episode_id, job.unit.generation, episode.length, anchors)
            self._next_episode_id += 1
            replaced = self._publish(row, occupant)
            if replaced is not None:
                gone.append(replaced)
        run.index.publish_all(job.rows, runs, job.unit.generation)
        run.index.retire_all(gone)
        rollout = job.rollout
        self.successful_episodes += len(rollout.episodes)
        self.generated_frames += rollout.steps
        self.production_seconds += rollout.production_seconds
        run.refill.published(len(rollout.episodes))
        record = run.roster.get(rollout.worker_id)
        if record is not None:
            record.rollouts += 1
        self._judge(Verdict(rollout.ticket_id, rollout.worker_id, "accepted"))
        self._rollout_done(job.unit.generation)

    # --- tickets ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do what can be done now: write what waits, request what is due, hand out tickets."""
        run = self._run
        while self._waiting and self._begin_write(self._waiting[0]):
            self._waiting.popleft()
        if not run.alive or self.buffer is None:
            return
        if self.requested == self.completed and run.refill.due and self.completed:
            self.request(run.refill.reason)
        if run.tickets.demand and not run.refill.production_pause:
            # A ticket that lies with a stalled worker must not keep the next one from those who can work.
            allowed = run.roster.dealt if run.roster.ready else 0
            for ticket in run.tickets.issue(allowed, run.now.seconds):
                run.do(PushTicket(ticket))

    @property
    def restless(self) -> bool:
        """Whether :meth:`advance` may have something to do (cheap, for the hot path)."""
        return bool(self._waiting) or self._run.tickets.demand > 0 or self._run.refill.due

    def look_at_deadlines(self) -> None:
        """Take back tickets that missed theirs."""
        run = self._run
        self.reissue(run.tickets.overdue(run.now.seconds, someone_idle=run.roster.idle > 0))

    def reissue(self, taken: list[Reissue]) -> None:
        """Revoke tickets that were taken back, and hand their units out again."""
        run = self._run
        if not taken:
            return
        run.do(Announce(RevokeTickets(tuple(entry.ticket.ticket_id for entry in taken))))
        for entry in taken:
            run.emit(
                TicketReissued,
                generation=entry.ticket.generation,
                rollout=entry.ticket.rollout,
                ticket_id=entry.ticket.ticket_id,
                reason=entry.reason,
            )
        self.advance()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _check(self, rollout: Rollout) -> None:
        run = self._run
        if len(rollout.episodes) != run.settings.num_envs:
            raise SchemaMismatchError(
                f"a rollout holds one episode an environment: expected {run.settings.num_envs}, found "
                f"{len(rollout.episodes)}; set gym_config['num_envs'] alike for broker and workers",
                field="episodes",
                expected=str(run.settings.num_envs),
                found=str(len(rollout.episodes)),
            )
        if run.recorded is None:
            raise SchemaMismatchError(
                "a rollout came before any worker said what it records", field="", expected="hello", found="a rollout"
            )
        for episode in rollout.episodes:
            episode.check(run.recorded, run.settings.max_episode_steps)

    def _no_good(self, rollout: Rollout, unit: Unit, error: OdsError) -> None:
        run = self._run
        self.failed_episodes += len(rollout.episodes) or run.settings.num_envs
        self._refuse(rollout, str(error))
        if not run.alive:
            return
        run.tickets.refuse(unit, run.now.seconds, run.settings.max_generation_attempts)
        if unit.refusals >= run.settings.max_generation_attempts or isinstance(error, LanguageCapacityError):
            run.report_worker_failure(rollout.worker_id, "hand-in", None, error)
            if run.settings.worker_failure == "fail":
                run.fail(error)

    def _refuse(self, rollout: Rollout, reason: str) -> None:
        self.refused_rollouts += 1
        self._run.emit(RolloutRefused, worker_id=rollout.worker_id, ticket_id=rollout.ticket_id, reason=reason[:2000])
        self._judge(Verdict(rollout.ticket_id, rollout.worker_id, "refused", reason[:2000]))

    def _judge(self, verdict: Verdict) -> None:
        self._verdicts[verdict.ticket_id] = verdict
        while len(self._verdicts) > REMEMBERED_VERDICTS:
            self._verdicts.popitem(last=False)
        self._run.do(Announce(verdict))

    def _records_for(self, rollout: Rollout) -> int:
        n = len(rollout.episodes)
        return n + self._run.store.next_evictions(n)

    def _begin_write(self, waiting: _Waiting) -> bool:
        run = self._run
        rollout, unit = waiting.rollout, waiting.unit
        if self._job is not None or not run.log.room_for(self._records_for(rollout)):
            return False
        rows = run.store.take_spare(len(rollout.episodes))
        if rows is None:
            return False
        try:
            task_indices, subtask_indices = run.language.intern_rollout(rollout)
        except (LanguageCapacityError, ArgumentError) as error:
            run.store.give_back(rows)
            self._in_pipeline.discard(rollout.ticket_id)
            self._no_good(rollout, unit, error)
            return True
        dirty, clean = run.store.next_stamps(rows)
        self._jobs_begun += 1
        self._job = _Job(self._jobs_begun, rollout, unit, rows)
        provenance = None
        if run.settings.include_provenance:
            provenance = provenance_of(run.run_id, unit.generation, self._next_episode_id, len(rows), run.now)
        run.do(WriteRollout(self._job.job_id, rollout, rows, dirty, clean, task_indices, subtask_indices, provenance))
        return True

    def _publish(self, row: int, occupant: Occupant) -> int | None:
        """Put the episode in its row and tell of it; the row of the episode that it replaces, if there is one."""
        run = self._run
        published = run.store.publish(row, occupant)
        if published.evicted is not None and published.retired_row is not None:
            run.budget.retire(published.retired_row)
            self.valid_frames -= published.evicted.length
            self._tell(EpisodeEvicted, published.slot, published.evicted)
        run.budget.assign(row, published.slot, occupant)
        self.valid_frames += occupant.length
        self._tell(EpisodePublished, published.slot, occupant)
        return published.retired_row

    def _tell(self, cls: type[EpisodePublished] | type[EpisodeEvicted], slot: int, occupant: Occupant) -> None:
        run = self._run
        event = cls(  # two for every episode: what ``emit`` does beside costs as much as the event
            sequence=run.events.next,
            run_id=run.run_id,
            monotonic_ns=run.now.monotonic_ns,
            episode_id=occupant.episode_id,
            generation=occupant.generation,
            slot=slot,
            valid_runs=((0, occupant.length),),
            anchor_runs=occupant.anchors,
            valid_frames=occupant.length,
            eligible_anchors=occupant.eligible_anchors,
        )
        run.log.append(run.tell(event))

    def _rollout_done(self, generation: int) -> None:
        run = self._run
        self._rollouts_done[generation] += 1
        whole = run.settings.rollouts_per_generation
        while self._rollouts_done.get(self.completed + 1) == whole:
            self.completed += 1
            del self._rollouts_done[self.completed]
            seconds = run.now.seconds - self._requested_at.pop(self.completed)
            run.emit(GenerationCompleted, generation=self.completed, seconds=seconds)
            run.refill.completed()
        if self.completed and run.state is State.STARTING:
            run.change_state(State.READY, "the first generation is published")
