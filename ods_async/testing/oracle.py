"""What may be drawn, written down the slow and obvious way, straight from the promise.

Published so that whoever draws from a live service can hold every window against it. Nothing here is shared with the
code that plans batches. A buffer is given as plain nested lists (or arrays), one entry a row, one value a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Oracle"]

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Oracle:
    """The annotations of a buffer, ``[rows][steps]`` each, and what follows from them.

    ``generation`` is only looked at where a question names generations. Rows that hold no published episode are given
    as rows without valid steps.
    """

    valid: Rows
    continuity_id: Rows
    segment_id: Rows
    segment_accepted: Rows
    generation: Rows = ()

    def is_eligible(self, row: int, start: int, length: int, mode: str) -> bool:
        """Whether the window of ``length`` steps from ``start`` on may be drawn in ``mode`` (B21)."""
        if start < 0 or start + length > len(self.valid[row]):
            return False
        steps = range(start, start + length)
        if not all(self.valid[row][t] for t in steps):
            return False
        if len({int(self.continuity_id[row][t]) for t in steps}) != 1 or self.continuity_id[row][start] < 0:
            return False
        if mode == "episode":
            return True
        if not all(self.segment_accepted[row][t] for t in steps):
            return False
        segments = {int(self.segment_id[row][t]) for t in steps}
        if mode == "segment":
            return len(segments) == 1 and min(segments) >= 0
        if mode == "boundary":
            return len(segments) >= 2
        raise ValueError(f"unknown mode {mode!r}")

    def windows(self, length: int, mode: str) -> set[tuple[int, int]]:
        """Every ``(row, start)`` that may be drawn."""
        return {
            (row, start)
            for row in range(len(self.valid))
            for start in range(len(self.valid[row]))
            if self.is_eligible(row, start, length, mode)
        }

    def belongs(self, row: int, step: int, mode: str, generations: Iterable[int] = ()) -> bool:
        """Whether the step can be an anchor, or part of a context, at all (B25, B28)."""
        if not self.valid[row][step] or self.continuity_id[row][step] < 0:
            return False
        wanted = tuple(generations)
        if wanted and self.generation[row][step] not in wanted:
            return False
        return mode == "episode" or (bool(self.segment_accepted[row][step]) and self.segment_id[row][step] >= 0)

    def anchors(self, mode: str, generations: Iterable[int] = ()) -> set[tuple[int, int]]:
        """Every ``(row, step)`` that may be the "now" of a context."""
        wanted = tuple(generations)
        return {
            (row, step)
            for row in range(len(self.valid))
            for step in range(len(self.valid[row]))
            if self.belongs(row, step, mode, wanted)
        }

    def context(
        self, row: int, anchor: int, history: int, horizon: int, mode: str, generations: Iterable[int] = ()
    ) -> list[int | None]:
        """The step at each place of the context around ``anchor``; None is padding (B26)."""
        first, last = self.context_bounds(row, anchor, mode, generations)
        wanted = range(anchor - history + 1, anchor + horizon)
        return [step if first <= step < last else None for step in wanted]

    def context_bounds(self, row: int, anchor: int, mode: str, generations: Iterable[int] = ()) -> tuple[int, int]:
        """The half-open range of steps a context around ``anchor`` may show, going outward from it (B26)."""
        wanted = tuple(generations)

        def goes_on(step: int) -> bool:
            if not 0 <= step < len(self.valid[row]) or not self.belongs(row, step, mode, wanted):
                return False
            if self.continuity_id[row][step] != self.continuity_id[row][anchor]:
                return False
            return mode == "episode" or self.segment_id[row][step] == self.segment_id[row][anchor]

        first, last = anchor, anchor + 1
        while goes_on(first - 1):
            first -= 1
        while goes_on(last):
            last += 1
        return first, last
