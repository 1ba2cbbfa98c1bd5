"""C35: asking a buffer that does not hold enough yet, with real programs where the order of starts matters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ods_async import Client, ConfigError, OnlineDataEngineCfg, RequestTimeoutError, Worker
from ods_async.testing import window_faults
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.peers import RawWorker, marked_episode
from tests.cli.programs import line_of, settings, started
from tests.e2e.test_recovery import SECONDS, until, values


@pytest.fixture
def sixteen() -> Iterator[RunningBroker]:
    with run_broker(OnlineDataEngineCfg(buffer_size=16, max_episode_steps=12, refill_policy="manual")) as broker:
        yield broker


@pytest.mark.parametrize("stored", [0, 1, 15])
def test_c35_a_batch_of_16_waits_with_a_reason_and_comes_with_the_last_episode(
    stored: int, sixteen: RunningBroker
) -> None:
    """C35: "15 of 16 episodes", its own time-out is obeyed, and no item is drawn in place of missing ones."""
    with RawWorker(sixteen.endpoint) as worker, Client(sixteen.endpoint, timeout=SECONDS) as client:
        for mark in range(stored):
            ticket = worker.next_ticket()
            assert ticket is not None
            worker.hand_in(ticket.ticket_id, marked_episode(mark, 7))
        until(lambda: client.get_stats()["successful_episodes"] == stored)
        with pytest.raises(RequestTimeoutError, match=f"{stored} of 16 episodes") as caught:
            client.sample_batch(16, 3, timeout=0.2)
        assert caught.value.timeout <= 0.2
        status = client.get_status()
        assert (status["state"], status["episodes"], status["slots"]) == ("STARTING", stored, 16)
        worker.made = stored
        worker.work_in_background()
        batch = client.sample_batch(400, 3)
        assert len((batch["obs", "mark"] // 1000).unique()) == 16


def test_c35_a_trainer_that_is_started_before_any_worker_is_served_by_the_first_one(tmp_path: Path) -> None:
    """C35: broker, then the trainer (``sample``), then a worker, each a program; it waits, and waits for no count."""
    endpoint = f"ipc://{tmp_path / 'b.sock'}"
    path = settings(tmp_path, **values(endpoint=endpoint))
    with started("broker", path, "--json") as broker:
        line_of(broker)
        with (
            started("sample", endpoint, "-b", "5", "-c", "3", "--timeout", "120", "--json") as trainer,
            Client(endpoint, timeout=SECONDS) as client,
        ):
            until(lambda: client.get_stats()["extra"]["parked_requests"] > 0)
            assert "no worker" in client.get_status()["waiting"]
            with started("worker", path, "--connect", endpoint):
                assert line_of(trainer)["batch_size"] == [5, 3]


async def test_c35_a_rate_limit_never_holds_back_the_first_generation() -> None:
    """C35: workers would wait for samples, and samples for the buffer."""
    cfg = OnlineDataEngineCfg(**values(refill_policy="continuous", samples_per_insert=1e6))
    with run_broker(cfg) as broker, Client(broker.endpoint, timeout=SECONDS) as client:
        async with Worker(cfg, broker.endpoint):
            client.wait_ready()
            assert [found for window in client.sample_batch(16, 3) if (found := window_faults(window))] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gym_config": {"id": "x", "num_envs": 5}}, r"num_envs.*must not exceed buffer_size=4"),
        ({"spare_rows": 1, "gym_config": {"id": "x", "num_envs": 3}}, "must hold one rollout"),
        ({"lifecycle_event_capacity": 5}, "at least 8"),
        ({"samples_per_insert": 2.0, "refill_policy": "manual"}, "continuous"),
    ],
)
def test_c35_settings_that_could_never_be_met_are_refused_at_the_start(changes: dict[str, Any], words: str) -> None:
    """C35: what is needed at least may not be above what fits."""
    with pytest.raises(ConfigError, match=words):
        OnlineDataEngineCfg(**(values() | changes))


def test_c35_capacity_is_in_episodes_and_says_so() -> None:
    """C35"""
    assert "episodes kept at once" in (OnlineDataEngineCfg.__doc__ or "")
