"""The oracle, held against examples worked out by hand."""

import pytest

from ods_async.testing.oracle import Oracle

#          step   0  1  2  3  4  5  6  7
VALID = [[1, 1, 1, 1, 1, 1, 1, 0]]
CONTINUITY = [[0, 0, 0, 0, 0, 3, 3, 3]]
SEGMENT = [[0, 0, 1, 1, 1, 1, -1, 1]]
ACCEPTED = [[1, 1, 1, 1, 0, 1, 1, 1]]
ORACLE = Oracle(VALID, CONTINUITY, SEGMENT, ACCEPTED, [[4] * 8])


@pytest.mark.parametrize(
    ("mode", "length", "starts"),
    [
        ("episode", 1, {0, 1, 2, 3, 4, 5, 6}),
        ("episode", 2, {0, 1, 2, 3, 5}),
        ("episode", 5, {0}),
        ("episode", 6, set()),
        ("segment", 1, {0, 1, 2, 3, 5}),
        ("segment", 2, {0, 2}),
        ("segment", 3, set()),
        ("boundary", 2, {1, 5}),
        ("boundary", 3, {0, 1}),
        ("boundary", 4, {0}),
        ("boundary", 5, set()),
    ],
)
def test_b21_eligible_starts_of_a_row_worked_out_by_hand(mode, length, starts):
    assert ORACLE.windows(length, mode) == {(0, start) for start in starts}


def test_b25_b26_contexts_of_a_row_worked_out_by_hand():
    assert ORACLE.anchors("episode") == {(0, t) for t in range(7)}
    assert ORACLE.anchors("segment") == {(0, t) for t in (0, 1, 2, 3, 5)}
    assert ORACLE.context(0, 0, 3, 2, "episode") == [None, None, 0, 1]
    assert ORACLE.context(0, 4, 2, 3, "episode") == [3, 4, None, None]
    assert ORACLE.context(0, 3, 4, 2, "segment") == [None, None, 2, 3, None]


def test_b28_generations_restrict_anchors():
    assert ORACLE.anchors("episode", (5,)) == set()
    assert len(ORACLE.anchors("episode", (4, 5))) == 7


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="sideways"):
        ORACLE.windows(1, "sideways")
