"""Which windows a batch holds: the outcome of planning, the input of gathering, and its form on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ods_async.core.requests import Plan
from ods_async.errors import ProtocolError

__all__ = ["Int32s", "WindowPlan"]

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class WindowPlan:
    """``n`` windows of ``length`` steps.

    Attributes:
        rows: int32 ``[n]``, the row of each window.
        starts: int32 ``[n]``, its first step; of a context it may lie before the row's beginning (negative).
        first, last: int32 ``[n]``, of contexts: the half-open run of steps of the row that belong to the context;
            what of the window lies outside is padding. None for chunks, where every step is real.
        length: steps of each window.
        history: of contexts, the steps up to "now" with it included; 0 for chunks.
    """

    rows: Int32s
    starts: Int32s
    first: Int32s | None
    last: Int32s | None
    length: int
    history: int

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, begin: int, end: int) -> WindowPlan:
        """The windows from ``begin`` to before ``end``; nothing is copied."""
        first = None if self.first is None else self.first[begin:end]
        last = None if self.last is None else self.last[begin:end]
        return WindowPlan(self.rows[begin:end], self.starts[begin:end], first, last, self.length, self.history)

    def to_message(self, lease_id: int, stamps: NDArray[np.int64]) -> Plan:
        """The plan as it is sent; ``stamps`` int64 ``[n]``, the stamp of each window's row."""
        return self.to_messages([lease_id], stamps)[0]

    def to_messages(self, lease_ids: Sequence[int], stamps: NDArray[np.int64]) -> list[Plan]:
        """As :meth:`to_message`, cut into one plan for each lease, of as many windows each."""
        count = len(lease_ids)
        n = len(self.rows) // count
        rows, starts, first, last = (
            b"" if part is None else part.astype("<i4", copy=False).tobytes()
            for part in (self.rows, self.starts, self.first, self.last)
        )
        stamped = stamps.astype("<i8", copy=False).tobytes()
        if count == 1:
            return [Plan(lease_ids[0], n, self.length, self.history, rows, starts, first, last, stamped)]
        plans = []
        for turn, lease_id in enumerate(lease_ids):
            begin, end = 4 * turn * n, 4 * (turn + 1) * n
            plans.append(
                Plan(
                    lease_id,
                    n,
                    self.length,
                    self.history,
                    rows[begin:end],
                    starts[begin:end],
                    first[begin:end],
                    last[begin:end],
                    stamped[2 * begin : 2 * end],
                )
            )
        return plans

    @classmethod
    def from_message(cls, message: Plan, rows: int, steps: int) -> tuple[WindowPlan, NDArray[np.int64]]:
        """The received plan for a buffer of ``rows`` rows of ``steps`` steps, and its stamps int64 ``[n]``; no copy.

        Raises:
            ProtocolError: the sizes disagree, or a window lies outside the buffer.
        """
        n, length, history = message.batch_size, message.length, message.history
        if n < 1 or length < 1 or not 0 <= history <= length:
            raise _bad(f"{n} windows of {length} steps, {history} of them history")
        chosen = _ints(message.rows, n, "<i4", "rows")
        starts = _ints(message.starts, n, "<i4", "starts")
        stamps: NDArray[np.int64] = _ints(message.stamps, n, "<i8", "stamps")
        if chosen.min() < 0 or chosen.max() >= rows:
            raise _bad(f"a row outside 0 to {rows - 1}")
        if history == 0:
            if message.first or message.last:
                raise _bad("chunks with bounds of contexts")
            if starts.min() < 0 or int(starts.max()) + length > steps:
                raise _bad(f"a window of {length} steps outside a row of {steps}")
            return cls(chosen, starts, None, None, length, 0), stamps
        first = _ints(message.first, n, "<i4", "first")
        last = _ints(message.last, n, "<i4", "last")
        now = starts.astype(np.int64) + (history - 1)
        if first.min() < 0 or last.max() > steps or not ((first <= now) & (now < last)).all():
            raise _bad(f"a context whose now lies outside its run, or a run outside a row of {steps} steps")
        return cls(chosen, starts, first, last, length, history), stamps


def _ints(data: bytes, n: int, dtype: str, name: str) -> NDArray[Any]:
    size = n * np.dtype(dtype).itemsize
    if len(data) != size:
        raise _bad(f"{name} has {len(data)} bytes instead of {size}")
    return np.frombuffer(data, dtype)


def _bad(reason: str) -> ProtocolError:
    return ProtocolError(f"the plan makes no sense: {reason}", reason=reason)
