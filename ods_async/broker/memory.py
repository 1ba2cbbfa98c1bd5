"""The memory behind the buffer: a shared segment, or private memory when there is none to share."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ods_async.core.copying import SegmentCopier
from ods_async.core.memory import TOKEN_BYTES, BatchLayout, SegmentHeader, SegmentLayout
from ods_async.core.requests import BufferDescription
from ods_async.core.schema import EpisodeSchema, Path
from ods_async.errors import SharedMemoryError
from ods_async.transport.shm import Segment, anonymous, create_segment, start_time

__all__ = ["BrokerMemory"]

_log = logging.getLogger(__name__)

_REMEMBERED_LAYOUTS = 64


class BrokerMemory:
    """Every field as an array ``[rows, steps, *shape]``, and one int64 stamp per row. Made by :meth:`create`.

    Attributes:
        layout: where everything lies.
        arrays: path -> array, writable.
        stamps: int64 ``[rows]``, writable.
        edition: int64 ``[1]``, writable: the number of what can be drawn now.
        copier: copies the windows of plans out of the arrays, in any thread.
        description: what consumers are told; ``segment`` is None when the memory is private.
    """

    def __init__(self, layout: SegmentLayout, segment: Segment, token: bytes) -> None:
        self.layout = layout
        self.arrays: Mapping[Path, NDArray[Any]] = layout.arrays(segment.buffer)
        self.stamps: NDArray[np.int64] = layout.stamps(segment.buffer)
        self.edition: NDArray[np.int64] = layout.edition(segment.buffer)
        self.description: BufferDescription = layout.describe(segment.path, token)
        self.copier = SegmentCopier(layout, segment.buffer)
        self._segment: Segment | None = segment
        self._layouts: dict[tuple[int, int, bool], BatchLayout] = {}

    @classmethod
    def create(cls, schema: EpisodeSchema, rows: int, steps: int, *, shared: str, run_id: int) -> Self:
        """Make the memory for ``rows`` rows of ``steps`` steps of ``schema``. Takes its time; call it in a thread.

        Args:
            schema: every field, annotations included.
            rows: slots and spare rows.
            steps: steps of a row.
            shared: ``on``: a shared segment or an error; ``auto``: a shared segment, or private memory with a warning
                (consumers on this host are then served frames); ``off``: private memory.
            run_id: goes into the segment's header.

        Raises:
            SharedMemoryError: too little room; the sizes and the remedy are in the message.
        """
        layout = SegmentLayout.of(schema, rows, steps)
        token = secrets.token_bytes(TOKEN_BYTES)
        if shared != "off":
            try:
                segment = create_segment(layout.nbytes, run_id, token)
            except SharedMemoryError as error:
                if shared == "on":
                    raise
                _log.warning("no shared memory, consumers on this host are served over the socket: %s", error)
            else:
                header = SegmentHeader(token, os.getpid(), start_time(os.getpid()), run_id, layout.nbytes)
                header.write(segment.buffer)
                return cls(layout, segment, token)
        return cls(layout, anonymous(layout.nbytes, token), token)

    @property
    def shared(self) -> bool:
        """Whether consumers on this host can map it."""
        return self.description.segment is not None

    def batch_layout(self, batch_size: int, length: int, *, context: bool) -> BatchLayout:
        """The layout of a batch's payload, remembered for the next batch of that size."""
        key = (batch_size, length, context)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _REMEMBERED_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = BatchLayout.of(self.layout.schema, batch_size, length, context=context)
        return layout

    def close(self) -> None:
        """Unlink the segment. Only when no thread reads or writes the arrays any more. Doing it twice is fine."""
        segment, self._segment = self._segment, None
        if segment is None:
            return
        self.arrays = {}
        del self.copier
        self.stamps = np.zeros(0, np.int64)
        self.edition = np.zeros(1, np.int64)
        segment.close()
