"""What a worker has to send, and what it must keep until it has read the verdict. Rules only: no clock, no socket."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

__all__ = ["Kept", "Outbox"]

FIRST_RESEND: Final = 5.0
LAST_RESEND: Final = 60.0
MAX_SMALL: Final = 1024


@dataclass(slots=True, eq=False)
class Kept:
    """A rollout without a verdict: its frames, how often it was sent, and when that is due again."""

    ticket_id: int
    frames: tuple[bytes | memoryview, ...]
    sent: int = 0
    due: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(len(frame) if isinstance(frame, bytes) else frame.nbytes for frame in self.frames)


class Outbox:
    """Small reports in order, and rollouts that stay until they are judged.

    A rollout is sent again when no verdict comes: after 5 seconds, then after twice as long each time, up to a minute.
    The broker publishes a ticket once, so that sending again can never store an episode twice.

    Args:
        max_bytes: of all rollouts kept; :attr:`full` says that no more should be made until a verdict comes. One
            rollout always fits, however large.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._small: deque[bytes | int] = deque()
        self._kept: OrderedDict[int, Kept] = OrderedDict()

    @property
    def unjudged(self) -> tuple[int, ...]:
        """Tickets whose rollout has no verdict yet, oldest first."""
        return tuple(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the rollouts kept."""
        return sum(kept.nbytes for kept in self._kept.values())

    @property
    def full(self) -> bool:
        """True if nothing more should be made for now."""
        return bool(self._kept) and self.nbytes >= self._max_bytes

    @property
    def waiting(self) -> bool:
        """True if something was never sent so far."""
        return bool(self._small) or any(not kept.sent for kept in self._kept.values())

    def report(self, data: bytes) -> None:
        """Line a small report up. Of more than a thousand that nobody takes, the oldest are dropped."""
        self._small.append(data)
        while len(self._small) > MAX_SMALL:
            self._small.popleft()

    def keep(self, ticket_id: int, frames: tuple[bytes | memoryview, ...]) -> None:
        """Line a rollout up, behind the reports before it, and keep it."""
        self._kept[ticket_id] = Kept(ticket_id, frames)
        self._small.append(ticket_id)

    def judged(self, ticket_id: int) -> bool:
        """A verdict came; False if there is no such rollout (any more)."""
        return self._kept.pop(ticket_id, None) is not None

    def next(self, now: float) -> tuple[bytes | memoryview, ...] | None:
        """The frames to send now, or None. The same ones again until :meth:`sent` is called."""
        found = self._next(now)
        return (found,) if isinstance(found, bytes) else (found.frames if found else None)

    def sent(self, now: float) -> None:
        """What :meth:`next` gave was taken."""
        found = self._next(now)
        if isinstance(found, Kept):
            found.due = now + min(FIRST_RESEND * 2.0**found.sent, LAST_RESEND)
            found.sent += 1
        if self._small:
            self._small.popleft()

    def next_due(self) -> float | None:
        """When the next rollout has to be sent (again), if nothing happens until then."""
        return min((kept.due for kept in self._kept.values()), default=None)

    def connected_again(self) -> None:
        """The way to the broker is new: what has no verdict is sent again at once."""
        for kept in self._kept.values():
            kept.due = 0.0

    def forget(self) -> tuple[int, ...]:
        """The broker that wanted all this is gone for good: drop everything. Returns the tickets whose work is lost."""
        lost = self.unjudged
        self._kept.clear()
        self._small.clear()
        return lost

    def _next(self, now: float) -> bytes | Kept | None:
        while self._small:
            first = self._small[0]
            if isinstance(first, bytes):
                return first
            kept = self._kept.get(first)
            if kept is not None and not kept.sent:
                return kept
            self._small.popleft()
        return next((kept for kept in self._kept.values() if kept.due <= now), None)
