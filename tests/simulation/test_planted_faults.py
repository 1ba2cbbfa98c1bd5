"""Each invariant catches a planted fault: a rule is broken on purpose, and some early schedule says so by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ods_async.client.exchange import Exchange
from ods_async.core import production, sampling, write
from ods_async.core.budget import SamplingBudget
from ods_async.core.lifecycle import LifecycleLog
from ods_async.core.production import ProductionDesk
from ods_async.core.reception import Reception
from ods_async.core.run import Run
from ods_async.core.sampling import SamplingDesk
from ods_async.core.sessions import Sessions
from ods_async.core.store import TrajectoryStore
from ods_async.core.tickets import TicketBook
from ods_async.core.window_plan import WindowPlan
from ods_async.core.workforce import Workforce
from ods_async.observe.sequence import Sequencer
from ods_async.testing.simulation import INVARIANTS, Violation, broker_peer, simulate

SEEDS = 300

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: list[tuple[str, Plant]] = []


def planted(invariant: str) -> Callable[[Plant], Plant]:
    def remember(plant: Plant) -> Plant:
        PLANTED.append((invariant, plant))
        return plant

    return remember


def instead(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Put ``change(original, *args)`` in place of ``owner.name``."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **more: change(original, *args, **more))


# --- memory under readers ---------------------------------------------------------------------------------------------


@planted("lease")
def a_replaced_row_is_free_at_once(patch: pytest.MonkeyPatch) -> None:
    def publish(original: Any, store: Any, row: int, occupant: Any) -> Any:
        held, store._held = store._held, np.zeros(store.rows, np.int64)
        try:
            return original(store, row, occupant)
        finally:
            store._held = held

    instead(patch, TrajectoryStore, "publish", publish)


@planted("lease")
def leases_never_expire(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrajectoryStore, "expire", lambda store, now: [])


@planted("lease")
def anyone_may_release(patch: pytest.MonkeyPatch) -> None:
    def release(original: Any, store: Any, lease_id: int, session: bytes) -> Any:
        lease = store._leases.get(lease_id) or next(iter(store._leases.values()), None)
        return None if lease is None else original(store, lease.lease_id, lease.session)

    instead(patch, TrajectoryStore, "release", release)


@planted("window")
def a_reader_trusts_what_it_copied(patch: pytest.MonkeyPatch) -> None:
    def second_half(original: Any, copy: Any) -> bool:
        original(copy)
        return True

    instead(patch, broker_peer.Copy, "second_half", second_half)


# --- windows ----------------------------------------------------------------------------------------------------------


@planted("window")
def windows_begin_a_step_late(patch: pytest.MonkeyPatch) -> None:
    def plan(original: Any, *args: Any, **more: Any) -> WindowPlan:
        made: WindowPlan = original(*args, **more)
        return WindowPlan(made.rows, made.starts + 1, None, None, made.length, 0)

    instead(patch, sampling, "plan_windows", plan)


@planted("window")
def contexts_end_a_step_early(patch: pytest.MonkeyPatch) -> None:
    def plan(original: Any, *args: Any, **more: Any) -> WindowPlan:
        made: WindowPlan = original(*args, **more)
        assert made.first is not None
        assert made.last is not None
        now = made.starts + made.history - 1
        shorter = made.last - (made.last > now + 1).astype("int32")
        return WindowPlan(made.rows, made.starts, made.first, shorter, made.length, made.history)

    instead(patch, sampling, "plan_contexts", plan)


@planted("window")
def continuity_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def runs(original: Any, valid: Any, continuity_id: Any, *notes: Any) -> Any:
        return original(valid, continuity_id * 0, *notes)

    instead(patch, write, "runs_of", runs)


@planted("window")
def a_failed_write_is_published(patch: pytest.MonkeyPatch) -> None:
    def tell_no_error(original: Any, segment: Any, effect: Any) -> None:
        original(segment, effect)
        segment.stamps[list(effect.rows)] = effect.stamps

    instead(patch, broker_peer.Segment, "scribble", tell_no_error)
    patch.setattr(
        broker_peer,
        "write_rollout",
        lambda arrays, stamps, effect: tuple(map(write.runs_of_episode, effect.rollout.episodes)),
    )
    patch.setattr(broker_peer.RunLedger, "memory_holds", lambda ledger, row, arrays: None)


@planted("kept")
def a_row_keeps_the_tail_of_its_last_episode(patch: pytest.MonkeyPatch) -> None:
    def leave_tails(original: Any, arrays: Any, stamps: Any, effect: Any) -> Any:
        before = {path: array[list(effect.rows)].copy() for path, array in arrays.items()}
        runs = original(arrays, stamps, effect)
        for number, (row, episode) in enumerate(zip(effect.rows, effect.rollout.episodes, strict=True)):
            for path, array in arrays.items():
                array[row, episode.length :] = before[path][number, episode.length :]
        return runs

    instead(patch, broker_peer, "write_rollout", leave_tails)


# --- rollouts ---------------------------------------------------------------------------------------------------------


@planted("once")
def every_hand_in_counts(patch: pytest.MonkeyPatch) -> None:
    def arrived(original: Any, desk: Any, rollout: Any) -> None:
        desk._verdicts.clear()
        unit = desk._run.tickets.unit_of(rollout.ticket_id)
        if unit is not None and rollout.ticket_id not in desk._in_pipeline:
            unit.settled = False
        original(desk, rollout)

    instead(patch, ProductionDesk, "arrived", arrived)


@planted("kept")
def the_newest_slot_is_replaced(patch: pytest.MonkeyPatch) -> None:
    def publish(original: Any, store: Any, row: int, occupant: Any) -> Any:
        if store.episodes == store.slots:
            store._by_age.rotate(1)
        return original(store, row, occupant)

    instead(patch, TrajectoryStore, "publish", publish)


@planted("kept")
def rollouts_are_accepted_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    def begin(original: Any, desk: Any, waiting: Any) -> bool:
        begun: bool = original(desk, waiting)
        if begun and desk._job is not None:
            rollout = waiting.rollout
            desk._run.do(production.Announce(production.Verdict(rollout.ticket_id, rollout.worker_id, "accepted")))
        return begun

    instead(patch, ProductionDesk, "_begin_write", begin)


# --- requests ---------------------------------------------------------------------------------------------------------


@planted("answer")
def deadlines_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reception, "refuse_expired", lambda desk: None)


@planted("answer")
def who_cancels_gets_no_answer(patch: pytest.MonkeyPatch) -> None:
    def cancel(original: Any, desk: Any, peer: Any, notice: Any) -> None:
        desk.sampling.cancelled(peer.identity, notice.request_id)
        desk.run.parking.take(lambda entry: entry.peer.identity == peer.identity)

    instead(patch, Reception, "_cancel", cancel)


@planted("answer")
def who_waits_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    def answer(original: Any, run: Any, peer: Any, request_id: int, what: Any) -> None:
        original(run, peer, request_id, what)
        if type(what).__name__ == "Done":
            original(run, peer, request_id, what)

    instead(patch, Run, "answer", answer)


# --- budgets ----------------------------------------------------------------------------------------------------------


@planted("budget")
def a_refund_can_be_had_twice(patch: pytest.MonkeyPatch) -> None:
    def refund(original: Any, budget: Any, receipt: Any) -> int:
        original(budget, receipt)
        receipt._open = True
        return int(original(budget, receipt))

    instead(patch, SamplingBudget, "refund", refund)


@planted("budget")
def what_was_lost_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SamplingBudget, "refund", lambda budget, receipt: 0)


@planted("delivered")
def a_consumer_hands_back_as_undelivered_what_it_has(patch: pytest.MonkeyPatch) -> None:
    def sample(original: Any, exchange: Any, session: Any, wanted: Any, landing: Any) -> Any:
        batch = yield from original(exchange, session, wanted, landing)
        session.undelivered += session.finished
        session.finished.clear()
        return batch

    instead(patch, Exchange, "sample", sample)


# --- events -----------------------------------------------------------------------------------------------------------


@planted("sequence")
def an_event_is_not_announced(patch: pytest.MonkeyPatch) -> None:
    def emit(original: Any, run: Any, cls: type, **values: Any) -> Any:
        event = original(run, cls, **values)
        if event.sequence % 7 == 6:
            run._effects.pop()
        return event

    instead(patch, Run, "emit", emit)


@planted("sequence")
def a_subscriber_overlooks_gaps(patch: pytest.MonkeyPatch) -> None:
    def take(original: Any, sequencer: Any, event: Any) -> None:
        sequencer._expected = max(sequencer._expected, event.sequence)
        original(sequencer, event)

    instead(patch, Sequencer, "take_event", take)


@planted("log")
def a_drain_takes_records_out_before_they_are_received(patch: pytest.MonkeyPatch) -> None:
    def oldest(original: Any, log: Any, limit: int) -> Any:
        found = original(log, limit)
        for _ in found:
            log._records.popleft()
        return found

    instead(patch, LifecycleLog, "oldest", oldest)


@planted("log")
def a_full_log_drops_the_oldest(patch: pytest.MonkeyPatch) -> None:
    def append(original: Any, log: Any, record: Any) -> None:
        if log.capacity and len(log) == log.capacity:
            log._records.popleft()
        original(log, record)

    instead(patch, LifecycleLog, "append", append)
    patch.setattr(LifecycleLog, "room_for", lambda log, n: True)


# --- bounds and rest --------------------------------------------------------------------------------------------------


@planted("memory")
def a_unit_is_queued_once_more_each_time(patch: pytest.MonkeyPatch) -> None:
    def want_again(original: Any, book: Any, unit: Any) -> bool:
        book._demand.appendleft(unit)
        return bool(original(book, unit))

    instead(patch, TicketBook, "_want_again", want_again)


@planted("memory")
def sessions_are_never_forgotten(patch: pytest.MonkeyPatch) -> None:
    def add(original: Any, sessions: Any, identity: bytes, connect: Any) -> None:
        sessions._limit = 10**9
        original(sessions, identity, connect)

    instead(patch, Sessions, "add", add)


@planted("memory")
def receipts_outlive_their_leases(patch: pytest.MonkeyPatch) -> None:
    def release(original: Any, desk: Any, notice: Any, session: bytes) -> None:
        before = dict(desk._booked)
        original(desk, notice, session)
        desk._booked.update(before)

    instead(patch, SamplingDesk, "release", release)


@planted("rest")
def lost_tickets_stay_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TicketBook, "overdue", lambda book, now, someone_idle: [])


@planted("rest")
def a_returning_worker_stays_stalled(patch: pytest.MonkeyPatch) -> None:
    def heard(original: Any, workforce: Any, worker_id: str) -> Any:
        record = workforce._run.roster.get(worker_id)
        if record is not None and record.state in ("stalled", "gone") and not record.ended:
            return record
        return original(workforce, worker_id)

    instead(patch, Workforce, "heard", heard)


@planted("rest")
def a_gone_workers_ticket_is_nobodys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TicketBook, "abandon", lambda book, worker_id, reason: [])
    patch.setattr(TicketBook, "overdue", lambda book, now, someone_idle: [])


@planted("fate")
def a_workers_failure_ends_a_tolerant_run(patch: pytest.MonkeyPatch) -> None:
    def report(original: Any, run: Any, worker_id: str, phase: str, step: Any, error: Any) -> None:
        original(run, worker_id, phase, step, error)
        run.fail(error)

    instead(patch, Run, "report_worker_failure", report)


def first_violation() -> Violation | None:
    for seed in range(SEEDS):
        try:
            simulate(seed)
        except Violation as violation:
            return violation
    return None


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as context:
        yield context


@pytest.mark.parametrize(("invariant", "plant"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_fault_is_caught_by_its_invariant(invariant: str, plant: Plant, patch: pytest.MonkeyPatch) -> None:
    plant(patch)
    caught = first_violation()
    assert caught is not None, f"{SEEDS} schedules did not notice"
    assert caught.invariant == invariant, caught


def test_every_invariant_has_a_planted_fault() -> None:
    assert {invariant for invariant, _ in PLANTED} == set(INVARIANTS)
