"""A network that is cut without a close, or slow: a relay on loopback between each party and the broker."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ods_async import BrokerUnreachableError, Client, EventSubscriber, OnlineDataEngineCfg, RequestTimeoutError, Worker
from ods_async.core.events import EpisodePublished, Event, WorkerReturned, WorkerStalled
from ods_async.core.requests import GetStatus
from ods_async.errors import OdsError
from ods_async.observe.sequence import EventsLost
from ods_async.testing import window_faults
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.peers import RawConsumer
from ods_async.testing.trial.relay import Relay
from ods_async.transport.endpoint import parse_endpoint
from tests.e2e.test_recovery import until, values

SECONDS = 60.0


class Far:
    """A broker, and its address behind the relay."""

    def __init__(self, broker: RunningBroker, relay: Relay) -> None:
        self.broker, self.relay = broker, relay
        with RawConsumer(broker.endpoint) as consumer:
            told = consumer.welcome
        ports = [parse_endpoint(e).port for e in (broker.endpoint, told.tickets, told.rollouts, told.events)]
        relay.follow(ports)
        self.near = broker.endpoint
        self.endpoint = f"tcp://127.0.0.2:{ports[0]}"


@pytest.fixture
def far() -> Iterator[Far]:
    cfg = config()
    with run_broker(cfg) as broker, Relay() as relay:
        yield Far(broker, relay)


def config(**changes: Any) -> OnlineDataEngineCfg:
    return OnlineDataEngineCfg(
        **values(refill_policy="continuous", heartbeat_interval=0.1, heartbeat_timeout=0.5, **changes)
    )


async def test_a_consumer_behind_a_cut_is_told_in_time_and_served_when_it_is_mended(far: Far) -> None:
    """C21: at its own deadline if that is near, else within about five seconds of silence."""
    async with Worker(config(), far.near):
        with Client(far.endpoint, data_path="frames", timeout=SECONDS) as client:
            client.wait_ready()
            far.relay.cut()
            begun = time.monotonic()
            with pytest.raises((RequestTimeoutError, BrokerUnreachableError)):
                client.sample_batch(4, 3, timeout=0.5)
            assert time.monotonic() - begun < 2.0
            with pytest.raises(BrokerUnreachableError):
                client.wait_for_generation(client_generation(far))
            assert time.monotonic() - begun < 15.0
            far.relay.mend()
            deadline = time.monotonic() + SECONDS
            while True:
                with contextlib.suppress(OdsError):
                    batch = client.sample_batch(4, 3, timeout=5.0)
                    break
                assert time.monotonic() < deadline
            assert [found for window in batch if (found := window_faults(window))] == []


def client_generation(far: Far) -> int:
    with RawConsumer(far.near) as consumer:
        status: Any = consumer.ask(GetStatus())
        return int(status.requested_generation)


async def test_a_worker_behind_a_cut_is_stalled_its_ticket_is_made_by_another_and_it_comes_back(far: Far) -> None:
    """B12, C20, C33: nothing is published twice, nothing accepted is lost, and the worker comes back by itself."""
    told: list[Event | EventsLost] = []
    with EventSubscriber(far.near, 0) as subscriber:
        listener = threading.Thread(target=lambda: told.extend(subscriber), daemon=True)
        listener.start()
        async with (
            Worker(config(), far.endpoint, worker_id="far", patience=SECONDS) as distant,
            Worker(config(), far.near, worker_id="near") as near,
        ):
            until(lambda: min(distant.rollouts, near.rollouts) > 1)
            far.relay.cut()
            until(lambda: any(isinstance(e, WorkerStalled) and e.worker_id == "far" for e in told))
            before = near.rollouts
            until(lambda: near.rollouts > before + 5)
            far.relay.mend()
            until(lambda: any(isinstance(e, WorkerReturned) and e.worker_id == "far" for e in told))
            before = distant.rollouts
            until(lambda: distant.rollouts > before + 2)
        ids = [event.episode_id for event in list(told) if isinstance(event, EpisodePublished)]
        assert ids == list(range(len(ids)))
        far.broker.stop()
        listener.join(10.0)
        assert not listener.is_alive()


async def test_a_subscriber_behind_a_cut_misses_nothing_that_is_held(far: Far) -> None:
    """B41, C42: what was sent meanwhile is replayed when the network is back."""
    told: list[Event | EventsLost] = []
    with EventSubscriber(far.endpoint, 0, reconnect_timeout=SECONDS) as subscriber:
        listener = threading.Thread(target=lambda: told.extend(subscriber), daemon=True)
        listener.start()
        async with Worker(config(), far.near) as worker:
            until(lambda: len(told) > 5)
            far.relay.cut()
            before = worker.rollouts
            until(lambda: worker.rollouts > before + 5)
            far.relay.drop()
            far.relay.mend()
            with Client(far.near, timeout=SECONDS) as client:
                most = client.get_stats()["extra"]["events"]
            until(lambda: bool(told) and isinstance(told[-1], Event) and told[-1].sequence > most)
        assert [event.sequence for event in list(told) if isinstance(event, Event)] == list(range(len(told)))
        far.broker.stop()
        listener.join(10.0)
        assert not listener.is_alive()


async def test_a_slow_network_makes_everything_late_and_nothing_wrong(far: Far) -> None:
    """A fifth of a second each way, for a worker, a consumer and a subscriber."""
    far.relay.delay(0.2)
    async with Worker(config(), far.endpoint, worker_id="far") as worker:
        with Client(far.endpoint, data_path="frames", timeout=SECONDS) as client:
            client.wait_ready()
            batch = client.sample_batch(4, 3)
            assert [found for window in batch if (found := window_faults(window))] == []
            with EventSubscriber(far.endpoint, 0, follow=False) as subscriber:
                events = list(subscriber)
            assert [event.sequence for event in events if isinstance(event, Event)] == list(range(len(events)))
    assert worker.failure is None
