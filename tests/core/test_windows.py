"""Planning against the oracle, exactly and statistically."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ods_async.core.windows import MODES, RunIndex, plan_contexts, plan_windows, runs_of
from ods_async.errors import DataUnavailableError, OnlineDataBudgetExhaustedError
from ods_async.testing.strategies import Annotations, annotated_buffers


class Enumerating:
    """Stands in for chance and deals out every outcome in turn, so that the whole distribution can be written down."""

    def __init__(self):
        self.highs = []

    def integers(self, low, high, size=None):
        assert low == 0
        self.highs.append(high)
        self.rows = high
        return np.arange(size) % high

    def random(self, size):
        return InTurn(self)


class InTurn:
    """Numbers from 0 to below 1 that, times their bounds, give all numbers below those in turn."""

    def __init__(self, generator):
        self.generator = generator

    def __mul__(self, bounds):
        self.generator.highs.append(bounds)
        return ((np.arange(len(bounds)) // self.generator.rows) % bounds).astype(np.float64)


def index_of(notes: Annotations) -> RunIndex:
    index = RunIndex(*notes.valid.shape)
    for row in range(index.rows):
        index.publish(row, runs_of_row(notes, row), int(notes.generation[row]))
    return index


def runs_of_row(notes: Annotations, row: int):
    return runs_of(notes.valid[row], notes.continuity_id[row], notes.segment_id[row], notes.segment_accepted[row])


def plain_index(lengths, steps, segment_lengths=None):
    """Rows of one continuity each, cut into segments of the given length (the whole episode by default)."""
    index = RunIndex(len(lengths), steps)
    for row, length in enumerate(lengths):
        valid = np.arange(steps) < length
        parts = np.arange(steps) // (segment_lengths or steps)
        index.publish(row, runs_of(valid, np.where(valid, 0, -1), np.where(valid, parts, -1), valid), 1)
    return index


def by_row(pairs):
    found = {}
    for row, start in pairs:
        found.setdefault(row, set()).add(start)
    return found


# --- eligible windows, exactly ----------------------------------------------------------------------------------------


@given(annotated_buffers(), st.integers(1, 8), st.sampled_from(MODES))
def test_b21_b22_every_eligible_window_can_be_drawn_and_each_equally_often_in_its_row(notes, length, mode):
    if mode == "boundary" and length == 1:
        length = 2
    eligible = by_row(notes.oracle().windows(length, mode))
    index = index_of(notes)
    assert index.rows_with(mode, length) == len(eligible)
    if not eligible:
        with pytest.raises(DataUnavailableError):
            plan_windows(index, 3, length, mode, np.random.default_rng(0))
        return
    rounds = max(map(len, eligible.values()))
    chance = Enumerating()
    plan = plan_windows(index, len(eligible) * rounds, length, mode, chance)
    drawn = list(zip(plan.rows.tolist(), plan.starts.tolist(), strict=True))
    assert by_row(drawn) == eligible
    rows, counts = chance.highs
    assert rows == len(eligible)
    assert counts.tolist() == [len(eligible[row]) for row, _ in drawn]


@given(annotated_buffers(), st.integers(1, 6), st.integers(1, 6), st.sampled_from(("episode", "segment")), st.data())
def test_b25_b26_b28_b29_contexts_have_every_anchor_equally_often_and_the_promised_bounds(
    notes, history, horizon, mode, data
):
    generations = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    oracle = notes.oracle()
    eligible = by_row(oracle.anchors(mode, generations))
    index = index_of(notes)
    if not eligible:
        with pytest.raises(DataUnavailableError):
            plan_contexts(index, 3, history, horizon, mode, np.random.default_rng(0), generations)
        return
    chance = Enumerating()
    rounds = max(map(len, eligible.values()))
    plan = plan_contexts(index, len(eligible) * rounds, history, horizon, mode, chance, generations)
    assert plan.length == history + horizon - 1
    assert plan.history == history
    anchors = plan.starts + (history - 1)
    drawn = list(zip(plan.rows.tolist(), anchors.tolist(), strict=True))
    assert by_row(drawn) == eligible
    assert chance.highs[1].tolist() == [len(eligible[row]) for row, _ in drawn]
    bounds = zip(plan.first.tolist(), plan.last.tolist(), strict=True)
    assert list(bounds) == [oracle.context_bounds(row, anchor, mode, generations) for row, anchor in drawn]


@given(annotated_buffers())
def test_longest_and_rows_with_agree_with_the_oracle_for_every_length(notes):
    index = index_of(notes)
    oracle = notes.oracle()
    for mode in MODES:
        lengths = range(2 if mode == "boundary" else 1, notes.valid.shape[1] + 1)
        rows = {length: len(by_row(oracle.windows(length, mode))) for length in lengths}
        assert {length: index.rows_with(mode, length) for length in lengths} == rows
        assert index.longest(mode) == max((length for length in lengths if rows[length]), default=0)


@given(annotated_buffers(max_rows=1))
def test_b39_anchors_of_a_row_are_the_steps_an_episode_context_can_be_centred_on(notes):
    anchors = runs_of_row(notes, 0).anchors()
    assert anchors.dtype == np.int64
    assert [(0, step) for step in anchors.tolist()] == sorted(notes.oracle().anchors("episode"))


def test_b22_the_last_step_of_an_episode_and_of_a_full_row_is_reachable():
    index = plain_index([9, 20], 20)
    plan = plan_windows(index, 2000, 4, "episode", np.random.default_rng(3))
    for row, length in ((0, 9), (1, 20)):
        assert (plan.starts[plan.rows == row] + 4).max() == length


def test_b21_a_window_as_long_as_the_row_has_one_start():
    plan = plan_windows(plain_index([20, 19], 20), 50, 20, "episode", np.random.default_rng(3))
    assert set(plan.rows.tolist()) == {0}
    assert set(plan.starts.tolist()) == {0}


# --- keeping the index ------------------------------------------------------------------------------------------------


@given(annotated_buffers(max_rows=6), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_an_index_after_many_changes_draws_like_one_built_afresh(notes, changes):
    """B24: the draw depends on what the buffer holds and on the seed, not on the way it came to hold it."""
    rows = notes.valid.shape[0]
    index = RunIndex(*notes.valid.shape)
    held = {}
    for number, (place, publish) in enumerate(changes):
        row = place % rows
        if publish:
            content = number % rows
            held[row] = (content, int(notes.generation[content]))
            index.publish(row, runs_of_row(notes, content), int(notes.generation[content]))
        else:
            held.pop(row, None)
            index.retire(row)
    fresh = RunIndex(*notes.valid.shape)
    for row in sorted(held):
        fresh.publish(row, runs_of_row(notes, held[row][0]), held[row][1])
    assert index.published == fresh.published == len(held)
    for mode in MODES:
        assert index.longest(mode) == fresh.longest(mode)
        for length in (2, 3):
            assert index.rows_with(mode, length) == fresh.rows_with(mode, length)
            if fresh.rows_with(mode, length):
                plans = [plan_windows(one, 40, length, mode, np.random.default_rng(5)) for one in (index, fresh)]
                assert plans[0].rows.tolist() == plans[1].rows.tolist()
                assert plans[0].starts.tolist() == plans[1].starts.tolist()
    if index.longest("episode"):
        generations = (1, 2, 3)
        plans = [
            plan_contexts(one, 40, 2, 3, "episode", np.random.default_rng(5), generations) for one in (index, fresh)
        ]
        assert plans[0].starts.tolist() == plans[1].starts.tolist()


def test_a_retired_row_is_never_drawn_and_a_row_outside_the_buffer_is_refused():
    index = plain_index([9, 9, 9], 12)
    index.retire(1)
    index.retire(1)
    plan = plan_windows(index, 200, 5, "episode", np.random.default_rng(1))
    assert set(plan.rows.tolist()) == {0, 2}
    assert index.published == 2
    with pytest.raises(IndexError):
        index.publish(3, runs_of(*(np.zeros(12, kind) for kind in (bool, int, int, bool))), 1)


def test_a_row_of_many_short_runs_among_rows_of_one_run():
    """C25: the run arrays grow with the most broken row, and the others draw as before."""
    steps = 64
    index = plain_index([60, 40], steps)
    valid = np.ones(steps, bool)
    index.publish(1, runs_of(valid, np.arange(steps) // 3, np.zeros(steps, int), valid), 1)
    plan = plan_windows(index, 3000, 3, "episode", np.random.default_rng(2))
    broken = plan.starts[plan.rows == 1]
    assert set(broken.tolist()) == set(range(0, 63, 3))
    assert set(plan.starts[plan.rows == 0].tolist()) == set(range(58))


# --- the distribution -------------------------------------------------------------------------------------------------


def assert_uniform(values, support):
    """Chi-square within five standard deviations of what a uniform draw gives."""
    found, counts = np.unique(values, return_counts=True)
    assert found.tolist() == list(support)
    expected = len(values) / len(found)
    excess = ((counts - expected) ** 2 / expected).sum() - (len(found) - 1)
    assert abs(excess) < 5 * np.sqrt(2 * max(1, len(found) - 1))


def test_b22_rows_are_uniform_then_starts_whatever_the_lengths_of_the_episodes():
    lengths = [5, 33, 400, 3]
    index = plain_index(lengths, 500)
    plan = plan_windows(index, 60_000, 4, "episode", np.random.default_rng(11))
    assert_uniform(plan.rows, [0, 1, 2])
    for row in range(3):
        assert_uniform(plan.starts[plan.rows == row], range(lengths[row] - 3))


def test_b22_starts_are_uniform_over_all_segments_and_boundaries_of_a_row():
    index = plain_index([7, 41], 50, segment_lengths=6)
    plan = plan_windows(index, 40_000, 4, "segment", np.random.default_rng(12))
    assert_uniform(plan.rows, [0, 1])
    assert_uniform(plan.starts[plan.rows == 1], [s for s in range(38) if s // 6 == (s + 3) // 6])
    plan = plan_windows(index, 40_000, 9, "boundary", np.random.default_rng(13))
    assert_uniform(plan.starts, range(33))
    plan = plan_windows(index, 40_000, 3, "boundary", np.random.default_rng(14))
    assert_uniform(plan.rows, [0, 1])
    assert_uniform(plan.starts[plan.rows == 1], [s for s in range(39) if s // 6 != (s + 2) // 6])


def test_b29_contexts_are_uniform_over_rows_then_anchors():
    index = plain_index([3, 150], 200)
    plan = plan_contexts(index, 40_000, 5, 20, "episode", np.random.default_rng(15))
    assert_uniform(plan.rows, [0, 1])
    assert_uniform(plan.starts[plan.rows == 1] + 4, range(150))


def test_b28_rows_of_several_generations_are_drawn_uniformly_together():
    index = RunIndex(9, 30)
    valid = np.ones(30, bool)
    for row, generation in enumerate((1, 2, 2, 3, 3, 3, 1, 4, 2)):
        part = np.arange(30) < row + 2
        index.publish(row, runs_of(valid & part, np.where(part, 0, -1), np.where(part, 0, -1), part), generation)
    plan = plan_contexts(index, 30_000, 1, 2, "segment", np.random.default_rng(16), (3, 1, 9))
    assert_uniform(plan.rows, [0, 3, 4, 5, 6])


def test_b24_a_seed_repeats_the_draw_and_no_global_generator_is_touched():
    index = plain_index([30, 70, 20], 80)
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()
    plans = [plan_windows(index, 64, 8, "episode", np.random.default_rng(77)) for _ in range(2)]
    assert plans[0].rows.tolist() == plans[1].rows.tolist()
    assert plans[0].starts.tolist() == plans[1].starts.tolist()
    assert np.random.get_state()[1].tolist() == before


# --- nothing to draw --------------------------------------------------------------------------------------------------


def test_b23_no_window_says_mode_length_and_what_the_buffer_holds():
    rng = np.random.default_rng(0)
    empty = RunIndex(3, 10)
    with pytest.raises(DataUnavailableError, match="no episodes") as caught:
        plan_windows(empty, 1, 5, "episode", rng)
    assert (caught.value.mode, caught.value.length, caught.value.holds) == ("episode", 5, "no episodes")
    short = plain_index([3, 1, 2], 10)
    with pytest.raises(DataUnavailableError, match="3 episodes, longest continuous run: 3 steps"):
        plan_windows(short, 1, 5, "episode", rng)
    with pytest.raises(DataUnavailableError, match="3 episodes without any accepted run with a segment boundary"):
        plan_windows(short, 1, 2, "boundary", rng)


def test_b28_b30_contexts_without_an_anchor_say_which_generation_or_segment_is_missing():
    rng = np.random.default_rng(0)
    index = plain_index([6], 10)
    with pytest.raises(DataUnavailableError, match="generation 4, 9"):
        plan_contexts(index, 2, 1, 1, "episode", rng, (4, 9))
    valid = np.ones(10, bool)
    index.publish(0, runs_of(valid, np.zeros(10, int), np.full(10, -1), np.zeros(10, bool)), 1)
    with pytest.raises(DataUnavailableError, match="1 episode without any accepted segment"):
        plan_contexts(index, 2, 1, 1, "segment", rng)


# --- quotas -----------------------------------------------------------------------------------------------------------


@given(annotated_buffers(max_rows=6), st.data(), st.integers(1, 40), st.sampled_from(MODES), st.integers(0, 2**32))
def test_b36_a_batch_stays_within_the_quotas_or_is_refused_without_cost(notes, data, batch_size, mode, seed):
    index = index_of(notes)
    rows = index.rows
    quota = st.one_of(st.integers(0, 12), st.just(2**63 - 1))
    remaining = np.array(data.draw(st.lists(quota, min_size=rows, max_size=rows)), np.int64)
    before = remaining.copy()
    eligible = by_row(notes.oracle().windows(2, mode))
    if not eligible:
        return
    supply = sum(int(remaining[row]) for row in eligible)
    rng = np.random.default_rng(seed)
    if supply < batch_size:
        with pytest.raises(OnlineDataBudgetExhaustedError) as caught:
            plan_windows(index, batch_size, 2, mode, rng, remaining)
        assert (caught.value.requested, caught.value.remaining) == (batch_size, supply)
    else:
        plan = plan_windows(index, batch_size, 2, mode, rng, remaining)
        assert len(plan) == batch_size
        assert (np.bincount(plan.rows, minlength=rows) <= remaining).all()
        assert all(start in eligible[row] for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True))
    assert (remaining == before).all()


@pytest.mark.parametrize("exhausted", [0, 300])
def test_b36_each_draw_is_uniform_among_rows_with_quota_left_in_this_batch(exhausted):
    """Quotas 1 and 2, batches of 2: A B half of the time, B A and B B a quarter each; other rows are used up."""
    index = plain_index([9, 30] + [12] * exhausted, 40)
    remaining = np.array([1, 2] + [0] * exhausted, np.int64)
    rng = np.random.default_rng(21)
    draws = 6000
    seen = {}
    for _ in range(draws):
        pair = tuple(plan_windows(index, 2, 3, "episode", rng, remaining).rows.tolist())
        seen[pair] = seen.get(pair, 0) + 1
    for pair, share in (((0, 1), 0.5), ((1, 0), 0.25), ((1, 1), 0.25)):
        assert abs(seen.pop(pair) - draws * share) < 5 * np.sqrt(draws * share * (1 - share))
    assert not seen


def test_b29_b36_a_context_costs_one_and_generations_narrow_the_quota_that_counts():
    index = plain_index([8, 8], 10)
    valid = np.ones(10, bool)
    index.publish(1, runs_of(valid, np.zeros(10, int), np.zeros(10, int), valid), 2)
    remaining = np.array([4, 100], np.int64)
    rng = np.random.default_rng(1)
    plan = plan_contexts(index, 4, 3, 30, "episode", rng, (1,), remaining)
    assert plan.rows.tolist() == [0] * 4
    with pytest.raises(OnlineDataBudgetExhaustedError) as caught:
        plan_contexts(index, 5, 3, 30, "episode", rng, (1,), remaining)
    assert (caught.value.requested, caught.value.remaining) == (5, 4)
