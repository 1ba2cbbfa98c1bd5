"""What is told to everyone, in order, a little at a time.

A rollout of 64 episodes is 128 events: encoding and sending them at once would let everybody who asks something wait
for it. So announcements queue up, and a turn of the loop sends what fits into a millisecond.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

from ods_async.core.requests import Limits
from ods_async.transport.pump import AsyncPump
from ods_async.wire.codec import encode_broadcast

__all__ = ["Broadcasts"]

TURN_SECONDS: Final = 0.001
MOST_WAITING: Final = 4096


class Broadcasts:
    """Sends announcements over the events' socket; belongs to the running loop.

    Args:
        events: the socket.
        limits: what a message may hold.
        counts: where ``announcements_dropped`` is counted.
        fault: told of an announcement that could not be encoded or sent.
    """

    def __init__(
        self,
        events: Callable[[], AsyncPump],
        limits: Limits,
        counts: Counter[str],
        fault: Callable[[str, BaseException], None],
    ) -> None:
        self._events = events
        self._limits = limits
        self._counts = counts
        self._fault = fault
        self._waiting: deque[Any] = deque()
        self._scheduled = False

    def say(self, what: Any) -> None:
        """Have ``what`` sent soon, after all that was said before."""
        self._waiting.append(what)
        if len(self._waiting) >= MOST_WAITING:  # more is said than turns of the loop can take: it has to wait for us
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def flush(self) -> None:
        """Send all of it now."""
        while self._waiting:
            self._send(self._waiting.popleft())

    def _turn(self) -> None:
        self._scheduled = False
        end = time.perf_counter() + TURN_SECONDS
        while self._waiting:
            self._send(self._waiting.popleft())
            if self._waiting and time.perf_counter() >= end:
                self._scheduled = True
                asyncio.get_running_loop().call_soon(self._turn)
                return

    def _send(self, what: Any) -> None:
        try:
            if not self._events().send(list(encode_broadcast(what, self._limits))):
                self._counts["announcements_dropped"] += 1
        except Exception as error:
            self._fault(f"announcing a {type(what).__name__}", error)
