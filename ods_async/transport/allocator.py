"""Tell glibc to keep big blocks: a fresh 57 MB frame costs more in page faults than in copying."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_big_blocks"]

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_KEPT_BYTES = 1 << 30
_TOP_PAD_BYTES = 16 << 20
_OLD_GLIBC_MOST = 32 << 20


def keep_big_blocks() -> bool:
    """Make ``malloc`` take blocks of up to 1 GiB from the heap, and keep up to 1 GiB of freed heap for the next ones.

    Received frames are then written into memory that was touched before, which doubles the rate of big batches that
    come over a socket (``data_path="frames"``, other machines). Batches out of shared memory gain nothing.

    The broker, the workers and the ``ods-async`` commands do this, and so does a DataLoader's worker that iterates over
    an ``OnlineDataset``. In a process of yours nothing is changed unless you call it, best before any thread is
    started, since it concerns the whole process, not only this package: up to 1 GiB of memory once used is not handed
    back to the system, and threads that are started afterwards share one heap, so that programs with many threads that
    allocate all the time may wait for each other. There is no way back.

    Returns:
        False where this C library cannot be told (not glibc); nothing is changed then.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
        is_glibc = hasattr(libc, "gnu_get_libc_version")
    except (OSError, AttributeError):
        return False
    if not is_glibc:
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    threshold = mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, _OLD_GLIBC_MOST)
    trim = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_TOP_PAD, _TOP_PAD_BYTES)
    # The other threads' own heaps end at 64 MiB and are unmapped as soon as they are empty, whatever the thresholds.
    mallopt(_M_ARENA_MAX, 1)
    return bool(threshold and trim)
