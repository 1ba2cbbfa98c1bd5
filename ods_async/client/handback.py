"""Leases handed back a moment later: with the next draw if one follows soon, else by a notice of their own.

A notice costs a send, which wakes two other threads; on a small batch that is a third of the time. So a client that
draws one batch after another lets each request carry what the one before owes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Final

from ods_async.client.session import HOLD_SECONDS, Session
from ods_async.transport.lane import AsyncLane, Lane

__all__ = ["Handback", "hand_back"]

_QUIET_ROUNDS: Final = 50


def hand_back(lane: Lane | AsyncLane, session: Session, *, gently: bool = False) -> None:
    """Tell what the session owes, where its connection still stands (else the broker's deadlines do it).

    ``gently`` leaves it the plans for later that it is using.
    """
    notice = session.notice(gently=gently)
    if notice is not None and not lane.lost:
        lane.tell(notice)


class Handback:
    """Calls ``settle`` every 20 ms from a thread of its own, as long as there is something to settle.

    Args:
        settle: hands back what is owed; returns False when nothing was. It is held weakly: the thread ends when its
            owner is gone.
    """

    def __init__(self, settle: Callable[[], bool]) -> None:
        self._settle = weakref.WeakMethod(settle)
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def owed(self) -> None:
        """Something is owed now."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._end.is_set():
                    self._thread = threading.Thread(target=self._run, name="ods-handback", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """End the thread. Again: no effect."""
        self._end.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        quiet = 0
        while not self._end.wait(HOLD_SECONDS):
            settle = self._settle()
            if settle is None:
                return
            quiet = 0 if settle() else quiet + 1
            del settle
            if quiet >= _QUIET_ROUNDS:
                with self._lock:
                    self._thread = None
                # Who owed something in between has seen a thread that is ending: one look more.
                settle = self._settle()
                if settle is not None:
                    settle()
                return
