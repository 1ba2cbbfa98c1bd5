"""The roster, the parking lot and the sessions."""

from __future__ import annotations

from ods_async.core.parking import Parked, ParkingLot
from ods_async.core.reports import Hello
from ods_async.core.requests import Connect, FieldDescription, WaitReady
from ods_async.core.roster import Roster
from ods_async.core.sessions import Sessions
from ods_async.core.stimuli import Peer

FIELD = FieldDescription(("obs",), "float32", (3,), 0, 0)


def hello(worker_id: str, *, pid: int = 1, ready: bool = True) -> Hello:
    return Hello(worker_id, pid, "host", 1, (FIELD,) if ready else (), "env")


class TestRoster:
    def test_a_worker_is_starting_until_it_says_what_it_records(self) -> None:
        roster = Roster(timeout=5.0)
        roster.hello(hello("w0", ready=False), now=0.0)
        assert (roster.ready, roster.idle, roster.present) == (0, 0, 1)
        roster.hello(hello("w0"), now=1.0)
        assert (roster.ready, roster.idle, roster.present) == (1, 1, 1)

    def test_silence_stalls_and_long_silence_is_given_up_and_a_sign_of_life_undoes_both(self) -> None:
        """C33"""
        roster = Roster(timeout=5.0)
        roster.hello(hello("w0"), now=0.0).told_ready = True
        assert roster.newly_silent(5.0) == []
        assert [record.worker_id for record in roster.newly_silent(5.1)] == ["w0"]
        assert roster.newly_silent(5.2) == []
        assert roster.long_silent(29.0) == []
        assert [record.worker_id for record in roster.long_silent(31.0)] == ["w0"]
        assert roster.present == 0
        record, back = roster.heard("w0", 40.0)
        assert back
        assert record is not None
        assert roster.ready == 1

    def test_a_worker_that_left_is_not_brought_back_by_a_late_heartbeat(self) -> None:
        roster = Roster(timeout=5.0)
        roster.hello(hello("w0"), now=0.0)
        roster.leave("w0")
        assert roster.heard("w0", 1.0)[1] is False
        assert roster.ready == 0

    def test_a_new_process_under_an_old_name_keeps_the_counts_and_none_of_the_state(self) -> None:
        roster = Roster(timeout=5.0)
        record = roster.hello(hello("w0", pid=1), now=0.0)
        record.rollouts, record.ticket_id, record.told_ready = 3, 9, True
        again = roster.hello(hello("w0", pid=2), now=1.0)
        assert (again.rollouts, again.ticket_id, again.told_ready) == (3, None, False)

    def test_the_long_gone_are_forgotten(self) -> None:
        roster = Roster(timeout=5.0)
        for number in range(1000):
            roster.hello(hello(f"w{number}"), now=0.0)
            roster.leave(f"w{number}")
        assert len(roster) < 300


class TestParkingLot:
    def test_requests_leave_in_order_of_arrival_or_at_their_deadline(self) -> None:
        lot = ParkingLot(per_session=4)
        first, second, third = (
            Parked(Peer(b"c"), n, WaitReady(), 0.0, deadline) for n, deadline in enumerate((9.0, 3.0, 6.0))
        )
        for parked in (first, second, third):
            assert lot.park(parked)
        assert lot.next_deadline() == 3.0
        assert lot.take_expired(2.9) == []
        assert lot.take_expired(3.0) == [second]
        assert lot.take(lambda _: True) == [first, third]
        assert len(lot) == 0
        assert lot.next_deadline() is None
        assert lot.take_expired(99.0) == []

    def test_one_session_cannot_fill_the_lot_and_gets_its_places_back(self) -> None:
        lot = ParkingLot(per_session=2)
        assert lot.park(Parked(Peer(b"c"), 1, WaitReady(), 0.0, 1.0))
        assert lot.park(Parked(Peer(b"c"), 2, WaitReady(), 0.0, 5.0))
        assert not lot.park(Parked(Peer(b"c"), 3, WaitReady(), 0.0, 5.0))
        assert lot.park(Parked(Peer(b"other"), 4, WaitReady(), 0.0, 5.0))
        lot.take_expired(1.0)
        assert lot.park(Parked(Peer(b"c"), 5, WaitReady(), 0.0, 5.0))


class TestSessions:
    def test_the_longest_unused_is_forgotten_first(self) -> None:
        sessions = Sessions(limit=2)
        for name in (b"a", b"b"):
            sessions.add(name, Connect("ipc://x", "consumer", name.decode(), 1))
        assert sessions.known(b"a")
        sessions.add(b"c", Connect("ipc://x", "owner", "c", 1))
        assert not sessions.known(b"b")
        assert sessions.known(b"a")
        assert (len(sessions), sessions.count("owner")) == (2, 1)
