"""Which windows can be drawn, and drawing them: row uniform, then start uniform.

:class:`RunIndex` knows for every row the runs of steps inside which windows may lie, and keeps the rows in order of
their longest run. So the rows that have a window of some length are the tail of a sorted array, and drawing a batch
costs the batch, not the buffer.

Two kinds of run. An *episode* or *segment* run is ``(start, end)``: every window inside it is eligible. A *boundary*
run is ``(low, b, end)``, where step ``b`` is the first of another segment: the windows that hold both ``b - 1`` and
``b``, start at ``low`` or later and end by ``end``. ``low`` is the boundary before (or the beginning of the run), which
makes the starts of different boundaries disjoint and keeps the draw uniform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ods_async.core.drawing import Candidates, Ranking, draw_rows, draw_rows_with_quota
from ods_async.core.window_plan import Int32s, WindowPlan
from ods_async.errors import DataUnavailableError

__all__ = [
    "MODES",
    "RowRuns",
    "RunIndex",
    "WindowPlan",
    "plan_contexts",
    "plan_windows",
    "runs_of",
]

MODES: Final = ("episode", "segment", "boundary")

_NOUNS: Final = {
    "episode": "continuous run",
    "segment": "accepted segment",
    "boundary": "accepted run with a segment boundary in it",
}


@dataclass(frozen=True, slots=True, eq=False)
class RowRuns:
    """The runs of one row, in order of time: int32 arrays, and the longest window each mode finds in the row.

    Attributes:
        episode: ``[n, 2]`` of ``(start, end)``: valid steps of one non-negative continuity.
        segment: ``[n, 2]`` of ``(start, end)``: the same within one non-negative segment, all accepted.
        boundary: ``[n, 3]`` of ``(low, b, end)``, see the module's docstring.
        longest: mode -> steps of the longest eligible window; 0 when there is none.
    """

    episode: Int32s
    segment: Int32s
    boundary: Int32s
    longest: dict[str, int]

    def of(self, mode: str) -> Int32s:
        """The runs of one mode."""
        runs: Int32s = getattr(self, mode)
        return runs

    def anchors(self) -> NDArray[np.int64]:
        """Every step that can be "now" in an episode context: valid, of non-negative continuity. int64, ascending."""
        return np.concatenate([np.arange(0), *(np.arange(start, end) for start, end in self.episode.tolist())])


def runs_of(
    valid: NDArray[np.bool_],
    continuity_id: NDArray[np.integer[Any]],
    segment_id: NDArray[np.integer[Any]],
    segment_accepted: NDArray[np.bool_],
) -> RowRuns:
    """The runs of one row from its annotations, each an array ``[steps]``."""
    in_episode = valid & (continuity_id >= 0)
    accepted = in_episode & segment_accepted
    goes_on = continuity_id[1:] == continuity_id[:-1]
    same_segment = segment_id[1:] == segment_id[:-1]
    episode = _runs(in_episode, goes_on)
    segment = _runs(accepted & (segment_id >= 0), goes_on & same_segment)
    around = _runs(accepted, goes_on)
    changes = np.flatnonzero(accepted[1:] & accepted[:-1] & goes_on & ~same_segment) + 1
    holder = np.searchsorted(around[:, 0], changes, side="right") - 1
    low, end = around[holder, 0], around[holder, 1]
    low[1:] = np.maximum(low[1:], changes[:-1])
    boundary = np.stack([low, changes, end], axis=1).astype(np.int32)
    longest = {"episode": _longest(episode), "segment": _longest(segment), "boundary": _longest(around[holder])}
    return RowRuns(episode.astype(np.int32), segment.astype(np.int32), boundary, longest)


def _runs(inside: NDArray[np.bool_], goes_on: NDArray[np.bool_]) -> NDArray[np.int64]:
    """``[n, 2]`` of the longest stretches where ``inside`` holds and each step follows on the one before."""
    joined = inside[1:] & inside[:-1] & goes_on
    starts = np.flatnonzero(inside & ~np.concatenate([[False], joined]))
    ends = np.flatnonzero(inside & ~np.concatenate([joined, [False]])) + 1
    return np.stack([starts, ends], axis=1)


def _longest(runs: NDArray[np.int64]) -> int:
    return int((runs[:, 1] - runs[:, 0]).max(initial=0))


class _ModeTable:
    """The runs of all rows in one mode, ``[rows, K, columns]`` padded with zeros, K growing by doubling."""

    def __init__(self, rows: int, columns: int) -> None:
        self.runs: Int32s = np.zeros((rows, 1, columns), np.int32)
        self.ranking = Ranking()
        self.by_generation: dict[int, Ranking] = {}

    def put(self, row: int, runs: Int32s) -> None:
        wide = self.runs.shape[1]
        if len(runs) > wide:
            while wide < len(runs):
                wide *= 2
            grown = np.zeros((self.runs.shape[0], wide, self.runs.shape[2]), np.int32)
            grown[:, : self.runs.shape[1]] = self.runs
            self.runs = grown
        self.runs[row, : len(runs)] = runs
        self.runs[row, len(runs) :] = 0

    def starts_of(self, rows: NDArray[np.int64], length: int, rng: np.random.Generator) -> tuple[Int32s, Int32s]:
        """For each of ``rows`` one of its eligible starts, uniformly, and the run it lies in (int32 ``[n, columns]``).

        Every row must have an eligible window of that length.
        """
        runs = self.runs[rows]
        if runs.shape[2] == 2:
            low = runs[:, :, 0]
            count = runs[:, :, 1] - low
            count -= length - 1
        else:
            low = np.maximum(runs[:, :, 0], runs[:, :, 1] - (length - 1))
            count = np.minimum(runs[:, :, 1], runs[:, :, 2] - (length - 1))
            count -= low
        if runs.shape[1] == 1:
            return low[:, 0] + _below(count[:, 0], rng).astype(np.int32), runs[:, 0]
        np.maximum(count, 0, out=count)
        upto = np.add.accumulate(count, axis=1)
        drawn = _below(upto[:, -1], rng)
        which = (upto <= drawn[:, None]).sum(axis=1)
        picked = np.arange(len(rows)) * runs.shape[1] + which
        before = upto.ravel()[picked] - count.ravel()[picked]
        starts = low.ravel()[picked] + (drawn - before)
        return starts.astype(np.int32), runs.reshape(-1, runs.shape[2])[picked]


def _below(bounds: NDArray[np.integer[Any]], rng: np.random.Generator) -> NDArray[np.int64]:
    """For each bound (1 to 2**31) a number from 0 to below it.

    ``rng.integers`` takes 0.1 µs for every bound of its own. A product never rounds up to its bound, and the chances of
    two numbers differ by less than 2**-22 of them, as there are 2**53 values to share.
    """
    return (rng.random(len(bounds)) * bounds).astype(np.int64)


class RunIndex:
    """The runs of every published row, kept up to date as episodes come and go.

    Args:
        rows: physical rows of the buffer.
        steps: capacity of a row.
    """

    def __init__(self, rows: int, steps: int) -> None:
        self.rows = rows
        self.steps = steps
        self._tables = {mode: _ModeTable(rows, 3 if mode == "boundary" else 2) for mode in MODES}
        self._published: dict[int, tuple[int, dict[str, int]]] = {}

    @property
    def published(self) -> int:
        """Rows that hold a published episode."""
        return len(self._published)

    def publish(self, row: int, runs: RowRuns, generation: int) -> None:
        """From now on ``row`` can be drawn; what it held before cannot."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of a buffer of {self.rows} rows")
        self.retire(row)
        self._published[row] = (generation, runs.longest)
        for mode, table in self._tables.items():
            table.put(row, runs.of(mode))
            longest = runs.longest[mode]
            if longest:
                table.ranking.add(row, longest)
                if generation not in table.by_generation:
                    table.by_generation[generation] = Ranking()
                table.by_generation[generation].add(row, longest)

    def retire(self, row: int) -> None:
        """From now on ``row`` cannot be drawn. A row that was not published stays so."""
        generation, before = self._published.pop(row, (0, {}))
        for mode, longest in before.items():
            if longest:
                table = self._tables[mode]
                table.ranking.remove(row, longest)
                ranking = table.by_generation[generation]
                ranking.remove(row, longest)
                if not len(ranking):
                    del table.by_generation[generation]

    def rows_with(self, mode: str, length: int) -> int:
        """Rows that have an eligible window of ``length`` steps."""
        return len(self._tables[mode].ranking.at_least(length))

    def longest(self, mode: str) -> int:
        """Steps of the longest eligible window; 0 when there is none."""
        return self._tables[mode].ranking.longest

    def shortest(self, mode: str) -> int:
        """Steps of the longest eligible window of the row that has least; 0 when there are no rows."""
        return self._tables[mode].ranking.shortest

    def holds(self, mode: str) -> str:
        """What the buffer holds for this mode, in words."""
        count = len(self._published)
        if not count:
            return "no episodes"
        episodes = f"{count} episode{'' if count == 1 else 's'}"
        longest = self.longest(mode)
        if not longest:
            return f"{episodes} without any {_NOUNS[mode]}"
        return f"{episodes}, longest {_NOUNS[mode]}: {longest} step{'' if longest == 1 else 's'}"

    def _candidates(self, mode: str, length: int, generations: Sequence[int] = ()) -> tuple[_ModeTable, Candidates]:
        table = self._tables[mode]
        if not generations:
            return table, Candidates((table.ranking.at_least(length),))
        found = (table.by_generation.get(generation) for generation in sorted(set(generations)))
        return table, Candidates(tuple(ranking.at_least(length) for ranking in found if ranking is not None))


def plan_windows(
    index: RunIndex,
    batch_size: int,
    length: int,
    mode: str,
    rng: np.random.Generator,
    remaining: NDArray[np.int64] | None = None,
) -> WindowPlan:
    """Draw ``batch_size`` windows of ``length`` steps: row uniform, then start uniform, with replacement.

    ``remaining`` (int64 ``[rows]``, not changed) is how many windows each row may still give; then each draw picks
    uniformly among the rows that have quota left in this batch.

    Raises:
        DataUnavailableError: no row has an eligible window.
        OnlineDataBudgetExhaustedError: the quotas of the eligible rows cannot fill the batch.
    """
    table, candidates = index._candidates(mode, length)
    rows = _draw(index, candidates, batch_size, length, mode, rng, remaining, f"window of {length} steps")
    starts, _ = table.starts_of(rows, length, rng)
    return WindowPlan(rows.astype(np.int32), starts, None, None, length, 0)


def plan_contexts(
    index: RunIndex,
    batch_size: int,
    history: int,
    horizon: int,
    mode: str,
    rng: np.random.Generator,
    generations: Sequence[int] = (),
    remaining: NDArray[np.int64] | None = None,
) -> WindowPlan:
    """Draw ``batch_size`` contexts: row uniform, then anchor uniform among the row's eligible steps.

    ``mode`` is ``episode`` or ``segment``. With ``generations`` only rows of those are drawn. ``remaining`` as for
    :func:`plan_windows`; a context costs one.

    Raises:
        DataUnavailableError: no row has an eligible anchor.
        OnlineDataBudgetExhaustedError: the quotas of the eligible rows cannot fill the batch.
    """
    length = history + horizon - 1
    table, candidates = index._candidates(mode, 1, generations)
    what = "context" if not generations else f"context of generation {', '.join(map(str, generations))}"
    rows = _draw(index, candidates, batch_size, length, mode, rng, remaining, what)
    anchors, runs = table.starts_of(rows, 1, rng)
    starts = anchors - np.int32(history - 1)
    return WindowPlan(rows.astype(np.int32), starts, runs[:, 0].copy(), runs[:, 1].copy(), length, history)


def _draw(
    index: RunIndex,
    candidates: Candidates,
    batch_size: int,
    length: int,
    mode: str,
    rng: np.random.Generator,
    remaining: NDArray[np.int64] | None,
    what: str,
) -> NDArray[np.int64]:
    if not candidates.count:
        holds = index.holds(mode)
        raise DataUnavailableError(
            f"no {what} for sampling_mode={mode!r}; the buffer holds {holds}", mode=mode, length=length, holds=holds
        )
    if remaining is None:
        return draw_rows(candidates, batch_size, rng)
    return draw_rows_with_quota(candidates, batch_size, rng, remaining)
