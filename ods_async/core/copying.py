"""Carrying out a plan: its windows out of a segment, into the memory of a batch, and whether they are whole.

The copy is compiled where the package was installed with a C compiler at hand (``core/_copy.c``, see :data:`COMPILED`);
elsewhere, and for tensors that a caller brings along, numpy does the same (``core/gather.py``).
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ods_async.core.gather import CONTEXT_PADS, GatherProgram
from ods_async.core.memory import LOSS_MASK, BatchLayout, SegmentLayout
from ods_async.core.requests import Plan
from ods_async.core.window_plan import WindowPlan
from ods_async.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Buffer

    from ods_async.core.schema import FieldSpec, Path

__all__ = ["COMPILED", "SegmentCopier"]


def _compiled() -> Callable[..., list[bool]] | None:
    if sys.byteorder != "little":  # a plan's numbers are little-endian
        return None
    try:
        module = importlib.import_module("ods_async.core._copy")
    except ImportError:
        return None
    copy_windows: Callable[..., list[bool]] = module.copy_windows
    return copy_windows


_copy_windows: Final = _compiled()
COMPILED: Final = _copy_windows is not None
"""Whether the compiled copy is there."""

_TABLES_KEPT: Final = 64


class SegmentCopier:
    """Copies the windows of plans out of one segment; made once, used by any number of threads.

    Args:
        layout: where everything lies in the segment.
        buffer: the segment's memory. It is held: who closes it takes nothing from a copy that is under way.
        compiled: False to do without the compiled copy.

    Attributes:
        program: the same copy by numpy, into arrays.
        stamps: int64 ``[rows]``, of the segment.
    """

    def __init__(self, layout: SegmentLayout, buffer: Buffer, *, compiled: bool = COMPILED) -> None:
        self._layout = layout
        self._buffer = memoryview(buffer)  # its own: who closes the segment meanwhile releases only theirs
        self._copy = _copy_windows if compiled else None
        self._tables: dict[int, tuple[BatchLayout, tuple[bytes, int] | None]] = {}
        self.program = GatherProgram(layout.arrays(buffer))
        self.stamps: NDArray[np.int64] = layout.stamps(buffer)

    def check(self, plan: Plan) -> None:
        """See that a received plan fits the segment, before memory is made for it.

        Raises:
            ProtocolError: it does not.
        """
        WindowPlan.from_message(plan, self._layout.rows, self._layout.steps)

    def copy(
        self,
        plan: Plan,
        batch: BatchLayout,
        memory: Buffer | NDArray[np.uint8],
        part: tuple[int, int] | None = None,
    ) -> bool:
        """Copy the windows of ``plan`` into ``memory``, which is laid out as ``batch``: every field of it.

        With ``part`` only the windows from its first number to before its second are copied, to their places: several
        threads can share the work.

        Returns:
            False when a row was written meanwhile, so that the windows may be torn.

        Raises:
            ProtocolError: the plan does not fit the segment, or not the batch.
        """
        self._check_size(plan, batch)
        table = self._table(batch)
        if table is None:
            view = memoryview(memory)  # type: ignore[arg-type]  # an array is one, which Python 3.11 cannot say
            return self.copy_into(plan, batch.views(view), batch.windows(view), part)
        if part is None:
            return self._run((plan,), table, ((memory, plan.rows, plan.starts, plan.first, plan.last, plan.stamps),))[0]
        begin, end = part
        ints = [each[4 * begin : 4 * end] for each in (plan.rows, plan.starts, plan.first, plan.last)]
        given = (memory, *ints, plan.stamps[8 * begin : 8 * end])
        return self._run((plan,), _further(*table, begin * plan.length), (given,))[0]

    def copy_each(
        self, plans: Sequence[Plan], batch: BatchLayout, memories: Sequence[Buffer | NDArray[np.uint8]]
    ) -> list[bool]:
        """As :meth:`copy`, for several plans of one length and history, each into memory of its own.

        Where the copy is compiled, the interpreter is left alone until the last one is there.
        """
        table = self._table(batch)
        if table is None:
            return [self.copy(plan, batch, memory) for plan, memory in zip(plans, memories, strict=True)]
        given = []
        for plan, memory in zip(plans, memories, strict=True):
            self._check_size(plan, batch)
            given.append((memory, plan.rows, plan.starts, plan.first, plan.last, plan.stamps))
        return self._run(plans, table, tuple(given))

    def _run(
        self, plans: Sequence[Plan], table: tuple[bytes, int], given: tuple[tuple[object, ...], ...]
    ) -> list[bool]:
        assert self._copy is not None
        fields, mask = table
        layout, plan = self._layout, plans[0]
        try:
            return self._copy(
                self._buffer,
                fields,
                given,
                layout.rows,
                layout.steps,
                plan.length,
                plan.history,
                mask,
                layout.stamps_offset,
            )
        except ValueError as error:
            for each in plans:
                self.check(each)  # says it in more words
            raise _misfit(plan, str(error)) from error

    @staticmethod
    def _check_size(plan: Plan, batch: BatchLayout) -> None:
        n = batch.batch_size
        if (plan.batch_size, plan.length) != (n, batch.length):
            raise _misfit(plan, f"memory for {n} windows of {batch.length} steps")
        if (len(plan.rows), len(plan.stamps)) != (4 * n, 8 * n):
            raise _misfit(plan, f"{len(plan.rows)} bytes of rows and {len(plan.stamps)} of stamps")

    def copy_into(
        self,
        plan: Plan,
        out: Mapping[Path, NDArray[Any]],
        whole: Mapping[Path, NDArray[np.void]] | None = None,
        part: tuple[int, int] | None = None,
    ) -> bool:
        """As :meth:`copy`, by numpy, into arrays wherever they lie; see :meth:`GatherProgram.run`."""
        windows, expected = WindowPlan.from_message(plan, self._layout.rows, self._layout.steps)
        if part is not None:
            begin, end = part
            windows, expected = windows.part(begin, end), expected[begin:end]
            out = {path: array[begin:end] for path, array in out.items()}
            whole = None if whole is None else {path: array[begin:end] for path, array in whole.items()}
        self.program.run(windows, out, whole)
        return np.array_equal(self.stamps[windows.rows], expected)

    def _table(self, batch: BatchLayout) -> tuple[bytes, int] | None:
        """Where each field comes from and goes to, and the offset of the mask; None if numpy has to do it."""
        if self._copy is None:
            return None
        known = self._tables.get(id(batch))  # by identity: a layout's hash is that of all its fields
        if known is None or known[0] is not batch:
            if len(self._tables) >= _TABLES_KEPT:
                self._tables = {}
            known = self._tables[id(batch)] = batch, self._made(batch)
        return known[1]

    def _made(self, batch: BatchLayout) -> tuple[bytes, int] | None:
        places = {
            field.path: (field, offset) for field, offset in zip(self._layout.schema, self._layout.offsets, strict=True)
        }
        entries, mask = [], -1
        for field, target in zip(batch.fields, batch.offsets, strict=True):
            if field.path not in places:
                if field != LOSS_MASK:
                    return None
                mask = target
                continue
            source, offset = places[field.path]
            pad = _byte_of_padding(source)
            if source.dtype != field.dtype or source.shape != field.shape or pad is None:
                return None
            entries.append((offset, field.step_nbytes, target, pad))
        return np.array(entries, np.int64).reshape(-1, 4).tobytes(), mask


def _further(fields: bytes, mask: int, steps: int) -> tuple[bytes, int]:
    """A table whose targets lie so many steps further on in the batch."""
    table = np.frombuffer(fields, np.int64).reshape(-1, 4).copy()
    table[:, 2] += steps * table[:, 1]
    return table.tobytes(), mask if mask < 0 else mask + steps


def _byte_of_padding(field: FieldSpec) -> int | None:
    """The byte that a context's padding of this field consists of; None when one byte does not make it."""
    pad = CONTEXT_PADS.get(field.path, 0)
    found = set(np.array(pad).astype(field.dtype).tobytes())
    return found.pop() if len(found) == 1 else None


def _misfit(plan: Plan, reason: str) -> ProtocolError:
    return ProtocolError(
        f"the plan of {plan.batch_size} windows of {plan.length} steps cannot be carried out: {reason}",
        reason="plan does not fit",
    )
