"""The one copy: planned windows out of the buffer, into memory somebody owns.

The same function runs in a consumer over shared memory and in the broker over its own. The time goes into
``numpy.ndarray.take``, which lets other threads run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ods_async.core.memory import LOSS_MASK
from ods_async.core.schema import PROVENANCE, Path, path_text
from ods_async.core.window_plan import WindowPlan

__all__ = ["CONTEXT_PADS", "GatherProgram", "gather_into"]

CONTEXT_PADS: Final[Mapping[Path, int]] = {
    ("task_index",): -1,
    ("subtask_index",): -1,
    **{field.path: -1 for field in PROVENANCE},
}
"""What padding of a context holds where that is not zero (B26). Steps behind an episode's end are padded otherwise."""


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
        for path, array in source.items():
            if not array.flags.c_contiguous:
                raise ValueError(f"{path_text(path)} is not contiguous")
            self._flat[path] = array.reshape(self.rows * self.steps, *array.shape[2:])
        self._pads = {path: pads.get(path, 0) for path in source}

    def run(self, plan: WindowPlan, out: Mapping[Path, NDArray[Any]]) -> None:
        """Copy the windows of ``plan`` into ``out``: path -> ``[n, length, *shape]`` of the source's dtype.

        ``out`` names the fields that are wanted; of a context also ``("loss_mask",)``, bool, where it is wanted.
        Padding gets each field's pad, so ``valid`` is False there. Indices outside the buffer are clipped to it.

        Raises:
            KeyError: the buffer has no such field.
            TypeError: the memory has another dtype; nothing is cast.
            ValueError: the memory has another shape.
        """
        steps = plan.starts.astype(np.intp)[:, None] + np.arange(plan.length)
        padding = None
        if plan.first is not None and plan.last is not None:
            first, last = plan.first[:, None], plan.last[:, None]
            real = (steps >= first) & (steps < last)
            np.clip(steps, first, last - 1, out=steps)
            mask = out.get(LOSS_MASK.path)
            if mask is not None:
                mask[...] = real
                mask[:, : plan.history - 1] = False
            if not real.all():
                padding = np.nonzero(~real)
        steps += (plan.rows.astype(np.intp) * self.steps)[:, None]
        for path, target in out.items():
            flat = self._flat.get(path)
            if flat is None:
                if path == LOSS_MASK.path and plan.first is not None:
                    continue
                raise KeyError(path_text(path))
            if target.dtype != flat.dtype:  # take would cast
                raise TypeError(f"{path_text(path)} holds {flat.dtype} and cannot be copied into {target.dtype}")
            flat.take(steps, axis=0, out=target, mode="clip")
            if padding is not None:
                target[padding] = self._pads[path]


def gather_into(
    source: Mapping[Path, NDArray[Any]],
    plan: WindowPlan,
    out: Mapping[Path, NDArray[Any]],
    pads: Mapping[Path, int] = CONTEXT_PADS,
) -> None:
    """Copy the windows of ``plan`` out of ``source`` into ``out``; see :class:`GatherProgram` for all four."""
    GatherProgram(source, pads).run(plan, out)
