"""Letting others go first: for threads that move many bytes, and that nobody in particular waits for."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

__all__ = ["NICER", "own_threads", "step_back", "thread_pool"]

NICER: Final = 10
_START_SECONDS: Final = 10.0


def step_back(thread: int | None = None) -> None:
    """Have the kernel prefer other threads to this one (or to the one of that native id) where processors are short.

    Linux keeps a "nice" value for each thread, see sched(7); elsewhere, or where that may not be set, nothing happens.
    There is no way back without privileges, so only threads that do nothing else should step back.
    """
    if not sys.platform.startswith("linux"):
        return
    number = threading.get_native_id() if thread is None else thread
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, number, os.getpriority(os.PRIO_PROCESS, number) + NICER)


def own_threads() -> set[int]:
    """The native ids of all threads of this process, those of libraries among them; empty where they cannot be seen."""
    with contextlib.suppress(OSError):
        return {int(task.name) for task in Path("/proc/self/task").iterdir()}
    return set()


def thread_pool(count: int, name: str, *, stepping_back: bool = False) -> ThreadPoolExecutor:
    """A pool whose threads run already: starting one waits for it, which an event loop should not do later.

    Args:
        count: how many threads.
        name: what their names begin with.
        stepping_back: whether others go first, see :func:`step_back`.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix=name, initializer=step_back if stepping_back else None)
    together = threading.Barrier(count, timeout=_START_SECONDS)
    for _ in range(count):
        pool.submit(together.wait)
    return pool
