"""The bookkeeper of a simulation: knows everything that was made, told and decided, and holds the service against it.

Nothing here looks up an answer in the code under test: leases, budgets, slots and numbers are kept a second time, the
slow and obvious way.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ods_async.core.broker_state import BrokerState
from ods_async.core.episode import Episode, Rollout
from ods_async.core.events import EpisodeEvicted, EpisodePublished, Event, GenerationCompleted, GenerationRequested
from ods_async.core.reports import Verdict
from ods_async.core.requests import Cancel, Plans, Release, Sample
from ods_async.core.schema import Path
from ods_async.core.stimuli import (
    Announce,
    AnswerLost,
    AnswerRequest,
    AskedFor,
    Effect,
    FrameGathered,
    GatherFrame,
    PushTicket,
    RefuseRequest,
    RolloutWritten,
    Stimulus,
    Tick,
    WriteRollout,
)
from ods_async.errors import SessionLostError
from ods_async.testing.simulation.clockwork import World
from ods_async.testing.simulation.lease_ledger import INVARIANTS, LeaseLedger, Unheard
from ods_async.testing.simulation.shown import MARK, Shown

if TYPE_CHECKING:
    from ods_async.testing.simulation.scenario import Scenario

__all__ = ["INVARIANTS", "RunLedger", "Works"]


@dataclass(slots=True)
class Works:
    """Every episode that any worker of this world ever made, by its fingerprint."""

    episodes: dict[int, Episode] = field(default_factory=dict)

    def add(self, episode: Episode, fingerprint: int) -> None:
        """Remember an episode."""
        self.episodes[fingerprint] = episode


def fingerprint_of(episode: Episode) -> int:
    """What every step of the episode carries."""
    return int(episode.arrays[MARK][0, 0])


class RunLedger(LeaseLedger):
    """The books on one run of the broker.

    Args:
        world: time.
        scenario: the settings of the run.
        state: what is held against the books; only its sizes and public counters are looked at.
        works: what was made.
    """

    def __init__(self, world: World, scenario: Scenario, state: BrokerState, works: Works) -> None:
        super().__init__(world, scenario.settings, state)
        self.works = works
        self.open: dict[bytes, AskedFor] = {}
        self._gathering: set[bytes] = set()
        self.answers = 0
        self.fingerprints: dict[int, int] = {}  # episode id -> fingerprint
        self.published: dict[int, int] = {}  # fingerprint -> episode id
        self.generation_of: dict[int, int] = {}  # episode id -> generation
        self.slots: deque[int] = deque(range(self.settings.buffer_size))
        self.by_slot: dict[int, int] = {}
        self.events: list[Event] = []
        self.records: list[int] = []
        self.units: dict[int, tuple[int, int]] = {}
        self.filled: set[tuple[int, int]] = set()
        self.accepted: set[int] = set()
        self.jobs: OrderedDict[int, WriteRollout] = OrderedDict()
        self._publishing: deque[tuple[int, Episode]] = deque()
        self.received: Counter[int] = Counter()
        self._was_alive = True
        self._rollouts = self.settings.rollouts_per_generation
        self._most_leases = 0
        self._most_parked = 0

    # --- before and after the state handles something ---------------------------------------------------------------

    def begin(self, effects: list[Effect]) -> None:
        """What follows from the birth of the state."""
        for effect in effects:
            self._follows(effect)

    def told(self, stimulus: Stimulus) -> None:
        """The state is about to hear this."""
        self._was_alive = self.state.run.alive
        if isinstance(stimulus, AskedFor):
            if isinstance(stimulus.request, Cancel):
                self._cancelled(stimulus.peer.identity, stimulus.request.request_id)
            elif not isinstance(stimulus.request, Release):
                self.open[stimulus.peer.envelope[0]] = stimulus
                self._unheard.pop(stimulus.peer.identity, None)
                self._decide(stimulus.peer.identity, heard=True)

    def handled(self, stimulus: Stimulus, effects: list[Effect]) -> None:
        """The state has heard it, and this follows."""
        now = self.world.seconds
        if isinstance(stimulus, AskedFor):
            request = stimulus.request
            if isinstance(request, Release) or (isinstance(request, Sample) and not _session_lost(effects)):
                leases = request.leases if isinstance(request, Release) else request.release
                self._release(leases, stimulus.peer.identity, refund=False)
                self._release(request.undelivered, stimulus.peer.identity, refund=True)
        elif isinstance(stimulus, FrameGathered):
            held = self.leases.get(stimulus.lease_id)
            given_up = held is not None and held.heard is False
            self._end(stimulus.lease_id, refund=given_up or bool(stimulus.error))
            if held is not None and held.heard is None and not stimulus.error:
                self._unheard[held.identity] = Unheard(
                    held.request_id, (), held.windows, now + self.settings.lease_seconds
                )
        elif isinstance(stimulus, AnswerLost):
            if isinstance(stimulus.answer, Plans):
                for plan in stimulus.answer.plans:
                    self._end(plan.lease_id, refund=True)
        elif isinstance(stimulus, RolloutWritten):
            self._written(stimulus)
        elif isinstance(stimulus, Tick):
            for lease_id in [key for key, held in self.leases.items() if held.deadline <= now]:
                self._end(lease_id, refund=False)
            self._unheard = {key: unheard for key, unheard in self._unheard.items() if unheard.until > now}
        for effect in effects:
            self._follows(effect)
        if self._publishing:
            self.fail("kept", f"{len(self._publishing)} episodes were written and not published")
        if isinstance(stimulus, Tick):
            for asked in self.open.values():
                token = asked.peer.envelope[0]
                if token not in self._gathering and asked.timeout < 1e6 and self._deadline(asked) <= now - 1e-6:
                    self.fail("answer", f"{asked.request} was not answered by its deadline")
        self._look()

    def _deadline(self, asked: AskedFor) -> float:
        return float(asked.peer.envelope[1]) + asked.timeout

    def _follows(self, effect: Effect) -> None:
        if isinstance(effect, Announce):
            what = effect.what
            if isinstance(what, Event):
                self._event(what)
            elif isinstance(what, Verdict) and what.outcome == "accepted" and what.ticket_id not in self.accepted:
                self.fail("kept", f"ticket {what.ticket_id} was accepted and not published")
        elif isinstance(effect, AnswerRequest):
            self._answered(effect.peer.envelope[0], effect)
            if isinstance(effect.answer, Plans):
                deadline = self.world.seconds + self.settings.lease_seconds
                for plan in effect.answer.plans:
                    self._lease(plan, effect.peer.identity, effect.request_id, deadline)
                leases = tuple(plan.lease_id for plan in effect.answer.plans)
                self._unheard[effect.peer.identity] = Unheard(effect.request_id, leases, Counter(), deadline)
        elif isinstance(effect, RefuseRequest):
            self._answered(effect.peer.envelope[0], effect)
        elif isinstance(effect, GatherFrame):
            self._gathering.add(effect.peer.envelope[0])
            self._lease(effect.plan, effect.peer.identity, effect.request_id, float("inf"))
        elif isinstance(effect, PushTicket):
            ticket = effect.ticket
            self.units[ticket.ticket_id] = (ticket.generation, ticket.rollout)
        elif isinstance(effect, WriteRollout):
            self._write(effect)

    # --- answers ----------------------------------------------------------------------------------------------------

    def _answered(self, token: bytes, effect: object) -> None:
        if self.open.pop(token, None) is None:
            self.fail("answer", f"answered twice, or without having been asked: {effect}")
        self.answers += 1

    def frame_answered(self, token: bytes) -> None:
        """A gathered frame, or the error in its place, is sent."""
        self._gathering.discard(token)
        self._answered(token, "a frame")

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def _write(self, effect: WriteRollout) -> None:
        now = self.world.seconds
        for row in effect.rows:
            if row in self.episode_in_row:
                self.fail("kept", f"row {row} of episode {self.episode_in_row[row]} is written over")
            for lease_id, held in self.leases.items():
                if row in held.rows and held.deadline > now:
                    self.fail("lease", f"row {row} is written over under lease {lease_id}")
        for other in self.jobs.values():
            if set(other.rows) & set(effect.rows):
                self.fail("lease", f"rows {effect.rows} are written by two")
        unit = self.units.get(effect.rollout.ticket_id)
        if unit is None or unit in self.filled:
            self.fail("once", f"unit {unit} of ticket {effect.rollout.ticket_id} is written again")
        self.jobs[effect.job_id] = effect

    def _written(self, written: RolloutWritten) -> None:
        job = self.jobs.pop(written.job_id, None)
        if job is None or written.error or not self._was_alive:
            return
        rollout: Rollout = job.rollout
        self.accepted.add(rollout.ticket_id)
        self.filled.add(self.units[rollout.ticket_id])
        self._publishing.extend(zip(job.rows, rollout.episodes, strict=True))

    def _event(self, event: Event) -> None:
        if event.sequence != len(self.events) or event.run_id != self.state.run.run_id:
            self.fail("sequence", f"event {event} came where {len(self.events)} was due")
        self.events.append(event)
        if isinstance(event, EpisodePublished):
            self._is_published(event)
        elif isinstance(event, EpisodeEvicted):
            self._is_evicted(event)
        elif isinstance(event, GenerationCompleted):
            whole = {(event.generation, rollout) for rollout in range(self.settings.rollouts_per_generation)}
            if not whole <= self.filled:
                self.fail("once", f"generation {event.generation} is called complete without {whole - self.filled}")
        elif isinstance(event, GenerationRequested):
            before = sum(isinstance(other, GenerationRequested) for other in self.events) - 1
            if event.generation != before + 1:
                self.fail("once", f"generation {event.generation} was requested after {before} others")
        if isinstance(event, EpisodePublished | EpisodeEvicted) and self.settings.lifecycle_event_capacity:
            self.records.append(event.sequence)

    def _is_published(self, event: EpisodePublished) -> None:
        if not self._publishing:
            self.fail("once", f"{event} without a written rollout")
        row, episode = self._publishing.popleft()
        mark = fingerprint_of(episode)
        if mark in self.published:
            self.fail("once", f"episode {mark} was published as {self.published[mark]} and {event.episode_id}")
        if event.episode_id != len(self.fingerprints):
            self.fail("once", f"episode {event.episode_id} is the {len(self.fingerprints)}th")
        slot = self.slots.popleft()
        self.slots.append(slot)
        if event.slot != slot or slot in self.by_slot:
            self.fail("kept", f"published in slot {event.slot}, and the oldest is {slot}")
        if event.valid_frames != episode.length:
            self.fail("kept", f"episode of {episode.length} steps published with {event.valid_frames}")
        self.published[mark] = event.episode_id
        self.fingerprints[event.episode_id] = mark
        self.generation_of[event.episode_id] = event.generation
        self.by_slot[slot] = row
        self.episode_in_row[row] = event.episode_id
        if self.settings.episode_sample_budget is not None:
            self.remaining[event.episode_id] = self.settings.episode_sample_budget
        self._budget_touched = True

    def _is_evicted(self, event: EpisodeEvicted) -> None:
        slot = self.slots[0]
        row = self.by_slot.pop(slot, None)
        if event.slot != slot or row is None or self.episode_in_row.pop(row) != event.episode_id:
            self.fail("kept", f"{event.episode_id} was evicted from slot {event.slot}; the oldest slot is {slot}")
        self._budget_touched = True

    def memory_holds(self, row: int, arrays: dict[Path, Any]) -> None:
        """The row of a published episode holds it, and nothing of the one before."""
        mark = self.fingerprints[self.episode_in_row[row]]
        episode = self.works.episodes[mark]
        found = arrays[MARK][row]
        length = episode.length
        if not np.array_equal(found[:length], episode.arrays[MARK]) or found[length:].any():
            self.fail("kept", f"row {row} should hold episode {mark} and holds {found.tolist()}")

    # --- bounds -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        state = self.state
        run, settings = state.run, self.settings
        if self._budget_touched:
            self._check_budget()
        production = state.production
        tickets = run.tickets
        held = len(production._waiting) + (production._job is not None)
        if tickets.outstanding + tickets.demand + held > self._rollouts:
            self.fail("memory", f"{tickets.outstanding}+{tickets.demand} units wanted, {held} held of {self._rollouts}")
        leases = run.store.open_leases
        if leases != len(self.leases):
            self.fail("lease", f"{leases} leases are open, should be {len(self.leases)}: {sorted(self.leases)}")
        parking = run.parking
        self._most_leases = max(self._most_leases, leases)
        self._most_parked = max(self._most_parked, len(parking))
        if len(parking._deadlines) > 4 * self._most_parked + 65:
            self.fail("memory", f"{len(parking._deadlines)} deadlines of {len(parking)} parked requests")
        if len(run.store._deadlines) > 4 * self._most_leases + 65:
            self.fail("memory", f"{len(run.store._deadlines)} deadlines of {leases} leases")
        if len(state.reception.sessions) > settings.limits.sessions:
            self.fail("memory", f"{len(state.reception.sessions)} sessions")
        if len(state.sampling._booked) > leases or len(state.sampling._frames) > leases:
            self.fail("memory", f"receipts for {len(state.sampling._booked)} leases of {leases}")
        if len(parking) + len(self._gathering) != len(self.open):
            self.fail("answer", f"{len(self.open)} requests are open, and {len(parking)} are parked")
        if self.episode_in_row and len(self.episode_in_row) != run.store.episodes:
            self.fail("kept", f"{run.store.episodes} rows occupied, should be {len(self.episode_in_row)}")
        if production.completed and len(self.episode_in_row) < settings.buffer_size:
            self.fail("kept", f"the buffer shrank to {len(self.episode_in_row)} of {settings.buffer_size}")
        if run.log.capacity and len(run.log) > run.log.capacity:
            self.fail("memory", f"{len(run.log)} records in a log of {run.log.capacity}")

    # --- what consumers say -----------------------------------------------------------------------------------------

    def batch_received(self, views: dict[Path, Any], wanted: Sample, who: str) -> None:
        """A consumer has this batch and keeps it."""
        for number in range(wanted.batch_size):
            shown = Shown.of(views, number, wanted, f"window {number} of {wanted} for {who}")
            episode_id = self.published.get(shown.mark)
            if episode_id is None:
                self.fail("window", f"{shown.label}: {shown.mark} was never published in this run")
                return
            shown.check(self.works.episodes[shown.mark])
            if self.settings.include_provenance:
                shown.check_provenance(episode_id)
            if wanted.generations and self.generation_of[episode_id] not in wanted.generations:
                self.fail("window", f"{shown.label}: generation {self.generation_of[episode_id]}")
            self.received[episode_id] += 1
            budget = self.settings.episode_sample_budget
            if budget is not None and self.received[episode_id] > budget:
                self.fail("delivered", f"episode {episode_id} was received {self.received[episode_id]} times")

    def records_received(self, sequences: list[int], done: int) -> int:
        """The owner got these records, having got ``done`` of them before; how many it has now."""
        expected = self.records[done : done + len(sequences)]
        if sequences != expected:
            self.fail("log", f"drained {sequences}, should be {expected}")
        return done + len(sequences)


def _session_lost(effects: list[Effect]) -> bool:
    return any(isinstance(effect, RefuseRequest) and isinstance(effect.error, SessionLostError) for effect in effects)
