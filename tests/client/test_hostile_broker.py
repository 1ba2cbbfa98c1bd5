"""What a broken or false broker may answer: every call ends in time with an error of ours, and nothing is believed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from ods_async.client.sync import Client
from ods_async.core.requests import Answer, Batch, BufferDescription, Plan, Plans, Welcome
from ods_async.core.stimuli import Peer
from ods_async.errors import OdsError, ProtocolError, SharedMemoryError
from ods_async.testing.trial.mutation import mutate_bytes, mutate_tree
from ods_async.transport.sockets import join_envelope
from ods_async.wire.codec import encode_answer
from tests.client.peer import Service

TIMEOUT = 2.0
SLACK = 4.0


class Liar(Service):
    """A service whose answers are changed on their way out, as objects or as bytes, while ``lie`` says so."""

    lie: Callable[[Any], Any] | None = None
    garble: Callable[[bytes], list[bytes]] | None = None

    def send(self, peer: Peer, request_id: int, answer: Answer | OdsError, payload: bytes | None = None) -> None:
        if self.lie is not None:
            answer = self.lie(answer)
            if isinstance(answer, tuple):
                answer, payload = answer
        if self.garble is None:
            super().send(peer, request_id, answer, payload)
        else:
            self.router.send(join_envelope(peer, self.garble(encode_answer(request_id, answer))))


@pytest.fixture(params=["shared_memory", "frames"])
def liar(request: pytest.FixtureRequest) -> Iterator[tuple[Liar, Client]]:
    with Liar() as service, Client(service.endpoint, data_path=request.param, timeout=20.0) as client:
        yield service, client


def ended_in_time(call: Callable[[], Any]) -> Any:
    """The result, or the error; never anything but an error of ours, and never late."""
    begun = time.monotonic()
    try:
        return call()
    except OdsError as error:
        return error
    finally:
        assert time.monotonic() - begun < TIMEOUT + SLACK


def test_c45_garbled_answers_end_every_call_and_the_next_good_one_is_taken(liar: tuple[Liar, Client]) -> None:
    """Noise, cut and flipped bytes, changed values, 0, 1 and 50 frames, for hello, buffer, batches and figures."""
    service, client = liar
    rng = random.Random(5)

    def garble(data: bytes) -> list[bytes]:
        kind = rng.randrange(6)
        if kind == 0:
            return rng.choice(([b""], [b"x"] * 50, [b"GET / HTTP/1.1\r\n\r\n"], [rng.randbytes(70)], [b"\x91" * 9000]))
        if kind == 1:
            return [data, *[b"y" * 100] * rng.randint(1, 3)]
        return [mutate_tree(data, rng) if kind < 4 else mutate_bytes(data, rng, data)]

    failed = 0
    for number in range(40):
        service.garble = garble
        fresh = Client(service.endpoint, data_path=client._data_path, timeout=TIMEOUT, connect_timeout=TIMEOUT)
        for victim in (fresh, client) if number % 4 == 0 else (client,):
            call = rng.choice((lambda c: c.sample_batch(4, 3, timeout=0.3), lambda c: c.get_stats(timeout=0.3)))
            failed += isinstance(ended_in_time(lambda v=victim, c=call: c(v)), OdsError)
        fresh.close()
        service.garble = None
        for _ in range(3):  # what was garbled may have said that the run has changed, or that the service has ended
            with contextlib.suppress(OdsError):
                assert tuple(client.sample_batch(4, 3).batch_size) == (4, 3)
                break
        else:
            raise AssertionError("the client does not recover from garbage")
    assert failed > 10


class Trap:
    """Leaves a mark when a pickle of it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_c45_pickles_from_a_false_broker_are_never_loaded(liar: tuple[Liar, Client], tmp_path: Path) -> None:
    """As the answer, beside it as its payload, inside an extension type, and as the words of an error."""
    service, client = liar
    marker = tmp_path / "ran"
    trap = pickle.dumps(Trap(marker))
    pickle.loads(trap)
    assert marker.exists(), "the trap does not work: this test proves nothing"
    marker.unlink()
    words = trap.decode("latin-1")

    def extended(data: bytes) -> list[bytes]:
        protocol, number, *_ = msgpack.unpackb(data)
        return [msgpack.packb([protocol, number, "Done", [msgpack.ExtType(5, trap)]])]

    client.sample_batch(4, 3)
    for garble in (lambda _: [trap], lambda data: [data, trap], extended):
        service.garble = garble
        assert isinstance(ended_in_time(lambda: client.sample_batch(4, 3, timeout=0.3)), OdsError)
        service.garble = None
        assert tuple(client.sample_batch(4, 3).batch_size) == (4, 3)
    service.lie = lambda answer: OdsError(words)
    assert isinstance(ended_in_time(lambda: client.get_stats(timeout=0.3)), OdsError)
    assert not marker.exists()


def changed(cls: type[Any], **changes: Any) -> Callable[[Any], Any]:
    return lambda answer: dataclasses.replace(answer, **changes) if isinstance(answer, cls) else answer


def plan_with(change: Callable[[Plan], dict[str, Any]]) -> Callable[[Any], Any]:
    def lie(answer: Any) -> Any:
        if not isinstance(answer, Plans):
            return answer
        return dataclasses.replace(answer, plans=tuple(dataclasses.replace(p, **change(p)) for p in answer.plans))

    return lie


def ints(count: int, value: int, dtype: str = "<i4") -> bytes:
    return np.full(count, value, dtype).tobytes()


PLANS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "rows outside": lambda p: {"rows": ints(p.batch_size, 10**6)},
    "negative rows": lambda p: {"rows": ints(p.batch_size, -1)},
    "starts outside": lambda p: {"starts": ints(p.batch_size, 10**6)},
    "negative starts": lambda p: {"starts": ints(p.batch_size, -5)},
    "longer windows": lambda p: {"length": p.length + 1},
    "another size": lambda p: {
        "batch_size": 1,
        "rows": p.rows[:4],
        "starts": p.starts[:4],
        "stamps": p.stamps[:8],
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_c38_a_plan_that_points_outside_is_refused_and_nothing_is_read(name: str) -> None:
    with Liar() as service, Client(service.endpoint, data_path="shared_memory", timeout=TIMEOUT) as client:
        client.sample_batch(4, 3)
        service.lie = plan_with(PLANS[name])
        assert isinstance(ended_in_time(lambda: client.sample_batch(4, 3)), ProtocolError)
        service.lie = None
        assert tuple(client.sample_batch(4, 3).batch_size) == (4, 3)


@pytest.mark.parametrize("name", ["cut", "longer", "none", "other shape"])
def test_c38_a_frame_of_another_size_is_refused(name: str) -> None:
    def lie(answer: Any) -> Any:
        if not isinstance(answer, Batch):
            return answer
        size = answer.payload_bytes
        payload = {"cut": bytes(size - 1), "longer": bytes(size + 64), "none": None, "other shape": bytes(size)}[name]
        return (dataclasses.replace(answer, batch_size=5) if name == "other shape" else answer), payload

    with Liar() as service, Client(service.endpoint, data_path="frames", timeout=TIMEOUT) as client:
        client.sample_batch(4, 3)
        service.lie = lie
        assert isinstance(ended_in_time(lambda: client.sample_batch(4, 3)), ProtocolError)
        service.lie = None
        assert tuple(client.sample_batch(4, 3).batch_size) == (4, 3)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/dev/zero", "/dev/shm/../../etc/passwd", "relative", "", "\x00", "fifo"]
)
def test_c39_c45_a_segment_that_is_none_of_the_brokers_is_not_mapped(path: str, tmp_path: Path) -> None:
    """Whatever path a broker names: only memory with its token is used, and opening it never blocks."""
    if path == "fifo":
        path = str(tmp_path / "fifo")
        os.mkfifo(path)
    for data_path, expected in (("shared_memory", SharedMemoryError), ("auto", None)):
        with Liar() as service, Client(service.endpoint, data_path=data_path, timeout=TIMEOUT) as client:
            service.lie = changed(BufferDescription, segment=path)
            found = ended_in_time(lambda c=client: c.sample_batch(4, 3))
            if expected is None:
                assert tuple(found.batch_size) == (4, 3), "it comes as frames instead"
            else:
                assert isinstance(found, expected)


@pytest.mark.parametrize(
    "lie",
    [
        changed(Welcome, protocol=99),
        changed(Welcome, run_id=-1),
        changed(BufferDescription, rows=2**40),
        changed(BufferDescription, steps=2**40),
        changed(BufferDescription, token=b""),
        changed(BufferDescription, stamps_offset=2**50),
        changed(BufferDescription, fields=()),
        changed(BufferDescription, segment_bytes=2**61),
    ],
)
def test_c45_a_description_that_cannot_be_is_refused_or_not_used(lie: Callable[[Any], Any]) -> None:
    with Liar() as service, Client(service.endpoint, timeout=TIMEOUT, connect_timeout=TIMEOUT) as client:
        service.lie = lie
        found = ended_in_time(lambda: client.sample_batch(4, 3))
        assert isinstance(found, OdsError) or tuple(found.batch_size) == (4, 3)
