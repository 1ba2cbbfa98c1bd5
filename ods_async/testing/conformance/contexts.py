"""Contexts: history before "now", targets from it on, and padding beyond (B25 to B30)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import ods_async as ods
from ods_async.testing.conformance.checks import (
    check_contexts,
    fields_of,
    fingerprints_in,
    is_about_uniform,
    oracle_of,
    story,
    until,
)
from ods_async.testing.conformance.ways import Service, Way


@pytest.mark.parametrize("mode", ["episode", "segment"])
@pytest.mark.parametrize(("history", "horizon"), [(1, 1), (4, 3), (2, 30)])
def test_b25_b26_b27_contexts_show_what_is_there_and_pad_the_rest(
    plain: Way, mode: str, history: int, horizon: int
) -> None:
    """B25, B26, B27: shape, padding (zeros, and -1 in ids), ``valid`` and ``loss_mask``; longer than a row, too."""
    batch = plain.sample_batch_with_context(120, history, horizon, sampling_mode=mode)
    assert tuple(batch.batch_size) == (120, history + horizon - 1)
    check_contexts(batch, history, mode)


def test_b25_b29_rows_are_equally_likely_then_anchors_first_and_last_included(plain: Way) -> None:
    """B25, B29: every valid step of non-negative continuity can be "now"."""
    prints = fingerprints_in(plain)
    possible = oracle_of([story(p) for p in prints]).anchors("episode")
    fields = fields_of(plain.sample_batch_with_context(6000, 2, 2, seed=4))
    anchors = zip(fields["obs", "fingerprint"][:, 1].tolist(), fields["obs", "step"][:, 1].tolist(), strict=True)
    drawn = Counter((prints.index(fingerprint), step) for fingerprint, step in anchors)
    assert set(drawn) == possible
    per_row = Counter[int]()
    for (row, _), count in drawn.items():
        per_row[row] += count
    assert is_about_uniform(list(per_row.values()))
    for row in per_row:
        assert is_about_uniform([count for (other, _), count in drawn.items() if other == row])


def test_b28_generations_restrict_anchors_and_context(logged: Way, logged_service: Service, way_in: str) -> None:
    """B28: while the buffer holds two generations, each can be asked for, and both."""
    owner = logged_service.owner_of(way_in)
    first = owner.request_refill()
    owner.wait_for_generation(first)
    second = owner.request_refill()
    until(lambda: "lifecycle log is full" in owner.get_status()["waiting"])
    for wanted in ((first,), (second,), (first, second)):
        batch = logged.sample_batch_with_context(200, 2, 3, generations=wanted)
        check_contexts(batch, 2, "episode")
        shown = set(fields_of(batch)["ods_generation",].reshape(-1).tolist())
        assert shown - {-1} == set(wanted)
    with pytest.raises(ods.DataUnavailableError):
        logged.sample_batch_with_context(2, 1, 1, generations=(second + 1,))


@pytest.mark.parametrize("bad", [(), (0,), (-1,), (True,), ("1",), 3])
def test_b28_bad_generations_are_refused(plain: Way, bad: Any) -> None:
    """B28, B23."""
    with pytest.raises(ValueError, match="generations"):
        plain.sample_batch_with_context(2, 1, 1, generations=bad)


def test_b28_generations_need_provenance(spaced: Way) -> None:
    """B28: an error says so where steps are not stamped."""
    with pytest.raises(ValueError, match="include_provenance"):
        spaced.sample_batch_with_context(2, 1, 1, generations=(1,))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 1, 1), "batch_size"), ((1, 0, 1), "history_length"), ((1, 1, -2), "prediction_horizon")],
)
def test_b23_bad_context_arguments_are_value_errors(plain: Way, arguments: Any, named: str) -> None:
    """B23."""
    with pytest.raises(ValueError, match=named):
        plain.sample_batch_with_context(*arguments)


def test_b30_segment_contexts_without_accepted_segments_say_so(spaced: Way) -> None:
    """B30: the error names the segments that are missing; episode contexts are served."""
    with pytest.raises(ods.DataUnavailableError, match="segment"):
        spaced.sample_batch_with_context(2, 1, 1, sampling_mode="segment")
    assert tuple(spaced.sample_batch_with_context(2, 1, 1).batch_size) == (2, 1)
    with pytest.raises(ValueError, match="boundary"):
        spaced.sample_batch_with_context(2, 1, 1, sampling_mode="boundary")


def test_b29_a_context_costs_one_draw(budgeted: Way) -> None:
    """B29, B35: whatever its length."""
    before = budgeted.get_flow_status()["unlocked_remaining_chunks"]
    budgeted.sample_batch_with_context(6, 5, 8)
    assert budgeted.get_flow_status()["unlocked_remaining_chunks"] == before - 6
