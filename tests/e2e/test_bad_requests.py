"""Requests that cannot be: each gets its one answer, in time, and nobody else notices (C12)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from tensordict import TensorDict

from ods_async import AsyncClient, ChunkSizeSampler, Client, OnlineDataEngineCfg, OnlineDataset
from ods_async.core.requests import GetStatus, Plans, Sample, ServiceStatus
from ods_async.errors import ArgumentError, LimitExceededError, OdsError, ProtocolError
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.peers import RawConsumer, RawWorker
from ods_async.wire.codec import decode_answer, encode_request

STEPS = 9


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    cfg = OnlineDataEngineCfg(buffer_size=3, max_episode_steps=STEPS, refill_policy="manual")
    with run_broker(cfg, ipc=True) as running:
        with RawWorker(running.endpoint) as worker, Client(running.endpoint) as client:
            worker.work(3, length=6)
            client.wait_ready()
        yield running
        assert running.counts.get("faults", 0) == 0


BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "batch size 0": (lambda c: c.sample_batch(0, 3), ArgumentError, "batch_size must be .*1.*got 0"),
    "batch size -1": (lambda c: c.sample_batch(-1, 3), ArgumentError, "batch_size.*-1"),
    "batch size 10**9": (lambda c: c.sample_batch(10**9, 3), OdsError, "batch|1000000000"),
    "batch size two": (lambda c: c.sample_batch("two", 3), ArgumentError, "batch_size must be an integer, got 'two'"),
    "window too long": (
        lambda c: c.sample_batch(2, STEPS + 1),
        ArgumentError,
        f"chunk_size.* from 1 to {STEPS} .*got {STEPS + 1}",
    ),
    "unknown sampler": (
        lambda c: c.sample_batch(2, 3, "weighted"),
        ArgumentError,
        "sampling_mode must be one of 'episode', .*got 'weighted'",
    ),
    "unknown fields": (lambda c: c.sample_batch(2, 3, fields=["obs"]), TypeError, "fields"),
    "unknown operation": (lambda c: c.resample(2, 3), AttributeError, "resample"),
    "unknown device": (lambda c: c.sample_batch(2, 3, device="toaster"), ArgumentError, "device.*toaster"),
    "history 0": (lambda c: c.sample_batch_with_context(2, 0, 3), ArgumentError, "history_length.*0"),
    "endless context": (
        lambda c: c.sample_batch_with_context(2, 1, 2**40),
        ArgumentError,
        "prediction_horizon.*got 1099",
    ),
    "unknown generation": (lambda c: c.wait_for_generation(7), ArgumentError, "generation 7 was never requested"),
}


def good(batch: TensorDict) -> bool:
    return batch.batch_size == (2, 3) and bool((batch["obs", "mark"].diff(dim=1) == 1).all())


@pytest.mark.parametrize("path", ["shared_memory", "frames"])
def test_c12_every_bad_request_is_answered_with_what_is_allowed_and_the_next_good_ones_succeed(
    broker: RunningBroker, path: str
) -> None:
    """C12: from the same client, from another one, and from one that waits in asyncio beside them."""
    with Client(broker.endpoint, data_path=path) as client, Client(broker.endpoints[1]) as other:
        other.sample_batch(2, 3)
        for name, (ask, kind, words) in BAD.items():
            began = time.monotonic()
            with pytest.raises(kind, match=words):
                ask(client)
            assert time.monotonic() - began < 10.0, name
            assert good(client.sample_batch(2, 3)), name
            assert good(other.sample_batch(2, 3)), name


async def test_c12_the_same_from_an_asyncio_client_beside_good_requests_under_way(broker: RunningBroker) -> None:
    async with AsyncClient(broker.endpoint) as client, AsyncClient(broker.endpoint) as other:
        for ask, kind, words in BAD.values():

            async def bad(ask: Callable[[Any], Any] = ask) -> None:
                await ask(client)

            outcomes = await asyncio.gather(
                bad(), client.sample_batch(2, 3), other.sample_batch(2, 3), return_exceptions=True
            )
            assert isinstance(outcomes[0], kind)
            with pytest.raises(kind, match=words):
                raise outcomes[0]
            assert [good(batch) for batch in outcomes[1:]] == [True, True]


def edited(change: Callable[[list[Any]], object]) -> bytes:
    """A valid request to sample, changed on the wire: ``[protocol, id, time-out, tag, fields]``."""
    tree = msgpack.unpackb(encode_request(5, 9.0, Sample(2, 3)), use_list=True)
    change(tree)
    return msgpack.packb(tree)  # type: ignore[no-any-return]


RAW: dict[str, tuple[Callable[[list[Any]], object], type[OdsError], str]] = {
    "batch size two": (lambda t: t[4].__setitem__(0, "two"), ProtocolError, "batch_size"),
    "batch size 2.0": (lambda t: t[4].__setitem__(0, 2.0), ProtocolError, "batch_size"),
    "batch size true": (lambda t: t[4].__setitem__(0, True), ProtocolError, "batch_size"),
    "batch size 0": (lambda t: t[4].__setitem__(0, 0), ArgumentError, "batch_size"),
    "batch size 10**9": (lambda t: t[4].__setitem__(0, 10**9), OdsError, "1000000000"),
    "unknown sampler": (
        lambda t: t[4].__setitem__(2, "weighted"),
        ArgumentError,
        "sampling_mode must be one of 'episode'",
    ),
    "window too long": (lambda t: t[4].__setitem__(1, STEPS + 1), ArgumentError, f"{STEPS}"),
    "one field more": (lambda t: t[4].append(["obs"]), ProtocolError, "field"),
    "one field less": (lambda t: t[4].pop(), ProtocolError, "field"),
    "unknown operation": (lambda t: t.__setitem__(3, "Resample"), ProtocolError, "Resample"),
    "an answer": (lambda t: t.__setitem__(3, "Plans"), ProtocolError, "Plans"),
    "another protocol": (lambda t: t.__setitem__(0, 999), ProtocolError, "999"),
    "plans and frames": (lambda t: t[4].__setitem__(7, 10**9), OdsError, "count|1000000000"),
}


def test_c12_what_our_own_clients_cannot_even_say_is_answered_too(broker: RunningBroker) -> None:
    """C12: requests made by hand; the asker's socket and another's are served after each."""
    with RawConsumer(broker.endpoint) as asker, RawConsumer(broker.endpoint) as other:
        for name, (change, kind, words) in RAW.items():
            assert asker.channel.wait(10.0, write=True)
            assert asker.channel.send([edited(change)])
            assert asker.channel.wait(10.0), f"{name}: no answer"
            _, answer = decode_answer((asker.channel.receive() or [b""])[0])
            assert isinstance(answer, kind), f"{name}: {answer!r}"
            with pytest.raises(kind, match=words):
                raise answer
            for consumer in (asker, other):
                assert isinstance(consumer.ask(Sample(2, 3)), Plans), name
        status = other.ask(GetStatus())
        assert isinstance(status, ServiceStatus)
        assert status.malformed_messages >= 8


class Raising(ChunkSizeSampler):
    """Fails at its second draw, as somebody's own plug-in may, and asks for the impossible at its third."""

    def __init__(self) -> None:
        self.sizes = iter((3, None, 10**6, 3))

    def draw(self, rng: np.random.Generator) -> int:
        size = next(self.sizes)
        if size is None:
            raise ZeroDivisionError("in the plug-in")
        return size


def test_c12_a_plug_in_that_raises_fails_its_own_draw_and_nothing_else(broker: RunningBroker) -> None:
    """C12: a sampler of chunk sizes and a transform; the iteration goes on, and so does everybody else."""
    with Client(broker.endpoint) as other:
        before = other.get_status()["open_leases"]
        items = iter(OnlineDataset(broker.endpoint, Raising(), 2))
        assert good(next(items))
        with pytest.raises(ZeroDivisionError, match="in the plug-in"):
            next(items)
        with pytest.raises((ArgumentError, LimitExceededError), match="1000000"):
            next(items)
        assert good(next(items))
        items.close()
        turns = iter((1, 0, 1))
        transformed = iter(OnlineDataset(broker.endpoint, 3, 2, transform=lambda item: 1 / next(turns)))
        assert next(transformed) == 1.0
        with pytest.raises(ZeroDivisionError):
            next(transformed)
        assert next(transformed) == 1.0
        transformed.close()
        assert good(other.sample_batch(2, 3))
        assert other.get_status()["open_leases"] <= before
