"""Counters, flow, health: detached snapshots that agree with each other (B47)."""

from __future__ import annotations

import ods_async as ods
from ods_async.testing.conformance.checks import CAPACITY, fields_of, story
from ods_async.testing.conformance.ways import Way


def test_b47_stats_add_up(plain: Way) -> None:
    """B47: every counter is there, and they agree with the buffer."""
    before = plain.get_stats()
    prints = sorted(set(fields_of(plain.sample_batch(300, 1, seed=2))["obs", "fingerprint"][:, 0].tolist()))
    stats = plain.get_stats()
    assert stats["run_id"] == plain.run_id
    assert 1 <= stats["completed_generation"] <= stats["requested_generation"]
    assert stats["sampled_chunks"] == before["sampled_chunks"] + 300
    assert stats["valid_frames"] == sum(story(fingerprint).length for fingerprint in prints)
    assert stats["valid_frames"] <= stats["generated_frames"] <= stats["successful_episodes"] * CAPACITY
    assert stats["production_seconds"] > 0
    stats["sampled_chunks"] = -1
    assert plain.get_stats()["sampled_chunks"] >= 300


def test_b47_flow_status_is_what_a_training_loop_steers_by(plain: Way, budgeted: Way) -> None:
    """B47: the last two are None when budgets are off."""
    flow, stats = plain.get_flow_status(), plain.get_stats()
    for name in ("requested_generation", "completed_generation", "successful_episodes"):
        assert flow[name] == stats[name]
    assert (flow["unlocked_remaining_chunks"], flow["total_delivered_chunks"]) == (None, None)
    before = budgeted.get_flow_status()
    budgeted.sample_batch(3, 1)
    after = budgeted.get_flow_status()
    assert after["unlocked_remaining_chunks"] == before["unlocked_remaining_chunks"] - 3 == 32
    assert after["total_delivered_chunks"] == before["total_delivered_chunks"] + 3


def test_b47_health_is_checked_without_sampling(plain: Way) -> None:
    """B47, B6: it returns nothing while all is well."""
    before = plain.get_stats()
    assert plain.check_health() is None
    assert plain.get_stats() == before | {"extra": plain.get_stats()["extra"]}
    assert plain.state is ods.OnlineDataEngineState.READY
    status = plain.get_status()
    assert (status["state"], status["slots"], status["episodes"]) == ("READY", 6, 6)
    assert [worker["worker_id"] for worker in status["workers"]] == ["worker-0"]
