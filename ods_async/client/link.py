"""The memory side of a connection: batches out of shared memory, or over received frames."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from ods_async.client.batch import Landing, Mould, views_of
from ods_async.client.crew import SHARED_WORK_BYTES, Crew
from ods_async.core.copying import SegmentCopier
from ods_async.core.memory import BatchLayout, SegmentLayout
from ods_async.core.requests import Batch, BufferDescription, Plan
from ods_async.errors import ArgumentError, OdsError, ProtocolError, SharedMemoryError
from ods_async.transport.endpoint import is_loopback, parse_endpoint
from ods_async.transport.pool import BufferPool
from ods_async.transport.shm import Attached, attach_segment

__all__ = ["DataPath", "Link", "checked_data_path", "open_link"]

DataPath = Literal["auto", "shared_memory", "frames"]

_LOG = logging.getLogger("ods_async.client")
_FORMS_KEPT = 64


class _Form(NamedTuple):
    """What batches of one size have in common."""

    layout: BatchLayout
    mould: Mould


class _Target(NamedTuple):
    """A batch whose memory is to be filled."""

    memory: NDArray[np.uint8]
    batch: TensorDict


class Link:
    """How this process gets at the buffer of one run. Any number of threads may use it at once.

    Args:
        layout: where everything lies in the buffer.
        pool: memory for batches.
        attached: the mapped segment, or None to live on frames.
    """

    def __init__(self, layout: SegmentLayout, pool: BufferPool, attached: Attached | None) -> None:
        self._layout = layout
        self._pool = pool
        self._attached = attached
        self._forms: dict[tuple[int, int, bool], _Form] = {}
        self._served: set[tuple[int, int, bool]] = set()
        self._crew = Crew()
        self._copier: SegmentCopier | None = None
        self._edition: NDArray[np.int64] | None = None
        if attached is not None:
            self._copier = SegmentCopier(layout, attached.buffer)
            self._edition = layout.edition(attached.buffer)

    @property
    def shared(self) -> bool:
        """Whether batches come out of shared memory."""
        return self._copier is not None

    @property
    def steps(self) -> int:
        """Steps of a row."""
        return self._layout.steps

    def nbytes(self, batch_size: int, length: int, history: int) -> int:
        """Bytes of such a batch."""
        return self._form(batch_size, length, history).layout.nbytes

    @property
    def edition(self) -> int | None:
        """The number of what can be drawn from the buffer now; None where batches come as frames."""
        edition = self._edition
        return None if edition is None else int(edition[0])

    def prepare(self, batch_size: int, length: int, history: int, landing: object) -> object:
        """Memory for such a batch, and the TensorDict over it; None before one like it was gathered.

        Making it takes about as long as copying a small batch, so it is done while the plan is on its way. Of sizes
        that no plan has come for yet nobody knows whether the broker will serve them.
        """
        assert isinstance(landing, Landing)
        if landing.out is not None or (batch_size, length, history > 0) not in self._served:
            return None
        return self._target(self._form(batch_size, length, history), landing)

    def gather(
        self, plans: Sequence[Plan], landing: object, prepared: Sequence[object] = ()
    ) -> list[TensorDict | None]:
        """Copy the windows of each of ``plans``, alike in size, into memory of the caller's own.

        Returns:
            For each plan its batch, or None when a row changed meanwhile.

        Raises:
            ProtocolError: a plan does not fit the buffer.
            ArgumentError: the tensors to fill do not fit the batch.
        """
        assert isinstance(landing, Landing)
        copier = self._copier
        if copier is None:
            raise ProtocolError("got a plan without having shared memory", reason="plan without memory")
        first = plans[0]
        key = (first.batch_size, first.length, first.history > 0)
        if key not in self._served:
            copier.check(first)
        form = self._form(first.batch_size, first.length, first.history)
        if landing.out is not None:
            views = views_of(landing.out, form.layout)
            return [landing.out if copier.copy_into(plan, views) else None for plan in plans]
        targets = [target for target in prepared if isinstance(target, _Target)]
        while len(targets) < len(plans):
            targets.append(self._target(form, landing))
        self._served.add(key)
        whole = self._copied(copier, plans, form.layout, [target.memory for target in targets])
        return [landing.deliver(target.batch) if fine else None for target, fine in zip(targets, whole, strict=True)]

    def _copied(
        self, copier: SegmentCopier, plans: Sequence[Plan], layout: BatchLayout, memories: list[NDArray[np.uint8]]
    ) -> list[bool]:
        """Whether the windows of each plan are there now, and whole. Large ones take as many threads as torch may."""
        if layout.nbytes < SHARED_WORK_BYTES:
            return copier.copy_each(plans, layout, memories)
        hands = torch.get_num_threads()
        return [
            self._crew.share(plan.batch_size, hands, functools.partial(copier.copy, plan, layout, memory))
            for plan, memory in zip(plans, memories, strict=True)
        ]

    def wrap(self, answer: Batch, payload: bytes | memoryview, landing: object) -> TensorDict:
        """A batch over the received frame itself where that is writable, else over a copy of it.

        Raises:
            ProtocolError: the frame has not the size of such a batch.
            ArgumentError: the tensors to fill do not fit the batch.
        """
        assert isinstance(landing, Landing)
        form = self._form(answer.batch_size, answer.length, answer.history)
        layout = form.layout
        if len(payload) != layout.nbytes:
            raise ProtocolError(
                f"a batch of {answer.batch_size} windows of {answer.length} steps has {layout.nbytes} bytes, the frame "
                f"has {len(payload)}; the broker and this client do not speak the same protocol",
                reason="payload size",
            )
        own = isinstance(payload, memoryview) and not payload.readonly
        if own and landing.out is None and not landing.pinned:
            views = layout.views(payload)
            # Torch reads misaligned memory, but not safely on every machine, and never fast.
            if all(view.flags.aligned for view in views.values()):
                return landing.deliver(form.mould.over(views.values()))
        if landing.out is not None:
            wanted = views_of(landing.out, layout)
            for path, received in layout.views(payload).items():
                np.copyto(wanted[path], received)
            return landing.out
        target = self._target(form, landing)
        target.memory[:] = np.frombuffer(payload, np.uint8)
        return landing.deliver(target.batch)

    def close(self) -> None:
        """Let go of the segment. Batches stay valid: they never point into it."""
        self._copier = None
        self._edition = None
        self._crew.close()
        if self._attached is not None:
            self._attached.close()

    def _form(self, batch_size: int, length: int, history: int) -> _Form:
        key = (batch_size, length, history > 0)
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _FORMS_KEPT:
                self._forms.clear()
                self._served.clear()
            layout = BatchLayout.of(self._layout.schema, batch_size, length, context=history > 0)
            form = _Form(layout, Mould([field.path for field in layout.fields], batch_size, length))
            self._forms[key] = form
        return form

    def _target(self, form: _Form, landing: Landing) -> _Target:
        memory = landing.buffer(self._pool, form.layout.nbytes)
        return _Target(memory, form.mould.over(form.layout.arrays(memory)))


def checked_data_path(value: str) -> DataPath:
    """The value, if it is one of the three.

    Raises:
        ArgumentError: it is not.
    """
    if value not in ("auto", "shared_memory", "frames"):
        raise ArgumentError(
            f"data_path is {value!r}; it must be 'auto', 'shared_memory' or 'frames'",
            argument="data_path",
            value=repr(value),
            rule="'auto', 'shared_memory' or 'frames'",
        )
    return value  # type: ignore[return-value]


def open_link(description: BufferDescription, endpoint: str, data_path: DataPath, pool: BufferPool) -> Link:
    """Attach the described segment, or settle for frames.

    That both ends see the same memory is proven by the token in the segment, never by names. With "auto", memory that
    cannot be used is worth one warning in the log (none for a broker on another machine) and frames are used instead.

    Raises:
        SharedMemoryError: ``data_path`` is "shared_memory" and there is none to share.
        ProtocolError: the description makes no sense.
    """
    layout = SegmentLayout.from_description(description)
    if data_path == "frames":
        return Link(layout, pool, None)
    if description.segment is None:
        if data_path == "shared_memory":
            raise SharedMemoryError(
                f"shared memory was demanded and the broker at {endpoint} has none to share; start it with "
                "shared_memory='on', or use data_path='auto' or 'frames'",
                path=None,
                needed_bytes=description.segment_bytes,
                free_bytes=None,
            )
        return Link(layout, pool, None)
    try:
        attached = attach_segment(description.segment, description.segment_bytes, description.token)
    except (OdsError, OSError) as error:
        if data_path == "shared_memory":
            raise SharedMemoryError(
                f"shared memory was demanded, but that of the broker at {endpoint} cannot be used here: {error}; run "
                "this program where it sees the broker's /dev/shm (same machine, same user, same IPC namespace), or "
                "use data_path='auto' or 'frames'",
                path=description.segment,
                needed_bytes=description.segment_bytes,
                free_bytes=None,
            ) from error
        level = logging.WARNING if _should_be_here(endpoint) else logging.INFO
        _LOG.log(level, "no shared memory with the broker at %s, batches come as frames instead: %s", endpoint, error)
        return Link(layout, pool, None)
    return Link(layout, pool, attached)


def _should_be_here(endpoint: str) -> bool:
    parsed = parse_endpoint(endpoint)
    return parsed.scheme == "ipc" or is_loopback(parsed)
