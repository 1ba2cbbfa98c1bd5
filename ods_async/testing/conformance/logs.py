"""The owner's log and everybody's events (B39 to B41)."""

from __future__ import annotations

from typing import Any

import pytest

import ods_async as ods
from ods_async.testing.conformance.checks import check_windows, fields_of, story, until, varied
from ods_async.testing.conformance.ways import LoopThread, Service, Way, make_engine


def test_b39_records_tell_what_was_published_and_evicted_in_order(
    logged: Way, logged_service: Service, way_in: str
) -> None:
    """B39: with the steps that can be drawn, and the anchors among them."""
    owner = logged_service.owner_of(way_in)
    owner.wait_for_generation(owner.request_refill())
    records = owner.drain_lifecycle_events()
    assert [record["kind"] for record in records] == ["evicted", "published"] * 4
    assert [r["sequence"] for r in records] == sorted({r["sequence"] for r in records})
    times = [record["monotonic_ns"] for record in records]
    assert times == sorted(times)
    assert {record["run_id"] for record in records} == {logged.run_id}
    fields = fields_of(logged.sample_batch(300, 1))
    told = dict(zip(fields["ods_episode_id",][:, 0].tolist(), fields["obs", "fingerprint"][:, 0].tolist(), strict=True))
    published = [record for record in records if record["kind"] == "published"]
    assert sorted(record["slot"] for record in published) == [0, 1, 2, 3]
    for record in published:
        tale = story(told[record["episode_id"]])
        assert list(record["valid_frame_indices"]) == list(range(tale.length))
        anchors = [step for step in range(tale.length) if tale.continuity[step] >= 0]
        assert list(record["eligible_anchor_indices"]) == anchors
        assert (record["valid_frames"], record["eligible_anchors"]) == (tale.length, len(anchors))
        assert record["generation"] == logged.get_stats()["completed_generation"]
    assert owner.drain_lifecycle_events() == []


def test_b40_a_full_log_stalls_production_and_not_sampling(logged: Way, logged_service: Service, way_in: str) -> None:
    """B40: the status says so; draining resumes; no record is lost."""
    owner = logged_service.owner_of(way_in)
    owner.wait_for_generation(owner.request_refill())
    stalled = owner.request_refill()
    until(lambda: "lifecycle log is full" in logged.get_status()["waiting"])
    made = logged.get_stats()["successful_episodes"]
    for _ in range(20):
        check_windows(logged.sample_batch(30, 2), "episode")
    with pytest.raises(TimeoutError, match="lifecycle log is full"):
        logged.wait_for_generation(stalled, timeout=0.3)
    assert logged.get_stats()["successful_episodes"] == made
    records = owner.drain_lifecycle_events()
    logged.wait_for_generation(stalled, timeout=30.0)
    records += owner.drain_lifecycle_events()
    assert [record["kind"] for record in records] == ["evicted", "published"] * 8
    episodes = [record["episode_id"] for record in records if record["kind"] == "published"]
    assert episodes == list(range(episodes[0], episodes[0] + 8))


def test_b40_stop_ends_the_wait_and_the_log_is_drained_after_it(engine_way: str, loop: LoopThread) -> None:
    """B40, B8: a producer that is held back leaves in good order."""
    engine = make_engine(engine_way, varied(lifecycle_event_capacity=8), loop)
    engine.start()
    engine.request_refill()
    until(lambda: "lifecycle log is full" in engine.get_status()["waiting"])
    engine.stop()
    assert engine.state is ods.OnlineDataEngineState.STOPPED
    records = engine.drain_lifecycle_events()
    assert len(records) == 8
    assert engine.drain_lifecycle_events() == []


def test_b40_without_a_log_nothing_is_kept(plain_service: Service, engine_way: str) -> None:
    """B40: zero switches it off."""
    assert plain_service.owner_of(engine_way).drain_lifecycle_events() == []


@pytest.mark.parametrize("capacity", [1, 11])
def test_b40_the_capacity_must_hold_two_buffers_and_the_first_fill(capacity: int) -> None:
    """B40, B1."""
    with pytest.raises(ods.ConfigError, match=r"lifecycle_event_capacity.*at least 12"):
        varied(buffer_size=6, num_envs=4, lifecycle_event_capacity=capacity)
    assert varied(buffer_size=6, num_envs=4, lifecycle_event_capacity=12).lifecycle_event_capacity == 12


def test_b41_events_are_numbered_from_the_beginning_for_whoever_comes_late(logged: Way) -> None:
    """B41: replayed without a gap; worker joined, generations, states, and every episode, whatever the owner drains."""
    with logged.events(since=0, follow=False) as subscriber:
        told: list[Any] = list(subscriber)
    assert [event.sequence for event in told] == list(range(len(told)))
    kinds = {event.kind for event in told}
    assert {"worker_joined", "state_changed", "generation_requested", "generation_completed", "published"} <= kinds
    assert sum(event.kind == "published" for event in told) == logged.get_stats()["successful_episodes"]
    assert {event.run_id for event in told} == {logged.run_id}


def test_b41_new_events_reach_a_subscriber_as_they_happen(logged: Way, logged_service: Service, way_in: str) -> None:
    """B41: a slow one holds nobody up."""
    owner = logged_service.owner_of(way_in)
    with logged.events(since=0) as slow, logged.events(since=logged.get_stats()["extra"]["events"]) as fresh:
        first = next(slow)  # and from now on it sleeps
        generation = owner.request_refill()
        for event in fresh:
            if event.kind == "generation_completed":
                break
        assert event.generation == generation
        owner.drain_lifecycle_events()
        assert first.sequence == 0
        assert next(slow).sequence == 1


def test_b41_events_that_are_gone_are_reported_as_lost(loop: LoopThread) -> None:
    """B41: the broker holds the newest ``event_history``; a gap is told, and how long it is."""
    engine = make_engine("engine", varied(event_history=5), loop)
    engine.start()
    try:
        with engine.events(since=0, follow=False) as subscriber:
            told: list[Any] = list(subscriber)
        assert isinstance(told[0], ods.EventsLost)
        numbers = [event.sequence for event in told[1:]]
        assert len(numbers) == 5
        assert numbers == list(range(numbers[0], numbers[0] + 5))
    finally:
        engine.stop()
