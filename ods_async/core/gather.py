"""The one copy: planned windows out of the buffer, into memory somebody owns.

The same function runs in a consumer over shared memory and in the broker over its own. Fields of few bytes a step are
copied a window at a time: a window's steps lie side by side, so it is one element of an array of overlapping elements,
and ``n`` elements are picked instead of ``n * length``. Larger ones go step by step through ``numpy.ndarray.take``,
which copies straight to where they belong and lets other threads run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ods_async.core.memory import LOSS_MASK, is_narrow
from ods_async.core.schema import PROVENANCE, Path, path_text
from ods_async.core.window_plan import WindowPlan

__all__ = ["CONTEXT_PADS", "GatherProgram", "gather_into"]

CONTEXT_PADS: Final[Mapping[Path, int]] = {
    ("task_index",): -1,
    ("subtask_index",): -1,
    **{field.path: -1 for field in PROVENANCE},
}
"""What padding of a context holds where that is not zero (B26). Steps behind an episode's end are padded otherwise."""

_LENGTHS_KEPT: Final = 16


class GatherProgram:
    """Copies windows out of one buffer; made once, run for every batch, by any number of threads.

    Args:
        source: path -> ``[rows, steps, *shape]``, contiguous, all of the same ``rows`` and ``steps``.
        pads: path -> what padding of that field holds; zero where a path is missing.
    """

    def __init__(self, source: Mapping[Path, NDArray[Any]], pads: Mapping[Path, int] = CONTEXT_PADS) -> None:
        sizes = {array.shape[:2] for array in source.values()}
        if len(sizes) != 1:
            raise ValueError(f"fields of one buffer share rows and steps; found {sorted(sizes)}")
        ((self.rows, self.steps),) = sizes
        self._flat: dict[Path, NDArray[Any]] = {}
        self._windows: dict[int, dict[Path, NDArray[np.void]]] = {}
        for path, array in source.items():
            if not array.flags.c_contiguous:
                raise ValueError(f"{path_text(path)} is not contiguous")
            self._flat[path] = array.reshape(self.rows * self.steps, *array.shape[2:])
        self._pads = {path: pads.get(path, 0) for path in source}

    def run(
        self,
        plan: WindowPlan,
        out: Mapping[Path, NDArray[Any]],
        whole: Mapping[Path, NDArray[np.void]] | None = None,
    ) -> None:
        """Copy the windows of ``plan`` into ``out``: path -> ``[n, length, *shape]`` of the source's dtype.

        ``out`` names the fields that are wanted; of a context also ``("loss_mask",)``, bool, where it is wanted.
        Padding gets each field's pad, so ``valid`` is False there. Indices outside the buffer are clipped to it.
        ``whole`` has the same memory as ``[n]`` windows (:meth:`BatchLayout.windows`), where that was made before.

        Raises:
            KeyError: the buffer has no such field.
            TypeError: the memory has another dtype; nothing is cast.
            ValueError: the memory has another shape.
        """
        begins = plan.rows.astype(np.intp) * self.steps
        firsts = begins + plan.starts
        inside = bool(firsts.min() >= 0 and firsts.max() + plan.length <= self.rows * self.steps)
        windows = self._windows_of(plan.length) if inside else {}
        padding = self._padding(plan, out.get(LOSS_MASK.path))
        shape = (len(plan), plan.length)
        steps: NDArray[np.intp] | None = None
        for path, target in out.items():
            flat = self._flat.get(path)
            if flat is None:
                if path == LOSS_MASK.path and plan.first is not None:
                    continue
                raise KeyError(path_text(path))
            if target.dtype != flat.dtype:  # take would cast
                raise TypeError(f"{path_text(path)} holds {flat.dtype} and cannot be copied into {target.dtype}")
            source = windows.get(path)
            if source is not None and whole is not None and path in whole:
                whole[path][...] = source[firsts]
            elif source is not None and target.flags.c_contiguous and target.shape == (*shape, *flat.shape[1:]):
                target.reshape(len(plan), -1).view(source.dtype)[:, 0] = source[firsts]
            else:
                if steps is None:
                    steps = self._steps_of(plan, begins)
                flat.take(steps, axis=0, out=target, mode="clip")
            if padding is not None:
                if target.flags.c_contiguous:
                    target.reshape(len(plan) * plan.length, *flat.shape[1:])[padding] = self._pads[path]
                else:
                    target[np.divmod(padding, plan.length)] = self._pads[path]

    def _windows_of(self, length: int) -> dict[Path, NDArray[np.void]]:
        """Each narrow field as ``[rows * steps - length + 1]`` overlapping windows; one begins at every step."""
        windows = self._windows.get(length)
        if windows is None:
            if len(self._windows) >= _LENGTHS_KEPT:
                self._windows = {}
            count = self.rows * self.steps - length + 1
            windows = self._windows[length] = {}
            for path, flat in self._flat.items():
                nbytes = flat.itemsize * math.prod(flat.shape[1:])
                if is_narrow(nbytes, length):
                    element = np.dtype((np.void, length * nbytes))
                    windows[path] = np.ndarray((count,), element, flat.reshape(-1).view(np.uint8), 0, (nbytes,))
        return windows

    @staticmethod
    def _padding(plan: WindowPlan, mask: NDArray[np.bool_] | None) -> NDArray[np.intp] | None:
        """Which of all steps, window after window, are no real ones; writes ``mask`` as well, where one is wanted."""
        if plan.first is None or plan.last is None:
            return None
        steps = plan.starts[:, None] + np.arange(plan.length, dtype=np.int32)
        real = (steps >= plan.first[:, None]) & (steps < plan.last[:, None])
        if mask is not None:
            mask[...] = real
            mask[:, : plan.history - 1] = False
        return None if real.all() else np.flatnonzero(~real)

    @staticmethod
    def _steps_of(plan: WindowPlan, begins: NDArray[np.intp]) -> NDArray[np.intp]:
        """The place of every step of every window, ``[n, length]``."""
        steps = plan.starts.astype(np.intp)[:, None] + np.arange(plan.length)
        if plan.first is not None and plan.last is not None:
            np.clip(steps, plan.first[:, None], plan.last[:, None] - 1, out=steps)
        return steps + begins[:, None]


def gather_into(
    source: Mapping[Path, NDArray[Any]],
    plan: WindowPlan,
    out: Mapping[Path, NDArray[Any]],
    pads: Mapping[Path, int] = CONTEXT_PADS,
) -> None:
    """Copy the windows of ``plan`` out of ``source`` into ``out``; see :class:`GatherProgram` for all four."""
    GatherProgram(source, pads).run(plan, out)
