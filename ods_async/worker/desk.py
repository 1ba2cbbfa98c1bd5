"""What the simulation and the link's thread share: tickets, the outbox, and the reasons to end.

All of it is guarded by one condition. Signal handlers only set an attribute and write to a pipe.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ods_async.core.reports import Hello, Report, RevokeTickets, Ticket
from ods_async.core.requests import Welcome
from ods_async.transport.curve import CurveKeys
from ods_async.transport.sockets import Waitable, wait_any
from ods_async.worker.outbox import Outbox

__all__ = ["Desk", "LinkSettings"]

_REVOKED_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a worker reaches its broker.

    Attributes:
        endpoint: where the broker answers.
        worker_id: name of the worker, unique within the run.
        restarts: how often it was started before.
        keys: this worker's CURVE keys, or None.
        alive_fd: a descriptor whose end of file says that the worker's owner is gone, or None.
        connect_timeout: seconds to find the broker in.
        patience: seconds to look for a broker that has gone silent; 0: end at once.
        max_unjudged_bytes: of rollouts without a verdict; beyond that nothing new is made.
    """

    endpoint: str
    worker_id: str
    restarts: int = 0
    keys: CurveKeys | None = None
    alive_fd: int | None = None
    connect_timeout: float = 10.0
    patience: float = 0.0
    max_unjudged_bytes: int = 512 * 1024 * 1024


class Desk:
    """The place between the simulation and the thread that talks.

    Attributes:
        settings: how the broker is reached.
        outbox: what is to be sent; only the thread touches it, through :meth:`do`, and :meth:`note_room` afterwards.
        hello: what this worker records, once it is known.
        welcome: the broker's, once connected.
        stop_reason: why the work is to end, or None; it may be read at any time.
        ticket_id: the ticket in hand; the simulation sets it.
        last_words: what to say at the very end.
        close_at: when to end even if verdicts are missing (monotonic), or None.
        accepted: rollouts published so far.
        refused: rollouts that were not taken.
        malformed: messages of the broker that could not be read.
        error: why the thread ended by itself, or None.
        over: the thread has ended.
        say: tells people something.
    """

    def __init__(self, settings: LinkSettings, say: Callable[[str], None]) -> None:
        self.settings = settings
        self.say = say
        self.outbox = Outbox(settings.max_unjudged_bytes)
        self.hello: Hello | None = None
        self.welcome: Welcome | None = None
        self.stop_reason: str | None = None
        self.ticket_id: int | None = None
        self.last_words: Report | None = None
        self.close_at: float | None = None
        self.accepted = 0
        self.refused = 0
        self.malformed = 0
        self.error: BaseException | None = None
        self.over = False
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._tickets: deque[Ticket] = deque()
        self._revoked: deque[int] = deque(maxlen=_REVOKED_REMEMBERED)
        self._full = False
        self._told_stop = False
        self._alive_fd = settings.alive_fd
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    # --- from the simulation and from signal handlers ---------------------------------------------------------------

    def request_stop(self, reason: str) -> None:
        """End between two steps. Safe to call from a signal handler and from any thread; the first reason counts."""
        if self.stop_reason is None:
            self.stop_reason = reason
        self.wake()

    def do(self, command: Callable[[], None]) -> None:
        """Let the thread call ``command`` soon."""
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        """Let the thread look around now."""
        with contextlib.suppress(OSError):  # a full pipe wakes as well; a closed one has nobody to wake
            os.write(self._wake_write, b"\0")

    def wait_connected(self) -> Welcome | None:
        """The welcome, or None when the work is to end before there was one. Raises what ended the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self.welcome is not None or self._ending)
            if self.error is not None:
                raise self.error
            return None if self.stop_reason is not None else self.welcome

    def take_ticket(self) -> Ticket | None:
        """The next ticket, while there is room for its rollout; None when the work is to end. Raises likewise."""
        with self._changed:
            self._changed.wait_for(lambda: (self._tickets and not self._full) or self._ending)
            if self.error is not None:
                raise self.error
            return None if self._ending else self._tickets.popleft()

    def close(self) -> None:
        """Give the pipe back; nothing may wait on it any more."""
        read, self._wake_read = self._wake_read, -1
        write, self._wake_write = self._wake_write, -1
        for descriptor in (read, write):
            if descriptor >= 0:
                os.close(descriptor)

    @property
    def _ending(self) -> bool:
        return self.stop_reason is not None or self.over

    # --- from the thread --------------------------------------------------------------------------------------------

    def look_around(self) -> bool:
        """Do what the simulation asked for and look at the owner's pipe; True when there is a reason to stop."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        while self._commands:
            self._commands.popleft()()
        if self._alive_fd is not None and self._alive_fd in wait_any([self._alive_fd], 0.0):
            try:
                gone = not os.read(self._alive_fd, 4096)
            except OSError:
                gone = True
            if gone:
                self._alive_fd = None
                self.request_stop("the owner is gone")
        if self.stop_reason is not None and not self._told_stop:
            self._told_stop = True
            self._tell()
        return self.stop_reason is not None

    def pause(self, readers: Sequence[Waitable | int], timeout: float) -> None:
        """Wait until a reader has something, somebody wakes the thread, or ``timeout`` seconds passed."""
        more = [self._wake_read] if self._alive_fd is None else [self._wake_read, self._alive_fd]
        wait_any([*readers, *more], max(timeout, 0.0))

    def connected(self, welcome: Welcome) -> None:
        """The broker answered."""
        with self._changed:
            self.welcome = welcome
            self._changed.notify_all()

    def ended(self, error: BaseException | None) -> None:
        """The thread is over; an error ends the work as well."""
        with self._changed:
            self.error = error
            self.over = True
            if error is not None and self.stop_reason is None:
                self.stop_reason = str(error)
            self._changed.notify_all()

    def add_ticket(self, ticket: Ticket) -> None:
        """A ticket came, unless it was revoked before it arrived."""
        if ticket.ticket_id in self._revoked:
            return
        with self._changed:
            self._tickets.append(ticket)
            self._changed.notify_all()

    def revoke(self, news: RevokeTickets) -> None:
        """These must not be started."""
        self._revoked.extend(news.ticket_ids)
        with self._changed:
            self._tickets = deque(t for t in self._tickets if t.ticket_id not in news.ticket_ids)

    def drop_tickets(self) -> None:
        """The broker that gave them is gone."""
        with self._changed:
            self._tickets.clear()

    def close_room(self) -> None:
        """A rollout is about to be kept: nothing new is begun until :meth:`note_room` has looked how much that is."""
        with self._changed:
            self._full = True

    def note_room(self) -> None:
        """The outbox changed: the simulation may go on, or has to wait."""
        with self._changed:
            self._full = self.outbox.full
            self._changed.notify_all()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
