"""What a stranger may send to the broker: drawn by hypothesis, or a lie of each kind; good traffic goes on after it."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.episode import Rollout
from ods_async.core.reports import EpisodeReport, Report, RolloutReport, TicketStarted
from ods_async.core.requests import (
    Connect,
    Done,
    GetStats,
    GetStatus,
    Sample,
    ServiceStatus,
    Stats,
    WaitReady,
)
from ods_async.errors import OdsError, ProtocolError
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.fuzz import Fuzzer
from ods_async.testing.peers import RawConsumer, RawWorker, marked_episode
from ods_async.transport.sockets import Channel, Hub, open_channel
from ods_async.wire.codec import decode_answer, decode_report, encode_report, encode_request
from ods_async.wire.messages import PROTOCOL
from ods_async.wire.rollout import pack_rollout, plan_rollout

FLOOD = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    cfg = OnlineDataEngineCfg(
        buffer_size=3, max_episode_steps=9, refill_policy="continuous", max_generation_attempts=99
    )
    with run_broker(cfg) as running:
        yield running
        assert running.counts.get("faults", 0) == 0


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as made:
        yield made


def status_of(consumer: RawConsumer) -> ServiceStatus:
    status = consumer.ask(GetStatus())
    assert isinstance(status, ServiceStatus)
    return status


def reaches(consumer: RawConsumer, malformed: int) -> int:
    """The count of malformed messages, once it is at least so high."""
    until = time.monotonic() + 10.0
    while (found := status_of(consumer).malformed_messages) < malformed and time.monotonic() < until:
        pass
    return found


def push(channel: Channel, frames: list[Any]) -> None:
    assert channel.wait(10.0, write=True)
    assert channel.send(frames)


def is_report(frames: list[bytes]) -> bool:
    """Whether frames happen to be a report that needs no payload, or a rollout with one."""
    try:
        report: Report = decode_report(frames[0])
    except ProtocolError:
        return False
    return len(frames) == 1 or isinstance(report, RolloutReport)


frames_of_noise = st.lists(st.binary(max_size=300), min_size=1, max_size=4) | st.sampled_from(
    [[b""], [b"x"] * 50, [b"GET / HTTP/1.1\r\n\r\n"], [b"\x80\x04c"], [b"\x91" * 5000], [b"\xdd\xff\xff\xff\xff"]]
)


def test_c45_any_frames_at_the_rollouts_socket_are_counted_and_work_goes_on(broker: RunningBroker, hub: Hub) -> None:
    with RawConsumer(broker.endpoint) as consumer, RawWorker(broker.endpoint) as worker:
        worker.work_in_background(5)
        consumer.ask(WaitReady())
        stranger = open_channel(hub, "push", connect=[consumer.welcome.rollouts])

        @FLOOD
        @given(frames_of_noise)
        def flood(frames: list[bytes]) -> None:
            before = status_of(consumer).malformed_messages
            push(stranger, frames)
            expected = before + (not is_report(frames))
            assert reaches(consumer, expected) == expected

        flood()
        stats = consumer.ask(GetStats())
        assert isinstance(stats, Stats)
        assert stats.extra["malformed_messages"] == status_of(consumer).malformed_messages > 0
        published = stats.successful_episodes
        until = time.monotonic() + 10.0
        while consumer.ask(GetStats()).successful_episodes <= published:  # type: ignore[union-attr]
            assert time.monotonic() < until


def test_c12_c45_any_mutated_request_is_answered_once_or_is_no_request(broker: RunningBroker, hub: Hub) -> None:
    """Also those that are valid and ask for the impossible; the same socket goes on being served."""
    fuzzer = Fuzzer(1)
    with RawConsumer(broker.endpoint) as consumer, RawWorker(broker.endpoint) as worker:
        worker.work_in_background(5)
        consumer.ask(WaitReady())
        stranger = open_channel(hub, "req", connect=[broker.endpoint])

        @FLOOD
        @given(st.integers(0, 2**32))
        def flood(seed: int) -> None:
            data, _ = fuzzer.message("request", random.Random(seed))
            if any(word in data for word in (b"Release", b"Cancel", b"Stop", b"Wait", b"Describe", b"Sample")):
                return  # not answered, or not at once
            push(stranger, [data])
            assert stranger.wait(10.0), f"no answer to {data!r}"
            frames = stranger.receive()
            assert frames is not None
            _, answer = decode_answer(frames[0])
            assert answer is not None

        flood()
        for size in (-1, 0, 2**62):
            with pytest.raises(OdsError, match="batch_size"):
                consumer.ask(Sample(size, 3))
        push(stranger, [encode_request(1, 5.0, Connect(broker.endpoint, "consumer", "", PROTOCOL))])
        assert stranger.wait(10.0)
        assert isinstance(decode_answer((stranger.receive() or [b""])[0])[1], object)
        assert consumer.ask(WaitReady()) == Done()


LIES: dict[str, Any] = {
    "payload is shorter than announced": lambda r: dataclasses.replace(r, payload_bytes=r.payload_bytes + 64),
    "payload is longer than announced": lambda r: dataclasses.replace(r, payload_bytes=r.payload_bytes - 64),
    "payload beyond every limit": lambda r: dataclasses.replace(r, payload_bytes=2**62),
    "more steps": lambda r: episode(r, length=r.episodes[0].length + 1),
    "fewer steps": lambda r: episode(r, length=r.episodes[0].length - 1),
    "no steps": lambda r: episode(r, length=0),
    "negative steps": lambda r: episode(r, length=-5),
    "steps beyond every memory": lambda r: episode(r, length=2**62),
    "offsets that overlap": lambda r: episode(r, offsets=tuple(0 for _ in r.fields)),
    "offsets outside": lambda r: episode(r, offsets=tuple(o + r.payload_bytes for o in r.episodes[0].offsets)),
    "too few offsets": lambda r: episode(r, offsets=r.episodes[0].offsets[:-1]),
    "another dtype": lambda r: field(r, dtype="float64"),
    "another shape": lambda r: field(r, shape=(3, 2)),
    "a shape beyond every memory": lambda r: field(r, shape=(2**31, 2**20)),
    "no fields": lambda r: dataclasses.replace(r, fields=()),
    "no episodes": lambda r: dataclasses.replace(r, episodes=()),
    "an episode twice": lambda r: dataclasses.replace(r, episodes=r.episodes * 2),
    "a field twice": lambda r: dataclasses.replace(r, fields=(*r.fields, r.fields[0])),
    "another path": lambda r: field(r, path=("obs", "other")),
    "segments that overlap": lambda r: episode(r, segments=r.episodes[0].segments * 2),
    "a segment outside": lambda r: episode(r, segments=(dataclasses.replace(r.episodes[0].segments[0], end=10**6),)),
    "no attempts": lambda r: dataclasses.replace(r, attempts=0),
}


def episode(report: RolloutReport, **changes: Any) -> RolloutReport:
    first: EpisodeReport = dataclasses.replace(report.episodes[0], **changes)
    return dataclasses.replace(report, episodes=(first, *report.episodes[1:]))


def field(report: RolloutReport, **changes: Any) -> RolloutReport:
    return dataclasses.replace(report, fields=(dataclasses.replace(report.fields[0], **changes), *report.fields[1:]))


def test_c11_c38_every_header_that_lies_is_refused_with_a_verdict_and_the_unit_is_made_again(
    broker: RunningBroker,
) -> None:
    with RawConsumer(broker.endpoint) as consumer, RawWorker(broker.endpoint) as worker:
        for number, (name, lie) in enumerate(LIES.items()):
            ticket = worker.next_ticket()
            assert ticket is not None, f"no ticket after {name!r}"
            made = Rollout(ticket.ticket_id, "w0", (marked_episode(number, 5),), 1, 0.25)
            report, nbytes = plan_rollout(made, worker.schema.fields)
            payload = bytearray(nbytes)
            pack_rollout(made, report, memoryview(payload))
            try:
                header = encode_report(lie(report))
            except OdsError:
                raise AssertionError(f"{name}: the lie cannot even be told; choose another") from None
            worker.send([header, bytes(payload)])
            verdict = worker.verdict()
            assert (name, verdict.ticket_id, verdict.outcome) == (name, ticket.ticket_id, "refused")
            assert verdict.reason
        worker.work(3, length=5)
        assert consumer.ask(WaitReady()) == Done()
        status = status_of(consumer)
        assert status.malformed_messages + status.refused_rollouts >= len(LIES)


def test_c29_c38_replays_and_duplicates_publish_nothing_twice(broker: RunningBroker, hub: Hub) -> None:
    """The same rollout again from the same worker, from a stranger, and after its ticket is long gone."""
    with RawConsumer(broker.endpoint) as consumer, RawWorker(broker.endpoint) as worker:
        stranger = open_channel(hub, "push", connect=[consumer.welcome.rollouts])
        sent: list[list[bytes]] = []
        for number in range(5):
            ticket = worker.next_ticket()
            assert ticket is not None
            made = Rollout(ticket.ticket_id, "w0", (marked_episode(number, 5),), 1, 0.25)
            report, nbytes = plan_rollout(made, worker.schema.fields)
            payload = bytearray(nbytes)
            pack_rollout(made, report, memoryview(payload))
            sent.append([encode_report(report), bytes(payload)])
            for _ in range(3):
                worker.send(list(sent[-1]))
                push(stranger, list(sent[-1]))
                push(stranger, [encode_report(TicketStarted("w0", ticket.ticket_id))])
            while (verdict := worker.verdict()).ticket_id != ticket.ticket_id:
                pass
            assert verdict.outcome == "accepted"
        for frames in sent:
            push(stranger, list(frames))
        worker.work(2, length=5)
        until = time.monotonic() + 10.0
        while (stats := consumer.ask(GetStats())).successful_episodes < 7:  # type: ignore[union-attr]
            assert time.monotonic() < until
        assert isinstance(stats, Stats)
        assert stats.successful_episodes == 7
        request = encode_request(5, 5.0, GetStats())
        for _ in range(5):
            push(consumer.channel, [request])
            assert consumer.channel.wait(10.0)
            assert decode_answer((consumer.channel.receive() or [b""])[0])[0] == 5
