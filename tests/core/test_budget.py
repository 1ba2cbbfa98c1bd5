"""SamplingBudget: B35–B38. The books always close: assigned = delivered + remaining, for every episode."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ods_async.core.budget import Receipt, SamplingBudget
from ods_async.core.requests import BudgetRow, BudgetSnapshot, GetBudget, Plans, Refill, Release, Sample, Stop
from ods_async.core.store import Occupant
from ods_async.errors import ConfigError, OnlineDataBudgetExhaustedError
from ods_async.testing.in_memory import OWNER, InMemoryBroker

INT64_MAX = 2**63 - 1


def occupant(episode_id: int, anchors: tuple[tuple[int, int], ...] = ((0, 4),), generation: int = 1) -> Occupant:
    return Occupant(episode_id, generation, 4, anchors)


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Account:
    """The model's book of one episode."""

    row: int
    eligible: bool
    delivered: int = 0
    retired: bool = False


class BudgetMachine(RuleBasedStateMachine):
    """Against one account an episode, kept for ever."""

    BUDGET = 7
    ROWS = 4

    def __init__(self) -> None:
        super().__init__()
        self.budget = SamplingBudget(self.BUDGET, 9, self.ROWS, run_id=11, clock_origin_ns=13)
        self.accounts: list[Account] = []
        self.here: dict[int, int] = {}
        self.receipts: list[tuple[Receipt, Counter[int]]] = []

    @rule(row=st.integers(0, ROWS - 1), eligible=st.booleans())
    def publish(self, row: int, eligible: bool) -> None:
        if row in self.here:
            self.accounts[self.here[row]].retired = True
            self.budget.retire(row)
        episode_id = len(self.accounts)
        self.accounts.append(Account(row, eligible))
        self.here[row] = episode_id
        self.budget.assign(row, row + 20, occupant(episode_id, ((0, 1),) if eligible else ()))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def book(self, data: st.DataObject) -> None:
        drawn = data.draw(st.lists(st.sampled_from(sorted(self.here)), min_size=1, max_size=10))
        wanted = Counter(self.here[row] for row in drawn)
        left = {episode: self.BUDGET - self.accounts[episode].delivered for episode in wanted}
        if any(left[episode] < n for episode, n in wanted.items()):
            with pytest.raises(OnlineDataBudgetExhaustedError) as raised:
                self.budget.book(rows(*drawn))
            assert raised.value.requested == len(drawn)
            assert raised.value.remaining == sum(left.values())
            return
        receipt = self.budget.book(rows(*drawn))
        assert receipt is not None
        assert receipt.windows == len(drawn)
        for episode, n in wanted.items():
            self.accounts[episode].delivered += n
        self.receipts.append((receipt, wanted))

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def refund(self, data: st.DataObject) -> None:
        receipt, charged = self.receipts.pop(data.draw(st.integers(0, len(self.receipts) - 1)))
        assert self.budget.refund(receipt) == charged.total()
        assert self.budget.refund(receipt) == 0
        for episode, n in charged.items():
            self.accounts[episode].delivered -= n

    @invariant()
    def books_close(self) -> None:
        found = self.budget.snapshot()
        assert {row.episode_id for row in found.rows} == set(self.here.values())
        for row in found.rows:
            account = self.accounts[row.episode_id]
            assert row.assigned == self.BUDGET == row.delivered + row.remaining
            assert (row.delivered, row.slot) == (account.delivered, account.row + 20)
            assert 0 <= row.remaining <= self.BUDGET
        assert found.total_delivered_chunks == sum(account.delivered for account in self.accounts)
        assert found.unlocked_remaining_chunks == sum(
            self.BUDGET - account.delivered for account in self.accounts if account.eligible and not account.retired
        )

    @invariant()
    def the_planner_sees_the_same(self) -> None:
        seen = self.budget.remaining_by_row
        assert seen is not None
        assert seen.dtype == np.int64
        assert seen.tolist() == [
            self.BUDGET - self.accounts[self.here[row]].delivered if row in self.here else 0 for row in range(self.ROWS)
        ]


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_b36_a_batch_beyond_the_quota_costs_nothing() -> None:
    budget = SamplingBudget(3, 3, 2)
    budget.assign(0, 0, occupant(0))
    budget.assign(1, 1, occupant(1))
    budget.book(rows(0, 0, 1))
    before = budget.snapshot()
    with pytest.raises(OnlineDataBudgetExhaustedError, match="2 windows: 1 left"):
        budget.book(rows(0, 0))
    assert budget.snapshot() == before


def test_b37_a_refund_never_credits_the_successor_in_the_same_row() -> None:
    budget = SamplingBudget(3, 3, 1)
    budget.assign(0, 0, occupant(0))
    receipt = budget.book(rows(0, 0))
    budget.retire(0)
    budget.assign(0, 0, occupant(1))
    budget.book(rows(0))
    assert budget.refund(receipt) == 2
    (row,) = budget.snapshot().rows
    assert (row.episode_id, row.delivered, row.remaining) == (1, 1, 2)
    assert budget.delivered == 1


def test_b38_lifetime_delivered_includes_retired_episodes() -> None:
    budget = SamplingBudget(3, 5, 2, run_id=6, clock_origin_ns=7)
    budget.assign(1, 0, occupant(0))
    budget.book(rows(1, 1, 1))
    budget.retire(1)
    budget.assign(0, 0, occupant(1, generation=2))
    budget.book(rows(0))
    assert budget.snapshot() == BudgetSnapshot(
        enabled=True,
        rows=(BudgetRow(6, 1, 2, 0, assigned=3, delivered=1, remaining=2, locked=False),),
        unlocked_remaining_chunks=2,
        total_delivered_chunks=4,
        episode_sample_budget=3,
        episode_sample_hard_limit=5,
        clock_origin_monotonic_ns=7,
    )


def test_b38_episodes_without_an_anchor_do_not_count_as_to_be_had() -> None:
    budget = SamplingBudget(3, 3, 2)
    budget.assign(0, 0, occupant(0, anchors=()))
    budget.assign(1, 1, occupant(1))
    assert budget.unlocked_remaining == 3


def test_b38_disabled_budgets_have_no_counters_and_charge_nothing() -> None:
    budget = SamplingBudget(None, None, 2)
    budget.assign(0, 0, occupant(0))
    receipt = budget.book(rows(0, 0, 0))
    assert receipt is None
    assert budget.refund(receipt) == 0
    budget.retire(0)
    assert not budget.enabled
    assert budget.remaining_by_row is None
    assert budget.delivered is None
    assert budget.unlocked_remaining is None
    assert budget.snapshot() == BudgetSnapshot(False, (), None, None, None, None, None)


def test_b35_the_largest_quota_neither_wraps_around_nor_loses_exactness() -> None:
    budget = SamplingBudget(INT64_MAX, INT64_MAX, 3)
    for row in range(3):
        budget.assign(row, row, occupant(row))
    budget.book(rows(0, 1, 1))
    assert budget.unlocked_remaining == 3 * INT64_MAX - 3
    assert [row.remaining for row in budget.snapshot().rows] == [INT64_MAX - 1, INT64_MAX - 2, INT64_MAX]


@pytest.mark.parametrize(
    ("budget", "hard_limit"),
    [(None, 3), (3, None), (4, 3), (0, 3), (True, 3), (2.0, 3), (2, 2**63), ("2", "3")],
)
def test_b35_both_or_neither_and_ordered(budget: object, hard_limit: object) -> None:
    with pytest.raises(ConfigError, match="episode_sample_budget") as raised:
        SamplingBudget(budget, hard_limit, 2)  # type: ignore[arg-type]
    assert raised.value.argument == "episode_sample_budget"
    assert isinstance(raised.value, ValueError)


def test_a_row_is_not_assigned_over_a_living_episode() -> None:
    budget = SamplingBudget(3, 3, 1)
    budget.assign(0, 0, occupant(0))
    with pytest.raises(ValueError, match="retire it first"):
        budget.assign(0, 0, occupant(1))


def budgeted(budget: int) -> InMemoryBroker:
    broker = InMemoryBroker(
        refill_policy="manual", include_provenance=True, episode_sample_budget=budget, episode_sample_hard_limit=budget
    )
    broker.join()
    for who in (b"c0", b"c1"):
        broker.connect(who)
    broker.fill()
    return broker


@given(
    st.lists(
        st.tuples(st.sampled_from(["draw", "undelivered", "delivered", "late", "refill"]), st.integers(1, 9)),
        max_size=25,
    )
)
@settings(max_examples=60, deadline=None)
def test_b37_however_consumers_behave_no_episode_is_delivered_beyond_its_budget(steps: list[tuple[str, int]]) -> None:
    broker = budgeted(6)
    delivered: Counter[int] = Counter()
    open_plans: list[tuple[bytes, int, Counter[int]]] = []
    for action, n in steps:
        who = (b"c0", b"c1")[n % 2]
        if action == "draw":
            before = broker.get(GetBudget())
            if before.unlocked_remaining_chunks < n:
                with pytest.raises(OnlineDataBudgetExhaustedError) as raised:
                    broker.get(Sample(batch_size=n, length=3), who)
                assert (raised.value.requested, raised.value.remaining) == (n, before.unlocked_remaining_chunks)
                assert broker.get(GetBudget()) == before
                continue
            plans = broker.get(Sample(batch_size=n, length=3), who)
            assert isinstance(plans, Plans)
            (plan,) = plans.plans
            drawn = Counter(broker.gather(plan)[("ods_episode_id",)][:, 0].tolist())
            assert drawn.total() == n
            delivered += drawn
            open_plans.append((who, plan.lease_id, drawn))
        elif action == "refill":
            broker.get(Refill(OWNER))
            broker.fill()
            broker.pass_time(0.1)
        elif action == "late":
            broker.pass_time(broker.settings.lease_seconds + 0.001)  # seconds are floats
            for who, lease_id, _ in open_plans:
                broker.ask(Release(undelivered=(lease_id,)), who)
            open_plans.clear()
        elif open_plans:
            who, lease_id, drawn = open_plans.pop(n % len(open_plans))
            broker.ask(Release(undelivered=(lease_id,)), b"c1" if who == b"c0" else b"c0")  # another's: no effect
            broker.ask(Release((), (lease_id,)) if action == "undelivered" else Release((lease_id,), ()), who)
            broker.ask(Release(undelivered=(lease_id,)), who)  # a second word on it: no effect
            if action == "undelivered":
                delivered -= drawn
        assert all(count <= 6 for count in delivered.values())
        found = broker.get(GetBudget())
        assert found.total_delivered_chunks == delivered.total()
        for row in found.rows:
            assert row.delivered == delivered[row.episode_id] == row.assigned - row.remaining


def test_b38_the_audit_works_after_a_clean_stop() -> None:
    broker = budgeted(6)
    broker.get(Sample(batch_size=5, length=2))
    before = broker.get(GetBudget())
    broker.ask(Stop(OWNER, grace=0.0))
    broker.pass_time(0.1)
    assert broker.get(GetBudget()) == before
    assert before.total_delivered_chunks == 5
