"""When the buffer turns over, and what replaces what (B15, B18, B19, B31 to B33)."""

from __future__ import annotations

import time

import pytest

import ods_async as ods
from ods_async.testing.conformance.checks import check_windows, fields_of, fingerprints_in, until, varied
from ods_async.testing.conformance.ways import LoopThread, Service, Way, make_engine


def _requested(way: Way) -> int:
    return int(way.get_stats()["requested_generation"])


def test_b32_a_refill_turns_the_buffer_over(plain: Way, plain_service: Service, way_in: str) -> None:
    """B32: the number to wait for is returned, and the same while it is outstanding; everybody may wait."""
    owner = plain_service.owner_of(way_in)
    before = set(fingerprints_in(plain))
    generation = owner.request_refill()
    assert generation == _requested(plain)
    assert owner.request_refill() in (generation, generation + 1)
    plain.wait_for_generation(generation, timeout=30.0)
    plain.wait_for_generation(1, timeout=1.0)
    assert before.isdisjoint(fingerprints_in(plain))
    owner.wait_for_generation(_requested(plain))


def test_b32_a_wait_ends_with_its_time_out_or_a_bad_number(logged: Way, logged_service: Service, way_in: str) -> None:
    """B32: ``TimeoutError``, in the time asked for; ``ValueError`` for what was never requested."""
    owner = logged_service.owner_of(way_in)
    owner.wait_for_generation(owner.request_refill())
    stalled = owner.request_refill()
    assert owner.request_refill() == stalled
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=f"generation {stalled}") as caught:
        logged.wait_for_generation(stalled, timeout=0.3)
    assert isinstance(caught.value, ods.RequestTimeoutError)
    assert 0.25 < time.monotonic() - before < 3.0
    for number in (0, -1, stalled + 1):
        with pytest.raises(ValueError, match="generation"):
            logged.wait_for_generation(number)
    for timeout in (0.0, -1.0, float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match="timeout"):
            logged.wait_for_generation(1, timeout=timeout)


def test_b18_the_buffer_never_shrinks_and_the_oldest_slot_goes_first(
    logged: Way, logged_service: Service, way_in: str
) -> None:
    """B18: in the middle of a refill all slots are filled: the new ones, and the youngest of the old."""
    owner = logged_service.owner_of(way_in)
    owner.wait_for_generation(owner.request_refill())
    old = [record for record in owner.drain_lifecycle_events() if record["kind"] == "published"]
    owner.wait_for_generation(owner.request_refill())
    middle = owner.drain_lifecycle_events()
    evicted = [record["episode_id"] for record in middle if record["kind"] == "evicted"]
    assert evicted == [record["episode_id"] for record in old]
    owner.wait_for_generation(owner.request_refill())
    owner.request_refill()
    until(lambda: "lifecycle log is full" in owner.get_status()["waiting"])
    batch = fields_of(logged.sample_batch(400, 1))
    by_generation = dict(
        zip(batch["ods_episode_id",][:, 0].tolist(), batch["ods_generation",][:, 0].tolist(), strict=True)
    )
    assert len(by_generation) == logged.buffer_size
    episodes = sorted(by_generation)
    assert episodes == list(range(episodes[0], episodes[0] + 4))
    generations = [by_generation[episode] for episode in episodes]
    assert generations == [generations[0]] * 2 + [generations[0] + 1] * 2


def test_b15_rollouts_are_published_whole_and_failed_attempts_are_counted_only(plain: Way) -> None:
    """B15: episodes of a rollout come together; what failed is never seen, and is counted."""
    stats = plain.get_stats()
    assert stats["failed_episodes"] >= 2
    assert stats["failed_episodes"] % 2 == 0
    assert stats["successful_episodes"] == 6 * stats["completed_generation"]
    fields = fields_of(plain.sample_batch(400, 1))
    episodes = sorted(set(fields["ods_episode_id",][:, 0].tolist()))
    assert episodes == list(range(episodes[0], episodes[0] + 6))
    accepted = dict(
        zip(fields["ods_episode_id",][:, 0].tolist(), fields["ods_accepted_at_ns",][:, 0].tolist(), strict=True)
    )
    for first in episodes[::2]:
        assert accepted[first] == accepted[first + 1]


def test_b19_a_worker_fails_after_its_last_attempt_with_the_reason(engine_way: str, loop: LoopThread) -> None:
    """B19, B7: ``max_generation_attempts``; nothing was published."""
    engine = make_engine(engine_way, varied(env={"fail_every": 1}, max_generation_attempts=2), loop)
    with pytest.raises(Exception, match=r"not made in 2 attempts.*failure"):
        engine.start()
    assert engine.state is ods.OnlineDataEngineState.FAILED


def test_b31_so_many_windows_request_the_next_generation_once(threshold: Way) -> None:
    """B31: ``refill_threshold * buffer_size`` windows since the last request; then the count begins anew."""
    before = _requested(threshold)
    drawn = 0
    while _requested(threshold) == before:
        check_windows(threshold.sample_batch(1, 1), "episode")
        drawn += 1
        assert drawn <= 20
    threshold.wait_for_generation(before + 1, timeout=30.0)
    # What other tests drew counts as well, but from a request on it is known.
    for _ in range(19):
        threshold.sample_batch(1, 1)
    assert _requested(threshold) == before + 1
    threshold.sample_batch(1, 1)
    assert _requested(threshold) == before + 2


def test_b32_a_refill_by_hand_is_allowed_under_every_policy(
    threshold: Way, threshold_service: Service, way_in: str
) -> None:
    """B32."""
    owner = threshold_service.owner_of(way_in)
    generation = owner.request_refill()
    threshold.wait_for_generation(generation, timeout=30.0)
    assert _requested(threshold) == generation


def test_b33_consumers_ahead_wait_with_a_reason_and_producers_ahead_pause(continuous: Way) -> None:
    """B33: ``samples_per_insert`` keeps both together, within what one buffer is worth on either side."""
    first = continuous.get_stats()
    started = time.monotonic()
    while time.monotonic() - started < 20.0:
        continuous.sample_batch(24, 1, timeout=20.0)
        if continuous.get_stats()["completed_generation"] >= first["completed_generation"] + 3:
            break
    stats = continuous.get_stats()
    published = stats["successful_episodes"] - 4  # the first generation is free
    # 12 windows of tolerance, one batch let through, and rollouts that were under way when the pause began
    assert abs(stats["sampled_chunks"] - 3 * published) <= 12 + 24 + 3 * 4
    until(lambda: "producers are ahead" in continuous.get_status()["waiting"])


def test_b33_a_consumer_too_far_ahead_is_told_why_it_waits(loop: LoopThread) -> None:
    """B33: the time-out says who is ahead, and by how much."""
    cfg = varied(refill_policy="continuous", samples_per_insert=0.5, num_workers=1, env={"delay": 0.02})
    engine = make_engine("engine", cfg, loop)
    engine.start()
    try:
        engine.sample_batch(500, 1)
        with pytest.raises(TimeoutError, match="consumers are ahead"):
            engine.sample_batch(1, 1, timeout=0.3)
    finally:
        engine.stop()
