"""From memory to a TensorDict the caller owns, and where it lands: host, pinned memory, a device, or given tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import from_numpy

from ods_async.core.memory import BatchLayout
from ods_async.core.schema import Path, path_text
from ods_async.errors import ArgumentError
from ods_async.transport.pool import BufferPool

__all__ = ["HOST", "Landing", "Mould", "landing_for", "views_of"]


@dataclass(frozen=True, slots=True)
class Landing:
    """Where a batch goes.

    Attributes:
        device: move it there; None leaves it on the host.
        pinned: page-locked host memory, for fast copies to a GPU.
        out: tensors to fill instead of making new ones.
    """

    device: torch.device | None = None
    pinned: bool = False
    out: TensorDict | None = None

    def buffer(self, pool: BufferPool, nbytes: int) -> NDArray[np.uint8]:
        """Memory for a batch of ``nbytes``, owned by whatever is built over it."""
        if self.pinned:
            pinned: NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned
        return pool.take(nbytes)

    def deliver(self, batch: TensorDict) -> TensorDict:
        """The batch where it was asked for."""
        if self.device is None:
            return batch
        moved: TensorDict = batch.to(self.device, non_blocking=self.pinned)
        return moved


HOST = Landing()


def landing_for(device: object = None, pin_memory: bool = False, out: TensorDict | None = None) -> Landing:
    """The landing for the arguments a caller gave. Without an accelerator ``pin_memory`` has no effect.

    Raises:
        ArgumentError: ``device`` is none torch knows, or ``out`` comes together with the others or is no TensorDict.
    """
    if device is None and not pin_memory and out is None:
        return HOST
    if out is not None:
        if device is not None or pin_memory:
            raise _bad("out", out, "given tensors are filled where they are; leave out device= and pin_memory=")
        if not isinstance(out, TensorDict):
            raise _bad("out", out, "out must be a TensorDict")
        return Landing(out=out)
    target: torch.device | None = None
    if device is not None:
        try:
            target = torch.device(device)  # type: ignore[call-overload]
        except (RuntimeError, TypeError) as error:
            raise _bad("device", device, f"device must be one that torch knows ({error})") from None
        if target.type == "cpu":
            target = None
    return Landing(target, bool(pin_memory) and torch.cuda.is_available())


_Group = dict[str, Any]  # key -> the place of a field, or a group of its own


class Mould:
    """Makes batches of one form: paths and sizes are looked at once, and not for every batch.

    Args:
        paths: of the fields, in order.
        batch_size, length: the batch's own size.
    """

    def __init__(self, paths: Sequence[Path], batch_size: int, length: int) -> None:
        self._size = torch.Size((batch_size, length))
        self._make = _quick_maker()
        self._root: _Group = {}
        for place, path in enumerate(paths):
            group = self._root
            for key in path[:-1]:
                group = group.setdefault(key, {})
            group[path[-1]] = place

    def over(self, views: Iterable[NDArray[Any]]) -> TensorDict:
        """The batch over the memory of ``views``, one for each path, ``[batch_size, length, ...]``; no copy."""
        return self._made(self._root, [from_numpy(view) for view in views])

    def _made(self, group: _Group, tensors: list[torch.Tensor]) -> TensorDict:
        found = {
            key: self._made(inside, tensors) if isinstance(inside, dict) else tensors[inside]
            for key, inside in group.items()
        }
        if self._make is None:
            return TensorDict(found, batch_size=self._size)
        return self._make(found, batch_size=self._size, nested=False)


@functools.cache
def _quick_maker() -> Callable[..., TensorDict] | None:
    """The maker that leaves out the checks, a quarter of a small batch's time; None where it is not what it was.

    TensorDict itself and torchrl make their results with it, but it is not promised to users: so its outcome is
    compared, once, with that of the constructor.
    """
    make: Callable[..., TensorDict] | None = getattr(TensorDict, "_new_unsafe", None)
    if make is None:
        return None
    size = torch.Size((2, 3))
    tensor = torch.zeros(2, 3, 5)
    try:
        inner = make({"b": tensor}, batch_size=size, nested=False)
        quick = make({"a": inner, "c": tensor}, batch_size=size, nested=False)
        slow = TensorDict({"a": {"b": tensor}, "c": tensor}, batch_size=size)
        same = _traits(quick) == _traits(slow) and _traits(quick["a"]) == _traits(slow["a"])
    except Exception:
        return None
    return make if same else None


def _traits(made: TensorDict) -> dict[str, Any]:
    return {
        "class": type(made),
        "attributes": {name: value for name, value in vars(made).items() if name != "_tensordict"},
        "keys": sorted(made.keys(include_nested=True), key=str),
        "locked": made.is_locked,
    }


def views_of(out: TensorDict, layout: BatchLayout) -> dict[Path, NDArray[Any]]:
    """The memory of ``out``'s tensors as arrays, field by field, to be filled.

    Raises:
        ArgumentError: ``out`` has other fields, dtypes or shapes than the batch, or tensors that cannot be written to
            directly (not on the CPU, not contiguous, needing gradients).
    """
    size = (layout.batch_size, layout.length)
    if tuple(out.batch_size) != size:
        raise _bad("out", list(out.batch_size), f"the batch is {list(size)}")
    leaves: Any = out.items(include_nested=True, leaves_only=True)
    tensors: dict[Path, torch.Tensor] = {key if isinstance(key, tuple) else (key,): tensor for key, tensor in leaves}
    wanted = {field.path for field in layout.fields}
    for path in tensors.keys() ^ wanted:
        have = "the batch has no such field" if path in tensors else "it is missing"
        raise _bad("out", path_text(path), have)
    views: dict[Path, NDArray[Any]] = {}
    for field in layout.fields:
        tensor = tensors[field.path]
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.requires_grad:
            raise _bad("out", path_text(field.path), "it must be a contiguous CPU tensor without gradients")
        view: NDArray[Any] = tensor.numpy()
        if view.dtype != np.dtype(field.dtype) or view.shape != size + field.shape:
            found = f"{view.dtype} {list(view.shape)}"
            raise _bad("out", f"{path_text(field.path)} {found}", f"it must be {field.dtype} {[*size, *field.shape]}")
        views[field.path] = view
    return views


def _bad(argument: str, value: object, rule: str) -> ArgumentError:
    shown = value if isinstance(value, str) else repr(value)
    shown = shown if len(shown) <= 200 else type(value).__name__
    return ArgumentError(f"{argument}: {shown}: {rule}", argument=argument, value=shown, rule=rule)
