"""Batches drawn ahead of need: plans asked several at a time and gathered in a thread of its own, over its own socket.

So the round trip disappears, and a training loop that keeps the interpreter busy does not starve its own input.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np
from tensordict import TensorDict

from ods_async.client.core import StreamPlan
from ods_async.client.drive import drive
from ods_async.client.errand import Errand
from ods_async.client.exchange import LARGE_BYTES, Exchange
from ods_async.client.session import Session
from ods_async.errors import ClosedError
from ods_async.transport.lane import Lane

__all__ = ["LAST_WORDS_SECONDS", "Feed", "Seeds"]

A = TypeVar("A")

_JOIN_SECONDS: Final = 5.0
LAST_WORDS_SECONDS: Final = 0.2


class Seeds:
    """A seed for every request of a stream, or None for each where the stream has none."""

    def __init__(self, seed: int | None) -> None:
        self._generator = None if seed is None else np.random.default_rng(seed)

    def next(self) -> int | None:
        """The next one."""
        return None if self._generator is None else int(self._generator.integers(2**63))


class Feed:
    """Keeps up to ``ahead`` batches ready. Thread-safe.

    A lease is handed back right after the copy, or, where episodes have a sampling budget, when the batch has been
    taken: what was never taken is given back as undelivered.

    Args:
        exchange: the client's conversations.
        make_lane: opens a socket that the given descriptor can wake.
        plan: what to draw.
        ahead: at least 1.
        notify: called from the thread whenever there may be something to take.
    """

    def __init__(
        self,
        exchange: Exchange[TensorDict],
        make_lane: Callable[[int], Lane],
        plan: StreamPlan,
        ahead: int,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self._exchange = exchange
        self._make_lane = make_lane
        self._plan = plan
        self._ahead = ahead
        self._group = 1
        self._notify = notify
        self._seeds = Seeds(plan.seed)
        self._changed = threading.Condition()
        # Both are filled at one end and emptied at the other, each step at once: that needs no lock, and neither thread
        # wakes the other for every batch.
        self._ready: collections.deque[tuple[int | None, TensorDict]] = collections.deque()
        self._settled: collections.deque[int] = collections.deque()
        self._full = False  # the thread waits for room, or is about to
        self._error: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._wake: int | None = None
        self._pid = os.getpid()

    def take(self, *, wait: bool) -> TensorDict | None:
        """The next batch; None if there is none yet (only without ``wait``).

        Raises:
            ClosedError: the feed was stopped.
            Exception: what went wrong while drawing; the next call tries again.
        """
        batch = self._pop()
        if batch is not None:
            return batch
        with self._changed:
            while True:
                batch = self._pop()
                if batch is not None:
                    return batch
                if self._error is not None:
                    error, self._error = self._error, None
                    self._changed.notify_all()
                    raise error
                self._start()
                if not wait:
                    return None
                self._changed.wait()

    def _pop(self) -> TensorDict | None:
        if self._stopped:
            raise ClosedError("this stream is closed", what="stream")
        try:
            lease, batch = self._ready.popleft()
        except IndexError:
            return None
        if lease is not None:
            self._settled.append(lease)
        if self._full:
            with self._changed:
                self._changed.notify_all()
        return batch

    def stop(self) -> None:
        """End the thread and hand back what was not taken. Again, or in a forked child: no effect."""
        if self._pid != os.getpid():
            return  # thread, lock and descriptor are the parent's
        with self._changed:
            self._stopped = True
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _start(self) -> None:
        if self._thread is None and not self._stopped:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._run, args=(self._wake,), name="ods-prefetch", daemon=True)
            self._thread.start()

    def _run(self, wake: int) -> None:
        try:
            while True:
                session = Session()
                try:
                    lane = self._make_lane(wake)
                except Exception as error:
                    self._tell_error(error)
                    if not self._room(session, None):
                        return
                    continue
                try:
                    while not lane.lost:
                        if not self._room(session, lane):
                            return
                        if session.greeted and lane.check() is not None:
                            break  # cut off while nobody wanted anything: a new one tells whether the broker is there
                        try:
                            self._draw(session, lane)
                        except Exception as error:
                            if not (session.overslept and lane.lost):
                                self._tell_error(error)
                finally:
                    with self._changed:
                        if self._stopped:
                            leases = [lease for lease, _ in _taken(self._ready)]
                            session.undelivered += [lease for lease in leases if lease is not None]
                            session.finished += _taken(self._settled)
                    self._hand_back(session, lane)
                    lane.close(LAST_WORDS_SECONDS)
        finally:
            with self._changed:
                self._thread = None
                self._wake = None
            os.close(wake)

    def _tell_error(self, error: Exception) -> None:
        """Keep the error for whoever takes next; nothing is drawn until it was taken."""
        with self._changed:
            if not self._stopped:
                self._error = error
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    def _room(self, session: Session, lane: Lane | None) -> bool:
        """Wait until a group of batches has room, handing leases back meanwhile; False when stopped."""
        while True:
            with self._changed:
                self._full = True  # before the look: whoever takes a batch after it will say so
                session.finished += _taken(self._settled)
                if self._stopped:
                    return False
                if self._error is None and self._ahead - len(self._ready) >= self._group:
                    self._full = False
                    return True
                if lane is None or not (session.finished or session.undelivered):
                    self._changed.wait()
                    continue
            self._hand_back(session, lane)

    def _draw(self, session: Session, lane: Lane) -> None:
        """Draw a group; while it is copied, the broker plans the next one, as long as there is room for that."""
        _, memory = drive(self._exchange.ready(session), lane, time.monotonic() + self._plan.timeout)
        wanted = self._plan.wanted
        large = memory.nbytes(wanted.batch_size, wanted.length, wanted.history) > LARGE_BYTES
        # Groups save round trips. A large batch is worth many of those, and should be there as soon as it can be.
        self._group = 1 if large or not memory.shared else max(1, self._ahead // 2)
        errand: Errand[list[tuple[int | None, TensorDict]]] | None = self._errand(session, lane)
        while errand is not None:
            drawn, errand = errand.finish(lambda: self._errand(session, lane).post() if self._more(session) else None)
            self._put(session, drawn)
            del drawn  # or the memory of what was taken meanwhile would not come back while the next group is copied

    def _errand(self, session: Session, lane: Lane) -> Errand[list[tuple[int | None, TensorDict]]]:
        wanted = dataclasses.replace(self._plan.wanted, count=self._group, seed=self._seeds.next())
        talk = self._exchange.draw(session, wanted, self._plan.landing)
        return Errand(talk, lane, time.monotonic() + self._plan.timeout)

    def _more(self, session: Session) -> bool:
        """Whether another group has room beside the one that is being copied."""
        session.finished += _taken(self._settled)
        return not self._stopped and self._ahead - len(self._ready) >= 2 * self._group

    def _put(self, session: Session, drawn: list[tuple[int | None, TensorDict]]) -> None:
        known = self._exchange.known
        if known is None or known.welcome.settings.get("episode_sample_budget") is None:
            session.finished += [lease for lease, _ in drawn if lease is not None]
            drawn = [(None, batch) for _, batch in drawn]
        with self._changed:
            self._ready.extend(drawn)
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    @staticmethod
    def _hand_back(session: Session, lane: Lane) -> None:
        notice = session.notice()
        if notice is not None and not lane.lost:
            lane.tell(notice)


def _taken(waiting: collections.deque[A]) -> list[A]:
    """All that was there, each taken once, whoever else takes or adds meanwhile."""
    taken: list[A] = []
    with contextlib.suppress(IndexError):
        while waiting:
            taken.append(waiting.popleft())
    return taken
