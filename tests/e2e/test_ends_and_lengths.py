"""How episodes end and how long they are, from a real worker through a real broker into batches (C11, C13, C25)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ods_async import Client, EventSubscriber, OnlineDataEngine, OnlineDataEngineCfg, Worker
from ods_async.core.events import WorkerFailure
from ods_async.errors import SchemaMismatchError
from ods_async.testing.broker import run_broker
from tests.e2e.programs import until
from tests.e2e.scripted import LIMITED_ID, SCRIPTED_ID

PATHS = ("shared_memory", "frames")


def config(episodes: list[dict[str, Any]], steps: int, env: str = SCRIPTED_ID, **changes: Any) -> OnlineDataEngineCfg:
    gym = {"id": env, "imports": ["tests.e2e.scripted"], "kwargs": {"episodes": episodes}, "next_obs": True}
    settings: dict[str, Any] = {
        "buffer_size": len(episodes),
        "max_episode_steps": steps,
        "refill_policy": "manual",
        "gym_config": gym | changes.pop("gym", {}),
    }
    return OnlineDataEngineCfg(**(settings | changes))


def ends_of(batch: Any) -> dict[int, tuple[int, bool, bool, list[float]]]:
    """Of the episodes in a batch of single steps: length, terminated, truncated, and the observation after it all."""
    found: dict[int, tuple[int, bool, bool, list[float]]] = {}
    for step in batch.squeeze(1):
        number, length = int(step["obs"][0]), int(step["obs"][1]) + 1
        if length > found.get(number, (0,))[0]:
            last = step["next_obs"].tolist()
            found[number] = (length, bool(step["terminated"]), bool(step["truncated"]), last)
    return found


async def fill(cfg: OnlineDataEngineCfg, endpoint: str) -> None:
    """Fill the buffer with a worker of this process."""
    async with Worker(cfg, endpoint, worker_id="w", max_rollouts=cfg.buffer_size) as worker:
        await worker.wait(60.0)


async def test_c13_ends_by_goal_limit_both_and_capacity_stay_apart_up_to_the_batch() -> None:
    """C13: with the last observation of each, over both data paths."""
    cfg = config([{"goal": 3}, {"limit": 4}, {"goal": 5, "limit": 5}, {}], 7)
    with run_broker(cfg) as broker:
        await fill(cfg, broker.endpoint)
        for path in PATHS:
            with Client(broker.endpoint, data_path=path) as client:
                client.wait_ready()
                batch = client.sample_batch(600, 1)
                inner = client.sample_batch(50, 3)
            assert ends_of(batch) == {
                0: (3, True, False, [0, 3]),
                1: (4, False, True, [1, 4]),
                2: (5, True, True, [2, 5]),
                3: (7, False, True, [3, 7]),
            }
            assert not inner["terminated"][:, :-1].any()
            assert not inner["truncated"][:, :-1].any()


async def test_c13_an_environment_that_raises_beyond_its_own_limit_is_truncated_there() -> None:
    """C13: the limit it was registered with counts, although rows are longer; one that is configured counts instead."""
    cfg = config([{"raises": 7}], 10, LIMITED_ID, buffer_size=2)
    with run_broker(cfg) as broker, Client(broker.endpoint) as client:
        await fill(cfg, broker.endpoint)
        client.wait_ready()
        ends = ends_of(client.sample_batch(200, 1))
        assert ends == {0: (6, False, True, [0, 6]), 1: (6, False, True, [1, 6])}
        assert client.get_status()["last_failure"] == ""
    cfg = config([{}], 10, LIMITED_ID, gym={"max_episode_steps": 9})
    with run_broker(cfg) as broker, Client(broker.endpoint) as client:
        await fill(cfg, broker.endpoint)
        client.wait_ready()
        assert ends_of(client.sample_batch(200, 1)) == {0: (9, False, True, [0, 9])}


def test_c13_one_that_raises_at_a_limit_nobody_told_is_one_failure_and_the_worker_goes_on(tmp_path: Path) -> None:
    """C13: the event has the step and what the simulator said; half an episode is never stored."""
    script = [{"plan": 3}, {"raises": 5, "marker": str(tmp_path / "raised")}, {"plan": 4}]
    cfg = config(script, 10, max_worker_restarts=1, num_workers=1, initialization_timeout=90.0)
    with OnlineDataEngine(cfg) as engine:
        with EventSubscriber(engine.endpoint, 0, follow=False) as events:
            failures = [event for event in events if isinstance(event, WorkerFailure)]
        assert [(event.type_name, event.phase, event.step) for event in failures] == [("ValueError", "step", 4)]
        assert "no step is allowed after step 4, the limit of this simulator" in failures[0].message
        stats = engine.get_stats()
        assert stats["successful_episodes"] == 3
        # 3 before it failed; anew from the first one on: 3, and then one that its capacity cuts.
        assert stats["generated_frames"] == 16
        assert {length for length, *_ in ends_of(engine.sample_batch(300, 1)).values()} == {3, 10}


async def test_c25_lengths_of_a_worker_become_whole_truncated_or_failed_tries_and_are_counted() -> None:
    """C25: 0, 1, 9, 10, 11 and 1000 steps in rows of 10: beyond them the environment is truncated, and says so."""
    lengths = (0, 1, 9, 10, 11, 1000)
    cfg = config([{"plan": length} for length in lengths], 10, buffer_size=5)
    with run_broker(cfg) as broker, Client(broker.endpoint) as client:
        await fill(cfg, broker.endpoint)
        client.wait_ready()
        stats = client.get_stats()
        assert (stats["successful_episodes"], stats["failed_episodes"], stats["generated_frames"]) == (5, 1, 40)
        assert stats["extra"]["undrawn_episodes"] == 5
        longest = client.sample_batch(200, 10)
        assert sorted(longest["obs"][:, 0, 0].unique().tolist()) == [3, 4, 5]
        assert client.get_stats()["extra"]["undrawn_episodes"] == 2  # those of 1 and 9 steps
        found = ends_of(client.sample_batch(600, 1))
        # The step that fills the row is the environment's last, whether or not the plan was used up with it.
        assert {number: found[number][:3] for number in found} == {
            1: (1, False, False),
            2: (9, False, False),
            3: (10, False, True),
            4: (10, False, True),
            5: (10, False, True),
        }


@pytest.mark.parametrize(
    ("reward", "words"),
    [(2**24 + 1, "int64 16777217, which float32 cannot hold exactly"), ([1.0], r"float64 \[1\]"), ("1", r"<U1 \[\]")],
)
async def test_c11_a_reward_that_is_no_float32_is_refused_where_it_is_made(reward: Any, words: str) -> None:
    """C11: by its worker, which says so to everyone; nothing of that episode is stored."""
    cfg = config([{"plan": 2, "reward": 2**24}, {"plan": 2, "reward": reward}], 10)
    with run_broker(cfg) as broker, Client(broker.endpoint) as client:
        with pytest.raises(SchemaMismatchError, match=f"rewards: expected one number a step.*{words}"):
            await fill(cfg, broker.endpoint)
        await asyncio.to_thread(until, lambda: "rewards: expected" in client.get_status()["last_failure"])
        assert client.get_stats()["successful_episodes"] == 1
