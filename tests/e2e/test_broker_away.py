"""A broker that dies while a worker sends it large episodes, and comes back at the same address (C20)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest

from ods_async import Client, EventSubscriber, OnlineDataEngineCfg, Worker
from ods_async.core.events import EpisodePublished
from ods_async.testing import COUNTING_ID, window_faults
from tests.cli.programs import ends, line_of, settings, started
from tests.e2e.programs import until

BOUND = 8_000_000  # bytes without a verdict
EPISODE = 6 * 512 * 512 * 3  # a little less than one has


def values(folder: Path, port: int) -> dict[str, Any]:
    image = {"min_length": 6, "max_length": 6, "image_shape": [512, 512, 3], "segments": 2}
    return {
        "buffer_size": 2,
        "max_episode_steps": 6,
        "endpoint": f"tcp://127.0.0.1:{port}",
        "refill_policy": "continuous",
        "heartbeat_interval": 0.1,
        "heartbeat_timeout": 0.5,
        "include_provenance": True,
        "gym_config": {"id": COUNTING_ID, "kwargs": image},
    }


@pytest.mark.slow
async def test_c20_a_broker_killed_in_the_middle_of_it_loses_what_is_numbered_and_stores_nothing_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C20: memory stays within its bound while the broker is away; pushing goes on by itself when it is back."""
    caplog.set_level(logging.WARNING)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(started("broker", settings(tmp_path, **values(tmp_path, 0)), "--json"))
        endpoint = (await asyncio.to_thread(line_of, first))["endpoints"][0]
        config = values(tmp_path, int(endpoint.rpartition(":")[2]))
        cfg = OnlineDataEngineCfg.from_dict(config)
        async with Worker(cfg, endpoint, worker_id="w", patience=120.0, flush_timeout=20.0) as worker:
            outbox = worker._shift.link.desk.outbox
            outbox._max_bytes = BOUND
            await asyncio.to_thread(until, lambda: worker.rollouts > 4)
            first.kill()  # one 4.7 MB episode after the other: in the middle of one
            await asyncio.to_thread(first.wait, 20.0)
            await asyncio.to_thread(until, lambda: "looking for it" in caplog.text)
            assert outbox.nbytes <= BOUND + 2 * EPISODE
            second = stack.enter_context(started("broker", settings(tmp_path, **config), "--json"))
            assert (await asyncio.to_thread(line_of, second))["endpoints"][0] == endpoint
            await asyncio.to_thread(until, lambda: published(endpoint) > 4)
            assert outbox.nbytes <= BOUND + 2 * EPISODE
            with Client(endpoint) as client:
                batch = client.sample_batch(20, 6)
                assert [found for window in batch if (found := window_faults(window))] == []
                prints = batch["obs", "fingerprint"][:, 0].tolist()
                ids = batch["ods_episode_id"][:, 0].tolist()
                # One episode a fingerprint, and the other way round: nothing was stored under two numbers.
                assert len(set(prints)) == len(set(ids)) == len(set(zip(prints, ids, strict=True)))
        for lost in worker.lost:
            assert str(lost) in caplog.text
        assert ("are lost: tickets" in caplog.text) == bool(worker.lost)
        with EventSubscriber(endpoint, 0, follow=False) as events:
            numbers = [event.episode_id for event in events if isinstance(event, EpisodePublished)]
        assert numbers == list(range(len(numbers)))
        second.terminate()
        assert (await asyncio.to_thread(ends, second, 20.0))[0] == 0


def published(endpoint: str) -> int:
    with Client(endpoint) as client:
        return int(client.get_stats()["successful_episodes"])
