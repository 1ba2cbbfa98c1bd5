"""SIGINT, SIGTERM and SIGHUP: the first asks for an end in good order, a second one ends the program at once.

Process 1 of a container gets no signal but those it has asked for. So the handlers stand before anything slow is
imported (:func:`listen_early`), and what comes before anybody can act on it is remembered.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

__all__ = ["INTERRUPTED", "SAME_SECONDS", "SIGNALS", "Interrupted", "SignalWatch", "listen_early", "take_watch"]

INTERRUPTED: Final = 130
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SECONDS: Final = 0.02
"""A signal that comes again so soon is the same one: ``timeout`` and terminals send to a program and to its group."""


class Interrupted(BaseException):
    """Raised in the main thread by the first signal while a command has nothing that must be put in order."""


class SignalWatch:
    """Remembers the first signal, and has somebody act on it; takes no lock, so that no handler can block itself.

    Attributes:
        number: which signal came first, or None.
        before_cut: called by a second signal, right before the program is ended at once: must be quick.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.before_cut: Callable[[], None] = _nothing
        self._at = 0.0
        self._cutting = False
        self._react: Callable[[], object] = _nothing
        self._fd = -1
        self._hold = -1

    def install(self) -> None:
        """Handle the signals from now on; main thread only. A hangup that is ignored (``nohup``) stays ignored."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def tell(self, react: Callable[[], object]) -> None:
        """From now on the first signal calls ``react`` in the main thread; at once when it has come already."""
        self._react = react
        if self.number is not None:
            react()

    def interrupt(self) -> None:
        """From now on the first signal raises :class:`Interrupted` in the main thread."""
        self.tell(_interrupt)

    def wait(self, seconds: float) -> bool:
        """For programs that look now and then: wait, at most until the first signal. Whether it has come."""
        if self._fd < 0:
            self._fd, self._hold = os.pipe()
        if self.number is None:
            select.select([self._fd], [], [], seconds)
        return self.number is not None

    def close(self) -> None:
        """The command is over: give the descriptors back, and take no first signal for more than it is by now."""
        self._react = _nothing
        for fd in (self._fd, self._hold):
            if fd >= 0:
                os.close(fd)
        self._fd = self._hold = -1

    def exit_code(self, *, service: bool) -> int:
        """130 for Ctrl-C, and for every signal that cut a question short; 0 for a service that was asked to end."""
        if self.number is None or (service and self.number != signal.SIGINT):
            return 0
        return INTERRUPTED

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._at = number, time.monotonic()
            if self._hold >= 0:
                hold, self._hold = self._hold, -1
                os.close(hold)
            self._react()
        elif self._cutting or number != self.number or time.monotonic() - self._at > SAME_SECONDS:
            again, self._cutting = self._cutting, True
            try:
                if not again:
                    self.before_cut()
            finally:
                os._exit(128 + number)


_early: SignalWatch | None = None


def listen_early() -> None:
    """Stand ready before the rest of the program is imported; :func:`take_watch` hands over what came meanwhile."""
    global _early
    _early = SignalWatch()
    _early.install()


def take_watch() -> SignalWatch:
    """The watch of this run of the command line, installed."""
    global _early
    watch, _early = _early or SignalWatch(), None
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs us there has the signals
        watch.install()
    return watch


def _nothing() -> None:
    pass


def _interrupt() -> None:
    raise Interrupted
