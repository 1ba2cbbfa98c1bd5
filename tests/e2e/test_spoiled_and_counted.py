"""C37 and C38 with real workers: spoiled episodes stay out, and what was asked for is what is stored and counted."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ods_async import Client, OnlineDataEngineCfg, Worker
from ods_async.core.events import AttemptDiscarded, EpisodePublished
from ods_async.testing import window_faults
from ods_async.testing.broker import run_broker
from tests.cli.programs import line_of, run_json, settings, started
from tests.e2e.test_recovery import SECONDS, values


@pytest.mark.parametrize(("kind", "where"), [("nan", "obs/state at step 5"), ("inf", "rewards at step 5")])
async def test_c37_one_spoiled_episode_of_ten_is_made_again_counted_and_told(kind: str, where: str) -> None:
    """C37: NaN from step 5 on, or an infinite reward; 100 samples follow, and none holds it."""
    env = {"min_length": 8, "fail_phase": "step", "fail_step": 5 - (kind == "nan"), "fail_kind": kind}
    env |= {"fail_episode": 4, "fail_times": 1}
    cfg = OnlineDataEngineCfg(**values(buffer_size=10, env=env))
    with run_broker(cfg) as broker, Client(broker.endpoint, timeout=SECONDS) as client:
        async with Worker(cfg, broker.endpoint, worker_id="w0"):
            client.wait_ready()
            stats = client.get_stats()
            assert (stats["successful_episodes"], stats["failed_episodes"]) == (10, 1)
            told = [event for event in client.events(0, follow=False) if isinstance(event, AttemptDiscarded)]
            assert [(event.worker_id, event.attempt, event.episodes, event.reason) for event in told] == [
                ("w0", 1, 1, f"nonfinite: {where}")
            ]
            for _ in range(100):
                batch = client.sample_batch(8, 4)
                assert batch["obs", "state"].isfinite().all()
                assert batch["rewards"].isfinite().all()
            assert [found for window in batch if (found := window_faults(window))] == []
        # Values decide nothing about what is drawn: there are no weights that could be bad.
        with pytest.raises(TypeError, match="weights"):
            client.sample_batch(8, 4, weights=[float("nan")])  # type: ignore[call-arg]


async def test_c37_kept_on_purpose_it_stops_no_sampling() -> None:
    """C37: ``allow_nonfinite`` stores such episodes, and they are drawn like any other."""
    env = {"min_length": 8, "fail_phase": "step", "fail_step": 4, "fail_kind": "nan", "fail_episode": 1}
    given = values(env=env)
    given["gym_config"]["allow_nonfinite"] = True
    cfg = OnlineDataEngineCfg(**given)
    with run_broker(cfg) as broker, Client(broker.endpoint, timeout=SECONDS) as client:
        async with Worker(cfg, broker.endpoint):
            client.wait_ready()
            spoiled = sum(not bool(client.sample_batch(8, 4)["obs", "state"].isfinite().all()) for _ in range(100))
            assert spoiled > 0
            assert client.get_stats()["failed_episodes"] == 0


def test_c38_twenty_requested_are_twenty_stored_and_all_counts_agree(tmp_path: Path) -> None:
    """C38: command line, stats, status, events and the stored rows; lengths sum up to the steps that were taken."""
    endpoint = f"ipc://{tmp_path / 'b.sock'}"
    given = values(buffer_size=20, endpoint=endpoint, include_provenance=True)
    given["gym_config"]["num_envs"] = 2  # rows of a vector end at different steps: nothing may leak into the next
    path = settings(tmp_path, **given)
    with contextlib.ExitStack() as stack:
        line_of(stack.enter_context(started("broker", path, "--json")))
        for _ in range(2):
            stack.enter_context(started("worker", path, "--connect", endpoint))
        client = stack.enter_context(Client(endpoint, timeout=SECONDS))
        client.wait_ready()
        batch = client.sample_batch(2000, 1)
        told = [event for event in client.events(0, follow=False) if isinstance(event, EpisodePublished)]
        shown = run_json("stats", endpoint)
        stats, status = shown["stats"], shown["status"]
    assert [event.episode_id for event in told] == list(range(20))
    assert len({event.slot for event in told}) == 20
    assert stats["successful_episodes"] == status["episodes"] == status["slots"] == 20
    steps = {event.episode_id: event.valid_frames for event in told}
    assert stats["generated_frames"] == stats["valid_frames"] == sum(steps.values())
    assert all(5 <= length <= 9 for length in steps.values())
    # Each row holds one episode with one fingerprint, whose length is the one announced.
    prints: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    for episode, mark, step in zip(
        batch["ods_episode_id"][:, 0].tolist(),
        batch["obs", "fingerprint"][:, 0].tolist(),
        batch["obs", "step"][:, 0].tolist(),
        strict=True,
    ):
        prints.setdefault(episode, set()).add(mark)
        last[episode] = max(last.get(episode, 0), step)
    assert sorted(prints) == list(range(20))
    assert all(len(marks) == 1 for marks in prints.values())
    assert {episode: 5 + next(iter(marks)) % 5 for episode, marks in prints.items()} == steps
    assert all(last[episode] < steps[episode] for episode in last)
