"""Lengths of windows that change from draw to draw."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest

from ods_async.client.chunk_sizes import ChunkSizeSampler, GMMChunkSampler, UniformChunkSampler
from ods_async.errors import ArgumentError


def drawn(sampler: ChunkSizeSampler, count: int, seed: int = 5) -> list[int]:
    rng = np.random.default_rng(seed)
    return [sampler.draw(rng) for _ in range(count)]


def test_uniform_reaches_both_bounds_and_everything_between_equally_often() -> None:
    counts = Counter(drawn(UniformChunkSampler(3, 7), 5000))
    assert set(counts) == {3, 4, 5, 6, 7}
    assert all(850 < count < 1150 for count in counts.values())
    assert set(drawn(UniformChunkSampler(4, 4), 10)) == {4}


def test_mixture_draws_around_its_means_in_proportion_to_the_weights() -> None:
    lengths = np.array(drawn(GMMChunkSampler([20, 200], [2, 5], [3, 1]), 4000))
    short = lengths[lengths < 100]
    assert 0.72 < len(short) / len(lengths) < 0.78
    assert abs(short.mean() - 20) < 0.3
    assert abs(short.std() - 2) < 0.2
    assert abs(lengths[lengths >= 100].mean() - 200) < 1


def test_mixture_is_moved_into_its_bounds_and_never_below_one() -> None:
    assert min(drawn(GMMChunkSampler([1], [50]), 500)) == 1
    bounded = drawn(GMMChunkSampler([10, 12], [30, 30], low=8, high=17), 500)
    assert (min(bounded), max(bounded)) == (8, 17)
    assert set(drawn(GMMChunkSampler([1e18], [1e18], high=9), 50)) <= set(range(1, 10))
    assert set(drawn(GMMChunkSampler((6,), (0,), weights=(0.5,)), 20)) == {6}


@pytest.mark.parametrize("sampler", [UniformChunkSampler(2, 90), GMMChunkSampler([40, 9], [9, 3], low=2)])
def test_draws_repeat_with_their_source_of_chance_and_survive_pickling(sampler: ChunkSizeSampler) -> None:
    assert drawn(sampler, 30) == drawn(sampler, 30) == drawn(pickle.loads(pickle.dumps(sampler)), 30)
    assert drawn(sampler, 30) != drawn(sampler, 30, seed=6)
    assert len({sampler() for _ in range(40)}) > 3
    assert type(sampler()) is int
    assert repr(sampler).startswith(type(sampler).__name__)


def test_no_global_source_of_chance_is_touched() -> None:
    before = np.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
    GMMChunkSampler([9], [3])()
    UniformChunkSampler(1, 5)()
    assert np.random.get_state()[1].tolist() == before  # type: ignore[union-attr, index]


def test_own_samplers_define_either_way() -> None:
    class ByCall(ChunkSizeSampler):
        def __call__(self) -> int:
            return 11

    class ByDraw(ChunkSizeSampler):
        def draw(self, rng: np.random.Generator) -> int:
            return int(rng.integers(5, 6))

    assert drawn(ByCall(), 2) == [11, 11]
    assert ByDraw()() == 5
    with pytest.raises(TypeError, match="Neither must define draw"):

        class Neither(ChunkSizeSampler):
            pass


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: UniformChunkSampler(0, 4), "low"),
        (lambda: UniformChunkSampler(True, 4), "low"),
        (lambda: UniformChunkSampler(5, 4), "high"),
        (lambda: UniformChunkSampler(5, 8.0), "high"),  # type: ignore[arg-type]
        (lambda: GMMChunkSampler([], []), "means"),
        (lambda: GMMChunkSampler("12", [1]), "means"),  # type: ignore[arg-type]
        (lambda: GMMChunkSampler([1, 2], [1]), "stds"),
        (lambda: GMMChunkSampler([1, 2], [1, -1]), "stds"),
        (lambda: GMMChunkSampler([1, float("nan")], [1, 1]), "means"),
        (lambda: GMMChunkSampler([1, 2], [1, 1], [1]), "weights"),
        (lambda: GMMChunkSampler([1, 2], [1, 1], [0, 0]), "weights"),
        (lambda: GMMChunkSampler([1], [1], low=0), "low"),
        (lambda: GMMChunkSampler([1], [1], low=4, high=3), "high"),
    ],
)
def test_bad_arguments_are_refused_by_name(make: object, argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.argument == argument
