"""How long the windows of the next draw are, where their length changes from draw to draw."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np

from ods_async.errors import ArgumentError

__all__ = ["ChunkSizeSampler", "GMMChunkSampler", "UniformChunkSampler", "bad_argument", "checked_count"]


class ChunkSizeSampler:
    """Base of whatever chooses the number of steps, once per draw: all windows of a batch have the same length.

    A subclass overrides :meth:`draw`, and gets lengths that repeat with the dataset's seed and differ between workers.
    One that overrides ``__call__`` alone works too, with whatever source of chance it brings.

    Raises:
        TypeError: a subclass overrides neither.
    """

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if cls.draw is ChunkSizeSampler.draw and cls.__call__ is ChunkSizeSampler.__call__:
            raise TypeError(f"{cls.__name__} must define draw(self, rng) -> int: the number of steps of the next draw")

    def draw(self, rng: np.random.Generator) -> int:
        """The next number of steps, at least 1, by chance from ``rng`` alone."""
        del rng
        return self()

    def __call__(self) -> int:
        """The next number of steps, by fresh chance."""
        return self.draw(np.random.default_rng())


class UniformChunkSampler(ChunkSizeSampler):
    """Every length from ``low`` to ``high`` equally often, both included.

    Raises:
        ArgumentError: a bound that is no integer of at least 1, or ``high`` below ``low``.
    """

    def __init__(self, low: int, high: int) -> None:
        self.low = checked_count("low", low)
        self.high = checked_count("high", high)
        _ordered(self.low, self.high)

    def draw(self, rng: np.random.Generator) -> int:
        """The next number of steps."""
        return int(rng.integers(self.low, self.high, endpoint=True))

    def __repr__(self) -> str:
        return f"UniformChunkSampler({self.low}, {self.high})"


class GMMChunkSampler(ChunkSizeSampler):
    """Lengths from a mixture of normal distributions, rounded to whole steps and moved into ``[low, high]``.

    Args:
        means: centre of each component, in steps.
        stds: standard deviation of each, in steps; 0 for always the mean.
        weights: how often each is chosen, in proportion; None for equally often.
        low: shortest length; None for 1.
        high: longest length; None for no bound but the buffer's.

    Raises:
        ArgumentError: lists of different lengths, numbers that are not finite, negative deviations or weights, weights
            that are all 0, or bounds as for :class:`UniformChunkSampler`.
    """

    def __init__(
        self,
        means: Sequence[float],
        stds: Sequence[float],
        weights: Sequence[float] | None = None,
        low: int | None = None,
        high: int | None = None,
    ) -> None:
        self.means = _numbers("means", means)
        self.stds = _numbers("stds", stds)
        given = _numbers("weights", weights) if weights is not None else (1.0,) * len(self.means)
        for name, numbers in (("stds", self.stds), ("weights", given)):
            if len(numbers) != len(self.means):
                raise bad_argument(name, numbers, f"as many numbers as means, which has {len(self.means)}")
            if min(numbers) < 0:
                raise bad_argument(name, numbers, "numbers of at least 0")
        if not 0 < sum(given) < math.inf:
            raise bad_argument("weights", given, "numbers whose sum is finite and above 0")
        self.weights = tuple(weight / sum(given) for weight in given)
        self.low = 1 if low is None else checked_count("low", low)
        self.high = None if high is None else checked_count("high", high)
        _ordered(self.low, self.high)

    def draw(self, rng: np.random.Generator) -> int:
        """The next number of steps."""
        which = int(rng.choice(len(self.means), p=self.weights))
        drawn = max(rng.normal(self.means[which], self.stds[which]), self.low)
        return round(drawn if self.high is None else min(drawn, self.high))

    def __repr__(self) -> str:
        means, stds, weights = list(self.means), list(self.stds), list(self.weights)
        return f"GMMChunkSampler({means}, {stds}, {weights}, low={self.low}, high={self.high})"


def checked_count(argument: str, value: object) -> int:
    """``value`` as an integer of at least 1.

    Raises:
        ArgumentError: it is none.
    """
    rule = "an integer of at least 1"
    if isinstance(value, bool):
        raise bad_argument(argument, value, rule)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise bad_argument(argument, value, rule) from None
    if number < 1:
        raise bad_argument(argument, value, rule)
    return number


def _ordered(low: int, high: int | None) -> None:
    if high is not None and high < low:
        raise bad_argument("high", high, f"at least low, which is {low}")


def _numbers(argument: str, values: object) -> tuple[float, ...]:
    rule = "a list of at least one finite number"
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)):
        raise bad_argument(argument, values, rule)
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise bad_argument(argument, values, rule) from None
    if not numbers or not all(map(math.isfinite, numbers)):
        raise bad_argument(argument, values, rule)
    return numbers


def bad_argument(argument: str, value: object, rule: str) -> ArgumentError:
    """The error that says what ``argument`` must be, and what was given instead."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ArgumentError(f"{argument} must be {rule}, got {shown}", argument=argument, value=shown, rule=rule)
