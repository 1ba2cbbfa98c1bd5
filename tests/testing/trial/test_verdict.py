from __future__ import annotations

import json

from ods_async.testing.trial.verdict import events_faults, fatal_words, run_faults, sum_of
from ods_async.testing.trial.witness import RunBook


def event(sequence: int, run: int = 1, **more: object) -> str:
    return json.dumps({"kind": "published", "run_id": run, "sequence": sequence} | more)


def test_events_without_a_gap_are_fine_in_every_run_and_after_every_start() -> None:
    starts = [[event(4), event(5), event(0, run=2), event(1, run=2)], [event(7), "noise", event(8), '{"cut']]
    assert events_faults(starts) == (6, [])


def test_a_gap_that_was_told_is_none_and_one_that_was_not_is_found() -> None:
    """B41"""
    lost = json.dumps({"kind": "events_lost", "run_id": 1, "first": 5, "count": 3, "reason": "late"})
    assert events_faults([[event(4), lost, event(8)]]) == (2, [])
    assert events_faults([[event(4), event(8)]])[1] == ["run 1: event 5 was due, 8 came"]
    assert events_faults([[event(4), event(4)]])[1] == ["run 1: event 5 was due, 4 came"]


def test_books_that_cannot_be_are_told() -> None:
    assert run_faults([RunBook(1), RunBook(2, highest=7, published=8)]) == []
    assert len(run_faults([RunBook(1, twice=[3]), RunBook(2, backwards=1)])) == 2


def test_a_traceback_is_quoted() -> None:
    assert fatal_words([["fine"], []]) == []
    (found,) = fatal_words([["before", "Traceback (most recent call last):", "KeyError: 5"]])
    assert "before" in found
    assert "KeyError: 5" in found


def test_reports_add_up() -> None:
    reports = [
        {"counts": {"requests": 3}, "errors": {"E": 1}, "faults": ["torn"], "slowest": 1.0},
        {"counts": {"requests": 4}, "errors": {}, "faults": [], "slowest": 2.5},
    ]
    counts, errors, faults, slowest = sum_of(reports)
    assert (counts["requests"], errors["E"], faults, slowest) == (7, 1, ["torn"], 2.5)
