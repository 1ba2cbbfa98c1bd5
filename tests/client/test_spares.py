"""Plans for later: asked for by who draws alike again and again, used as long as nothing changed, else handed back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from ods_async.client import aio, handback
from ods_async.client import session as session_module
from ods_async.client.aio import AsyncClient
from ods_async.client.exchange import Ask, Do, Exchange
from ods_async.client.session import MOST_SPARES, Session
from ods_async.client.sync import Client
from ods_async.core.requests import Plans, Release, Sample
from ods_async.testing.in_memory import OWNER
from ods_async.wire.asking import Answered
from tests.client.peer import Service
from tests.client.test_conversations import WANTED, Words, plan, ready


class Broker:
    """Answers every draw with as many plans as may be, of the edition it is at."""

    def __init__(self) -> None:
        self.leases = count(100)
        self.asked: list[Sample] = []
        self.edition = 5

    def draw(self, made: Exchange[str], session: Session, wanted: Sample = WANTED) -> str:
        """One batch; what had to be asked for it is in :attr:`asked`."""
        talk = made.sample(session, wanted, "host")
        try:
            step = next(talk)
            while True:
                if isinstance(step, Do):
                    step = talk.send(step.work())
                    continue
                assert isinstance(step, Ask)
                assert isinstance(step.request, Sample)
                self.asked.append(step.request)
                plans = tuple(plan(next(self.leases)) for _ in range(1 + step.request.spare))
                step = talk.send(Answered(Plans(plans, (0, 0), self.edition)))
        except StopIteration as done:
            result: str = done.value
            return result


def settled() -> tuple[Broker, Exchange[str], Words, Session]:
    """After so many draws that as many plans as can be are asked for, with all of them still there."""
    broker, (made, memory, session) = Broker(), ready()
    while not broker.asked or broker.asked[-1].spare < MOST_SPARES:
        broker.draw(made, session)
    broker.asked.clear()
    return broker, made, memory, session


def test_plans_for_later_are_asked_for_when_the_last_ones_were_used_up_and_each_is_used_once() -> None:
    broker, (made, _, session) = Broker(), ready()
    batches = [broker.draw(made, session) for _ in range(1 + 2 + 4 + 8 + 8)]
    assert [sample.spare for sample in broker.asked] == [0, 1, 3, 7, 7]
    assert batches == [f"batch {100 + number} to host" for number in range(23)]
    assert [sample.release for sample in broker.asked] == [
        (),
        (100,),
        (101, 102),
        (103, 104, 105, 106),
        (*range(107, 115),),
    ]
    assert not any(sample.undelivered for sample in broker.asked)


def test_another_edition_of_the_buffer_makes_them_worthless() -> None:
    broker, made, memory, session = settled()
    memory.number = broker.edition = 6
    assert broker.draw(made, session) == "batch 115 to host"
    (sample,) = broker.asked
    assert (sample.release, sample.undelivered) == ((107,), (*range(108, 115),))
    assert sample.spare == MOST_SPARES, "they went stale, which is no sign that they are not needed"
    broker.draw(made, session)
    assert len(broker.asked) == 1


def test_an_edition_that_changed_while_the_answer_was_on_its_way_does_too() -> None:
    broker, made, memory, session = settled()
    broker.edition, memory.number = 6, 7
    broker.draw(made, session)
    broker.draw(made, session)
    assert len(broker.asked) == 2


@pytest.mark.parametrize(
    "other",
    [
        replace(WANTED, seed=3),
        replace(WANTED, mode="segment"),
        replace(WANTED, generations=(1,)),
    ],
    ids=["a seed", "another mode", "a filter"],
)
def test_who_wants_something_else_gets_it_and_hands_them_back_b24(other: Sample) -> None:
    broker, made, _, session = settled()
    broker.draw(made, session, other)
    (sample,) = broker.asked
    assert sample.seed == other.seed
    assert sample.spare == 0
    assert sample.undelivered == (*range(108, 115),)
    broker.draw(made, session, other)
    assert broker.asked[-1].spare == (0 if other.seed is not None else 1)


def test_a_plan_whose_rows_changed_is_given_back_and_another_one_drawn_b37() -> None:
    broker, made, memory, session = settled()
    memory.stale.add(108)
    assert broker.draw(made, session) == "batch 115 to host"
    assert made.redrawn == 1
    (sample,) = broker.asked
    assert set(sample.undelivered) == set(range(108, 115))


def test_of_large_batches_few_are_planned_ahead() -> None:
    broker, (made, memory, session) = Broker(), ready()
    memory.nbytes = lambda *_: 1_000_001  # type: ignore[method-assign]
    for _ in range(1 + 2 + 4 + 4):
        broker.draw(made, session)
    assert [sample.spare for sample in broker.asked] == [0, 1, 3, 3]


def test_many_windows_a_batch_leave_room_for_few_plans() -> None:
    session = Session()
    wanted = Sample(600, 4)
    asked = []
    for _ in range(5):
        asked.append(session.spares_for(wanted))
        session.keep(wanted, None, (), 1)
    assert asked == [0, 1, 3, 3, 3]


def test_nothing_is_kept_for_a_request_that_was_never_served_c12() -> None:
    session = Session()
    assert [session.spares_for(Sample(600, 4)) for _ in range(5)] == [0] * 5


def test_a_gentle_notice_keeps_what_is_in_use_and_the_next_one_hands_it_back() -> None:
    *_, session = settled()
    assert session.notice(gently=True) == Release((107,), ())
    assert session.owes
    assert session.notice(gently=True) == Release((), (*range(108, 115),))
    assert not session.owes
    assert session.notice() is None


def test_who_comes_back_late_has_no_plans_ahead_whose_rows_would_be_held() -> None:
    """A training step of a second in between, during which an asyncio loop could not hand anything back."""
    broker, made, _, session = settled()
    session.pause(10.0)
    session.resume(10.019)
    broker.draw(made, session)
    assert broker.asked == []
    session.pause(11.0)
    session.resume(12.0)
    broker.draw(made, session)
    session.pause(13.0)
    session.resume(14.0)
    broker.draw(made, session)
    assert [sample.spare for sample in broker.asked] == [0, 0]
    assert broker.asked[0].undelivered == (*range(109, 115),)


# --- over real sockets ----------------------------------------------------------------------------------------------


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(refill_policy="manual") as started:
        yield started


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, calls follow each other at once."""
    for module in (aio, handback, session_module):
        monkeypatch.setattr(module, "HOLD_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_client_that_draws_in_a_row_asks_seldom_and_gives_back_what_it_did_not_use(service: Service) -> None:
    with Client(service.endpoint) as client:
        for _ in range(4):
            client.sample_batch(5, 3)
        assert [sample.spare for sample in service.asked(Sample)] == [0, 1, 3]
        stats = client.get_stats()
        assert stats["sampled_chunks"] == 4 * 5
        assert stats["extra"]["sampled_batches"] == 4
        assert service.open_leases == 0


def test_what_a_client_keeps_for_later_goes_back_although_nothing_is_asked_any_more(service: Service) -> None:
    with Client(service.endpoint) as client:
        for _ in range(4):
            client.sample_batch(5, 3)
        service.wait_for(lambda: service.broker.state.run.store.open_leases == 0)


def test_figures_are_right_at_once_for_who_asks_itself(service: Service) -> None:
    with Client(service.endpoint) as client:
        for number in range(1, 12):
            client.sample_batch(5, 3)
            assert client.get_stats()["sampled_chunks"] == 5 * number


@pytest.mark.usefixtures("patient")
async def test_an_asyncio_client_that_draws_in_a_row_asks_seldom_and_lets_others_run(service: Service) -> None:
    ticks = 0

    async def others() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async with AsyncClient(service.endpoint) as client:
        await client.sample_batch(5, 3)
        task = asyncio.create_task(others())
        for number in range(40):
            await client.sample_batch(5, 3)
            assert ticks >= number
        task.cancel()
        assert len(service.asked(Sample)) < 12
        assert (await client.get_stats())["sampled_chunks"] == 5 * 41
        assert service.open_leases == 0


async def test_what_an_asyncio_client_keeps_for_later_goes_back_as_well(service: Service) -> None:
    async with AsyncClient(service.endpoint) as client:
        for _ in range(4):
            await client.sample_batch(5, 3)
        await asyncio.to_thread(service.wait_for, lambda: service.broker.state.run.store.open_leases == 0)


def test_a_generation_published_meanwhile_is_drawn_from_at_once(service: Service) -> None:
    """Nothing is older than what was complete before the call, however many plans for later there were."""
    with Client(service.endpoint) as client:
        for generation in range(2, 12):
            for _ in range(12):
                client.sample_batch(6, 3)
            newest = service.broker._fingerprint
            service.refill()
            # What is kept for later holds rows back, for as long as it takes to see that nobody uses it.
            service.wait_for(lambda generation=generation: service.broker.state.production.completed == generation)
            assert client.sample_batch(6, 3)["obs", "qpos"].min() > newest


def test_a_run_that_ended_gives_no_batch_more(service: Service) -> None:
    with Client(service.endpoint, owner=OWNER) as client, Client(service.endpoint) as other:
        for _ in range(12):
            other.sample_batch(6, 3)
        client.stop(grace=0.01)
        begun = time.monotonic()
        with pytest.raises(Exception, match="stopped"):
            other.sample_batch(6, 3)
        assert time.monotonic() - begun < 5.0
