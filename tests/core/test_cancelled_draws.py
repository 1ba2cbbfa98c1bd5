"""B37: a consumer that gives up before its answer came gives the windows back, and only those."""

from __future__ import annotations

import pytest

from ods_async.core.requests import Cancel, GetBudget, GetStats, Release, Sample
from ods_async.testing.in_memory import InMemoryBroker


def ready() -> InMemoryBroker:
    broker = InMemoryBroker(episode_sample_budget=10, episode_sample_hard_limit=10)
    broker.join()
    broker.fill()
    broker.connect()
    return broker


def delivered(broker: InMemoryBroker) -> int:
    return broker.get(GetBudget(), b"watcher").total_delivered_chunks  # type: ignore[no-any-return]


@pytest.fixture
def broker() -> InMemoryBroker:
    made = ready()
    made.connect(b"watcher")
    return made


@pytest.mark.parametrize("frame", [False, True])
def test_a_draw_given_up_before_its_answer_came_costs_nothing_b37(broker: InMemoryBroker, frame: bool) -> None:
    broker.ask(Sample(4, 3))
    kept = delivered(broker)
    broker.ask(Sample(5, 3, frame=frame))
    assert delivered(broker) == kept + 5
    broker.ask(Cancel())
    assert delivered(broker) == kept
    broker.ask(Cancel())
    assert delivered(broker) == kept


def test_the_lease_of_a_draw_given_up_ends_at_once(broker: InMemoryBroker) -> None:
    broker.ask(Sample(5, 3, count=1))
    broker.ask(Cancel())
    assert not broker.state.run.store.leases_of(b"c0")


@pytest.mark.parametrize("frame", [False, True])
def test_giving_up_a_later_question_leaves_a_delivered_draw_paid_for_b37(broker: InMemoryBroker, frame: bool) -> None:
    broker.ask(Sample(5, 3, frame=frame))
    broker.ask(GetStats())
    broker.ask(Cancel())
    assert delivered(broker) == 5


def test_another_session_giving_up_changes_nothing_b37(broker: InMemoryBroker) -> None:
    broker.ask(Sample(5, 3))
    broker.ask(Cancel(), b"watcher")
    assert delivered(broker) == 5


def test_a_draw_released_is_not_given_back_b37(broker: InMemoryBroker) -> None:
    plan = broker.get(Sample(5, 3)).plans[0]
    broker.ask(Release((plan.lease_id,)))
    broker.ask(Cancel())
    assert delivered(broker) == 5


def test_after_the_lease_time_nothing_is_given_back_any_more_b37(broker: InMemoryBroker) -> None:
    broker.ask(Sample(5, 3, frame=True))
    broker.pass_time(broker.settings.lease_seconds + 1)
    broker.ask(Cancel())
    assert delivered(broker) == 5


@pytest.mark.parametrize("given_up", [True, False])
def test_a_frame_still_being_copied_is_given_back_only_if_its_asker_gave_up_b37(
    broker: InMemoryBroker, given_up: bool
) -> None:
    sampling = broker.state.sampling
    plan = broker.get(Sample(5, 3)).plans[0]
    sampling.heard(b"c0")
    sampling._frames[plan.lease_id] = b"c0", 0  # as if a thread were still at it
    if given_up:
        broker.ask(Cancel())
        assert delivered(broker) == 5
    else:
        broker.ask(GetStats())
    sampling.gathered(plan.lease_id, "")
    broker.ask(Cancel())
    assert delivered(broker) == (0 if given_up else 5)


@pytest.mark.parametrize("asked_more", [False, True])
def test_a_frame_its_session_received_and_gave_nobody_is_given_back_once_b37(
    broker: InMemoryBroker, asked_more: bool
) -> None:
    broker.ask(Sample(5, 3, frame=True))
    lease = broker.frame_leases[-1]
    if asked_more:
        broker.ask(Sample(4, 3, frame=True))
    kept = 4 if asked_more else 0
    broker.ask(Release((), (lease,)), b"watcher")
    assert delivered(broker) == kept + 5
    broker.ask(Release((), (lease,)))
    assert delivered(broker) == kept
    broker.ask(Release((), (lease,)))
    assert delivered(broker) == kept


def test_a_frame_said_to_be_delivered_or_too_old_stays_paid_for_b37(broker: InMemoryBroker) -> None:
    for size in (2, 3):
        broker.ask(Sample(size, 3, frame=True))
    first, second = broker.frame_leases
    broker.ask(Release((first,)))
    broker.ask(Release((), (first,)))
    assert delivered(broker) == 5
    broker.pass_time(broker.settings.lease_seconds + 1)
    broker.ask(Release((), (second,)))
    assert delivered(broker) == 5
    assert not broker.state.sampling._sent


@pytest.mark.parametrize("frame", [False, True])
def test_giving_up_a_question_that_never_arrived_leaves_the_one_before_paid_for_b37(
    broker: InMemoryBroker, frame: bool
) -> None:
    """The network lost the later question and not the notice: what the earlier one brought was delivered."""
    number = broker.ask(Sample(5, 3, frame=frame))
    assert delivered(broker) == 5
    broker.ask(Cancel(number + 7))
    assert delivered(broker) == 5
    broker.ask(Cancel(number))
    assert delivered(broker) == 5, "too late: its asker has gone on since"


@pytest.mark.parametrize("frame", [False, True])
def test_giving_up_the_very_question_gives_its_windows_back_b37(broker: InMemoryBroker, frame: bool) -> None:
    number = broker.ask(Sample(5, 3, frame=frame))
    broker.ask(Cancel(number))
    assert delivered(broker) == 0
