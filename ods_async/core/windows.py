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

from collections.abc import Iterable, Sequence
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

    def put(self, rows: NDArray[np.int64], runs: Sequence[Int32s]) -> None:
        """From now on each of ``rows`` has these runs and no others."""
        counts = [len(found) for found in runs]
        wide, most = self.runs.shape[1], max(counts, default=0)
        if most > wide:
            while wide < most:
                wide *= 2
            grown = np.zeros((self.runs.shape[0], wide, self.runs.shape[2]), np.int32)
            grown[:, : self.runs.shape[1]] = self.runs
            self.runs = grown
        if most and min(counts) == most:
            self.runs[rows, :most] = np.stack(runs)
        else:
            for row, found in zip(rows.tolist(), runs, strict=True):
                self.runs[row, : len(found)] = found
                self.runs[row, len(found) : most] = 0
        self.runs[rows, most:] = 0

    def rank(self, rows: NDArray[np.int64], longest: NDArray[np.int64], generation: int) -> None:
        """Rows that can be drawn from now on, where they have any window at all."""
        rows, longest = _with_windows(rows, longest)
        if len(rows):
            self.ranking.add(rows, longest)
            if generation not in self.by_generation:
                self.by_generation[generation] = Ranking()
            self.by_generation[generation].add(rows, longest)

    def unrank(self, rows: NDArray[np.int64], longest: NDArray[np.int64], generation: int) -> None:
        """The opposite of :meth:`rank`, with the same words."""
        rows, longest = _with_windows(rows, longest)
        if len(rows):
            self.ranking.remove(rows, longest)
            ranking = self.by_generation[generation]
            ranking.remove(rows, longest)
            if not len(ranking):
                del self.by_generation[generation]

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


def _with_windows(rows: NDArray[np.int64], longest: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    some = longest > 0
    return (rows, longest) if some.all() else (rows[some], longest[some])


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
        self.publish_all((row,), (runs,), generation)

    def publish_all(self, rows: Sequence[int], runs: Sequence[RowRuns], generation: int) -> None:
        """As :meth:`publish`, of several rows at once, all of them different ones."""
        for row in rows:
            if not 0 <= row < self.rows:
                raise IndexError(f"row {row} of a buffer of {self.rows} rows")
        self.retire_all(rows)
        self._published.update((row, (generation, found.longest)) for row, found in zip(rows, runs, strict=True))
        places = np.array(rows, np.int64)
        for mode, table in self._tables.items():
            table.put(places, [found.of(mode) for found in runs])
            table.rank(places, np.array([found.longest[mode] for found in runs], np.int64), generation)

    def retire(self, row: int) -> None:
        """From now on ``row`` cannot be drawn. A row that was not published stays so."""
        self.retire_all((row,))

    def retire_all(self, rows: Iterable[int]) -> None:
        """As :meth:`retire`, of several rows at once."""
        found: dict[int, list[tuple[int, dict[str, int]]]] = {}
        for row in rows:
            if row in self._published:
                generation, longest = self._published.pop(row)
                found.setdefault(generation, []).append((row, longest))
        for generation, before in found.items():
            places = np.array([row for row, _ in before], np.int64)
            for mode, table in self._tables.items():
                table.unrank(places, np.array([longest[mode] for _, longest in before], np.int64), generation)

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
