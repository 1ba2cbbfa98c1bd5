from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.broker_state import BrokerState
from ods_async.core.reports import Heartbeat
from ods_async.core.requests import Batch, Connect, Done, GetStats, GetStatus, Sample, ServiceStatus, WaitReady
from ods_async.core.schema import FieldSpec
from ods_async.errors import LimitExceededError, OdsError, ProtocolError
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.peers import RawConsumer, RawWorker, marked_episode
from ods_async.wire.codec import decode_answer, encode_report, encode_request
from ods_async.wire.messages import PROTOCOL
from ods_async.wire.rollout import plan_rollout


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    cfg = OnlineDataEngineCfg(
        buffer_size=3, max_episode_steps=9, refill_policy="manual", heartbeat_interval=0.1, limits={"text_bytes": 512}
    )
    with run_broker(cfg) as running:
        yield running
        assert running.counts.get("faults", 0) == 0


@pytest.fixture
def raw() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    opened: list[zmq.Socket[bytes]] = []
    with zmq.Context() as context:

        def make(kind: int, address: str, **options: int) -> zmq.Socket[bytes]:
            sock = context.socket(kind)
            opened.append(sock)
            sock.linger = 0
            sock.rcvtimeo = sock.sndtimeo = 5000
            for name, value in options.items():
                sock.set(getattr(zmq, name), value)
            sock.connect(address)
            return sock

        yield make
        for sock in opened:
            sock.close()


def malformed(consumer: RawConsumer, at_least: int) -> int:
    """The count of malformed messages, once it has reached ``at_least``."""
    until = time.monotonic() + 10
    while True:
        status = consumer.ask(GetStatus())
        assert isinstance(status, ServiceStatus)
        if status.malformed_messages >= at_least or time.monotonic() > until:
            return status.malformed_messages


def test_noise_on_the_answering_socket_is_counted_answered_and_survived(
    broker: RunningBroker, raw: Callable[..., zmq.Socket[bytes]], tmp_path: Path
) -> None:
    """C12, C45: no envelope, 0, 1, 50 frames, pickles, foreign msgpack; then an honest request from the same peer."""
    bomb = pickle.dumps(_Bomb(tmp_path / "marker"))
    dealer = raw(zmq.DEALER, broker.endpoint)
    answered = [
        [b""],
        [b"", b""],
        [b"", b"GET / HTTP/1.1"],
        [b"", bomb],
        [b"", *[b"x"] * 50],
        [b"", *[b"x"] * 500],
        [b"id", b"", b"\x93\x01\x02\x03"],
        [b"", b"\xdd\xff\xff\xff\xff"],
        [b"", encode_request(7, 1.0, GetStats()), b"a payload"],
        [b"", encode_request(7, 1.0, GetStats())[:-1] + b"\xc1"],
    ]
    for message in answered:
        dealer.send_multipart(message)
        reply = dealer.recv_multipart()
        assert reply[: message.index(b"") + 1] == message[: message.index(b"") + 1]
        assert isinstance(decode_answer(reply[-1])[1], ProtocolError)
    silent = [[b"no envelope"], [b"x"] * 50, [bomb]]
    for message in silent:
        dealer.send_multipart(message)
    with RawConsumer(broker.endpoint) as consumer:
        assert malformed(consumer, len(answered) + len(silent)) == len(answered) + len(silent)
    dealer.send_multipart([b"", encode_request(9, 1.0, Connect("tcp://x:1", "consumer", "", PROTOCOL))])
    dealer.recv_multipart()
    dealer.send_multipart([b"", encode_request(10, 1.0, GetStatus())])
    number, status = decode_answer(dealer.recv_multipart()[-1])
    assert number == 10
    assert isinstance(status, ServiceStatus)
    assert not (tmp_path / "marker").exists()


def test_noise_on_the_rollouts_socket_is_counted_and_a_broken_rollout_gets_a_verdict(
    broker: RunningBroker, raw: Callable[..., zmq.Socket[bytes]], tmp_path: Path
) -> None:
    """C12, C38, C45: after it the very same ticket's unit is made and published."""
    bomb = pickle.dumps(_Bomb(tmp_path / "marker"))
    with RawConsumer(broker.endpoint) as consumer, RawWorker(broker.endpoint) as worker:
        push = raw(zmq.PUSH, consumer.welcome.rollouts)
        noise = [
            [b""],
            [bomb],
            [b"x"] * 50,
            [encode_request(1, 1.0, GetStats())],
            [encode_report(Heartbeat("w0", "step", None, 3)), b"payload"],
            [b"\xc1" * 100_000],
        ]
        for message in noise:
            push.send_multipart(message)
        assert malformed(consumer, len(noise)) == len(noise)

        ticket = worker.next_ticket()
        assert ticket is not None
        from ods_async.core.episode import Rollout

        report, nbytes = plan_rollout(Rollout(ticket.ticket_id, "w0", (marked_episode(1, 5),)), worker.schema.fields)
        worker.send([encode_report(report), bytes(nbytes - 64)])
        verdict = worker.verdict()
        assert (verdict.ticket_id, verdict.outcome) == (ticket.ticket_id, "refused")
        assert str(nbytes) in verdict.reason
        assert str(nbytes - 64) in verdict.reason
        worker.work(3, length=5)
        assert consumer.ask(WaitReady()) == Done()
    assert not (tmp_path / "marker").exists()


def test_a_web_browser_at_any_port_is_counted_and_harms_nobody(broker: RunningBroker) -> None:
    """C45: bytes that are not even this transport."""
    with RawConsumer(broker.endpoint) as consumer:
        told = consumer.welcome
        for address in (broker.endpoint, told.tickets, told.rollouts, told.events):
            with socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])), 5) as browser:
                browser.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
                browser.shutdown(socket.SHUT_WR)
                while browser.recv(4096):  # until the broker hangs up
                    pass
        assert malformed(consumer, 4) >= 4


def test_a_consumer_that_asks_for_frames_and_reads_none_is_bounded_and_others_are_served(
    raw: Callable[..., zmq.Socket[bytes]],
) -> None:
    """Sends never block, unread batches are bounded per client, and every request still has its one answer."""
    cfg = OnlineDataEngineCfg(buffer_size=3, max_episode_steps=9, refill_policy="manual")
    image = (FieldSpec(("obs", "image"), "uint8", (200, 200, 3)),)
    asked = 30
    with (
        run_broker(cfg) as broker,
        RawConsumer(broker.endpoint) as consumer,
        RawWorker(broker.endpoint, fields=image) as worker,
    ):
        worker.work(3, length=5)
        consumer.ask(WaitReady())
        greedy = raw(zmq.DEALER, broker.endpoint, RCVHWM=1, RCVBUF=4096)
        greedy.send_multipart([b"", encode_request(1, 9.0, Connect("tcp://x:1", "consumer", "", PROTOCOL))])
        greedy.recv_multipart()
        for number in range(2, 2 + asked):
            greedy.send_multipart([b"", encode_request(number, 9.0, Sample(30, 4, frame=True))])
        until = time.monotonic() + 20
        while not broker.counts.get("batches_refused") and time.monotonic() < until:
            assert isinstance(consumer.ask(Sample(2, 4, frame=True)), Batch)
        assert broker.counts["batches_refused"] > 0
        answers = dict(decode_answer(greedy.recv_multipart()[1]) for _ in range(asked))
        assert answers.keys() == set(range(2, 2 + asked))
        kinds = {type(answer) for answer in answers.values()}
        assert kinds == {Batch, LimitExceededError}


def test_a_peer_that_left_costs_nothing_and_its_windows_are_taken_back(broker: RunningBroker) -> None:
    """An answer to a peer that is gone is dropped and counted; the leases end at once."""
    with RawConsumer(broker.endpoint) as consumer, RawWorker(broker.endpoint) as worker:
        with RawConsumer(broker.endpoint) as leaver:
            leaver.send(Sample(2, 3), 30.0)
            assert isinstance(leaver.ask(GetStatus()), ServiceStatus)
        until = time.monotonic() + 10
        worker.work(3, length=5)
        consumer.ask(WaitReady())
        while broker.counts.get("answers_dropped", 0) < 1 and time.monotonic() < until:
            consumer.ask(GetStatus())
        assert broker.counts["answers_dropped"] == 1
        status = consumer.ask(GetStatus())
        assert isinstance(status, ServiceStatus)
        assert status.open_leases == 0


def test_a_fault_in_the_broker_is_answered_counted_and_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: the state raises what it never should; its asker gets an error, the next request an answer."""
    handle = BrokerState.handle

    def faulty(self: BrokerState, stimulus: Any, now: Any) -> Any:
        if isinstance(getattr(stimulus, "request", None), GetStats):
            raise ZeroDivisionError("on purpose")
        return handle(self, stimulus, now)

    monkeypatch.setattr(BrokerState, "handle", faulty)
    with run_broker(OnlineDataEngineCfg(), ipc=True) as broker, RawConsumer(broker.endpoint) as consumer:
        with pytest.raises(OdsError, match="ZeroDivisionError: on purpose"):
            consumer.ask(GetStats())
        assert isinstance(consumer.ask(GetStatus()), ServiceStatus)
        assert broker.counts["faults"] == 1


def test_a_failed_write_gives_its_rows_back_and_the_rollout_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """B15: a rollout is published as a whole or not at all, whatever happens while it is written."""
    from ods_async.broker import effects

    write, calls = effects.write_rollout, []

    def faulty(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError("on purpose")
        return write(*args)

    monkeypatch.setattr(effects, "write_rollout", faulty)
    cfg = OnlineDataEngineCfg(buffer_size=3, max_episode_steps=9, refill_policy="manual")
    with (
        run_broker(cfg) as broker,
        RawConsumer(broker.endpoint) as consumer,
        RawWorker(broker.endpoint) as worker,
    ):
        worker.work(4, length=5)
        assert consumer.ask(WaitReady()) == Done()
        outcomes = [worker.verdict().outcome for _ in range(4)]
        assert sorted(outcomes) == ["accepted", "accepted", "accepted", "refused"]
        assert broker.counts["faults"] == 1
