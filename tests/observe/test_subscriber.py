"""Subscribers on real sockets; every test that takes ``follow`` runs for plain iteration and for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ods_async.core.events import EpisodePublished, StateChanged
from ods_async.core.requests import Records, Replay
from ods_async.errors import ArgumentError, BrokerUnreachableError, EndpointError
from ods_async.observe.subscriber import EventsLost, EventSubscriber
from tests.client.peer import Service


class Follower:
    """Takes the next few items, plainly or awaiting."""

    def __init__(self, awaiting: bool) -> None:
        self.runner = asyncio.Runner() if awaiting else None
        self.made: list[EventSubscriber] = []

    def subscribe(self, *args: Any, **options: Any) -> EventSubscriber:
        self.made.append(EventSubscriber(*args, **options))
        return self.made[-1]

    def take(self, subscriber: EventSubscriber, count: int) -> list[Any]:
        if self.runner is None:
            return [next(subscriber) for _ in range(count)]
        return self.runner.run(self._take(subscriber, count))

    async def _take(self, subscriber: EventSubscriber, count: int) -> list[Any]:
        return [await anext(subscriber) for _ in range(count)]

    def all(self, subscriber: EventSubscriber) -> list[Any]:
        if self.runner is None:
            return list(subscriber)
        return self.runner.run(self._all(subscriber))

    async def _all(self, subscriber: EventSubscriber) -> list[Any]:
        return [item async for item in subscriber]


@pytest.fixture(params=[False, True], ids=["plain", "asyncio"])
def follow(request: pytest.FixtureRequest) -> Iterator[Follower]:
    follower = Follower(request.param)
    yield follower
    for subscriber in follower.made:
        subscriber.close()
        subscriber.close()
    if follower.runner is not None:
        follower.runner.close()


def sequences(items: list[Any]) -> list[int]:
    return [item.sequence for item in items]


def test_from_the_first_on_every_event_comes_in_order_b41(follow: Follower) -> None:
    with Service() as service:
        subscriber = follow.subscribe(service.endpoint, since=0)
        total = service.do(lambda: len(service.broker.events))
        items = follow.take(subscriber, total)
        assert sequences(items) == list(range(total))
        assert subscriber.run_id == 7
        service.refill()
        more = follow.take(subscriber, 3)
        assert sequences(more) == [total, total + 1, total + 2]


def test_without_following_it_ends_with_what_the_broker_holds(follow: Follower) -> None:
    with Service() as service:
        items = follow.all(follow.subscribe(service.endpoint, since=0, follow=False))
        assert sequences(items) == list(range(service.do(lambda: len(service.broker.events))))
        assert follow.all(follow.subscribe(service.endpoint, follow=False)) == []


def test_an_event_right_after_subscribing_is_not_missed_c42(follow: Follower) -> None:
    with Service(heartbeat_interval=0.1) as service:
        subscriber = follow.subscribe(service.endpoint)
        done = threading.Event()

        def publish() -> None:
            service.wait_for(lambda: bool(service.asked(Replay)))
            service.refill()
            done.set()

        publisher = threading.Thread(target=publish)
        publisher.start()
        first = follow.take(subscriber, 1)[0]
        publisher.join()
        assert done.is_set()
        assert first.kind == "generation_requested"


def test_events_that_were_swallowed_are_noticed_and_replayed_c42(follow: Follower) -> None:
    with Service(heartbeat_interval=0.1) as service:
        subscriber = follow.subscribe(service.endpoint, since=0)
        total = service.do(lambda: len(service.broker.events))
        follow.take(subscriber, total)
        service.mute = True
        service.refill()
        service.mute = False
        after = service.do(lambda: len(service.broker.events))
        items = follow.take(subscriber, after - total)
        assert sequences(items) == list(range(total, after))


def test_what_is_lost_for_good_is_said_c42(follow: Follower) -> None:
    with Service(event_history=5) as service:
        for _ in range(3):
            service.refill()
        total = service.do(lambda: len(service.broker.events))
        lost, *items = follow.all(follow.subscribe(service.endpoint, since=0, follow=False))
        assert isinstance(lost, EventsLost)
        assert (lost.first, lost.count) == (0, total - 5)
        assert sequences(items) == list(range(total - 5, total))


def test_a_slow_subscriber_delays_nobody_and_loses_nothing_that_is_held_c42() -> None:
    with Service(event_history=20_000, heartbeat_interval=0.1) as service:
        slow, fast = (EventSubscriber(service.endpoint, since=0) for _ in range(2))
        with slow, fast:
            next(slow)
            begin = time.monotonic()
            for _ in range(30):
                service.refill(length=2)
            total = service.do(lambda: len(service.broker.events))
            assert sequences([next(fast) for _ in range(total)]) == list(range(total))
            assert time.monotonic() - begin < 30
            assert sequences([next(slow) for _ in range(total - 1)]) == list(range(1, total))


def test_a_restarted_broker_is_found_again_and_the_change_is_told_c42(follow: Follower) -> None:
    with Service() as first:
        subscriber = follow.subscribe(first.endpoint, since=0)
        follow.take(subscriber, first.do(lambda: len(first.broker.events)))
    second = Service(first.endpoint)
    second.broker.state.run.run_id = 8
    second.broker.state.run.events._events.clear()
    with second:
        lost = follow.take(subscriber, 1)[0]
        assert isinstance(lost, EventsLost)
        assert lost.run_id == 7
        assert lost.count is None
        assert subscriber.run_id == 8


def test_a_broker_that_goes_away_between_its_first_two_answers_is_found_again_c42(follow: Follower) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Service())
        first.hold = lambda answer: isinstance(answer, Records)

        def replace() -> None:
            first.wait_for(lambda: bool(first.held))
            first.end()
            stack.enter_context(Service(first.endpoint))

        replacer = threading.Thread(target=replace)
        replacer.start()
        stack.callback(replacer.join)
        subscriber = follow.subscribe(first.endpoint, since=0)
        assert sequences(follow.take(subscriber, 3)) == [0, 1, 2]


def test_it_ends_when_the_service_has_ended(follow: Follower) -> None:
    with Service() as service:
        subscriber = follow.subscribe(service.endpoint, since=0)
        follow.take(subscriber, 1)
        service.do(lambda: service.broker.state.stop(0.0, "enough"))
        service.wait_for(
            lambda: any(isinstance(e, StateChanged) and e.state == "STOPPED" for e in service.broker.events)
        )
        total = service.do(lambda: len(service.broker.events))
        service.end(linger=60.0)
        items = follow.all(subscriber)
        assert sequences(items) == list(range(1, total))


def test_a_dead_link_is_noticed_and_given_up_after_the_stated_time_c42(follow: Follower) -> None:
    with Service() as service:
        subscriber = follow.subscribe(service.endpoint, reconnect_timeout=0.3)
        service.refill()

        def end() -> None:
            service.wait_for(lambda: bool(service.asked(Replay)))
            service.end()

        ender = threading.Thread(target=end)
        ender.start()
        begin = time.monotonic()
        with pytest.raises(BrokerUnreachableError):
            follow.take(subscriber, 1000)
        assert time.monotonic() - begin < 20
        ender.join()


def test_nobody_there_is_said_in_time(follow: Follower) -> None:
    subscriber = follow.subscribe("tcp://127.0.0.1:9", connect_timeout=0.2)
    with pytest.raises(BrokerUnreachableError, match="tcp://127"):
        follow.take(subscriber, 1)


@pytest.mark.parametrize("since", [-1, "0", 1.5, True])
def test_a_bad_number_or_address_is_refused_at_once(since: Any) -> None:
    with pytest.raises(ArgumentError, match="since"):
        EventSubscriber("tcp://127.0.0.1:9", since=since)
    with pytest.raises(EndpointError):
        EventSubscriber("tcp:/x")


def test_garbage_on_the_socket_is_counted_and_ends_nothing_c45(follow: Follower) -> None:
    with Service(heartbeat_interval=0.1) as service:
        subscriber = follow.subscribe(service.endpoint)

        def shout() -> None:
            service.wait_for(lambda: bool(service.asked(Replay)))
            seen: list[int] = []
            while not seen and service.endpoint:
                service.do(lambda: service.events.send([b"event.published", b"\x80garbage"]))
                service.do(service.beat)
                seen += [1] if subscriber.malformed else []
            service.refill()

        shouter = threading.Thread(target=shout)
        shouter.start()
        items = follow.take(subscriber, 2)
        shouter.join()
        assert items[0].kind == "generation_requested"
        assert subscriber.malformed > 0


def test_published_episodes_are_among_the_events(follow: Follower) -> None:
    with Service() as service:
        items = follow.all(follow.subscribe(service.endpoint, since=0, follow=False))
        assert sum(isinstance(item, EpisodePublished) for item in items) == 4
