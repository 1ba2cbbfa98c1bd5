"""A watch over real sockets: what it shows when the broker goes, comes back, or says more than arrives (C42)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.requests import Sample
from ods_async.errors import BrokerUnreachableError, EndpointError
from ods_async.observe.sequence import EventsLost
from ods_async.observe.view import View
from ods_async.observe.watch import KEPT_EVENTS, ServiceWatch
from ods_async.testing.broker import run_broker
from ods_async.testing.peers import RawConsumer
from tests.client.peer import Service

SECONDS = 60.0
CFG = OnlineDataEngineCfg(buffer_size=4, max_episode_steps=12, refill_policy="manual")


@contextlib.asynccontextmanager
async def watching(endpoint: str) -> AsyncIterator[ServiceWatch]:
    watch = ServiceWatch(endpoint, interval=0.05)
    try:
        await watch.connect(SECONDS)
        task = asyncio.create_task(watch.run())
        yield watch
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        watch.close()
        watch.close()


async def until(watch: ServiceWatch, holds: Callable[[View], object]) -> View:
    async with asyncio.timeout(SECONDS):
        while not holds(view := watch.view):
            await watch.changed(watch.version)
        return view


async def test_counters_and_events_agree() -> None:
    """C38: what the broker counts and what its events add up to."""
    with Service(heartbeat_interval=0.1) as service:
        async with watching(service.endpoint) as watch:
            service.refill()
            total = service.do(lambda: len(service.broker.events))
            view = await until(
                watch, lambda view: view.snapshot.next_sequence == total and view.stats.extra["events"] == total
            )
            assert view.connected
            assert view.stats is not None
            assert view.status is not None
            assert view.snapshot.published_episodes == view.stats.successful_episodes == 8
            assert sum(steps for _, _, steps in view.snapshot.slots.values()) == view.stats.valid_frames
            assert len(view.snapshot.slots) == view.status.episodes == view.stats.extra["retained_episodes"]
            assert view.snapshot.completed_generation == view.status.completed_generation == 2
            assert (view.missed_events, view.runs, view.problem) == (0, 1, "")


async def test_what_is_drawn_is_shown_as_a_rate() -> None:
    with Service() as service:
        async with watching(service.endpoint) as watch:
            with RawConsumer(service.endpoint) as consumer:
                await until(watch, lambda view: view.windows_per_second is not None)
                await asyncio.to_thread(consumer.ask, Sample(batch_size=3, length=4))
            view = await until(watch, lambda view: any(view.rates))
            assert view.stats is not None
            assert view.stats.sampled_chunks == 3
            await until(watch, lambda view: view.windows_per_second == 0.0)


async def test_swallowed_events_are_had_all_the_same_and_lost_ones_are_shown_c42() -> None:
    """C42"""
    with Service(heartbeat_interval=0.1, event_history=5) as service:
        service.refill()
        total = service.do(lambda: len(service.broker.events))
        async with watching(service.endpoint) as watch:
            view = await until(watch, lambda view: view.snapshot.next_sequence == total)
            assert (view.missed_events, view.gaps[0].first, view.gaps[0].count) == (total - 5, 0, total - 5)
            service.mute = True
            service.refill()
            service.mute = False
            total = service.do(lambda: len(service.broker.events))
            view = await until(watch, lambda view: view.snapshot.next_sequence == total)
            assert view.missed_events == sum(gap.count or 0 for gap in view.gaps)
            assert view.snapshot.lost_events == view.missed_events


async def test_a_killed_broker_is_missed_looked_for_and_its_successor_is_another_run_c42() -> None:
    """C42: the page says so, and goes on when there is one again."""
    with Service() as first:
        async with watching(first.endpoint) as watch:
            await until(watch, lambda view: view.snapshot.published_episodes == 4)
            first.end()
            view = await until(watch, lambda view: not view.connected)
            assert view.problem
            assert view.status is not None  # what was last known stays
            assert view.silent_for is not None
            assert watch.view.windows_per_second is None
            second = Service(first.endpoint)
            second.broker.state.run.run_id = 8
            with second:
                second.refill()
                view = await until(watch, lambda view: view.connected and view.snapshot.run_id == 8)
                assert view.runs == 2
                lost = [gap for gap in view.gaps if gap.run_id == 7]
                assert [(gap.count, "restarted" in gap.reason) for gap in lost] == [(None, True)]
                assert any(isinstance(event, EventsLost) for event in view.events)


async def test_a_service_that_ended_in_good_order_and_its_successor() -> None:
    async with contextlib.AsyncExitStack() as stack:
        with run_broker(CFG) as first:
            port = int(first.endpoint.rpartition(":")[2])
            watch = await stack.enter_async_context(watching(first.endpoint))
            view = await until(watch, lambda view: view.events)
            await asyncio.to_thread(first.stop)
            await until(watch, lambda view: view.snapshot.state == "STOPPED")
        await until(watch, lambda view: not view.connected)
        # The port is free at once for a broker, and what another program would do meanwhile is not of interest here.
        with run_broker(CFG, port) as second:
            view = await until(
                watch, lambda view: view.connected and view.snapshot.run_id == second.run_id and view.events
            )
            assert (view.runs, view.problem) == (2, "")
            assert view.snapshot.state != "STOPPED"


async def test_events_that_are_told_again_count_once() -> None:
    """A subscription that had to begin anew tells all that the broker holds, from the first on."""
    with Service(event_history=3) as service:
        watch = ServiceWatch(service.endpoint)
        events = service.do(lambda: list(service.broker.events))
        for event in events:
            watch._take(event)
        before = watch.view
        for item in (EventsLost(run_id=7, first=0, count=len(events) - 3, reason="old"), *events[-3:]):
            watch._take(item)
        after = watch.view
        assert (after.snapshot, after.missed_events) == (before.snapshot, 0)
        watch._take(EventsLost(run_id=7, first=1, count=len(events) + 4, reason="old"))
        assert watch.view.missed_events == 5
        assert len(watch.view.events) <= KEPT_EVENTS
        watch.close()


async def test_nobody_there_at_the_start_is_said_at_once() -> None:
    watch = ServiceWatch("tcp://127.0.0.1:9")
    with pytest.raises(BrokerUnreachableError, match=r"tcp://127\.0\.0\.1:9"):
        await watch.connect(0.2)
    watch.close()
    with pytest.raises(EndpointError):
        ServiceWatch("tcp:/x")
