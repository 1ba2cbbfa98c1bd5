"""The order of rows, and drawing among several of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ods_async.core.drawing import Candidates, Ranking, draw_rows_with_quota

LONGEST = st.dictionaries(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1), max_size=50)


def one(row, longest):
    return np.array([row]), np.array([longest])


def rows_of(entries):
    return (entries & (2**32 - 1)).tolist()


@given(LONGEST, st.integers(0, 2**31 - 1), st.data())
def test_a_ranking_gives_the_rows_with_a_long_enough_run(content, length, data):
    ranking = Ranking()
    ranking.add(np.array(list(content), np.int64), np.array(list(content.values()), np.int64))
    gone = data.draw(st.sets(st.sampled_from(sorted(content)))) if content else set()
    for row in gone:
        ranking.remove(*one(row, content[row]))
    left = {row: longest for row, longest in content.items() if row not in gone}
    assert len(ranking) == len(left)
    assert ranking.longest == max(left.values(), default=0)
    expected = sorted((longest, row) for row, longest in left.items() if longest >= length)
    assert rows_of(ranking.at_least(length)) == [row for _, row in expected]


def test_an_order_that_nobody_looks_at_gathers_no_more_than_its_rows():
    """The orders of modes and generations that nobody samples must not grow as long as the run lasts."""
    ranking = Ranking()
    ranking.add(*one(7, 1))
    assert ranking.longest == 1
    most = 0
    for longest in range(1, 5000):
        ranking.remove(*one(7, longest))
        ranking.add(*one(7, longest + 1))
        most = max(most, len(ranking._changes))
    assert most <= 1026
    assert rows_of(ranking.at_least(5000)) == [7]
    assert len(ranking) == len(ranking.at_least(0)) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), max_size=40))
def test_a_row_that_comes_and_goes_between_looks_is_there_or_not(turns):
    ranking, there = Ranking(), set()
    for row, longest, looked_at in turns:
        if (longest, row) in there:
            ranking.remove(*one(row, longest))
        else:
            ranking.add(*one(row, longest))
        there ^= {(longest, row)}
        if looked_at:
            assert rows_of(ranking.at_least(0)) == [row for _, row in sorted(there)]
    assert rows_of(ranking.at_least(0)) == [row for _, row in sorted(there)]


@given(st.lists(st.sets(st.integers(0, 1000), max_size=8), min_size=1, max_size=4))
def test_candidates_of_several_parts_have_a_place_each(parts):
    arrays = tuple(np.array(sorted(part), np.int64) + (7 << 32) for part in parts)
    candidates = Candidates(arrays)
    everything = [row for part in parts for row in sorted(part)]
    assert candidates.count == len(everything)
    assert candidates.rows(np.arange(candidates.count)).tolist() == everything


def test_b36_quotas_that_sum_up_to_the_batch_exactly_are_used_up_exactly():
    quota = np.array([0, 1, 500, 2, 1, 0, 7], np.int64)
    candidates = Candidates((np.arange(7) + (3 << 32),))
    rows = draw_rows_with_quota(candidates, int(quota.sum()), np.random.default_rng(4), quota)
    assert np.bincount(rows, minlength=7).tolist() == quota.tolist()


def test_b35_b36_quotas_near_the_end_of_int64_do_not_overflow_in_the_sum():
    quota = np.array([2**63 - 1, 2**63 - 1] + [0] * 500, np.int64)
    candidates = Candidates((np.arange(502) + (3 << 32),))
    rows = draw_rows_with_quota(candidates, 40, np.random.default_rng(4), quota)
    assert set(rows.tolist()) == {0, 1}
