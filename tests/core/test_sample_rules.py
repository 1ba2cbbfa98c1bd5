"""What may be asked for (B23, B25, B28, C12)."""

import pytest

from ods_async.core.requests import Limits, Sample
from ods_async.core.sample_rules import check_batch_bytes, check_request
from ods_async.errors import ArgumentError, LimitExceededError

STEPS = 50
LIMITS = Limits()


def context(**changes):
    values = {"batch_size": 3, "length": 8, "history": 4, "horizon": 5} | changes
    return Sample(**values)


@pytest.mark.parametrize(
    "sample",
    [
        Sample(1, 1),
        Sample(65_536, 50, "segment", count=64, seed=0),
        Sample(7, 2, "boundary", frame=True, seed=2**64 - 1),
        context(),
        context(length=1, history=1, horizon=1, mode="segment"),
        context(length=400, history=200, horizon=201),
        context(generations=(1, 2**62)),
    ],
)
def test_requests_that_make_sense_are_let_through(sample):
    check_request(sample, STEPS, True, LIMITS)


@pytest.mark.parametrize(
    ("sample", "argument"),
    [
        (Sample(0, 5), "batch_size"),
        (Sample(-1, 5), "batch_size"),
        (Sample(10**9, 5), "batch_size"),
        (Sample("two", 5), "batch_size"),
        (Sample(True, 5), "batch_size"),
        (Sample(2.0, 5), "batch_size"),
        (Sample(2, 0), "chunk_size"),
        (Sample(2, 51), "chunk_size"),
        (Sample(2, None), "chunk_size"),
        (Sample(2, True), "chunk_size"),
        (Sample(2, 5, "sideways"), "sampling_mode"),
        (Sample(2, 5, ["episode"]), "sampling_mode"),
        (Sample(2, 1, "boundary"), "chunk_size"),
        (Sample(2, 5, count=0), "count"),
        (Sample(2, 5, count=65), "count"),
        (Sample(2, 5, count=2, frame=True), "count"),
        (Sample(2, 5, seed=-1), "seed"),
        (Sample(2, 5, seed=2**64), "seed"),
        (Sample(2, 5, seed="x"), "seed"),
        (Sample(2, 5, generations=(1,)), "generations"),
        (context(history=0), "history_length"),
        (context(history=True), "history_length"),
        (context(history=2**40, length=2**40 + 4), "history_length"),
        (context(horizon=0), "prediction_horizon"),
        (context(horizon=-5), "prediction_horizon"),
        (context(length=9), "length"),
        (context(mode="boundary"), "sampling_mode"),
        (context(generations=(0,)), "generations"),
        (context(generations=(True,)), "generations"),
        (context(generations=[1]), "generations"),
    ],
)
def test_b23_c12_a_bad_argument_is_named_with_its_value_and_what_is_allowed(sample, argument):
    with pytest.raises(ArgumentError) as caught:
        check_request(sample, STEPS, True, LIMITS)
    assert isinstance(caught.value, ValueError)
    assert caught.value.argument == argument
    assert argument in str(caught.value)
    assert caught.value.value in str(caught.value)
    assert caught.value.rule in str(caught.value)


def test_b28_the_generations_filter_needs_provenance():
    with pytest.raises(ArgumentError, match="include_provenance"):
        check_request(context(generations=(1,)), STEPS, False, LIMITS)
    check_request(context(), STEPS, False, LIMITS)


def test_c12_a_huge_value_is_not_repeated_in_full():
    with pytest.raises(ArgumentError) as caught:
        check_request(Sample(1, 5, "x" * 10_000), STEPS, True, LIMITS)
    assert len(str(caught.value)) < 300


def test_c43_a_batch_over_the_limit_is_refused_with_both_sizes():
    limits = Limits(batch_bytes=1000)
    check_batch_bytes(5, 4, 50, limits)
    with pytest.raises(LimitExceededError, match="1020 bytes, over the limit of 1000") as caught:
        check_batch_bytes(5, 4, 51, limits)
    assert (caught.value.size, caught.value.limit) == (1020, 1000)
