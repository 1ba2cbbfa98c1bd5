"""Which row holds which episode, which rows are spare, and who still reads what. Bookkeeping only, no data.

A *slot* is a logical place in the buffer; a *row* is memory. Each row is in one of four states:

* spare: free to be taken for writing;
* reserved: taken by :meth:`TrajectoryStore.take_spare`, being written;
* occupied: behind a slot, can be planned on and leased;
* retired: replaced, but still under a lease; it becomes spare when its last lease ends.

So nothing moves under a reader whose lease holds. A reader that slept past its deadline is warned by the row's stamp:
odd while the row is being written, even when it is whole, and larger after every write.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lease", "Occupant", "Place", "Published", "TrajectoryStore"]

_SPARE, _RESERVED, _OCCUPIED, _RETIRED = range(4)


@dataclass(frozen=True, slots=True)
class Occupant:
    """What the service remembers of a published episode.

    Attributes:
        episode_id: from 0, one per published episode.
        generation: the generation it was made for.
        length: its steps; exactly these are valid.
        anchors: half-open runs of steps of one non-negative continuity, in order: where a context may be anchored.
    """

    episode_id: int
    generation: int
    length: int
    anchors: tuple[tuple[int, int], ...]

    @property
    def eligible_anchors(self) -> int:
        """How many steps a context may be anchored at."""
        return sum(end - start for start, end in self.anchors)


class Place(NamedTuple):
    """An occupied slot."""

    slot: int
    row: int
    occupant: Occupant


class Published(NamedTuple):
    """What :meth:`TrajectoryStore.publish` did: where the episode is, and what it replaced (None, None: nothing)."""

    slot: int
    evicted: Occupant | None
    retired_row: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """The promise that ``rows`` stay unchanged until it is released, or until ``deadline`` (monotonic seconds).

    A row that is there several times is held as often. intp ``[n]``.
    """

    lease_id: int
    session: bytes
    deadline: float
    rows: NDArray[np.intp]


class TrajectoryStore:
    """Slots, rows, leases and stamps of one buffer.

    Args:
        slots: places of the buffer, at least 1.
        rows: rows of memory, at least ``slots + 1``: what is written next must not be what can be read.

    Attributes:
        episodes: how many slots hold an episode.
        undrawn: episodes that are here and of which no window was ever drawn.
        evicted_undrawn: episodes that were replaced before any window of them was drawn.
        retired: replaced rows that wait for their last lease to end.

    Raises:
        ValueError: sizes that cannot work, or a row used in a state that forbids it (an error of the caller, never of a
            peer: nothing a peer sends reaches these checks).
    """

    def __init__(self, slots: int, rows: int) -> None:
        if slots < 1 or rows <= slots:
            raise ValueError(f"a store needs at least one slot and more rows than slots, found {slots} and {rows}")
        self.slots = slots
        self.rows = rows
        # Arrays, because a batch touches many rows at once, and rows are many.
        self._state = np.full(rows, _SPARE, np.uint8)
        self._held = np.zeros(rows, np.int64)  # not less: numpy adds 1 to these twenty times as fast
        self._drawn = np.zeros(rows, np.bool_)
        self._stamps = np.zeros(rows, np.int64)
        self._spare = deque(range(rows))
        self._by_age = deque(range(slots))  # the slot to be replaced next comes first
        self._row_of_slot: list[int | None] = [None] * slots
        self._slot_of_row: list[int | None] = [None] * rows
        self._occupants: list[Occupant | None] = [None] * rows
        self.episodes = 0
        self.undrawn = 0
        self.retired = 0
        self.evicted_undrawn = 0
        self._leases: dict[int, Lease] = {}
        self._sessions: dict[bytes, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._next_lease = 1

    # --- rows for writing -------------------------------------------------------------------------------------------

    @property
    def spare(self) -> int:
        """How many rows could be taken now."""
        return len(self._spare)

    def take_spare(self, n: int) -> tuple[int, ...] | None:
        """Reserve ``n`` rows for writing, the longest unused first; None, reserving nothing, while there are fewer."""
        if n > len(self._spare):
            return None
        rows = tuple(self._spare.popleft() for _ in range(n))
        for row in rows:
            self._state[row] = _RESERVED
        return rows

    def give_back(self, rows: Iterable[int]) -> None:
        """Reserved rows that will not be published become spare again."""
        for row in rows:
            self._expect(row, _RESERVED, "given back")
            self._free(row)

    def next_stamps(self, rows: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Stamps for writing reserved ``rows``: ``(dirty, clean)``, odd and even, each larger than any before it."""
        for row in rows:
            self._expect(row, _RESERVED, "stamped")
        dirty = tuple(int(self._stamps[row]) + 1 for row in rows)
        for row in rows:
            self._stamps[row] += 2
        return dirty, tuple(stamp + 1 for stamp in dirty)

    # --- publishing -------------------------------------------------------------------------------------------------

    def next_evictions(self, n: int) -> int:
        """How many episodes the next ``n`` publications will replace."""
        return max(0, self.episodes + n - self.slots)

    def publish(self, row: int, occupant: Occupant) -> Published:
        """Put the episode in a reserved ``row`` behind the oldest slot (B18); the old row is freed or retired."""
        self._expect(row, _RESERVED, "published")
        slot = self._by_age.popleft()
        self._by_age.append(slot)
        old_row = self._row_of_slot[slot]
        evicted = None
        if old_row is not None:
            evicted = self._occupants[old_row]
            self._occupants[old_row] = None
            self._slot_of_row[old_row] = None
            self.episodes -= 1
            if not self._drawn[old_row]:
                self.undrawn -= 1
                self.evicted_undrawn += 1
            if self._held[old_row]:
                self._state[old_row] = _RETIRED
                self.retired += 1
            else:
                self._free(old_row)
        self._row_of_slot[slot] = row
        self._slot_of_row[row] = slot
        self._occupants[row] = occupant
        self._drawn[row] = False
        self._state[row] = _OCCUPIED
        self.episodes += 1
        self.undrawn += 1
        return Published(slot, evicted, old_row)

    def occupants(self) -> Iterator[Place]:
        """The occupied slots, in order of slot."""
        for slot, row in enumerate(self._row_of_slot):
            if row is not None:
                occupant = self._occupants[row]
                assert occupant is not None
                yield Place(slot, row, occupant)

    def occupant(self, row: int) -> Occupant | None:
        """The episode that can be sampled from ``row``, or None."""
        return self._occupants[row]

    def slot_of(self, row: int) -> int | None:
        """The slot in front of ``row``, or None."""
        return self._slot_of_row[row]

    def stamp(self, row: int) -> int:
        """The stamp a published ``row`` carries in memory."""
        return int(self._stamps[row])

    def stamps_of(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """The stamps of many rows at once, int64 of the same shape."""
        stamps: NDArray[np.int64] = self._stamps[rows]
        return stamps

    # --- leases -----------------------------------------------------------------------------------------------------

    @property
    def open_leases(self) -> int:
        """How many leases are neither released nor expired."""
        return len(self._leases)

    def lease(self, rows: Iterable[int] | NDArray[np.integer], session: bytes, deadline: float) -> int:
        """Keep occupied ``rows`` unchanged for ``session`` until ``deadline``; a new lease id.

        ``deadline`` is in monotonic seconds; ``math.inf`` for a lease that only a release can end.
        """
        wanted = rows if isinstance(rows, np.ndarray) else np.fromiter(rows, np.intp)
        return self.lease_each(wanted, 1, session, deadline)[0]

    def lease_each(self, rows: NDArray[np.integer], count: int, session: bytes, deadline: float) -> list[int]:
        """As :meth:`lease`, ``count`` leases, each of as many of the ``rows``, in order."""
        held = rows.astype(np.intp)
        self._expect_occupied(held)
        if self.undrawn:
            fresh = held[~self._drawn[held]]
            if len(fresh):
                self._drawn[fresh] = True
                self.undrawn -= len(np.unique(fresh))
        np.add.at(self._held, held, 1)
        first, size = self._next_lease, len(held) // count
        self._next_lease += count
        mine = self._sessions.setdefault(session, set())
        for turn in range(count):
            lease = Lease(first + turn, session, deadline, held[turn * size : (turn + 1) * size])
            self._leases[lease.lease_id] = lease
            mine.add(lease.lease_id)
            self._remember(deadline, lease.lease_id)
        return list(range(first, first + count))

    def release(self, lease_id: int, session: bytes) -> Lease | None:
        """End a lease; None when there is no such lease, it has expired, or it is another session's."""
        ended = self.release_all((lease_id,), session)
        return ended[0] if ended else None

    def release_all(self, lease_ids: Iterable[int], session: bytes) -> list[Lease]:
        """As :meth:`release`, of several; those that ended."""
        found = (self._leases.get(lease_id) for lease_id in dict.fromkeys(lease_ids))
        ended = [lease for lease in found if lease is not None and lease.session == session]
        if ended:
            self._end(ended)
        return ended

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose deadline is at or before ``now``; those leases, the earliest first."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            lease = self._leases.get(heapq.heappop(self._deadlines)[1])
            if lease is not None:
                self._end([lease])
                ended.append(lease)
        return ended

    def next_deadline(self) -> float | None:
        """When the next lease expires, or None when none is open."""
        while self._deadlines and self._deadlines[0][1] not in self._leases:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def leases_of(self, session: bytes) -> tuple[int, ...]:
        """The ids of the session's open leases, oldest first."""
        return tuple(sorted(self._sessions.get(session, ())))

    def leased(self, row: int) -> bool:
        """Whether any open lease covers ``row``."""
        return bool(self._held[row])

    # --- inside -----------------------------------------------------------------------------------------------------

    def _expect(self, row: int, state: int, verb: str) -> None:
        if not 0 <= row < self.rows or self._state[row] != state:
            names = ("spare", "reserved", "occupied", "retired")
            found = names[int(self._state[row])] if 0 <= row < self.rows else f"outside 0 … {self.rows - 1}"
            raise ValueError(f"row {row} cannot be {verb}: it should be {names[state]} and is {found}")

    def _free(self, row: int) -> None:
        self._state[row] = _SPARE
        self._spare.append(row)

    def _expect_occupied(self, rows: NDArray[np.intp]) -> None:
        # One comparison for all: this runs for every batch.
        if len(rows) and (rows.min() < 0 or rows.max() >= self.rows or (self._state[rows] != _OCCUPIED).any()):
            for row in rows.tolist():
                self._expect(row, _OCCUPIED, "leased")

    def _end(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            del self._leases[lease.lease_id]
            mine = self._sessions[lease.session]
            mine.discard(lease.lease_id)
            if not mine:
                del self._sessions[lease.session]
        rows = leases[0].rows if len(leases) == 1 else np.concatenate([lease.rows for lease in leases])
        np.subtract.at(self._held, rows, 1)
        if self.retired:
            free = rows[(self._held[rows] == 0) & (self._state[rows] == _RETIRED)]
            for row in np.unique(free).tolist():
                self.retired -= 1
                self._free(row)

    def _remember(self, deadline: float, lease_id: int) -> None:
        heapq.heappush(self._deadlines, (deadline, lease_id))
        if len(self._deadlines) > 4 * len(self._leases) + 64:
            # Released leases leave their deadlines behind; dropping them now and then keeps the heap small.
            self._deadlines = [(lease.deadline, lease.lease_id) for lease in self._leases.values()]
            heapq.heapify(self._deadlines)
