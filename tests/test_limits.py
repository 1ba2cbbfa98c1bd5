"""Every limit, by its name: what is over it is refused, with the size and the limit, before it costs anything (C43).

The limits stand in one place (``core.requests.Limits``), are settings, and are told to every peer in its welcome.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.episode import Rollout
from ods_async.core.events import MessageRejected, WorkerFailure
from ods_async.core.reports import Hello
from ods_async.core.requests import Connect, FieldDescription, GetStats, Limits, Sample, Stats, WaitGeneration, Welcome
from ods_async.core.schema import RECORDED, FieldSpec
from ods_async.errors import ArgumentError, LimitExceededError, OdsError, ProtocolError
from ods_async.testing.broker import run_broker
from ods_async.testing.in_memory import InMemoryBroker
from ods_async.testing.peers import RawConsumer, RawWorker, marked_episode
from ods_async.transport.sockets import ChannelOptions, Hub, open_channel
from ods_async.transport.watch import watch_connection
from ods_async.wire.codec import decode_report, decode_request, encode_report, encode_request
from ods_async.wire.messages import PROTOCOL
from ods_async.wire.rollout import plan_rollout, unpack_rollout


def ready(**limits: int) -> InMemoryBroker:
    broker = InMemoryBroker(limits=Limits(**limits))
    broker.join()
    broker.fill()
    broker.connect()
    return broker


def refused(broker: InMemoryBroker, sample: Any, what: str, size: int, limit: int) -> None:
    before = broker.get(GetStats())
    with pytest.raises(LimitExceededError) as caught:
        broker.get(sample)
    assert (caught.value.what, caught.value.size, caught.value.limit) == (what, size, limit)
    after = broker.get(GetStats())
    assert (after.sampled_chunks, after.extra["open_leases"]) == (before.sampled_chunks, before.extra["open_leases"])


def batch_windows() -> None:
    broker = ready(batch_windows=7)
    broker.get(Sample(7, 2))
    with pytest.raises(ArgumentError, match=r"batch_size.*7"):
        broker.get(Sample(8, 2))


def plans_per_request() -> None:
    broker = ready(plans_per_request=3)
    broker.get(Sample(2, 2, count=3))
    with pytest.raises(ArgumentError, match=r"count.*3"):
        broker.get(Sample(2, 2, count=4))


def batch_bytes() -> None:
    broker = ready(batch_bytes=1000)
    with pytest.raises(LimitExceededError) as caught:
        broker.get(Sample(50, 8, frame=True))
    assert caught.value.limit == 1000 < caught.value.size
    assert not broker.frames, "nothing was gathered"


def leases_per_session() -> None:
    broker = ready(leases_per_session=3)
    broker.get(Sample(2, 2, count=3))
    refused(broker, Sample(2, 2), "leases_per_session", 4, 3)
    broker.connect(b"another")
    broker.get(Sample(2, 2, count=3), b"another")


def parked_per_session() -> None:
    broker = InMemoryBroker(limits=Limits(parked_per_session=2))
    broker.connect()
    for _ in range(2):
        assert broker.get(WaitGeneration(1)) is None
    refused(broker, WaitGeneration(1), "parked_per_session", 3, 2)
    refused(broker, Sample(2, 2), "parked_per_session", 3, 2)
    broker.connect(b"another")
    assert broker.get(WaitGeneration(1), b"another") is None


def sessions() -> None:
    """The oldest is forgotten; what all of them may have waiting, and how many workers there are, is bounded too."""
    broker = InMemoryBroker(limits=Limits(sessions=3, parked_per_session=2))
    for number in range(9):
        who = b"c%d" % number
        broker.connect(who)
        if number < 6:
            assert broker.get(WaitGeneration(1), who) is None
        else:
            with pytest.raises(LimitExceededError, match="3 sessions"):
                broker.get(WaitGeneration(1), who)
        assert broker.get(GetStats(), who).extra["sessions"] <= 3
    for number in range(9):
        broker.join(f"w{number}", pid=number)
    assert broker.state.run.roster.present == 3
    assert "one more worker" in broker.events_of(MessageRejected)[0].reason


def _hello(fields: tuple[FieldSpec, ...]) -> Hello:
    described = tuple(FieldDescription(f.path, f.dtype, f.shape, f.pad, 0) for f in fields + RECORDED)
    return Hello("w9", 9, "host", 1, described, "env")


def schema_fields() -> None:
    """In a worker's hello, in a rollout at the sender, and in one at the receiver."""
    most = len(RECORDED) + 2
    broker = InMemoryBroker(limits=Limits(schema_fields=most))
    many = tuple(FieldSpec(("obs", f"f{index}"), "float32") for index in range(3))
    broker.report(_hello(many))
    assert f"{most + 1} fields, the broker takes at most {most} (schema_fields)" in (
        broker.events_of(WorkerFailure)[0].message
    )
    assert broker.layout is None, "no buffer was made of it"
    broker.report(_hello(many[:2]))
    assert broker.layout is not None
    _rollout_over("schema_fields", len(RECORDED) + 3, Limits(schema_fields=len(RECORDED) + 2))


def episodes_per_rollout() -> None:
    _rollout_over("episodes_per_rollout", 3, Limits(episodes_per_rollout=2), episodes=3)


def rollout_bytes() -> None:
    _rollout_over("rollout_bytes", None, Limits(rollout_bytes=100))


def _rollout_over(name: str, size: int | None, limits: Limits, episodes: int = 1) -> None:
    """A rollout that the sender itself refuses, and, from a sender without manners, the receiver."""
    rollout = Rollout(5, "w0", tuple(marked_episode(mark, 6) for mark in range(episodes)), 1, 0.5)
    fields = tuple(FieldDescription(f.path, f.dtype, f.shape, f.pad, 0) for f in _small())
    with pytest.raises(LimitExceededError, match=name) as caught:
        plan_rollout(rollout, fields, limits)
    assert size is None or caught.value.size == size
    report, nbytes = plan_rollout(rollout, fields)
    tracemalloc.start()
    with pytest.raises((LimitExceededError, ProtocolError)):
        unpack_rollout(report, memoryview(bytearray(nbytes)), limits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def _small() -> tuple[FieldSpec, ...]:
    from ods_async.testing.peers import SMALL_FIELDS

    return (*SMALL_FIELDS, *RECORDED)


def nesting() -> None:
    deep = tuple(f"level{index}" for index in range(5))
    broker = InMemoryBroker(limits=Limits(nesting=4))
    broker.report(_hello((FieldSpec(deep, "float32"),)))
    assert "5 levels of fields, the broker takes at most 4 (nesting)" in broker.events_of(WorkerFailure)[0].message
    tree: object = 1
    for _ in range(6):
        tree = [tree]
    episode = dataclasses.replace(marked_episode(1, 6), metadata={"deep": tree})
    rollout = Rollout(5, "w0", (episode,), 1, 0.5)
    report, _ = plan_rollout(rollout, tuple(FieldDescription(f.path, f.dtype, f.shape, f.pad, 0) for f in _small()))
    with pytest.raises(OdsError, match=r"deep|nest|level"):
        encode_report(report, Limits(nesting=4))
    with pytest.raises(ProtocolError):
        decode_report(encode_report(report), Limits(nesting=4))


def text_bytes() -> None:
    name = "n" * 300
    data = encode_request(1, 1.0, Connect("ipc://x", "consumer", name, PROTOCOL))
    with pytest.raises(ProtocolError):
        decode_request(data, Limits(text_bytes=256))
    with pytest.raises(LimitExceededError) as caught:
        encode_request(1, 1.0, Connect("ipc://x", "consumer", name, PROTOCOL), Limits(text_bytes=256))
    assert (caught.value.size, caught.value.limit) == (300, 256)


def header_bytes() -> None:
    """The plans of a request, before anything is drawn; and any message, in the codec."""
    broker = ready(header_bytes=65_536)
    broker.get(Sample(4096, 2))
    refused(broker, Sample(4097, 2), "header_bytes", 4097 * 16, 65_536)
    refused(broker, Sample(1366, 3, history=2, horizon=2, count=2), "header_bytes", 2 * 1366 * 24, 65_536)
    small = Limits(header_bytes=100)
    request = Connect("ipc://x", "consumer", "n" * 100, PROTOCOL)
    with pytest.raises(LimitExceededError) as caught:
        encode_request(1, 1.0, request, small)
    assert caught.value.limit == 100
    with pytest.raises(ProtocolError, match="at most 100"):
        decode_request(encode_request(1, 1.0, request), small)


CHECKS: list[Callable[[], None]] = [
    header_bytes,
    rollout_bytes,
    batch_bytes,
    batch_windows,
    plans_per_request,
    parked_per_session,
    sessions,
    schema_fields,
    nesting,
    text_bytes,
    episodes_per_rollout,
    leases_per_session,
]


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_over_the_limit_is_refused(check: Callable[[], None]) -> None:
    """C43"""
    check()


def test_every_limit_is_tried_here() -> None:
    assert [check.__name__ for check in CHECKS] == [field.name for field in dataclasses.fields(Limits)]


SMALL = OnlineDataEngineCfg(
    buffer_size=2,
    max_episode_steps=11,
    refill_policy="manual",
    limits={"header_bytes": 65_536, "rollout_bytes": 100_000, "text_bytes": 1024},
)


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[Any, Limits]]:
    """A broker with small limits."""
    with run_broker(SMALL) as broker:
        yield broker, Limits(**SMALL.limits)


def test_limits_are_told_to_every_peer(small: tuple[Any, Limits]) -> None:
    """C43: so that a sender refuses by itself what would vanish on the way."""
    broker, limits = small
    with RawConsumer(broker.endpoint) as consumer:
        welcome = consumer.ask(Connect(broker.endpoint, "consumer", "x", PROTOCOL))
        assert isinstance(welcome, Welcome)
        assert welcome.limits == limits


@pytest.mark.parametrize("socket", ["requests", "rollouts"])
def test_a_message_over_the_limit_of_its_socket_cuts_its_sender_off_and_nobody_else(
    small: tuple[Any, Limits], socket: str
) -> None:
    """C43: zmq drops the connection at the frame's announced size, before there is memory for it."""
    broker, limits = small
    with RawConsumer(broker.endpoint) as other, Hub() as hub:
        kind, address = ("req", broker.endpoint) if socket == "requests" else ("push", other.welcome.rollouts)
        size = limits.header_bytes + 1 if socket == "requests" else limits.rollout_bytes + 3 * 1024 * 1024
        channel = open_channel(hub, kind, connect=[address], options=ChannelOptions(watched=True))  # type: ignore[arg-type]
        watch = watch_connection(channel)
        assert channel.wait(5.0, write=True)
        assert channel.send([np.zeros(size, np.uint8).data])
        while not watch.disconnects:
            assert channel.wait(0.02) is False
            watch.poll()
        assert isinstance(other.ask(GetStats()), Stats)


def test_a_rollout_over_the_limit_is_refused_by_its_sender_and_the_next_is_taken() -> None:
    """C43: 'the oversize push vanishes, the sender sees nothing' must not be."""
    fields = (FieldSpec(("obs", "big"), "float64", (5000,)),)
    with run_broker(SMALL) as broker, RawWorker(broker.endpoint, fields=fields) as worker:
        ticket = worker.next_ticket()
        assert ticket is not None
        rollout = Rollout(ticket.ticket_id, "w0", (marked_episode(1, 6, fields),), 1, 0.5)
        with pytest.raises(LimitExceededError) as caught:
            plan_rollout(rollout, worker.schema.fields, worker.welcome.limits)
        assert caught.value.limit == 100_000 < caught.value.size
        worker.hand_in(ticket.ticket_id, marked_episode(1, 6, fields))  # without manners, but below zmq's own limit
        assert worker.verdict().outcome == "refused"
        worker.work(1, 2)  # the same unit, ordered anew
        assert worker.verdict().outcome == "accepted"
