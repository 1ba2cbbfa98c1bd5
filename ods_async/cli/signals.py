"""SIGINT and SIGTERM: the first asks for an end in good order, a second one ends the program at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["INTERRUPTED", "EndRequest", "Interrupted", "interrupt_on_signals"]

INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised in the main thread of a one-shot command by the first signal."""


class EndRequest:
    """For services: remembers the signal, and tells a thread (an event) or a poll (a descriptor's end of file).

    Attributes:
        event: set by the first signal.
        fd: readable (end of file) from then on.
        number: which signal it was, or None.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.number: int | None = None
        self.fd, hold = os.pipe()
        self._hold = [hold]

    def install(self) -> None:
        """Handle both signals from now on; main thread only."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 0 for SIGTERM (an orderly end was asked for) and for no signal."""
        return INTERRUPTED if self.number == signal.SIGINT else 0

    def ask(self) -> None:
        """Ask for the end without a signal."""
        while self._hold:
            os.close(self._hold.pop())
        self.event.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = number
        self.ask()


def interrupt_on_signals() -> None:
    """For one-shot commands: the first signal raises :class:`Interrupted`, the second ends the program at once."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        raise Interrupted

    for number in _SIGNALS:
        signal.signal(number, handle)
