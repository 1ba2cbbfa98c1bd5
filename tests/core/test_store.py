"""TrajectoryStore: nothing moves under a reader, the oldest slot goes first, stamps tell of every write."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ods_async.core.store import Occupant, Place, Published, TrajectoryStore

SESSIONS = (b"a", b"b")


def occupant(episode_id: int, length: int = 5) -> Occupant:
    return Occupant(episode_id, 1 + episode_id // 3, length, ((0, length),))


def filled(slots: int, rows: int) -> TrajectoryStore:
    """A store whose slots hold episodes 0, 1, … in rows 0, 1, …"""
    store = TrajectoryStore(slots, rows)
    taken = store.take_spare(slots)
    assert taken == tuple(range(slots))
    store.next_stamps(taken)
    for episode_id, row in enumerate(taken):
        store.publish(row, occupant(episode_id))
    return store


class StoreMachine(RuleBasedStateMachine):
    """Against a model that keeps the memory itself: what a lease covers must read the same until the lease ends."""

    SLOTS = 3
    ROWS = 6

    def __init__(self) -> None:
        super().__init__()
        self.store = TrajectoryStore(self.SLOTS, self.ROWS)
        self.memory_stamp = [0] * self.ROWS  # what lies in memory: the stamp and the episode
        self.memory_episode = [-1] * self.ROWS
        self.reserved: list[int] = []
        self.slots: list[tuple[int, Occupant] | None] = [None] * self.SLOTS
        self.slot_order = deque(range(self.SLOTS))
        self.leases: dict[int, tuple[bytes, float, dict[int, tuple[int, int]]]] = {}
        self.used_ids: set[int] = set()
        self.now = 0.0
        self.next_episode = 0

    def leased_rows(self) -> set[int]:
        return {row for _, _, seen in self.leases.values() for row in seen}

    def occupied_rows(self) -> list[int]:
        return [place[0] for place in self.slots if place is not None]

    @rule(n=st.integers(0, 4))
    def take(self, n: int) -> None:
        expected = set(range(self.ROWS)) - self.leased_rows() - set(self.occupied_rows()) - set(self.reserved)
        taken = self.store.take_spare(n)
        if n > len(expected):
            assert taken is None
            return
        assert taken is not None
        assert len(set(taken)) == n
        assert set(taken) <= expected, "a leased, occupied or reserved row was handed out as spare"
        self.reserved += taken
        before = [self.memory_stamp[row] for row in taken]
        dirty, clean = self.store.next_stamps(taken)
        for row, old, odd, even in zip(taken, before, dirty, clean, strict=True):
            assert odd % 2 == 1
            assert even % 2 == 0
            assert old < odd < even
            self.memory_stamp[row] = odd
            self.memory_episode[row] = -1

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(row)
        self.store.give_back([row])

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(row)
        new = occupant(self.next_episode)
        self.memory_stamp[row] += 1
        self.memory_episode[row] = new.episode_id
        self.next_episode += 1
        slot = self.slot_order.popleft()
        self.slot_order.append(slot)
        before = self.slots[slot]
        evictions = self.store.next_evictions(1)
        assert self.store.publish(row, new) == Published(
            slot, None if before is None else before[1], None if before is None else before[0]
        )
        assert evictions == (before is not None)
        self.slots[slot] = (row, new)

    @precondition(lambda self: self.occupied_rows())
    @rule(data=st.data(), session=st.sampled_from(SESSIONS), seconds=st.sampled_from([0.5, 2.0, 5.0, math.inf]))
    def lease(self, data: st.DataObject, session: bytes, seconds: float) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.occupied_rows()), min_size=1, max_size=5))
        lease_id = self.store.lease(np.array(rows, np.int32), session, self.now + seconds)
        assert lease_id not in self.used_ids
        self.used_ids.add(lease_id)
        seen = {row: (self.memory_stamp[row], self.memory_episode[row]) for row in rows}
        assert self.store.stamps_of(np.array(rows, np.int32)).tolist() == [seen[row][0] for row in rows]
        self.leases[lease_id] = (session, self.now + seconds, seen)

    @rule(lease_id=st.integers(0, 12), session=st.sampled_from(SESSIONS))
    def release(self, lease_id: int, session: bytes) -> None:
        mine = self.leases.get(lease_id)
        lease = self.store.release(lease_id, session)
        if mine is None or mine[0] != session:
            assert lease is None
        else:
            assert lease is not None
            assert (lease.lease_id, lease.session, lease.deadline) == (lease_id, session, mine[1])
            assert set(lease.rows.tolist()) == set(mine[2])
            del self.leases[lease_id]

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        ended = self.store.expire(self.now)
        expected = {key for key, (_, deadline, _) in self.leases.items() if deadline <= self.now}
        assert {lease.lease_id for lease in ended} == expected
        assert [lease.deadline for lease in ended] == sorted(lease.deadline for lease in ended)
        for key in expected:
            del self.leases[key]

    @invariant()
    def leased_memory_is_unchanged(self) -> None:
        for _, _, seen in self.leases.values():
            for row, read in seen.items():
                assert (self.memory_stamp[row], self.memory_episode[row]) == read

    @invariant()
    def every_row_is_accounted_for_once(self) -> None:
        occupied, leased = set(self.occupied_rows()), self.leased_rows()
        retired = leased - occupied
        assert self.store.retired == len(retired)
        assert self.store.spare == self.ROWS - len(occupied) - len(self.reserved) - len(retired)
        assert [self.store.leased(row) for row in range(self.ROWS)] == [row in leased for row in range(self.ROWS)]

    @invariant()
    def what_is_published_is_what_was_written(self) -> None:
        places = [Place(slot, *place) for slot, place in enumerate(self.slots) if place is not None]
        assert list(self.store.occupants()) == places
        assert self.store.episodes == len(places)
        for slot, row, who in places:
            assert self.store.slot_of(row) == slot
            assert self.store.occupant(row) == who
            assert self.store.stamp(row) == self.memory_stamp[row]
            assert self.memory_stamp[row] % 2 == 0
            assert self.memory_episode[row] == who.episode_id

    @invariant()
    def leases_are_known_by_session_and_deadline(self) -> None:
        assert self.store.open_leases == len(self.leases)
        for session in SESSIONS:
            assert self.store.leases_of(session) == tuple(
                sorted(key for key, (owner, _, _) in self.leases.items() if owner == session)
            )
        deadlines = [deadline for _, deadline, _ in self.leases.values()]
        assert self.store.next_deadline() == (min(deadlines) if deadlines else None)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_b18_the_replaced_episode_stays_until_its_successor_is_published() -> None:
    store = filled(2, 4)
    rows = store.take_spare(2)
    assert rows is not None
    assert [place.occupant.episode_id for place in store.occupants()] == [0, 1]
    assert store.publish(rows[0], occupant(2)) == Published(0, occupant(0), 0)
    assert [place.occupant.episode_id for place in store.occupants()] == [2, 1]


def test_b18_slots_are_replaced_in_turn() -> None:
    store = filled(3, 5)
    slots = []
    for episode_id in range(3, 10):
        rows = store.take_spare(1)
        assert rows is not None
        slots.append(store.publish(rows[0], occupant(episode_id)).slot)
    assert slots == [0, 1, 2, 0, 1, 2, 0]


def test_a_retired_row_becomes_spare_only_when_its_last_lease_ends() -> None:
    store = filled(1, 2)
    first = store.lease([0], b"x", 5.0)
    second = store.lease([0, 0], b"y", 9.0)
    (row,) = store.take_spare(1) or ()
    assert store.publish(row, occupant(1)).retired_row == 0
    assert store.take_spare(1) is None
    assert store.release(first, b"x") is not None
    assert store.take_spare(1) is None
    assert store.expire(8.999) == []
    assert [lease.lease_id for lease in store.expire(9.0)] == [second]
    assert store.take_spare(1) == (0,)


def test_a_replaced_row_without_a_lease_is_spare_at_once() -> None:
    store = filled(1, 2)
    (row,) = store.take_spare(1) or ()
    store.publish(row, occupant(1))
    assert store.take_spare(1) == (0,)


def test_a_released_lease_is_gone_for_a_second_release_and_for_expiry() -> None:
    store = filled(2, 3)
    lease_id = store.lease([1], b"x", 5.0)
    assert store.release(lease_id, b"other") is None
    assert store.release(lease_id, b"x") is not None
    assert store.release(lease_id, b"x") is None
    assert store.expire(100.0) == []


def test_several_leases_at_once_are_as_many_of_their_own() -> None:
    store = filled(3, 8)
    first, second, third = store.lease_each(np.array([0, 1, 1, 2, 0, 0], np.int32), 3, b"x", 5.0)
    assert store.undrawn == 0
    rows = store.take_spare(3) or ()
    for number, row in enumerate(rows):
        store.publish(row, occupant(9 + number))
    assert (store.retired, store.spare) == (3, 2)
    assert [lease.rows.tolist() for lease in store.release_all((second, 99, second), b"x")] == [[1, 2]]
    assert (store.retired, store.spare) == (2, 3)  # row 2 only: row 1 is held by the first lease, too
    assert store.release_all((first, third), b"other") == []
    assert [lease.lease_id for lease in store.release_all((third, first), b"x")] == [third, first]
    assert (store.retired, store.spare, store.open_leases) == (0, 5, 0)


def test_stamps_grow_across_rows_that_were_given_back_unwritten() -> None:
    store = TrajectoryStore(1, 2)
    seen = []
    for _ in range(3):
        rows = store.take_spare(2)
        assert rows is not None
        (dirty, _), (clean, _) = store.next_stamps((0, 1))
        seen += [dirty, clean]
        store.give_back(rows)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_many_short_leases_leave_nothing_behind() -> None:
    store = filled(2, 3)
    for _ in range(5_000):
        assert store.release(store.lease([0], b"x", 1e9), b"x")
    assert len(store._deadlines) < 200
    assert store.open_leases == 0
    assert store.leases_of(b"x") == ()


def test_rows_in_the_wrong_state_are_refused_and_nothing_changes() -> None:
    store = filled(2, 4)
    for call in (
        lambda: store.publish(0, occupant(9)),
        lambda: store.give_back([2]),
        lambda: store.lease([1, 2], b"x", 1.0),
        lambda: store.next_stamps([3]),
        lambda: store.lease([-1], b"x", 1.0),
        lambda: store.lease([4], b"x", 1.0),
    ):
        with pytest.raises(ValueError, match="row"):
            call()
    assert store.open_leases == 0
    assert not store.leased(1)
    assert store.spare == 2


@pytest.mark.parametrize(("slots", "rows"), [(0, 2), (3, 3), (3, 2)])
def test_a_store_without_a_spare_row_is_refused(slots: int, rows: int) -> None:
    with pytest.raises(ValueError, match="more rows than slots"):
        TrajectoryStore(slots, rows)


def test_c25_episodes_that_nobody_drew_are_counted_while_they_are_here_and_when_they_go() -> None:
    store = filled(3, 5)
    assert (store.undrawn, store.evicted_undrawn) == (3, 0)
    store.lease([1], b"a", math.inf)
    assert (store.undrawn, store.evicted_undrawn) == (2, 0)
    for episode_id in (3, 4):  # in place of 0, which nobody drew, and of 1
        (row,) = store.take_spare(1) or ()
        store.next_stamps([row])
        store.publish(row, occupant(episode_id))
    assert (store.undrawn, store.evicted_undrawn) == (3, 1)
