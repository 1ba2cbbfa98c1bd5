"""The owner's log and the ring of numbered events: B39–B41, C34 (bounded texts), C42 (nothing missed unnoticed)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ods_async.core.events import EpisodePublished, Event, WorkerFailure, WorkerReturned, to_plain, to_record
from ods_async.core.lifecycle import TEXT_BYTES, EventLog, LifecycleLog, bounded_text
from ods_async.core.requests import Drain, GetStatus, Refill, Replay, Sample, Stop
from ods_async.errors import ArgumentError
from ods_async.testing.in_memory import OWNER, InMemoryBroker, episode_of
from ods_async.wire.codec import encode_broadcast


def published(sequence: int, steps: int = 3, runs: int = 1) -> EpisodePublished:
    return EpisodePublished(
        sequence=sequence,
        run_id=4,
        monotonic_ns=10 * sequence,
        episode_id=sequence,
        generation=1,
        slot=0,
        valid_runs=((0, runs * steps),),
        anchor_runs=tuple((start, start + steps) for start in range(0, runs * steps, steps)),
        valid_frames=runs * steps,
        eligible_anchors=runs * steps,
    )


def failure(message: str, traceback_text: str) -> Event:
    return WorkerFailure(
        sequence=0,
        run_id=4,
        monotonic_ns=5,
        worker_id="w",
        module="m",
        type_name="T",
        message=message,
        traceback_text=traceback_text,
        phase="step",
        step=7,
    )


@given(st.integers(1, 9), st.lists(st.one_of(st.integers(1, 4), st.tuples(st.integers(0, 5), st.booleans()))))
def test_b40_no_record_is_lost_or_reordered_and_room_is_what_fits(
    capacity: int, steps: list[int | tuple[int, bool]]
) -> None:
    log, held, sequence = LifecycleLog(capacity), [], 0
    for step in steps:
        if isinstance(step, int):
            assert log.room_for(step) == (len(held) + step <= capacity)
            for _ in range(step if log.room_for(step) else 0):
                record = published(sequence)
                sequence += 1
                log.append(record)
                held.append(record)
        else:
            limit, arrives = step
            shown = log.oldest(limit)
            assert shown == held[:limit]
            if arrives and shown:
                assert log.forget(shown[-1].sequence + 1) == len(shown)
                del held[: len(shown)]
        assert len(log) == len(held)
    assert log.oldest(capacity) == held


def test_b40_a_full_log_never_drops() -> None:
    log = LifecycleLog(2)
    log.append(published(0))
    log.append(published(1))
    assert not log.room_for(1)
    assert log.room_for(0)
    with pytest.raises(ValueError, match="full with 2"):
        log.append(published(2))
    assert [record.sequence for record in log.oldest(1)] == [0]
    assert not log.room_for(1)
    assert log.forget(1) == 1
    assert log.room_for(1)


def test_b40_zero_capacity_switches_the_log_off() -> None:
    log = LifecycleLog(0)
    log.append(published(0))
    assert log.room_for(10**9)
    assert log.oldest(9) == []


@given(st.integers(1, 6), st.integers(0, 15), st.integers(0, 20), st.integers(0, 7))
def test_b41_replay_gives_what_is_held_and_tells_what_is_lost(
    history: int, appended: int, since: int, limit: int
) -> None:
    log = EventLog(history)
    events = [log.append(published(number)) for number in range(appended)]
    assert [event.sequence for event in events] == list(range(appended))
    found, oldest, following = log.since(since, limit)
    assert (oldest, following) == (max(0, appended - history), appended) == (log.oldest, log.next)
    assert found == events[max(since, oldest) :][:limit]


def test_b41_paging_through_replay_sees_every_event_once() -> None:
    log = EventLog(10)
    for _ in range(13):
        log.append(published(log.next))
    seen, since = [], 0
    while True:
        page, _, following = log.since(since, 4)
        seen += [event.sequence for event in page]
        since = seen[-1] + 1
        if since == following:
            break
    assert seen == list(range(3, 13))


def test_b41_memory_is_bounded_in_bytes_and_the_newest_is_always_held() -> None:
    log = EventLog(1_000, history_bytes=40_000)
    for _ in range(50):
        log.append(published(log.next, runs=60))
    assert 2 <= log.next - log.oldest <= 8
    last = log.append(published(log.next, runs=400))
    assert log.since(0, 5)[0] == [last]
    assert log.append(WorkerReturned(sequence=51, run_id=4, monotonic_ns=1, worker_id="w")).sequence == 51


def test_b41_an_event_with_another_number_is_refused() -> None:
    log = EventLog(3)
    with pytest.raises(ValueError, match="sequence 0, found 1"):
        log.append(published(1))
    assert log.next == 0


def test_an_event_log_holds_at_least_one_event() -> None:
    with pytest.raises(ValueError, match="at least one"):
        EventLog(0)


def test_c34_a_huge_traceback_is_cut_and_still_tells_where_and_what() -> None:
    log = EventLog(2)
    text = "Traceback of make\n" + "é" * 1_000_000 + "\nValueError: the joint broke"
    event = log.append(failure("short", text))
    assert isinstance(event, WorkerFailure)
    assert len(event.traceback_text.encode()) <= TEXT_BYTES
    assert event.traceback_text.startswith("Traceback of make\n")
    assert event.traceback_text.endswith("ValueError: the joint broke")
    assert "the middle is left out" in event.traceback_text
    assert (event.message, event.step) == ("short", 7)
    assert log.since(0, 1)[0] == [event]


@given(st.text(max_size=300), st.integers(0, 200))
def test_c34_a_text_within_the_limit_is_kept_and_any_other_is_cut_to_it(text: str, extra: int) -> None:
    limit = 60 + extra
    size = len(text.encode(errors="replace"))
    cut = bounded_text(text, limit)
    if size <= limit:
        assert cut == text
    else:
        assert len(cut.encode(errors="replace")) <= limit


def logging(capacity: int = 8) -> InMemoryBroker:
    broker = InMemoryBroker(refill_policy="manual", lifecycle_event_capacity=capacity)
    broker.join()
    broker.connect()
    return broker


def drained(broker: InMemoryBroker, limit: int = 100) -> list[tuple[str, int, int, int]]:
    records = broker.get(Drain(OWNER, limit)).events
    if records:
        broker.get(Drain(OWNER, 0, records[-1]["sequence"] + 1))
    return [(r["kind"], r["episode_id"], r["generation"], r["slot"]) for r in records]


def test_b39_records_come_in_the_order_of_publication_and_describe_the_steps() -> None:
    broker = logging()
    ticket = broker.start_ticket()
    broker.hand_in(ticket, episode_of(6, continuity=[0, 0, -1, 5, 5, -1]))
    broker.fill()
    first, *others = broker.get(Drain(OWNER)).events
    broker.get(Drain(OWNER, 0, others[-1]["sequence"] + 1))
    assert first == {
        "kind": "published",
        "sequence": first["sequence"],
        "run_id": 7,
        "episode_id": 0,
        "generation": 1,
        "slot": 0,
        "monotonic_ns": broker.now.monotonic_ns,
        "valid_runs": ((0, 6),),
        "anchor_runs": ((0, 2), (3, 5)),
        "valid_frames": 6,
        "eligible_anchors": 4,
    }
    event = broker.events_of(EpisodePublished)[0]
    assert to_record(event) == first
    shown = to_plain(event)
    assert shown.pop("valid_frame_indices") == event.valid_frame_indices == (0, 1, 2, 3, 4, 5)
    assert shown.pop("eligible_anchor_indices") == event.eligible_anchor_indices == (0, 1, 3, 4)
    assert shown == {key: value for key, value in first.items() if not key.endswith("_runs")}


def test_b39_an_episode_may_have_no_anchor_at_all() -> None:
    broker = logging()
    broker.hand_in(broker.start_ticket(), episode_of(2, continuity=-1))
    (event,) = broker.events_of(EpisodePublished)
    assert (event.anchor_runs, event.eligible_anchor_indices, event.eligible_anchors) == ((), (), 0)
    assert event.valid_frame_indices == (0, 1)


def test_b39_what_an_event_takes_does_not_grow_with_the_episode() -> None:
    broker = InMemoryBroker(buffer_size=2, max_episode_steps=5000)
    broker.join()
    broker.hand_in(broker.start_ticket(), episode_of(4896))
    (event,) = broker.events_of(EpisodePublished)
    assert len(encode_broadcast(event)[1]) < 200
    assert event.valid_frame_indices == tuple(range(4896))


def test_b39_evictions_come_with_their_publication() -> None:
    broker = logging()
    broker.fill()
    assert len(drained(broker)) == 4
    broker.get(Refill(OWNER))
    broker.fill()
    assert drained(broker) == [
        record for slot in range(4) for record in (("evicted", slot, 1, slot), ("published", 4 + slot, 2, slot))
    ]


def test_b40_a_full_log_holds_the_producer_back_and_nobody_else() -> None:
    broker = logging()
    broker.fill()
    broker.get(Refill(OWNER))
    broker.fill()
    status = broker.get(GetStatus())
    assert status.completed_generation == 1
    assert status.waiting.startswith("the lifecycle log is full (8 of 8 records)")
    assert broker.draw(Sample(batch_size=5, length=2))
    assert len(drained(broker, limit=1)) == 1  # one free place is too little for an eviction and a publication
    assert len(drained(broker, limit=1)) == 1
    assert len(drained(broker)) == 8
    broker.pass_time(0.1)
    assert broker.get(GetStatus()).completed_generation == 2
    assert [kind for kind, *_ in drained(broker)] == ["evicted", "published"]


def test_b40_stop_ends_the_wait_and_the_log_can_still_be_drained() -> None:
    broker = logging()
    broker.fill()
    broker.get(Refill(OWNER))
    broker.fill()
    stop = broker.ask(Stop(OWNER, grace=1.0))
    broker.leave()
    broker.pass_time(1.0)
    assert broker.answer(stop) is not None
    assert len(drained(broker)) == 8
    assert drained(broker) == []


def test_b41_the_same_records_are_replayed_whether_or_not_the_owner_drains() -> None:
    broker = logging()
    broker.fill()
    own = broker.get(Drain(OWNER)).events
    everyone = broker.get(Replay(0)).events
    assert [event["sequence"] for event in everyone] == list(range(len(everyone)))
    assert [event for event in everyone if event["kind"] in ("published", "evicted")] == list(own)


def test_b39_an_answer_to_a_drain_that_gets_lost_costs_no_record() -> None:
    broker = logging()
    broker.fill()
    lost = broker.get(Drain(OWNER)).events
    assert broker.get(Drain(OWNER)).events == lost
    assert broker.get(Drain(OWNER, 2, lost[1]["sequence"] + 1)).events == lost[2:4]
    assert broker.get(Drain(OWNER, 9, lost[1]["sequence"] + 1)).events == lost[2:]
    assert broker.get(Drain(OWNER, 9, lost[-1]["sequence"] + 1)).events == ()


@pytest.mark.parametrize("received", [-1, 10**9])
def test_b39_an_owner_cannot_have_received_what_there_is_not(received: int) -> None:
    broker = logging()
    broker.fill()
    with pytest.raises(ArgumentError, match="received="):
        broker.get(Drain(OWNER, 9, received))
    assert len(drained(broker)) == 4
