"""The client's conversations, driven without a port."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from ods_async.client.exchange import Ask, Exchange, Talk
from ods_async.client.session import Session
from ods_async.core.requests import Connect, Drain, Records
from ods_async.errors import BrokerUnreachableError, OdsError
from ods_async.testing.in_memory import OWNER, InMemoryBroker
from ods_async.wire.asking import Answered

Lose = Callable[[Any], BaseException | None]


def owner() -> Exchange[Any]:
    return Exchange(
        endpoint="ipc://x",
        role="owner",
        name="own",
        owner=OWNER,
        connect_timeout=1.0,
        make_memory=lambda welcome, description: pytest.fail("no memory is needed"),
    )


def drive(talk: Talk[Any], broker: InMemoryBroker, lose: Lose = lambda request: None) -> Any:
    """Carry a conversation out; ``lose(request)`` is the error in place of the answer, which is lost, or None."""
    try:
        step = next(talk)
        while True:
            assert isinstance(step, Ask)
            answer = broker.answer(broker.ask(step.request, b"own"), b"own")
            error = lose(step.request) or (answer if isinstance(answer, OdsError) else None)
            step = talk.throw(error) if error is not None else talk.send(Answered(answer))
    except StopIteration as done:
        return done.value


def logging() -> InMemoryBroker:
    broker = InMemoryBroker(refill_policy="manual", lifecycle_event_capacity=8)
    broker.join()
    broker.fill()
    return broker


def slots(records: list[dict[str, Any]]) -> list[int]:
    return [record["slot"] for record in records]


def test_b39_every_record_is_drained_once_and_leaves_the_log_when_it_is_received() -> None:
    broker, exchange, session = logging(), owner(), Session()
    assert slots(drive(exchange.drain(session, 3), broker)) == [0, 1, 2]
    assert len(broker.state.run.log) == 1
    assert slots(drive(exchange.drain(session, 3), broker)) == [3]
    assert drive(exchange.drain(session, 3), broker) == []
    assert len(broker.state.run.log) == 0


@pytest.mark.parametrize("error", [BrokerUnreachableError("gone", endpoint="", timeout=0.0), KeyboardInterrupt()])
@pytest.mark.parametrize("lost", [1, 2])
def test_b39_a_drain_whose_answer_is_lost_or_that_is_cancelled_loses_no_record(lost: int, error: BaseException) -> None:
    broker, exchange, session = logging(), owner(), Session()
    drains: list[Drain] = []

    def lose(request: Any) -> BaseException | None:
        if isinstance(request, Drain):
            drains.append(request)
        return error if len(drains) == lost else None

    records: list[dict[str, Any]] = []
    try:
        records += drive(exchange.drain(session, 9), broker, lose)
    except type(error):
        drains.append(Drain())
    records += drive(exchange.drain(session, 9), broker)
    assert slots(records) == [0, 1, 2, 3]
    assert len(broker.state.run.log) == 0


@pytest.mark.parametrize("heard", [False, True])
def test_b39_b40_what_no_drain_returned_of_a_run_that_is_over_is_returned_once(heard: bool) -> None:
    """A drain gives up at its last question, which the broker has heard or has not; then the run ends."""
    for error in (BrokerUnreachableError("gone", endpoint="", timeout=0.0), KeyboardInterrupt()):
        broker, exchange, session = logging(), owner(), Session()
        pending = drive(owner().plain(Session(), Drain(OWNER), Records), broker).events

        def lose(request: Any, error: BaseException = error) -> BaseException | None:
            return error if isinstance(request, Drain) and request.received else None

        records: list[dict[str, Any]] = []
        with contextlib.suppress(KeyboardInterrupt):
            records += drive(exchange.drain(session, 9), broker, lose)
        assert len(records) == (0 if isinstance(error, KeyboardInterrupt) else 4)
        records += exchange.left_over([] if heard else list(pending))
        assert slots(records) == [0, 1, 2, 3]
        assert exchange.left_over([]) == []


def test_b40_what_is_pending_at_the_end_is_all_there_is_when_nobody_ever_asked() -> None:
    broker = logging()
    pending = list(drive(owner().plain(Session(), Drain(OWNER), Records), broker).events)
    assert owner().left_over(pending) == pending


def test_a_forgotten_session_says_hello_again() -> None:
    broker, exchange, session = logging(), owner(), Session()
    drive(exchange.greet(session), broker)
    broker.state.reception.sessions._sessions.clear()
    asked: list[Any] = []
    assert slots(drive(exchange.drain(session, 9), broker, lambda request: asked.append(request))) == [0, 1, 2, 3]
    assert [type(request) for request in asked] == [Drain, Connect, Drain, Drain]
