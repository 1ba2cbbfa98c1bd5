"""Consumers in processes of their own draw while everything they draw from is being replaced (law 3, B16, B18, B21)."""

from __future__ import annotations

from typing import Any

import pytest

from ods_async import OnlineDataEngine, OnlineDataEngineCfg
from tests.e2e.programs import Consumer

WAYS = (("asyncio", 0, "shared_memory"), ("blocking", 0, "shared_memory"), ("blocking", 1, "frames"))


def engine(num_envs: int, facts: dict[str, int], **changes: Any) -> OnlineDataEngine:
    gym = {
        "id": "ods_async/Counting-v0",
        "num_envs": num_envs,
        "kwargs": facts | changes.pop("env", {}),
        "vectorization": changes.pop("vectorization", "loop"),
    }
    values: dict[str, Any] = {
        "max_episode_steps": facts["max_length"] + 3,
        "gym_config": gym,
        "num_workers": 2,
        "include_provenance": True,
        "initialization_timeout": 90.0,
        "extra_endpoints": ("tcp://127.0.0.1:0",),
    }
    return OnlineDataEngine(OnlineDataEngineCfg(**(values | changes)))


@pytest.mark.parametrize(
    ("num_envs", "slots", "windows", "facts", "changes"),
    [
        (1, 7, 20_000, {"min_length": 9, "max_length": 47}, {}),
        (3, 11, 6_000, {"min_length": 8, "max_length": 21}, {"vectorization": "sync"}),
        (2, 5, 3_000, {"min_length": 11, "max_length": 13}, {"env": {"image_shape": [48, 31, 3]}}),
    ],
    ids=["one environment", "three environments in a vector", "images"],
)
def test_no_torn_stale_or_crossed_window_while_two_workers_publish_as_fast_as_they_can(
    num_envs: int,
    slots: int,
    windows: int,
    facts: dict[str, int],
    changes: dict[str, Any],
    consumers: tuple[Consumer, Consumer, Consumer],
) -> None:
    """B18, B21, B25 to B27, law 3: 20,000 windows and more, all three modes, contexts too, three kinds of consumers."""
    with engine(num_envs, facts, buffer_size=slots, refill_policy="continuous", **changes) as running:
        with running.events(since=0) as events:  # one worker may be much slower to start than the other
            joined = (event.worker_id for event in events if event.kind == "worker_joined")
            assert len({next(joined), next(joined)}) == 2
        for consumer, (kind, endpoint, data_path) in zip(consumers, WAYS, strict=True):
            consumer.tell(
                "draw",
                kind=kind,
                endpoint=running.endpoints[endpoint],
                data_path=data_path,
                windows=windows // 3 + 100,
                generations=6,
                batch=61,
                chunk=6,
                facts=facts,
            )
        found = [consumer.hear("result") for consumer in consumers]
        assert [entry.get("trace") for entry in found] == [None] * 3
        assert [entry["faults"] for entry in found] == [[]] * 3
        assert [entry["data_path"] for entry in found] == [way[2] for way in WAYS]
        assert sum(entry["total"] for entry in found) >= windows
        for entry in found:
            assert min(entry["windows"].values()) > windows // 30, entry["windows"]
            assert len(entry["windows"]) == 5
            assert entry["generation"] >= 6
            assert entry["episodes"] > 3 * slots  # it really saw the buffer being replaced
        stats = running.get_stats()
        assert stats["completed_generation"] >= 6
        workers = running.get_status()["workers"]
        assert len(workers) == 2
        assert all(worker["rollouts"] > 0 for worker in workers)
