"""Chunks: what is drawn, how often, and what is refused (B14, B16, B20 to B24)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import ods_async as ods
from ods_async.testing.conformance.checks import (
    CAPACITY,
    check_windows,
    fields_of,
    fingerprints_in,
    is_about_uniform,
    oracle_of,
    story,
)
from ods_async.testing.conformance.ways import Way

ANNOTATIONS = {
    "valid": "bool",
    "terminated": "bool",
    "truncated": "bool",
    "episode_step": "int64",
    "segment_id": "int64",
    "segment_step": "int64",
    "segment_start": "bool",
    "segment_end": "bool",
    "segment_accepted": "bool",
    "continuity_id": "int64",
    "task_index": "int64",
    "subtask_index": "int64",
}


def test_b14_the_buffer_holds_the_environments_fields_and_the_annotations(plain: Way) -> None:
    """B14: nested ``obs``, ``actions``, ``rewards``, and the twelve annotations, in their dtypes."""
    fields = fields_of(plain.sample_batch(2, 3))
    assert {path: array.shape[2:] for path, array in fields.items() if path[0] == "obs"} == {
        ("obs", "fingerprint"): (),
        ("obs", "step"): (),
        ("obs", "state"): (5,),
    }
    assert (fields["actions",].dtype, fields["actions",].shape) == (np.float32, (2, 3, 3))
    assert (fields["rewards",].dtype, fields["rewards",].shape) == (np.float32, (2, 3))
    for name, dtype in ANNOTATIONS.items():
        array = fields[name,]
        assert array.shape == (2, 3), name
        assert array.dtype == dtype or (dtype == "int64" and array.dtype.kind == "i"), name


@pytest.mark.parametrize("mode", ["episode", "segment", "boundary"])
@pytest.mark.parametrize("length", [2, 5])
def test_b21_every_window_is_an_eligible_piece_of_one_episode(plain: Way, mode: str, length: int) -> None:
    """B21, B16: and every field of every step of it is right."""
    prints = fingerprints_in(plain)
    possible = oracle_of([story(p) for p in prints]).windows(length, mode)
    if not possible:
        with pytest.raises(ods.DataUnavailableError):
            plain.sample_batch(9, length, mode)
        return
    batch = plain.sample_batch(150, length, mode)
    assert tuple(batch.batch_size) == (150, length)
    check_windows(batch, mode)


def test_b22_rows_are_equally_likely_then_starts_and_the_last_step_is_reached(plain: Way) -> None:
    """B22: whatever the episodes' lengths."""
    prints = fingerprints_in(plain)
    assert len(prints) == plain.buffer_size
    possible = oracle_of([story(p) for p in prints]).windows(3, "episode")
    fields = fields_of(plain.sample_batch(6000, 3, seed=8))
    starts = zip(fields["obs", "fingerprint"][:, 0].tolist(), fields["obs", "step"][:, 0].tolist(), strict=True)
    drawn = Counter((prints.index(fingerprint), start) for fingerprint, start in starts)
    assert set(drawn) == possible
    per_row = Counter[int]()
    for (row, _), count in drawn.items():
        per_row[row] += count
    assert is_about_uniform(list(per_row.values()))
    for row in per_row:
        assert is_about_uniform([count for (other, _), count in drawn.items() if other == row])


def test_b20_a_batch_belongs_to_its_caller(plain: Way) -> None:
    """B20: writing into it changes nothing that is drawn later, and warns of nothing."""
    batch = plain.sample_batch(40, 3, seed=3)
    kept = batch.clone()
    for tensor in batch.values(include_nested=True, leaves_only=True):
        tensor.zero_()
    again = plain.sample_batch(40, 3, seed=3)
    assert (again == kept).all()
    held = [plain.sample_batch(8, 3) for _ in range(12)]
    copies = [one.clone() for one in held]
    plain.sample_batch(64, 2)
    assert all((one == copy).all() for one, copy in zip(held, copies, strict=True))


def test_b20_a_batch_can_be_drawn_into_tensors_that_are_there(plain: Way) -> None:
    """B20: ``out=`` is filled and returned."""
    out = plain.sample_batch(5, 4)
    assert plain.sample_batch(5, 4, seed=6, out=out) is out
    assert (out == plain.sample_batch(5, 4, seed=6)).all()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 3), "batch_size"),
        ((-1, 3), "batch_size"),
        ((True, 3), "batch_size"),
        ((2.0, 3), "batch_size"),
        ((2, 0), "chunk_size"),
        ((2, CAPACITY + 1), "chunk_size"),
        ((2, 3, "episodes"), "sampling_mode"),
        ((2, 1, "boundary"), "chunk_size"),
    ],
)
def test_b23_a_bad_argument_is_a_value_error_that_names_it(plain: Way, arguments: Any, named: str) -> None:
    """B23: with the value and what is allowed; the next request is served."""
    before = plain.get_stats()["sampled_chunks"]
    with pytest.raises(ValueError, match=named) as caught:
        plain.sample_batch(*arguments)
    assert isinstance(caught.value, ods.ArgumentError)
    assert caught.value.argument == named
    assert plain.get_stats()["sampled_chunks"] == before
    plain.sample_batch(1, 1)


def test_b23_no_eligible_window_is_told_with_what_the_buffer_holds(plain: Way) -> None:
    """B23: at once, with mode and length; it is also a ``RuntimeError``."""
    with pytest.raises(ods.DataUnavailableError) as caught:
        plain.sample_batch(2, CAPACITY, "segment")
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert (error.mode, error.length) == ("segment", CAPACITY)
    assert str(plain.buffer_size) in error.holds


def test_b24_a_generator_or_a_seed_repeats_a_draw_and_touches_nothing_global(plain: Way) -> None:
    """B24."""
    torch.manual_seed(1)
    state, numpys = torch.get_rng_state(), repr(np.random.get_state(legacy=False))
    one, two = (torch.Generator().manual_seed(5) for _ in range(2))
    first, second = plain.sample_batch(30, 3, generator=one), plain.sample_batch(30, 3, generator=one)
    assert (first == plain.sample_batch(30, 3, generator=two)).all()
    assert (second == plain.sample_batch(30, 3, generator=two)).all()
    assert not (first == second).all()
    assert (plain.sample_batch(30, 3, seed=9) == plain.sample_batch(30, 3, seed=9)).all()
    assert torch.equal(state, torch.get_rng_state())
    assert numpys == repr(np.random.get_state(legacy=False))


def test_b21_a_stream_yields_the_same_kind_of_windows(plain: Way) -> None:
    """B20, B21: drawn ahead or not."""
    for prefetch in (0, 3):
        with plain.streaming(20, 3, "segment", prefetch=prefetch) as batches:
            for _ in range(7):
                check_windows(next(batches), "segment")
