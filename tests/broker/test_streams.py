"""A worker that never pauses, consumers that never pause, and a subscriber that watches."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from ods_async.broker.service import Broker
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.events import EpisodeEvicted, EpisodePublished, Event
from ods_async.core.gather import gather_into
from ods_async.core.memory import BatchLayout, SegmentLayout
from ods_async.core.reports import ServiceBeat, ShutDown
from ods_async.core.requests import (
    Batch,
    BufferDescription,
    Describe,
    GetStats,
    Plans,
    Release,
    Sample,
    Stats,
    WaitReady,
)
from ods_async.core.schema import FieldSpec
from ods_async.core.window_plan import WindowPlan
from ods_async.testing.broker import run_broker
from ods_async.testing.peers import RawConsumer, RawWorker
from ods_async.transport.shm import attach_segment
from ods_async.transport.sockets import ChannelOptions, Hub, open_channel
from ods_async.wire.codec import decode_broadcast

FIELDS = (FieldSpec(("obs", "image"), "uint8", (24, 20, 3)), FieldSpec(("obs", "mark"), "int64"))
BATCHES = 150


def whole(image: np.ndarray, marks: np.ndarray) -> bool:
    """Whether every window holds one episode, step after step."""
    consecutive = np.array_equal(marks - marks[:, :1], np.broadcast_to(np.arange(marks.shape[1]), marks.shape))
    return consecutive and bool((image == (marks // 1000 % 251)[..., None, None, None].astype(np.uint8)).all())


@pytest.mark.parametrize("path", ["plan", "frame"])
def test_no_window_is_torn_while_episodes_are_replaced_all_the_time(path: str) -> None:
    """Law 3, B20: rows move only when nobody reads them; a reader who was too slow sees it by the stamp."""
    cfg = OnlineDataEngineCfg(
        buffer_size=5, max_episode_steps=19, refill_policy="continuous", gym_config={"num_envs": 2}
    )
    with (
        run_broker(cfg) as broker,
        RawConsumer(broker.endpoint) as consumer,
        RawWorker(broker.endpoint, fields=FIELDS, num_envs=2) as worker,
    ):
        worker.work_in_background(length=13)
        consumer.ask(WaitReady())
        described = consumer.ask(Describe())
        assert isinstance(described, BufferDescription)
        layout = SegmentLayout.from_description(described)
        batch = BatchLayout.of(layout.schema, 16, 9, context=False)
        memory = bytearray(batch.nbytes)
        assert described.segment is not None
        with attach_segment(described.segment, described.segment_bytes, described.token) as segment:
            arrays, stamps = layout.arrays(segment.buffer), layout.stamps(segment.buffer)
            checked = 0
            while checked < BATCHES:
                answer = consumer.ask(Sample(16, 9, frame=path == "frame"))
                if isinstance(answer, Plans):
                    windows, expected = WindowPlan.from_message(answer.plans[0], layout.rows, layout.steps)
                    views = batch.views(memory)
                    gather_into(arrays, windows, views)
                    unchanged = np.array_equal(stamps[windows.rows], expected)
                    consumer.send(Release((answer.plans[0].lease_id,)))
                    assert unchanged, "a leased row was written to"
                else:
                    assert consumer.payload is not None
                    views = batch.views(consumer.payload)
                assert whole(views["obs", "image"], views["obs", "mark"])
                checked += 1
            del arrays, stamps
        stats = consumer.ask(GetStats())
        assert isinstance(stats, Stats)
        assert stats.sampled_chunks == BATCHES * 16
        assert broker.counts.get("faults", 0) == 0


def test_a_subscriber_hears_numbered_events_and_beats_and_the_end() -> None:
    """B41, C42: sequence numbers without gaps, a beat each interval with the next number, and the order to end."""
    cfg = OnlineDataEngineCfg(buffer_size=3, max_episode_steps=9, refill_policy="manual", heartbeat_interval=0.05)
    heard: list[object] = []
    beats: list[float] = []
    with Hub() as hub:
        with run_broker(cfg) as broker, RawConsumer(broker.endpoint) as consumer:
            news = open_channel(hub, "sub", connect=[consumer.welcome.events], options=ChannelOptions(topics=(b"",)))
            stopped = threading.Event()

            def listen() -> None:
                until = time.monotonic() + 20
                while time.monotonic() < until and not stopped.is_set():
                    if news.wait(0.05) and (frames := news.receive()) is not None:
                        what = decode_broadcast(frames[0], frames[1])
                        heard.append(what)
                        if isinstance(what, ServiceBeat):
                            beats.append(time.monotonic())
                        if isinstance(what, ShutDown):
                            break

            listener = threading.Thread(target=listen)
            listener.start()
            while len(beats) < 2:
                consumer.ask(GetStats())
            with RawWorker(broker.endpoint) as worker:
                worker.work(3, length=5)
                consumer.ask(WaitReady())
                while len(beats) < 8:
                    consumer.ask(GetStats())
            broker.stop(0.0)
            listener.join()
            stopped.set()
        news.close()
    events = [what for what in heard if isinstance(what, Event)]
    sequences = [event.sequence for event in events]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
    assert sum(isinstance(event, EpisodePublished) for event in events) == 3
    assert not any(isinstance(event, EpisodeEvicted) for event in events)
    beat = [what for what in heard if isinstance(what, ServiceBeat)][-1]
    assert beat.run_id == broker.run_id
    assert np.median(np.diff(beats)) < 0.25
    assert isinstance(heard[-1], ShutDown)


async def test_large_rollouts_and_frames_do_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """53 MB in, 57 MB out: no turn of the loop does the copying (which into fresh memory takes 40 ms)."""
    turns: list[float] = []
    run = asyncio.events.Handle._run  # type: ignore[attr-defined]

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        turns.append(time.thread_time() - began)

    image = (FieldSpec(("obs", "image"), "uint8", (96, 96, 3)), FieldSpec(("obs", "mark"), "int64"))
    cfg = OnlineDataEngineCfg(
        buffer_size=8, max_episode_steps=243, refill_policy="manual", spare_rows=8, gym_config={"num_envs": 8}
    )

    def play(endpoint: str) -> None:
        with RawConsumer(endpoint) as consumer, RawWorker(endpoint, fields=image, num_envs=8) as worker:
            worker.work(1, length=240)
            consumer.ask(WaitReady())
            for _ in range(3):
                assert isinstance(consumer.ask(Sample(64, 32, frame=True)), Batch)

    async with Broker(cfg, endpoints=["tcp://127.0.0.1:0"]) as broker:
        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
        await asyncio.to_thread(play, broker.endpoint)
        monkeypatch.undo()
    assert len(turns) > 10
    assert max(turns) < 0.02
