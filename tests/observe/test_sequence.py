"""Gaps in numbers: seen, asked for, or reported (B41, C42)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ods_async.core.events import StateChanged, to_record
from ods_async.core.reports import ServiceBeat
from ods_async.core.requests import Records
from ods_async.errors import ProtocolError
from ods_async.observe.sequence import EventsLost, Sequencer


def event(sequence: int, run_id: int = 7) -> StateChanged:
    return StateChanged(sequence=sequence, run_id=run_id, monotonic_ns=5, previous="A", state="B", reason=str(sequence))


def records(first: int, end: int, oldest: int = 0, upto: int | None = None) -> Records:
    return Records(tuple(to_record(event(n)) for n in range(first, end)), oldest, end if upto is None else upto)


def numbers(sequencer: Sequencer) -> list[Any]:
    found = [item.sequence if isinstance(item, StateChanged) else item for item in sequencer.ready]
    sequencer.ready.clear()
    return found


def begun(since: int | None, next_sequence: int) -> Sequencer:
    sequencer = Sequencer(since)
    sequencer.begin(7, next_sequence)
    return sequencer


def test_from_now_on_means_from_the_number_the_broker_is_at() -> None:
    sequencer = begun(None, 40)
    assert sequencer.wanted is None
    for number in (39, 40, 41):
        sequencer.take_event(event(number))
    assert numbers(sequencer) == [40, 41]


def test_from_a_number_on_asks_for_what_went_before_b41() -> None:
    sequencer = begun(3, 6)
    assert sequencer.wanted == 3
    sequencer.take_records(records(3, 6))
    assert sequencer.wanted is None
    assert numbers(sequencer) == [3, 4, 5]


def test_a_gap_is_seen_by_the_next_event_and_filled_in_order_c42() -> None:
    sequencer = begun(0, 0)
    sequencer.take_event(event(0))
    sequencer.take_event(event(3))
    assert sequencer.wanted == 1
    sequencer.take_event(event(4))
    sequencer.take_records(records(1, 5))
    sequencer.take_event(event(4))
    assert numbers(sequencer) == [0, 1, 2, 3, 4]


def test_a_missed_last_event_is_seen_by_the_beat_c42() -> None:
    sequencer = begun(0, 0)
    sequencer.take_beat(ServiceBeat(7, 2, "READY"))
    assert sequencer.wanted == 0
    sequencer.take_records(records(0, 2))
    assert numbers(sequencer) == [0, 1]


def test_what_the_broker_no_longer_holds_is_reported_with_its_number_c42() -> None:
    sequencer = begun(2, 9)
    sequencer.take_records(records(6, 9, oldest=6))
    lost, *rest = numbers(sequencer)
    assert isinstance(lost, EventsLost)
    assert (lost.run_id, lost.first, lost.count) == (7, 2, 4)
    assert "missed 4" in lost.reason
    assert rest == [6, 7, 8]


def test_when_nothing_is_held_all_of_it_is_lost_and_it_is_not_asked_for_again() -> None:
    sequencer = begun(2, 9)
    sequencer.take_records(Records((), 9, 9))
    (lost,) = numbers(sequencer)
    assert lost.count == 7
    assert sequencer.wanted is None


def test_a_broker_that_contradicts_itself_is_not_asked_for_ever() -> None:
    sequencer = begun(0, 5)
    sequencer.take_records(Records((), 0, 5))
    assert sequencer.wanted is None


def test_another_runs_event_or_beat_asks_for_a_new_connection() -> None:
    sequencer = begun(0, 0)
    sequencer.take_event(event(0, run_id=8))
    assert sequencer.restarted
    other = begun(0, 0)
    other.take_beat(ServiceBeat(8, 0, "STARTING"))
    assert other.restarted
    other.begin(8, 2)
    (lost,) = numbers(other)
    assert (lost.run_id, lost.count) == (7, None)
    assert other.wanted == 0
    assert not other.restarted


def test_a_replay_with_garbage_in_it_is_refused() -> None:
    sequencer = begun(0, 1)
    with pytest.raises(ProtocolError):
        sequencer.take_records(Records(({"kind": "nonsense"},), 0, 1))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_dropped_every_number_comes_once_in_order_or_is_reported_c42(seed: int) -> None:
    rng = random.Random(seed)
    sequencer, held, total = begun(0, 0), 30, 400
    seen: list[int] = []
    lost = 0

    def collect() -> None:
        nonlocal lost
        for item in numbers(sequencer):
            if isinstance(item, EventsLost):
                assert item.count is not None
                lost += item.count
            else:
                seen.append(item)

    for number in range(total):
        if rng.random() < 0.6:
            sequencer.take_event(event(number))
        if rng.random() < 0.05 or number == total - 1:
            sequencer.take_beat(ServiceBeat(7, number + 1, "READY"))
            while sequencer.wanted is not None:
                oldest = max(0, number + 1 - held)
                first = max(oldest, sequencer.wanted)
                sequencer.take_records(records(first, min(first + 7, number + 1), oldest, number + 1))
        collect()
    assert seen == sorted(set(seen))
    assert len(seen) + lost == total
