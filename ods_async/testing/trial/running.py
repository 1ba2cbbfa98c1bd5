"""How long this process really ran: time in which it was stopped, or got no processor, is nobody else's fault."""

from __future__ import annotations

import threading
import time
from typing import Final

__all__ = ["RunningTime"]

_TICK: Final = 0.05
_PATIENCE: Final = 0.25


class RunningTime:
    """Seconds in which this process ran, from a thread that ticks; a tick that comes late shows a pause.

    Pauses below a quarter of a second count as running.
    """

    def __init__(self) -> None:
        self._paused = 0.0
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="running-time", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Seconds on a clock that stands still while the process does."""
        self._look()
        return time.monotonic() - self._paused

    @property
    def paused(self) -> float:
        """Seconds of pauses so far."""
        return self._paused

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        now = time.monotonic()
        last, self._last = self._last, now
        if now - last > _PATIENCE:
            self._paused += now - last - _TICK

    def _tick(self) -> None:
        while not self._ended.wait(_TICK):
            self._look()
