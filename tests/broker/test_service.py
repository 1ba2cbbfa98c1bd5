from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ods_async.broker import effects
from ods_async.broker.service import Broker
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.memory import BatchLayout, SegmentLayout
from ods_async.core.requests import (
    Batch,
    BufferDescription,
    Connect,
    Describe,
    Done,
    GenerationPromise,
    GetStats,
    GetStatus,
    Plans,
    Refill,
    Release,
    Sample,
    ServiceStatus,
    Stats,
    Stop,
    WaitGeneration,
    WaitReady,
    Welcome,
)
from ods_async.core.window_plan import WindowPlan
from ods_async.errors import (
    ArgumentError,
    ClosedError,
    DataUnavailableError,
    EndpointError,
    OdsError,
    OwnerOnlyError,
    RequestTimeoutError,
    SessionLostError,
    StateError,
)
from ods_async.testing.broker import run_broker
from ods_async.testing.peers import RawConsumer, RawWorker
from ods_async.transport.shm import attach_segment
from ods_async.wire.messages import PROTOCOL


def config(**changes: object) -> OnlineDataEngineCfg:
    settings: dict[str, object] = {
        "buffer_size": 4,
        "max_episode_steps": 11,
        "refill_policy": "manual",
        "heartbeat_interval": 0.1,
        "gym_config": {"num_envs": 1},
    }
    return OnlineDataEngineCfg(**(settings | changes))  # type: ignore[arg-type]


def test_a_run_from_the_first_ticket_to_a_plan_gathered_out_of_the_segment() -> None:
    """B14, B18, B20: a worker fills the buffer; a consumer maps it, and what its plan names is what was handed in."""
    with (
        run_broker(config()) as broker,
        RawConsumer(broker.endpoint) as consumer,
        RawWorker(broker.endpoint) as worker,
    ):
        worker.work(4)
        assert consumer.ask(WaitReady()) == Done()
        assert broker.state == "READY"
        described = consumer.ask(Describe())
        assert isinstance(described, BufferDescription)
        assert described.segment is not None
        layout = SegmentLayout.from_description(described)
        answer = consumer.ask(Sample(5, 3))
        assert isinstance(answer, Plans)
        (plan,) = answer.plans
        windows, stamps = WindowPlan.from_message(plan, layout.rows, layout.steps)
        with attach_segment(described.segment, described.segment_bytes, described.token) as segment:
            arrays = layout.arrays(segment.buffer)
            assert np.array_equal(layout.stamps(segment.buffer)[windows.rows], stamps)
            for row, start in zip(windows.rows, windows.starts, strict=True):
                marks = arrays["obs", "mark"][row, start : start + 3]
                assert np.array_equal(marks, marks[0] + np.arange(3))
                assert marks[0] % 1000 == start
                assert (arrays["obs", "state"][row, start : start + 3] == marks[0] // 1000).all()
                assert arrays["valid",][row, start : start + 3].all()
            del arrays
        consumer.send(Release((plan.lease_id,)))
        status = consumer.ask(GetStatus())
        assert isinstance(status, ServiceStatus)
        assert status.open_leases == 0
        assert not Path(described.segment).samefile("/dev/null")
    assert not Path(described.segment).exists()
    assert broker.counts.get("faults", 0) == 0


@pytest.mark.parametrize("in_parts", [False, True], ids=["at once", "by several threads"])
@pytest.mark.parametrize("shared_memory", ["on", "off"])
def test_a_frame_holds_the_same_windows_with_and_without_shared_memory(
    shared_memory: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B20, B25–B27: batches and contexts leave as one payload, laid out as BatchLayout says."""
    if in_parts:
        monkeypatch.setattr(effects, "INLINE_BYTES", 0)
        monkeypatch.setattr(effects, "SHARED_WORK_BYTES", 0)
    with (
        run_broker(config(shared_memory=shared_memory, gym_config={"num_envs": 2})) as broker,
        RawConsumer(broker.endpoint) as consumer,
        RawWorker(broker.endpoint, num_envs=2) as worker,
    ):
        worker.work(2)
        consumer.ask(WaitReady())
        described = consumer.ask(Describe())
        assert isinstance(described, BufferDescription)
        assert (described.segment is not None) == (shared_memory == "on")
        schema = SegmentLayout.from_description(described).schema

        batch = consumer.ask(Sample(6, 5, frame=True))
        assert isinstance(batch, Batch)
        assert consumer.payload is not None
        views = BatchLayout.of(schema, 6, 5, context=False).views(consumer.payload)
        assert views["valid",].all()
        marks = views["obs", "mark"]
        assert np.array_equal(marks - marks[:, :1], np.broadcast_to(np.arange(5), (6, 5)))
        assert np.array_equal(views["episode_step",], marks % 1000)

        context = consumer.ask(Sample(3, 9, history=4, horizon=6, frame=True))
        assert isinstance(context, Batch)
        assert context.history == 4
        views = BatchLayout.of(schema, 3, 9, context=True).views(consumer.payload)
        assert (views["episode_step",][~views["valid",]] == 0).all()
        assert (views["task_index",][~views["valid",]] == -1).all()
        assert views["valid",][:, 3].all()
        assert not views["loss_mask",][:, :3].any()
        status = consumer.ask(GetStatus())
        assert isinstance(status, ServiceStatus)
        assert status.open_leases == 0


def test_large_frames_use_their_memory_again() -> None:
    """A 4 MB batch: the pooled memory of the first answers comes back and serves the next ones."""
    from ods_async.core.schema import FieldSpec

    fields = (FieldSpec(("obs", "image"), "uint8", (64, 64, 3)), FieldSpec(("obs", "mark"), "int64"))
    with (
        run_broker(config()) as broker,
        RawConsumer(broker.endpoint) as consumer,
        RawWorker(broker.endpoint, fields=fields) as worker,
    ):
        worker.work(4)
        consumer.ask(WaitReady())
        described = consumer.ask(Describe())
        assert isinstance(described, BufferDescription)
        layout = BatchLayout.of(SegmentLayout.from_description(described).schema, 50, 7, context=False)
        for _ in range(12):
            consumer.ask(Sample(50, 7, frame=True))
            assert consumer.payload is not None
            views = layout.views(consumer.payload)
            assert (views["obs", "image"][:, 0, 0, 0, 0] == views["obs", "mark"][:, 0] // 1000).all()
        assert broker.counts.get("batches_refused", 0) == 0


def test_a_refill_replaces_every_episode_and_wakes_who_waits() -> None:
    """B18, B31, B32: the owner asks for a generation; whoever waits for it is answered when it is there."""
    with (
        run_broker(config()) as broker,
        RawConsumer(broker.endpoint) as owner,
        RawConsumer(broker.endpoint) as waiter,
        RawWorker(broker.endpoint) as worker,
    ):
        worker.work(4)
        owner.ask(WaitReady())
        with pytest.raises(OwnerOnlyError):
            owner.ask(Refill(b"guess"))
        assert owner.ask(Refill(broker.owner_token)) == GenerationPromise(2)
        number = waiter.send(WaitGeneration(2))
        worker.work(4)
        assert waiter.receive() == (number, Done())
        stats = owner.ask(GetStats())
        assert isinstance(stats, Stats)
        assert (stats.completed_generation, stats.successful_episodes) == (2, 8)
        assert [worker.verdict().outcome for _ in range(8)] == ["accepted"] * 8


def test_many_requests_wait_at_once_and_each_gets_one_answer_when_the_data_comes() -> None:
    """C12, C35: parked, not slept on; other requests are answered meanwhile."""
    with run_broker(config()) as broker, RawWorker(broker.endpoint) as worker, RawConsumer(broker.endpoint) as other:
        consumers = [RawConsumer(broker.endpoint) for _ in range(20)]
        try:
            numbers = [consumer.send(Sample(2, 3), 20.0) for consumer in consumers]
            assert isinstance(other.ask(GetStatus()), ServiceStatus)
            worker.work(4)
            for consumer, number in zip(consumers, numbers, strict=True):
                answered, answer = consumer.receive()
                assert answered == number
                assert isinstance(answer, Plans)
                assert not consumer.channel.wait(0.0)
        finally:
            for consumer in consumers:
                consumer.close()


def test_a_request_that_waits_in_vain_hears_at_its_deadline_what_is_missing() -> None:
    """C35: an empty buffer."""
    with (
        run_broker(config()) as broker,
        RawConsumer(broker.endpoint) as consumer,
        pytest.raises(RequestTimeoutError, match="0 of 4 episodes"),
    ):
        consumer.ask(Sample(2, 3), 0.1)


def test_stop_while_requests_wait_gives_each_exactly_one_answer() -> None:
    """Law 4: every request gets one answer, also when the service ends."""
    with run_broker(config()) as broker:
        consumers = [RawConsumer(broker.endpoint) for _ in range(10)]
        try:
            requests = [Sample(2, 3), WaitReady(), Describe(), WaitGeneration(1)]
            for index, consumer in enumerate(consumers):
                consumer.send(requests[index % len(requests)], 20.0)
            with RawConsumer(broker.endpoint) as asker:
                asker.ask(GetStatus())
            with ThreadPoolExecutor(len(consumers)) as threads:
                answers = [threads.submit(consumer.receive) for consumer in consumers]
                end = broker.stop(0.0)
                assert not end.failed
                assert all(isinstance(answer.result()[1], ClosedError) for answer in answers)
            assert not any(consumer.channel.wait(0.02) for consumer in consumers)
        finally:
            for consumer in consumers:
                consumer.close()
        assert broker.state == "STOPPED"
        assert broker.stop() == end


def test_the_owner_stops_it_over_the_wire() -> None:
    """B8, B13."""
    with run_broker(config()) as broker, RawConsumer(broker.endpoint) as consumer:
        with pytest.raises(OwnerOnlyError):
            consumer.ask(Stop(b"guess", 0.0))
        assert consumer.ask(Stop(broker.owner_token, 0.0)) == Done()
        consumer.ask(Stop(broker.owner_token, 0.0))
        assert not broker.wait_closed().failed


def test_errors_of_arguments_and_order_come_back_and_the_next_request_is_served() -> None:
    """B23, C12."""
    with (
        run_broker(config()) as broker,
        RawConsumer(broker.endpoint) as consumer,
        RawWorker(broker.endpoint) as worker,
    ):
        worker.work(4)
        consumer.ask(WaitReady())
        bad: list[tuple[Sample, type[OdsError]]] = [
            (Sample(0, 3), ArgumentError),
            (Sample(-1, 3), ArgumentError),
            (Sample(10**9, 3), OdsError),
            (Sample(2, 12), ArgumentError),
            (Sample(2, 3, "sideways"), ArgumentError),
            (Sample(2, 11), DataUnavailableError),
            (Sample(2, 3, frame=True, count=2), ArgumentError),
        ]
        for sample, kind in bad:
            with pytest.raises(kind):
                consumer.ask(sample)
        assert isinstance(consumer.ask(Sample(2, 3)), Plans)
        with RawConsumer(broker.endpoint, connect=False) as stranger, pytest.raises(SessionLostError):
            stranger.ask(GetStatus())
    assert broker.counts.get("faults", 0) == 0


def test_each_endpoint_names_the_sockets_beside_it() -> None:
    """C44: ports are filled in; the addresses suit the way a client came."""
    with run_broker(config(), ipc=True) as broker:
        tcp, ipc = broker.endpoints
        port = tcp.rsplit(":", 1)[1]
        assert port != "0"
        with RawConsumer(tcp) as consumer:
            told = consumer.welcome
            assert all(text.startswith("tcp://127.0.0.1:") for text in (told.tickets, told.rollouts, told.events))
            assert len({told.tickets, told.rollouts, told.events, tcp}) == 4
            named = consumer.ask(Connect(f"tcp://localhost:{port}", "consumer", "", PROTOCOL))
            assert isinstance(named, Welcome)
            assert named.tickets == told.tickets.replace("127.0.0.1", "localhost")
            elsewhere = consumer.ask(Connect("tcp://gateway:1234", "consumer", "", PROTOCOL))
            assert isinstance(elsewhere, Welcome)
            assert elsewhere.events == told.events.replace("127.0.0.1", "gateway")
        with RawConsumer(ipc) as consumer, RawWorker(ipc) as worker:
            assert consumer.welcome.rollouts.startswith(ipc)
            worker.work(4)
            assert consumer.ask(WaitReady()) == Done()


async def test_wrong_endpoints_are_refused_and_leave_nothing_open() -> None:
    """C44, C45: a wide bind needs the flag; a port that is taken says so."""
    with pytest.raises(EndpointError, match="allow_insecure_bind"):
        await Broker(config(), endpoints=["tcp://0.0.0.0:0"]).start()
    async with Broker(config(), endpoints=["tcp://127.0.0.1:0"]) as broker:
        again = Broker(config(), endpoints=[broker.endpoint])
        with pytest.raises(EndpointError):
            await again.start()
        assert again.state == "CREATED"
        with pytest.raises(StateError, match="start"):
            await broker.start()
    assert (await broker.wait_closed()).failed is False


async def test_it_may_be_stopped_before_it_was_started_and_more_than_once() -> None:
    """B8: stop is idempotent."""
    broker = Broker(config(), endpoints=["tcp://127.0.0.1:0"])
    assert not (await broker.stop()).failed
    async with Broker(config(), endpoints=["tcp://127.0.0.1:0"], run_id=77, owner_token=b"t" * 32) as broker:
        assert (broker.run_id, broker.owner_token) == (77, b"t" * 32)
        first, second = await asyncio.gather(broker.stop(0.0), broker.stop(0.0))
    assert first == second == await broker.wait_closed()


async def test_a_buffer_that_shared_memory_cannot_hold_fails_the_run_and_says_why() -> None:
    """C32: found at start, with sizes; every waiting request hears it."""
    from ods_async.core.schema import FieldSpec

    fields = (FieldSpec(("obs", "huge"), "float64", (2**31, 2**20)),)
    with run_broker(config(shared_memory="on")) as broker, RawConsumer(broker.endpoint) as consumer:
        worker = await asyncio.to_thread(lambda: RawWorker(broker.endpoint, fields=fields))
        with pytest.raises(OdsError, match="memory"):
            await asyncio.to_thread(lambda: consumer.ask(Describe()))
        assert broker.state == "FAILED"
        worker.close()


def test_several_brokers_live_side_by_side_in_one_process() -> None:
    """C47: each its own run, memory and sockets."""
    before = threading.active_count()
    with run_broker(config()) as one, run_broker(config()) as two:
        assert one.run_id != two.run_id
        for broker in (one, two):
            with RawWorker(broker.endpoint) as worker, RawConsumer(broker.endpoint) as consumer:
                worker.work(4)
                assert consumer.ask(WaitReady()) == Done()
    assert threading.active_count() == before


def test_the_broker_imports_neither_torch_nor_gymnasium() -> None:
    """Its process starts quickly and stays small."""
    code = (
        "import sys, ods_async.broker.service, ods_async.transport.allocator as a; a.keep_big_blocks();"
        "print([name for name in ('torch', 'tensordict', 'gymnasium') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


async def test_it_rests_when_nothing_happens() -> None:
    """Sockets that only send wake the loop when a peer comes or goes, and not for ever after."""
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select, turns = selector.select, []

    def counted(timeout: float | None = None) -> object:
        turns.append(timeout)
        return select(timeout)

    async with Broker(config(ticket_start_timeout=0.1), endpoints=["tcp://127.0.0.1:0"]) as broker:
        for _ in range(2):
            worker = await asyncio.to_thread(lambda: RawWorker(broker.endpoint))
            await asyncio.to_thread(worker.work, 1)
            await asyncio.to_thread(worker.close)
        selector.select = counted
        await asyncio.sleep(0.5)
        selector.select = select
    assert len(turns) < 100
