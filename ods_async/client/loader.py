"""What torch's DataLoader needs to be told: how batches are put together, and how errors come home from its workers."""

from __future__ import annotations

import copy
import copyreg
import functools
import os
import select
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.utils.data import default_collate, default_convert, get_worker_info

from ods_async.errors import ArgumentError, OdsError

__all__ = ["end_with_training", "for_home", "pass_through", "stack", "suit_loader"]


def stack(items: Sequence[Any]) -> Any:
    """Items of equal shape stacked to one batch, with one dimension more in front.

    Raises:
        ArgumentError: the items are windows of different lengths.
    """
    shapes = {tuple(item.batch_size) for item in items if isinstance(item, TensorDictBase)}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
        refused = ArgumentError(
            f"items of different lengths, {shown} among them, cannot be stacked to one batch; let the dataset draw "
            "whole batches, whose windows are equally long: OnlineDataset(..., batch_size=n) and "
            "DataLoader(dataset, batch_size=None)",
            argument="chunk_size",
            value=shown,
            rule="one length for all items of a batch",
        )
        raise for_home(refused)
    return torch.stack(list(items), 0)


def pass_through(batch: Any) -> Any:
    """The batch as the dataset drew it; from a DataLoader that makes lists (``batch_size=1``), the list's one element.

    Raises:
        ArgumentError: a list of several batches.
    """
    if not isinstance(batch, list):
        return batch
    if len(batch) == 1:
        return batch[0]
    refused = ArgumentError(
        f"passthrough_collate_fn got {len(batch)} items at once; use DataLoader(dataset, batch_size=None), which takes "
        "one batch after the other from the dataset",
        argument="batch_size",
        value=str(len(batch)),
        rule="None",
    )
    raise for_home(refused)


def suit_loader(caller: FrameType) -> None:
    """Make a DataLoader with its default functions work, given the frame that asked for the dataset's iterator.

    With ``batch_size=None`` torch converts what comes, and takes a TensorDict for a dict, which fails; torch lets
    nobody register a type with that function, and a dataset never meets its loader but here.
    """
    fetcher = caller.f_locals.get("self")
    used = getattr(fetcher, "collate_fn", None)
    if used is default_convert:
        fetcher.collate_fn = _convert  # type: ignore[union-attr]
    elif used is default_collate:
        fetcher.collate_fn = _collate  # type: ignore[union-attr]


def _convert(item: Any) -> Any:
    return item if isinstance(item, TensorDictBase) else default_convert(item)  # type: ignore[no-untyped-call]


def _collate(items: list[Any]) -> Any:
    return stack(items) if all(isinstance(item, TensorDictBase) for item in items) else default_collate(items)


@functools.cache
def end_with_training(pid: int) -> None:
    """End this process, a DataLoader's worker, as soon as process ``pid``, which trains, has ended.

    Torch's own watch looks every five seconds, and at its parent's number only: a worker that began to look after its
    parent was killed waits for ever, and keeps the pipes open by which its elder siblings would notice.
    """
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel without it: waiting in small pieces is what remains
        return

    def watch() -> None:
        select.select([watched], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="ods-training-watch", daemon=True).start()


# A DataLoader's worker sends home the type of an error and its traceback as text, nothing else, and the other side
# calls the type with the text. So the type carries the error: it is pickled to something that gives the error back.


class _CarrierType(type):
    """Type of the classes that carry one error each."""

    original: OdsError


class _Delivered:
    """Stands at home for the type of an error; called with the worker's report, it is the error."""

    def __init__(self, error: OdsError) -> None:
        self.error = error
        self.__name__ = type(error).__name__

    def __call__(self, report: str) -> OdsError:
        self.error.add_note(report)
        return self.error


def for_home(error: OdsError) -> OdsError:
    """The error to raise instead: in a DataLoader's worker one of the same kind that arrives with text and fields."""
    if get_worker_info() is None:
        return error
    kind = type(error)
    original = copy.copy(error)
    members = {
        "original": original,
        "__module__": __name__,
        "__qualname__": kind.__qualname__,
        "__reduce__": lambda _: original.__reduce__(),
    }
    # Not the very name: classes of errors are looked up by it.
    carrier: Any = _CarrierType(f"Carried{kind.__name__}", (kind,), members)
    made: OdsError = carrier(error.message, **error.fields)
    return made.with_traceback(error.__traceback__)


def _deliver(carrier: _CarrierType) -> tuple[Any, ...]:
    return _Delivered, (carrier.original,)


copyreg.pickle(_CarrierType, _deliver)
