"""C42: 100,000 events past a subscriber that sleeps, next to one that keeps up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from ods_async import Client, EventsLost, EventSubscriber
from ods_async.core.schema import FieldSpec
from ods_async.testing.peers import RawWorker, marked_episode
from ods_async.testing.trial.house import figures_of
from ods_async.transport.options import get_int
from ods_async.transport.sockets import ChannelOptions, Hub, open_channel
from tests.cli.programs import line_of, settings, started

EVENTS = 100_000
EPISODES = 1000  # of a rollout, a step each: as many published and evicted events, but for the first
HELD = 3000
FIELDS = (FieldSpec(("actions",), "float32", (2,)),)


class Broker:
    def __init__(self, endpoint: str, pid: int) -> None:
        self.endpoint, self.pid = endpoint, pid

    @property
    def private_bytes(self) -> int:
        figures = figures_of(self.pid)
        assert figures is not None
        return figures.private_bytes


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    path = settings(
        tmp_path,
        buffer_size=EPISODES,
        max_episode_steps=2,
        gym_config={"id": "x", "num_envs": EPISODES},
        refill_policy="continuous",
        event_history=HELD,
        endpoint=f"ipc://{tmp_path / 'b.sock'}",
    )
    with started("broker", path, "--json") as program:
        told = line_of(program)
        yield Broker(told["endpoints"][0], told["pid"])


@pytest.mark.parametrize("kind", ["pub", "sub"])
def test_c42_nobody_is_cut_off_for_not_reading_events(kind: Any) -> None:
    """C42: libzmq would ask a subscriber whether it lives, cut it off, and end its process when it reads again."""
    with Hub() as hub, open_channel(hub, kind, options=ChannelOptions(heartbeat_ms=50)) as channel:
        assert get_int(channel._socket, zmq.HEARTBEAT_IVL) == 0


@pytest.mark.slow
def test_c42_a_sleeping_subscriber_delays_nobody_is_told_what_it_missed_and_costs_no_memory(broker: Broker) -> None:
    """C42: the other one sees every number; the broker's memory does not grow with what one of them does not read."""
    seen: list[int] = []
    lost: list[Any] = []
    enough, memory = threading.Event(), [0]
    fast, slow = EventSubscriber(broker.endpoint, since=0), EventSubscriber(broker.endpoint, since=0)

    def follow() -> None:
        for event in fast:
            if isinstance(event, EventsLost):
                lost.append(event)
            else:
                seen.append(event.sequence)
                if len(seen) == EVENTS // 5:
                    memory[0] = broker.private_bytes
            if len(seen) >= EVENTS:
                break
        enough.set()

    with fast, slow, RawWorker(broker.endpoint, fields=FIELDS, num_envs=EPISODES) as worker:
        assert next(slow).sequence == 0
        listener = threading.Thread(target=follow, daemon=True)
        listener.start()
        episodes = [marked_episode(mark, 1, FIELDS) for mark in range(EPISODES)]
        while not enough.is_set():
            # A generation a time, and the next one only when the fast one has heard of this one.
            ticket = worker.next_ticket(0.05)
            if ticket is not None:
                worker.hand_in(ticket.ticket_id, *episodes)
        listener.join(10.0)
        assert lost == []
        assert seen == list(range(len(seen)))
        grown = broker.private_bytes - memory[0]
        assert grown < 50_000_000, f"{grown} bytes more"

        with Client(broker.endpoint, timeout=60.0) as client:
            newest = client.get_stats()["extra"]["events"]
            expected, missed, taken = 1, 0, 0
            while expected < newest:
                event = next(slow)
                if isinstance(event, EventsLost):
                    assert event.first == expected
                    assert event.count
                    missed += event.count
                    expected += event.count
                else:
                    assert event.sequence == expected
                    expected, taken = expected + 1, taken + 1
            assert missed > 0
            assert missed + taken == expected - 1
