"""Drawing rows: uniformly among the rows whose longest run is long enough, with or without quotas."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ods_async.errors import OnlineDataBudgetExhaustedError

__all__ = ["Candidates", "Ranking", "draw_rows", "draw_rows_with_quota"]

Int64s = NDArray[np.int64]

_SHIFT: Final = 32
_ROW: Final = np.int64(2**_SHIFT - 1)
_HASTY_ROUNDS: Final = 3
_MOST_WAITING: Final = 1024


class Ranking:
    """Rows in order of (longest run, row), so that the rows with a long enough run are the tail of one array.

    Each entry is one int64, the longest run in the upper half and the row in the lower. So the order depends on what
    the rows hold and not on how they came to, which makes a seeded draw repeatable. Changes are gathered and made when
    the order is looked at: a rollout brings as many as it has episodes.
    """

    def __init__(self) -> None:
        self._keys: Int64s = np.empty(0, np.int64)
        self._changes: list[tuple[Int64s, int]] = []  # keys, and 1 to put them in, -1 to take them out
        self._waiting = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def longest(self) -> int:
        """The longest run of any row; 0 when there are no rows."""
        return int(self._settled()[-1]) >> _SHIFT if self._count else 0

    @property
    def shortest(self) -> int:
        """The longest run of the row that has least; 0 when there are no rows."""
        return int(self._settled()[0]) >> _SHIFT if self._count else 0

    def add(self, rows: Int64s, longest: Int64s) -> None:
        """Put in rows that are not in yet, each with its longest run: int64 ``[n]`` both."""
        self._change(rows, longest, 1)

    def remove(self, rows: Int64s, longest: Int64s) -> None:
        """Take out rows that were put in with those longest runs."""
        self._change(rows, longest, -1)

    def at_least(self, length: int) -> Int64s:
        """The entries of rows whose longest run has at least ``length`` steps: not to be written to."""
        keys = self._settled()
        return keys[keys.searchsorted(length << _SHIFT) :]

    def _change(self, rows: Int64s, longest: Int64s, by: int) -> None:
        self._changes.append(((longest << _SHIFT) | rows, by))
        self._count += by * len(rows)
        self._waiting += len(rows)
        if self._waiting > _MOST_WAITING + 2 * len(self._keys):  # nobody may ever look at this order
            self._settled()

    def _settled(self) -> Int64s:
        if self._changes:
            changed, place = np.unique(np.concatenate([keys for keys, _ in self._changes]), return_inverse=True)
            by = np.repeat([by for _, by in self._changes], [len(keys) for keys, _ in self._changes])
            total = np.zeros(len(changed), np.int64)
            np.add.at(total, place, by)
            keys = self._keys
            gone, new = changed[total < 0], changed[total > 0]
            if len(gone):
                keys = np.delete(keys, keys.searchsorted(gone))
            if len(new):
                keys = np.insert(keys, keys.searchsorted(new), new)
            self._keys = keys
            self._changes = []
            self._waiting = 0
        return self._keys


class Candidates:
    """The rows a draw may pick: parts of one or several rankings, which share no row."""

    __slots__ = ("count", "parts")

    def __init__(self, parts: tuple[Int64s, ...]) -> None:
        self.parts = parts
        self.count = sum(map(len, parts))

    def rows(self, places: Int64s) -> Int64s:
        """The rows at these places, ``0 <= place < count``."""
        if len(self.parts) == 1:
            return self.parts[0][places] & _ROW
        ends = np.cumsum([len(part) for part in self.parts])
        part = ends.searchsorted(places, side="right")
        rows = np.empty_like(places)
        for number, (entries, end) in enumerate(zip(self.parts, ends.tolist(), strict=True)):
            mine = part == number
            rows[mine] = entries[places[mine] - (end - len(entries))] & _ROW
        return rows


def draw_rows(candidates: Candidates, n: int, rng: np.random.Generator) -> Int64s:
    """``n`` rows, each uniformly among the candidates (at least one), with replacement."""
    return candidates.rows(rng.integers(0, candidates.count, n))


def draw_rows_with_quota(candidates: Candidates, n: int, rng: np.random.Generator, remaining: Int64s) -> Int64s:
    """``n`` rows, each uniformly among the candidates that still have quota left in this batch.

    A draw among all candidates that is thrown away when it hits a row without quota left is a uniform draw among those
    with quota. So a few rounds are drawn hastily, at the cost of the batch; only when they do not suffice are all
    candidates looked at, and from then on only those with quota are drawn.

    Args:
        candidates: at least one row.
        n: rows to draw.
        rng: where chance comes from.
        remaining: int64 ``[rows]``, how often each row may still be drawn; not changed.

    Raises:
        OnlineDataBudgetExhaustedError: the candidates' quotas sum up to less than ``n``.
    """
    taken = np.empty(0, np.int64)
    for _ in range(_HASTY_ROUNDS):
        drawn = np.concatenate([taken, draw_rows(candidates, n, rng)])
        taken = drawn[_within_quota(drawn, remaining)][:n]
        if len(taken) == n:
            return taken
    rows = candidates.rows(np.arange(candidates.count))
    quota = np.clip(remaining[rows], 0, n)
    if int(quota.sum()) < n:
        left = int(quota.sum())
        raise OnlineDataBudgetExhaustedError(
            f"the eligible episodes have quota for {left} of the {n} windows of this batch; nothing was spent. Wait "
            "for fresh episodes, ask for a smaller batch, or raise episode_sample_budget",
            requested=n,
            remaining=left,
        )
    while len(taken) < n:
        used = np.bincount(taken, minlength=len(remaining))[rows]
        open_rows = rows[used < quota]
        drawn = np.concatenate([taken, open_rows[rng.integers(0, len(open_rows), n - len(taken))]])
        taken = drawn[_within_quota(drawn, remaining)]
    return taken


def _within_quota(drawn: Int64s, remaining: Int64s) -> NDArray[np.bool_]:
    """Which of the draws, in their order, hit a row that was drawn less often before than its quota allows."""
    order = drawn.argsort(kind="stable")
    ordered = drawn[order]
    places = np.arange(len(drawn))
    begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    earlier = places - np.maximum.accumulate(np.where(begins, places, 0))
    kept = np.empty(len(drawn), np.bool_)
    kept[order] = earlier < remaining[ordered]
    return kept
