"""Texts and facts of episodes, from a worker through a broker to whoever reads them (C26, C28)."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ods_async import Client, OnlineDataEngineCfg, OnlineDataset, Worker
from ods_async.broker import effects
from ods_async.errors import ArgumentError
from ods_async.testing.broker import RunningBroker, run_broker
from tests.e2e.programs import until
from tests.e2e.scripted import SCRIPTED_ID
from tests.wire.strategies import same

LONG, CUP = "x" * 10_000, "place the cup ☕"
SCRIPT: list[dict[str, Any]] = [
    {"task": "pick", "plan": 4},
    {"task": "pick", "plan": 4},
    {"task": CUP, "says": [[2, "reach"], [1, ""], [1, LONG], [1, None], [1, "reach"]]},
    {"task": "", "plan": 3},
    {"task": LONG, "plan": 3},
]
TASKS = ("pick", "pick", CUP, "unknown_task", LONG)
SAID = ("reach", "reach", CUP, LONG, CUP, "reach")


def config(episodes: list[dict[str, Any]]) -> OnlineDataEngineCfg:
    gym = {"id": SCRIPTED_ID, "kwargs": {"episodes": episodes}}
    return OnlineDataEngineCfg(buffer_size=len(episodes), max_episode_steps=9, refill_policy="manual", gym_config=gym)


async def work(cfg: OnlineDataEngineCfg, endpoint: str, policy: Any = None) -> None:
    async with Worker(cfg, endpoint, policy=policy, max_rollouts=cfg.buffer_size) as worker:
        await worker.wait(60.0)


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    cfg = config(SCRIPT)
    with run_broker(cfg) as running:
        asyncio.run(work(cfg, running.endpoint))
        with Client(running.endpoint) as client:
            client.wait_ready()
        yield running


def expected(batch: Any) -> dict[str, Any]:
    """The texts of every step, by its observation."""
    obs = batch["obs"].long()
    task = [[TASKS[number] for number, _ in row] for row in obs.tolist()]
    subtask = [[SAID[step] if number == 2 else TASKS[number] for number, step in row] for row in obs.tolist()]
    return {"task": task, "subtask": subtask}


@pytest.mark.parametrize("path", ["shared_memory", "frames"])
def test_c28_every_item_keeps_its_own_texts_in_order_and_of_one_type(broker: RunningBroker, path: str) -> None:
    """C28: repeated, re-ordered, one item, all alike, all different; per step as well; an empty one is none."""
    with Client(broker.endpoint, data_path=path) as client:
        batch = client.sample_batch(200, 2, seed=3)
        assert set(batch["obs"][..., 0].unique().tolist()) == set(range(5))
        alike = batch[batch["obs"][:, 0, 0] == 0]
        different = torch.stack([batch[batch["obs"][:, 0, 0] == number][0] for number in (4, 2, 0, 3)])
        for some in (batch, batch[torch.randperm(200)], batch.flip(0), batch[7:8], alike, different):
            texts = client.resolve_language(some)
            assert texts == expected(some)
            assert {type(text) for kind in texts.values() for row in kind for text in row} == {str}
        assert {*expected(alike)["task"][0]} == {"pick"}
        assert len({row[0] for row in expected(different)["task"]}) == 4
        single = client.sample_batch(1, 1, seed=1)
        assert client.resolve_language(single) == expected(single)


def test_c28_editing_one_items_texts_changes_no_other_and_not_the_buffer(broker: RunningBroker) -> None:
    """C28: lists of one's own, indices of one's own."""
    with Client(broker.endpoint) as client, Client(broker.endpoint, data_path="frames") as other:
        batch = client.sample_batch(50, 2, seed=3)
        before = expected(batch)
        texts = client.resolve_language(batch)
        texts["task"][0][0] = "something else"
        texts["subtask"][1].clear()
        assert texts["task"][1:] == before["task"][1:]
        assert client.resolve_language(batch) == before
        batch["task_index"][0] = batch["task_index"][-1]
        batch["subtask_index"].zero_()
        for again in (client, other):
            fresh = again.sample_batch(50, 2, seed=3)
            assert again.resolve_language(fresh) == expected(fresh) == before


@pytest.mark.parametrize("batch_size", [None, 4])
def test_c28_items_of_a_dataset_have_the_texts_of_their_own_steps(
    broker: RunningBroker, batch_size: int | None
) -> None:
    """C28: also stacked by a loader."""
    with Client(broker.endpoint) as client:
        options = {} if batch_size else {"batch_size": 6}
        dataset = OnlineDataset(broker.endpoint, 2, batch_size, length=30, seed=2)
        loader = torch.utils.data.DataLoader(dataset, **({"batch_size": None} | options))
        for batch in loader:
            assert client.resolve_language(batch) == expected(batch)


KEPT: dict[str, Any] = {
    "float32": np.float32(0.1),
    "int64": np.int64(-5),
    "bool": np.bool_(True),
    "tuple": (1, ("a", 2.0)),
    "none": None,
    "bytes": b"\x00\xff",
    "beyond 64 bits": 2**64,
    "entropy": np.random.SeedSequence().entropy,
    "nan": float("nan"),
    "nested": {"a": {"b": [1, {"c": ()}]}},
}
REFUSED: dict[str, Any] = {
    "0-dim": np.zeros(()),
    "number as key": {1: "a"},
    "set": {1, 2},
    "datetime": datetime.datetime(2020, 1, 1),
    "path": Path("x"),
    "surrogate": "\ud800",
    "deep": None,
}
for _ in range(40):
    REFUSED["deep"] = [REFUSED["deep"]]


async def test_c26_facts_of_an_episode_reach_the_broker_equal_and_of_the_same_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C26: numpy scalars, tuples, bytes, large numbers, NaN."""
    seen: list[Any] = []
    write = effects.write_rollout

    def look(arrays: Any, stamps: Any, effect: Any) -> Any:
        seen.extend(episode.metadata for episode in effect.rollout.episodes)
        return write(arrays, stamps, effect)

    monkeypatch.setattr(effects, "write_rollout", look)
    cfg = config(SCRIPT[:1])
    with run_broker(cfg) as broker:
        await work(cfg, broker.endpoint, noting(KEPT))
    assert len(seen) == 1
    assert same(seen[0], {"outcome": "ended"} | KEPT) or same(seen[0], {"outcome": "success"} | KEPT)


@pytest.mark.parametrize("name", REFUSED)
async def test_c26_a_fact_that_would_not_come_back_is_refused_by_its_worker_with_the_way_to_it(name: str) -> None:
    """C26: never accepted and lost later; the broker serves on."""
    cfg = config(SCRIPT[:1])
    with run_broker(cfg) as broker, Client(broker.endpoint) as client:
        with pytest.raises(ArgumentError, match="metadata/fact/1") as caught:
            await work(cfg, broker.endpoint, noting({"fine": 1, "fact": [0, REFUSED[name]]}))
        assert "episodes/0/metadata/fact/1" in caught.value.argument
        await asyncio.to_thread(until, lambda: "metadata/fact/1" in client.get_status()["last_failure"])
        await work(cfg, broker.endpoint)
        await asyncio.to_thread(client.wait_ready, 60.0)


def noting(facts: dict[str, Any]) -> Any:
    """A policy that keeps these facts with its episode."""

    def policy(view: Any) -> Any:
        view.metadata.update(facts)
        return [np.zeros(1, np.float32)] * 2

    return policy
