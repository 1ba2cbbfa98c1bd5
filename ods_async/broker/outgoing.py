"""How much of the broker's memory is on its way to whom: a consumer that does not read must not fill it."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from numpy.typing import NDArray

__all__ = ["OutgoingBook", "Reservation"]


class Reservation:
    """Room for one payload, held from the request on until the last byte left (or :meth:`free` is called)."""

    __slots__ = ("_freed", "nbytes", "session")

    def __init__(self, session: bytes, nbytes: int, freed: deque[Reservation]) -> None:
        self.session = session
        self.nbytes = nbytes
        self._freed: deque[Reservation] | None = freed

    def hold_until_gone(self, payload: NDArray[Any]) -> None:
        """Give the room back when nothing refers to ``payload`` any more, in whatever thread that happens."""
        weakref.finalize(payload, self.free).atexit = False

    def free(self) -> None:
        """Give the room back. Safe in any thread; the second time does nothing."""
        freed, self._freed = self._freed, None
        if freed is not None:
            freed.append(self)


class OutgoingBook:
    """Bounds the payloads that are gathered or sent and not gone yet, per session and over all.

    Args:
        most_bytes: over all sessions; one payload is always let through, whatever its size.
        per_session: payloads of one session.
    """

    def __init__(self, most_bytes: int, per_session: int) -> None:
        self._most_bytes = most_bytes
        self._per_session = per_session
        self._bytes = 0
        self._sessions: dict[bytes, int] = {}
        # Finalizers run in whatever thread drops the last reference, at any moment: appending is all they may do.
        self._freed: deque[Reservation] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""
        self._settle()
        return self._bytes

    def reserve(self, session: bytes, nbytes: int) -> Reservation | str:
        """Room for a payload, or the reason (in words, for the asker) why there is none."""
        self._settle()
        waiting = self._sessions.get(session, 0)
        if waiting >= self._per_session:
            return f"{waiting} earlier batches of this client are still unread"
        if self._bytes and self._bytes + nbytes > self._most_bytes:
            return f"{self._bytes} bytes of batches to all clients are unread, and {self._most_bytes} are allowed"
        self._bytes += nbytes
        self._sessions[session] = waiting + 1
        return Reservation(session, nbytes, self._freed)

    def _settle(self) -> None:
        while self._freed:
            done = self._freed.popleft()
            self._bytes -= done.nbytes
            left = self._sessions[done.session] - 1
            if left:
                self._sessions[done.session] = left
            else:
                del self._sessions[done.session]
