"""Requests that cannot be answered yet: parked with a deadline, never slept on."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from ods_async.core.requests import Request
from ods_async.core.stimuli import Peer

__all__ = ["Parked", "ParkingLot"]


@dataclass(slots=True, eq=False)
class Parked:
    """One waiting request; ``arrived`` and ``deadline`` in monotonic seconds."""

    peer: Peer
    request_id: int
    request: Request
    arrived: float
    deadline: float
    left: bool = field(default=False)

    @property
    def timeout(self) -> float:
        """How long the asker said it would wait, in seconds."""
        return self.deadline - self.arrived


class ParkingLot:
    """All parked requests in order of arrival.

    Args:
        per_session: how many one session may have parked at once.
    """

    def __init__(self, per_session: int) -> None:
        self._per_session = per_session
        self._parked: dict[Parked, None] = {}
        self._by_session: dict[bytes, int] = {}
        self._deadlines: list[tuple[float, int, Parked]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, parked: Parked, *, forced: bool = False) -> bool:
        """Keep the request; False when its session has too many already (unless ``forced``)."""
        session = parked.peer.identity
        if not forced and self._by_session.get(session, 0) >= self._per_session:
            return False
        self._parked[parked] = None
        self._by_session[session] = self._by_session.get(session, 0) + 1
        self._serial += 1
        heapq.heappush(self._deadlines, (parked.deadline, self._serial, parked))
        if len(self._deadlines) > 4 * len(self._parked) + 64:
            # Answered requests leave their deadlines behind, and a deadline may be days away.
            self._deadlines = [entry for entry in self._deadlines if not entry[2].left]
            heapq.heapify(self._deadlines)
        return True

    def take(self, wanted: Callable[[Parked], bool]) -> list[Parked]:
        """Take out every request for which ``wanted`` is true, oldest first."""
        found = [parked for parked in self._parked if wanted(parked)]
        for parked in found:
            self._drop(parked)
        return found

    def take_expired(self, now: float) -> list[Parked]:
        """Take out every request whose deadline has passed."""
        expired = []
        while self._deadlines and (self._deadlines[0][2].left or self._deadlines[0][0] <= now):
            parked = heapq.heappop(self._deadlines)[2]
            if not parked.left:
                self._drop(parked)
                expired.append(parked)
        return expired

    def next_deadline(self) -> float | None:
        """The earliest deadline, in monotonic seconds."""
        while self._deadlines and self._deadlines[0][2].left:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _drop(self, parked: Parked) -> None:
        parked.left = True
        del self._parked[parked]
        session = parked.peer.identity
        left = self._by_session[session] - 1
        if left:
            self._by_session[session] = left
        else:
            del self._by_session[session]
