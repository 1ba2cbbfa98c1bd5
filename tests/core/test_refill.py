"""RefillRule: B31–B33, C35 (waiting has a visible reason, and nobody waits for each other)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ods_async.core.refill import POLICIES, RefillRule
from ods_async.core.requests import GetStatus, Refill, Sample
from ods_async.testing.in_memory import OWNER, InMemoryBroker


def after_first_fill(rule: RefillRule, episodes: int = 4) -> RefillRule:
    rule.requested()
    rule.published(episodes)
    rule.completed()
    return rule


def test_b31_due_at_exactly_the_threshold_and_the_count_restarts() -> None:
    rule = after_first_fill(RefillRule("sample_threshold", 5, 4))
    assert not rule.drawn(19)
    assert rule.drawn(1)
    rule.requested()
    assert not rule.due
    assert not rule.completed()
    assert not rule.drawn(19)
    assert rule.drawn(7)


def test_b31_nothing_is_due_while_a_generation_is_outstanding() -> None:
    rule = RefillRule("sample_threshold", 5, 4)
    rule.requested()
    assert rule.outstanding
    assert not rule.drawn(1_000)
    assert rule.completed()
    assert not rule.outstanding


def test_b31_a_request_by_hand_restarts_the_count_too() -> None:
    rule = after_first_fill(RefillRule("sample_threshold", 5, 4))
    rule.drawn(19)
    rule.requested()
    rule.completed()
    assert not rule.drawn(19)
    assert rule.drawn(1)


@given(st.integers(1, 7), st.integers(1, 5), st.lists(st.integers(1, 40) | st.just(0), max_size=60))
def test_b31_each_request_costs_a_full_threshold_of_draws(threshold: int, size: int, steps: list[int]) -> None:
    rule = after_first_fill(RefillRule("sample_threshold", threshold, size))
    since, outstanding = 0, False
    for step in steps:  # 0: the outstanding generation completes
        if step == 0:
            due = rule.completed()
            outstanding = False
        else:
            due = rule.drawn(step)
            since += step
        assert due == rule.due == (not outstanding and since >= threshold * size)
        if due:
            rule.requested()
            since, outstanding = 0, True


def test_b32_manual_is_never_due() -> None:
    rule = after_first_fill(RefillRule("manual", 1, 1))
    assert not rule.drawn(10**9)
    rule.requested()
    assert not rule.completed()
    assert (rule.production_pause, rule.sampling_pause) == ("", "")


def test_b33_continuous_is_due_whenever_nothing_is_outstanding() -> None:
    rule = RefillRule("continuous", 50, 4)
    assert rule.due
    rule.requested()
    assert not rule.due
    assert not rule.drawn(1_000)
    assert rule.completed()
    assert (rule.production_pause, rule.sampling_pause) == ("", "")


def test_b33_producers_ahead_pause_and_say_so() -> None:
    rule = after_first_fill(RefillRule("continuous", 50, 4, samples_per_insert=8, tolerance=16))
    rule.requested()
    rule.published(2)
    assert not rule.completed()
    assert rule.production_pause == (
        "producers are ahead: 0 windows drawn for 2 episodes since the first generation, samples_per_insert=8 asks for "
        "16 with a tolerance of 16; they pause until more windows are drawn"
    )
    assert rule.sampling_pause == ""
    assert rule.drawn(1)
    assert rule.production_pause == ""


def test_b33_consumers_ahead_wait_and_say_so() -> None:
    rule = after_first_fill(RefillRule("continuous", 50, 4, samples_per_insert=8, tolerance=16))
    rule.requested()
    rule.drawn(15)
    assert rule.sampling_pause == ""
    rule.drawn(1)
    assert rule.sampling_pause.startswith("consumers are ahead: 16 windows drawn for 0 episodes")
    assert rule.production_pause == ""
    rule.published(1)
    assert rule.sampling_pause == ""


def test_b33_the_first_generation_owes_nothing() -> None:
    rule = after_first_fill(RefillRule("continuous", 50, 4, samples_per_insert=8), episodes=5)
    assert rule.ahead == 0
    assert rule.due
    assert rule.tolerance == 32


def test_b32_a_request_by_hand_is_not_held_back_by_the_ratio() -> None:
    rule = after_first_fill(RefillRule("continuous", 50, 4, samples_per_insert=8, tolerance=16))
    rule.requested()
    rule.published(3)
    assert rule.production_pause
    rule.insist()
    assert rule.production_pause == ""
    rule.published(1)
    assert not rule.completed()
    assert rule.production_pause


def test_b32_b33_the_owner_can_wait_for_a_generation_that_only_its_own_draws_would_release() -> None:
    broker = InMemoryBroker(refill_policy="continuous", samples_per_insert=8.0)
    broker.join()
    broker.connect()
    while broker.tickets:
        broker.fill()
        broker.pass_time(0.01)
    status = broker.get(GetStatus())
    assert status.waiting.startswith("producers are ahead")
    generation = broker.get(Refill(OWNER)).generation
    assert generation == status.completed_generation + 1
    while broker.tickets:
        broker.fill()
        broker.pass_time(0.01)
    status = broker.get(GetStatus())
    assert status.completed_generation == generation
    assert status.waiting.startswith("producers are ahead")


def test_a_rollout_that_waits_for_leased_rows_says_so() -> None:
    broker = InMemoryBroker(num_envs=2, refill_threshold=1)
    broker.join()
    broker.connect()
    broker.fill()
    for _ in range(4):
        broker.get(Sample(batch_size=40, length=3))
        broker.pass_time(0.01)
        broker.fill(limit=1)
    assert broker.get(GetStatus()).waiting == "consumers still lease 2 replaced rows"
    broker.pass_time(broker.settings.lease_seconds)
    status = broker.get(GetStatus())
    assert "lease" not in status.waiting
    assert status.completed_generation == 2


@pytest.mark.parametrize("policy", ["manual", "sample_threshold"])
def test_b33_samples_per_insert_binds_only_continuous(policy: str) -> None:
    rule = after_first_fill(RefillRule(policy, 50, 4, samples_per_insert=1, tolerance=1))
    rule.published(100)
    assert rule.production_pause == ""
    rule.drawn(10_000)
    assert rule.sampling_pause == ""


@given(
    st.floats(0.01, 100),
    st.none() | st.floats(0.01, 50),
    st.integers(1, 5),
    st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=80),
)
def test_b33_c35_one_side_can_always_go_on_and_the_gap_stays_bounded(
    ratio: float, tolerance: float | None, size: int, steps: list[tuple[bool, int]]
) -> None:
    rule = after_first_fill(RefillRule("continuous", 50, size, ratio, tolerance), size)
    for produce, n in steps:
        assert not (rule.production_pause and rule.sampling_pause)
        if produce and not rule.production_pause:
            rule.published(size)
        elif not produce and not rule.sampling_pause:
            rule.drawn(n)
        assert -rule.tolerance - 64 <= rule.ahead <= rule.tolerance + ratio * size * (1 + 1e-9)


def test_a_request_is_announced_with_its_reason() -> None:
    assert [RefillRule(policy, 1, 1).reason for policy in POLICIES] == ["threshold", "manual", "continuous"]


def test_an_unknown_policy_and_bounds_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="known: sample_threshold, manual, continuous"):
        RefillRule("eager", 1, 1)
    with pytest.raises(ValueError, match="samples_per_insert"):
        RefillRule("continuous", 1, 1, samples_per_insert=0.0)
    with pytest.raises(ValueError, match="tolerance"):
        RefillRule("continuous", 1, 1, samples_per_insert=1.0, tolerance=0.0)
