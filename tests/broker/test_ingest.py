from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from ods_async.broker.ingest import BIG_HEADER_BYTES, Reports
from ods_async.core.episode import Episode, Rollout, recorded_schema
from ods_async.core.reports import Goodbye, Heartbeat
from ods_async.core.requests import Limits
from ods_async.core.stimuli import Malformed, Reported, RolloutArrived, Stimulus
from ods_async.testing.peers import SMALL_FIELDS, marked_episode
from ods_async.transport.sockets import Frame
from ods_async.wire.codec import encode_report
from ods_async.wire.rollout import pack_rollout, plan_rollout

LIMITS = Limits()


def rollout_frames(*episodes: Episode) -> list[Frame]:
    rollout = Rollout(31, "w0", episodes)
    report, nbytes = plan_rollout(rollout, recorded_schema(SMALL_FIELDS).fields)
    payload = bytearray(nbytes)
    pack_rollout(rollout, report, memoryview(payload))
    return [encode_report(report), memoryview(payload)]


async def test_a_goodbye_never_overtakes_the_big_rollout_before_it() -> None:
    """A worker that hands in its last rollout and exits loses nothing, however long the rollout takes to read."""
    heard: list[Stimulus] = []
    pauses: list[bool] = []
    readers: list[str] = []
    done = asyncio.Event()

    def feed(stimulus: Stimulus) -> None:
        heard.append(stimulus)
        if len(heard) == 4:
            done.set()

    async def in_thread(work: Callable[[], Stimulus]) -> Stimulus:
        def run() -> Stimulus:
            readers.append(threading.current_thread().name)
            return work()

        return await asyncio.to_thread(run)

    big = rollout_frames(*(marked_episode(index, 2 + index % 3) for index in range(1500)))
    assert len(big[0]) > BIG_HEADER_BYTES
    reports = Reports(feed, in_thread, pauses.append, LIMITS)
    reports.on_message([encode_report(Heartbeat("w0", "step", 31, 2))])
    assert len(heard) == 1
    reports.on_message(big)
    reports.on_message([encode_report(Heartbeat("w0", "idle", None, 3))])
    reports.on_message([encode_report(Goodbye("w0", "done"))])
    assert pauses == [True]
    await asyncio.wait_for(done.wait(), 20)
    await asyncio.sleep(0)
    assert [type(stimulus) for stimulus in heard] == [Reported, RolloutArrived, Reported, Reported]
    assert heard[3] == Reported(Goodbye("w0", "done"))
    assert isinstance(heard[1], RolloutArrived)
    assert heard[1].rollout.steps == 4500
    assert readers[0] != threading.main_thread().name
    assert pauses == [True, False]
    await reports.close()


async def test_arrays_of_a_rollout_are_views_of_the_received_frame() -> None:
    """Law 2: nothing is copied on the way in."""
    heard: list[Stimulus] = []

    async def in_thread(work: Callable[[], Stimulus]) -> Stimulus:
        return work()

    frames = rollout_frames(marked_episode(3, 5))
    Reports(heard.append, in_thread, lambda pause: None, LIMITS).on_message(frames)
    (arrived,) = heard
    assert isinstance(arrived, RolloutArrived)
    payload = frames[1]
    assert isinstance(payload, memoryview)
    payload[:] = bytes(payload.nbytes)
    assert not arrived.rollout.episodes[0].arrays["actions",].any()


async def test_what_cannot_be_read_names_its_ticket_and_worker_where_it_can() -> None:
    """C38: the verdict needs them."""
    heard: list[Stimulus] = []

    async def in_thread(work: Callable[[], Stimulus]) -> Stimulus:
        return work()

    reports = Reports(heard.append, in_thread, lambda pause: None, LIMITS)
    header, payload = rollout_frames(marked_episode(3, 5))
    for frames in ([header], [header, payload[:-64]], [header, payload, payload], [b"\xc1"], []):
        reports.on_message(list(frames))
    assert all(isinstance(stimulus, Malformed) for stimulus in heard)
    assert [(s.worker_id, s.ticket_id) for s in heard if isinstance(s, Malformed)] == [
        ("w0", 31),
        ("w0", 31),
        ("", None),
        ("", None),
        ("", None),
    ]
