"""A trial that is told to end: its programs are sessions of their own, so it must end them itself."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

__all__ = ["ended_by_signals"]

_SIGNALS: Final[tuple[int, ...]] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """The first signal leaves the context by ``SystemExit`` with ``128 + number``; later ones are ignored in it.

    Also SIGINT that was ignored, as a shell does it to what it starts in the background; not a SIGHUP that was
    (``nohup``). Main thread only.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # the programs are being ended, which takes bounded time
        raise SystemExit(128 + number)

    before: dict[int, Any] = {}
    for each in _SIGNALS:
        if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN:
            before[each] = signal.getsignal(each)
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
