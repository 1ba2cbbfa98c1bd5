"""BufferPool: big blocks of memory that come back by themselves when nobody looks at them any more.

Memory touched before is several times faster to write than fresh memory, which costs a page fault every 4 KiB.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BufferPool"]

PAGE: Final = mmap.PAGESIZE
HUGE_BYTES: Final = 4 * 1024 * 1024  # from here on huge pages are asked for: fewer faults at first, fewer misses later


class _Loan(weakref.ref[NDArray[np.uint8]]):
    """Tells when an array over ``block`` is gone, with less ado than ``weakref.finalize``."""

    __slots__ = ("block",)
    block: mmap.mmap


class BufferPool:
    """Hands out byte arrays; their memory returns when the last array, tensor, view or frame over them is gone.

    Thread-safe, also against the garbage collector running in the middle of it. After a fork the child keeps what it
    has (its own copy) and shares nothing with the parent.

    Args:
        max_idle_bytes: so much may wait for the next use; what exceeds it goes back to the system, the longest unused
            first.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._limit = max_idle_bytes
        self._lock = threading.Lock()
        self._loans: dict[int, _Loan] = {}  # a reference that is gone itself tells nothing
        self._returned: deque[mmap.mmap] = deque()
        self._idle: list[mmap.mmap] = []  # the longest unused first
        self._idle_bytes = 0
        self._closed = False

    @property
    def idle_bytes(self) -> int:
        """Bytes that wait for their next use."""
        self._tidy()
        return self._idle_bytes

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A writable array of ``nbytes`` bytes, page-aligned, with whatever was in it before.

        Keep it or anything made from it (``torch.from_numpy``, a slice, a memoryview, a frame sent without copy): the
        memory is used again only after all of these are gone.
        """
        size = _rounded(nbytes)
        with self._lock:
            self._collect()
            block = self._fitting(size)
        if block is None:
            block = _fresh(size)
        # What is watched is the array that every view has as its base: numpy collapses chains of views down to an
        # array that owns nothing, so this one, over the mapping, is what all of them keep alive.
        whole: NDArray[np.uint8] = np.frombuffer(block, np.uint8)
        loan = _Loan(whole, self._give_back)
        loan.block = block
        self._loans[id(loan)] = loan
        return whole[:nbytes]

    def close(self) -> None:
        """Give idle memory back to the system; what is in use follows as it is let go. The pool stays usable, empty."""
        with self._lock:
            self._closed = True
            self._collect()
        self._tidy()

    def _give_back(self, loan: _Loan) -> None:
        # Runs wherever the last view dies, possibly inside take() of this very thread: so no waiting for the lock.
        del self._loans[id(loan)]
        self._returned.append(loan.block)
        self._tidy()

    def _tidy(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._idle.append(block)
            self._idle_bytes += len(block)
        limit = 0 if self._closed else self._limit
        while self._idle_bytes > limit:
            self._idle_bytes -= len(self._idle.pop(0))

    def _fitting(self, size: int) -> mmap.mmap | None:
        for index in range(len(self._idle) - 1, -1, -1):  # the last used is the likeliest to be in the cache
            if size <= len(self._idle[index]) <= 2 * size:
                block = self._idle.pop(index)
                self._idle_bytes -= len(block)
                return block
        return None


def _fresh(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _rounded(nbytes: int) -> int:
    """Sizes go in steps of an eighth, so that batches of nearly one size share blocks."""
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return max(PAGE, -(-nbytes // step) * step)
