"""Threads that copy a large batch together: one processor alone does not reach the speed of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

__all__ = ["SHARED_WORK_BYTES", "Crew"]

SHARED_WORK_BYTES: Final = 8 * 1024 * 1024  # below, waking a thread costs more than it copies
_MOST_HANDS: Final = 4  # memory is busy then

Part = tuple[int, int]


class Crew:
    """Does a piece of work in parts, the first of them itself. Any number of threads may use it at once.

    Its threads are started when they are first needed, and end with :meth:`close`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def share(self, count: int, hands: int, work: Callable[[Part], bool]) -> bool:
        """Have ``work`` done for all numbers from 0 to before ``count``, by up to ``hands`` threads.

        Args:
            count: how many there are, at least 1.
            hands: how many threads may work, this one included.
            work: does the numbers from the first to before the second of those it is given, and tells how it went.

        Returns:
            Whether all parts returned True.

        Raises:
            Exception: what a part raised. No part is under way any more then.
        """
        hands = max(1, min(hands, _MOST_HANDS, count))
        parts = [(count * turn // hands, count * (turn + 1) // hands) for turn in range(hands)]
        lent = [(part, self._begin(work, part)) for part in parts[1:]]
        try:
            fine = [work(parts[0])]
            # What nobody has begun (all threads may be busy with others' work) needs nobody else.
            fine += [work(part) for part, future in lent if future is None or future.cancel()]
        finally:
            begun = [future for _, future in lent if future is not None and not future.cancel()]
            wait(begun)
        return all([*fine, *(future.result() for future in begun)])

    def close(self) -> None:
        """End the threads, after what they are doing. Work that is shared later is done by its own thread alone."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True)

    def _begin(self, work: Callable[[Part], bool], part: Part) -> Future[bool] | None:
        with self._lock:
            if self._closed:
                return None
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_MOST_HANDS - 1, thread_name_prefix="ods-copy")
            return self._threads.submit(work, part)
