"""A rollout is kept until its verdict, sent again when none comes, and memory is bounded (C20)."""

from __future__ import annotations

import itertools

from ods_async.worker.outbox import MAX_SMALL, Outbox


def drain(outbox: Outbox, now: float) -> list[tuple[bytes | memoryview, ...]]:
    found = []
    while (frames := outbox.next(now)) is not None:
        found.append(frames)
        outbox.sent(now)
    return found


def test_reports_and_rollouts_leave_in_order() -> None:
    outbox = Outbox(100)
    outbox.report(b"started 1")
    outbox.keep(1, (b"header", memoryview(b"payload")))
    outbox.report(b"started 2")
    assert drain(outbox, 0.0) == [(b"started 1",), (b"header", b"payload"), (b"started 2",)]
    assert drain(outbox, 1.0) == []
    assert outbox.unjudged == (1,)


def test_what_was_not_taken_is_offered_again() -> None:
    outbox = Outbox(100)
    outbox.report(b"a")
    assert outbox.next(0.0) == outbox.next(0.0) == (b"a",)


def test_a_rollout_without_verdict_is_sent_again_ever_more_rarely() -> None:
    outbox = Outbox(100)
    outbox.keep(7, (b"x",))
    times = []
    now = 0.0
    while len(times) < 7:
        if drain(outbox, now):
            times.append(now)
        due = outbox.next_due()
        assert due is not None
        assert due > now
        now = due
    assert [b - a for a, b in itertools.pairwise(times)] == [5, 10, 20, 40, 60, 60]


def test_a_verdict_ends_it() -> None:
    outbox = Outbox(100)
    outbox.keep(7, (b"x",))
    drain(outbox, 0.0)
    assert outbox.judged(7)
    assert not outbox.judged(7)
    assert (drain(outbox, 1e9), outbox.next_due(), outbox.nbytes) == ([], None, 0)


def test_a_verdict_before_it_was_ever_sent_leaves_no_hole_in_the_order() -> None:
    outbox = Outbox(100)
    outbox.keep(7, (b"x",))
    outbox.report(b"later")
    outbox.judged(7)
    assert drain(outbox, 0.0) == [(b"later",)]


def test_c20_it_is_full_at_its_bytes_but_one_rollout_always_fits() -> None:
    outbox = Outbox(10)
    assert not outbox.full
    outbox.keep(1, (b"h", memoryview(bytes(8))))
    assert not outbox.full
    outbox.keep(2, (b"h",))
    assert outbox.full
    outbox.judged(1)
    assert not outbox.full
    huge = Outbox(10)
    huge.keep(3, (bytes(999),))
    assert huge.full


def test_a_new_connection_sends_everything_again_at_once() -> None:
    outbox = Outbox(100)
    for ticket in (1, 2):
        outbox.keep(ticket, (b"%d" % ticket,))
    drain(outbox, 0.0)
    outbox.connected_again()
    assert drain(outbox, 1.0) == [(b"1",), (b"2",)]


def test_c20_what_is_lost_is_numbered() -> None:
    outbox = Outbox(100)
    for ticket in (4, 9):
        outbox.keep(ticket, (b"x",))
    assert outbox.forget() == (4, 9)
    assert (outbox.unjudged, outbox.next(1e9)) == ((), None)


def test_reports_that_nobody_takes_are_bounded() -> None:
    outbox = Outbox(100)
    for index in range(MAX_SMALL + 5):
        outbox.report(b"%d" % index)
    sent = drain(outbox, 0.0)
    assert (len(sent), sent[0]) == (MAX_SMALL, (b"5",))
