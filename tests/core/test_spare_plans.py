"""Plans for later: given where it makes no difference when they are drawn, counted when used, void with the edition."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ods_async.core.events import EpisodePublished, StateChanged
from ods_async.core.requests import GetStats, Limits, Plans, Refill, Release, Sample, Stop
from ods_async.core.stimuli import Announce, AnswerRequest, AskedFor, MarkEdition, Peer, Tick
from ods_async.core.window_plan import WindowPlan
from ods_async.errors import OnlineDataBudgetExhaustedError
from ods_async.testing.in_memory import OWNER, InMemoryBroker

BUDGET = {"episode_sample_budget": 2**40, "episode_sample_hard_limit": 2**41, "include_provenance": True}


def filled(**changes: Any) -> InMemoryBroker:
    broker = InMemoryBroker(**{"refill_policy": "manual", **changes})
    broker.join()
    broker.fill()
    broker.connect()
    return broker


def drawn(broker: InMemoryBroker, **changes: Any) -> Plans:
    answer = broker.get(Sample(**{"batch_size": 5, "length": 3, "spare": 6, **changes}))
    assert isinstance(answer, Plans)
    return answer


def sampled(broker: InMemoryBroker) -> tuple[int, int]:
    stats = broker.get(GetStats())
    return stats.sampled_chunks, stats.extra["sampled_batches"]


@pytest.mark.parametrize(
    ("settings", "request_", "plans"),
    [
        ({}, {}, 7),
        ({"refill_policy": "continuous"}, {}, 7),
        (BUDGET, {}, 7),
        ({}, {"spare": 0}, 1),
        ({}, {"count": 2}, 8),
        ({}, {"mode": "segment", "length": 3}, None),
        ({}, {"history": 2, "horizon": 3, "length": 4}, 7),
        ({"refill_policy": "sample_threshold"}, {}, 1),
        ({"refill_policy": "continuous", "samples_per_insert": 3.0}, {}, 1),
        ({**BUDGET, "episode_sample_budget": 64 * 5 - 1}, {}, 1),
        ({}, {"seed": 4}, 1),
        ({"limits": Limits(leases_per_session=3)}, {}, 3),
        ({"limits": Limits(plans_per_request=6)}, {}, 6),
        ({"limits": Limits(header_bytes=16 * 5 * 4)}, {}, 4),
    ],
)
def test_so_many_follow_as_make_no_difference_and_have_room(
    settings: dict[str, Any], request_: dict[str, Any], plans: int | None
) -> None:
    broker = filled(**settings)
    if plans is None:  # no segments in these episodes: the error is that of a plain request
        with pytest.raises(Exception, match="segment"):
            drawn(broker, **request_)
        return
    found = drawn(broker, **request_)
    assert len(found.plans) == plans
    assert len({plan.lease_id for plan in found.plans}) == plans


def test_they_count_when_they_were_used_and_not_when_they_come_back() -> None:
    broker = filled(**BUDGET)
    plans = drawn(broker).plans
    leases = [plan.lease_id for plan in plans]
    assert sampled(broker) == (5, 1)
    assert broker.state.run.budget.delivered == 7 * 5
    broker.tell(AskedFor(Peer(b"c0"), 0, Release(tuple(leases[:3]), tuple(leases[3:])), 0.0))
    assert sampled(broker) == (15, 3)
    assert broker.state.run.budget.delivered == 15
    assert broker.state.run.store.open_leases == 0


def test_those_that_nobody_speaks_of_until_their_lease_ends_count_as_used_b37() -> None:
    broker = filled(**BUDGET)
    drawn(broker)
    broker.pass_time(broker.settings.lease_seconds + 1.0)
    assert sampled(broker) == (35, 7)
    assert broker.state.run.budget.delivered == 35


def test_an_answer_that_was_lost_gives_all_of_them_back_b37() -> None:
    broker = filled(**BUDGET)
    answer = drawn(broker)
    broker.state.sampling.lost(answer, b"c0")
    assert broker.state.run.budget.delivered == 0
    assert broker.state.run.store.open_leases == 0


def test_the_edition_changes_before_anybody_is_told_of_an_episode_or_a_state() -> None:
    broker = filled()
    plans = drawn(broker)
    first = plans.edition
    assert broker.layout is not None
    assert int(broker.layout.edition(broker.memory)[0]) == first
    again = drawn(broker)
    assert again.edition == first
    held = tuple(plan.lease_id for plan in plans.plans + again.plans)  # they would hold back rows, and so production
    broker.tell(AskedFor(Peer(b"c0"), 0, Release((), held), 0.0))
    seen: list[Any] = []
    carry_out = broker._carry_out
    broker._carry_out = lambda effect: (seen.append(effect), carry_out(effect))[0]  # type: ignore[method-assign,assignment,func-returns-value]
    broker.tell(AskedFor(Peer(b"c0"), 90, Refill(OWNER), 5.0))
    broker.tell(Tick())
    broker.fill()
    after = drawn(broker).edition
    assert after == first + 4  # as many rollouts
    broker.tell(AskedFor(Peer(b"c0"), 91, Stop(OWNER, 1.0), 5.0))
    known = first
    told = 0
    for effect in seen:
        if isinstance(effect, MarkEdition):
            assert effect.edition == known + 1
            known = effect.edition
        elif isinstance(effect, Announce) and isinstance(effect.what, EpisodePublished):
            told += 1
            assert known >= first + told
        elif isinstance(effect, Announce) and isinstance(effect.what, StateChanged):
            assert known == after + 1
        elif isinstance(effect, AnswerRequest) and isinstance(effect.answer, Plans):
            assert effect.answer.edition == known
    assert told == 4
    assert int(broker.layout.edition(broker.memory)[0]) == known == after + 1


def test_several_batches_planned_together_are_windows_like_any_others_each_with_its_own_lease() -> None:
    """The rows and starts of many plans asked for at once are spread as those asked for one by one (B20, B22)."""
    broker = filled(limits=Limits(leases_per_session=4096, plans_per_request=64))
    together: Counter[tuple[int, int]] = Counter()
    alone: Counter[tuple[int, int]] = Counter()
    for _ in range(40):
        for counted, plans in (
            (together, drawn(broker, count=32, spare=0).plans),
            (alone, drawn(broker, spare=0).plans),
        ):
            assert len({plan.lease_id for plan in plans}) == len(plans)
            for plan in plans:
                windows, stamps = WindowPlan.from_message(plan, broker.settings.rows, 10)
                assert (stamps % 2 == 0).all()
                counted.update(zip(windows.rows.tolist(), windows.starts.tolist(), strict=True))
    assert set(together) == set(alone), "4 rows of 8 steps have 24 windows of 3, and each comes up"
    assert len(together) == 24
    assert max(together.values()) < 1.6 * min(together.values())


def test_where_quotas_allow_a_batch_and_no_spare_one_it_comes_alone_b36() -> None:
    broker = filled(episode_sample_budget=2, episode_sample_hard_limit=2, include_provenance=True)
    assert len(drawn(broker, spare=3).plans) == 1
    with pytest.raises(OnlineDataBudgetExhaustedError):
        drawn(broker, spare=3)  # 4 episodes of 2 windows, of which 5 are gone
    assert broker.state.run.budget.delivered == 5
