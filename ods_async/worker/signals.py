"""Signals that are noticed: whatever the main thread was just about to do.

Python runs a handler between two of its own instructions. A signal that comes after the last of them and before a call
that blocks is noticed when that call returns, which may be never (an environment that hangs while it is made).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["insisting"]

_INSIST_SECONDS: Final = 0.05
_THE_END: Final = b"\0"


@contextlib.contextmanager
def insisting(handled: Callable[[], bool]) -> Iterator[None]:
    """Within the block, a signal that has a handler is sent to this thread again and again until ``handled()``.

    For the main thread only. In a forked child it does nothing.

    Args:
        handled: whether a handler has run; asked by a thread.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writing, False)
    over = threading.Event()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _INSISTING.add(writing)
    thread = threading.Thread(
        target=_insist, args=(reading, threading.get_ident(), handled, over), name="ods-signals", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        _INSISTING.discard(writing)
        with contextlib.suppress(BlockingIOError):
            os.write(writing, _THE_END)  # closing would not do: forked children may hold that end as well
        thread.join()
        os.close(writing)
        os.close(reading)


def _insist(reading: int, main: int, handled: Callable[[], bool], over: threading.Event) -> None:
    while not over.is_set():
        number = os.read(reading, 1)[0]
        # Nearly always it is handled at once.
        while not over.wait(_INSIST_SECONDS) and not handled():
            signal.pthread_kill(main, number)


_INSISTING: set[int] = set()


def _after_fork_in_child() -> None:
    if _INSISTING:  # the other end is the parent's: a child's signal must not seem to be the parent's
        signal.set_wakeup_fd(-1)
        _INSISTING.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
