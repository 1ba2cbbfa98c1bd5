from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ods_async.client.sync import Client
from ods_async.config import OnlineDataEngineCfg
from ods_async.testing.broker import run_broker
from ods_async.testing.trial.consumer import Consumer
from ods_async.worker.runtime import Worker

CFG = OnlineDataEngineCfg(
    buffer_size=5,
    max_episode_steps=36,
    refill_policy="manual",
    include_provenance=True,
    gym_config={
        "id": "ods_async/Counting-v0",
        # Segments of ten steps at least: every window that is asked for at random can be found.
        "kwargs": {"min_length": 30, "max_length": 35, "image_shape": [4, 4, 3]},
    },
)


async def test_the_consumer_finds_nothing_wrong_with_whole_windows_and_every_planted_fault() -> None:
    """Each check of the trial bites."""
    with run_broker(CFG, ipc=True) as broker, Client(broker.endpoint, timeout=30.0) as client:
        async with Worker(CFG, broker.endpoint):
            client.wait_ready()
        consumer = Consumer(client, random.Random(1), 20.0, 2.0)
        try:
            for _ in range(25):
                await consumer.ask()
            assert (consumer.faults, consumer.errors) == ([], {})
            assert consumer.counts["answers"] == consumer.counts["requests"] > 25

            def spoilt(change: Callable[[Any], None]) -> str:
                batch = client.sample_batch(4, 5, seed=3)
                change(batch)
                before = consumer.counts["torn"]
                consumer._check(batch)
                assert consumer.counts["torn"] > before
                return consumer.faults[-1]

            assert "consecutive" in spoilt(lambda b: b["obs", "step"][0, 2].add_(1))
            assert "several episodes" in spoilt(lambda b: b["obs", "fingerprint"][1, 2].add_(1))
            assert "state" in spoilt(lambda b: b["obs", "state"][2, 4].zero_())
            assert "image" in spoilt(lambda b: b["obs", "image"][3, 0].add_(1))
            assert "actions" in spoilt(lambda b: b["actions"][3, 4].add_(1))
            assert "published before" in spoilt(lambda b: b["ods_episode_id"].add_(100))
        finally:
            consumer.clock.close()


async def test_a_late_answer_and_an_error_that_should_not_be_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_broker(CFG, ipc=True) as broker, Client(broker.endpoint) as client:
        consumer = Consumer(client, random.Random(1), 0.05, -0.05)
        try:
            await consumer._call(lambda wait: client.wait_ready(timeout=wait), None)
            assert (consumer.counts["late"], consumer.errors["RequestTimeoutError"]) == (1, 1)
            await consumer._call(lambda wait: client.wait_for_generation(0, timeout=wait), None)
            assert consumer.counts["surprises"] == 1
        finally:
            consumer.clock.close()
