"""Workers that are stopped or killed during their ticket, and what everyone else sees of it (B10, B12)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ods_async import (
    AsyncOnlineDataEngine,
    Client,
    OnlineDataEngine,
    OnlineDataEngineCfg,
    OnlineDataEngineState,
    WorkerExitedError,
)
from ods_async.testing import window_faults
from tests.cli.programs import ends, line_of, run_json, settings, started
from tests.e2e.programs import Consumer
from tests.e2e.test_stopped_consumers import is_stopped, until

SLOW = {"min_length": 6, "max_length": 8, "step_delay": 0.05}


def config(**changes: Any) -> OnlineDataEngineCfg:
    env = SLOW | changes.pop("env", {})
    values: dict[str, Any] = {
        "buffer_size": 4,
        "max_episode_steps": 11,
        "gym_config": {"id": "ods_async/Counting-v0", "num_envs": changes.pop("num_envs", 1), "kwargs": env},
        "refill_policy": "manual",
        "num_workers": 2,
        "include_provenance": True,
        "initialization_timeout": 90.0,
        "extra_endpoints": ("tcp://127.0.0.1:0",),
    }
    return OnlineDataEngineCfg(**(values | changes))


def busy(client: Any) -> set[str]:
    return {worker["worker_id"] for worker in client.get_status()["workers"] if worker["state"] == "busy"}


def handed_in_by(client: Any) -> dict[str, int]:
    return {worker["worker_id"]: worker["rollouts"] for worker in client.get_status()["workers"]}


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_tolerated_a_generation_completes_by_the_other_when_one_is_stopped_during_its_ticket(num_envs: int) -> None:
    """B12, C33: silence is noticed, the ticket goes to the other; who comes back works on, and nothing counts twice."""
    cfg = config(worker_failure="tolerate", heartbeat_timeout=1.0, num_envs=num_envs)
    with OnlineDataEngine(cfg) as engine:
        generation = engine.request_refill()
        until(lambda: busy(engine) == {"worker-0", "worker-1"})
        with stopped(engine.pids["worker-0"]):
            engine.wait_for_generation(generation, timeout=60.0)
            workers = {worker["worker_id"]: worker["state"] for worker in engine.get_status()["workers"]}
            assert workers["worker-0"] in ("stalled", "gone")
            # And a whole one without it, whose tickets are dealt to it as well.
            engine.wait_for_generation(engine.request_refill(), timeout=60.0)
        until(lambda: {worker["state"] for worker in engine.get_status()["workers"]} <= {"idle", "busy"})
        before = {worker["worker_id"]: worker["rollouts"] for worker in engine.get_status()["workers"]}
        engine.wait_for_generation(engine.request_refill(), timeout=60.0)
        after = {worker["worker_id"]: worker["rollouts"] for worker in engine.get_status()["workers"]}
        assert after["worker-0"] > before["worker-0"], "the worker that came back gets no work"
        kinds = [event.kind for event in engine.events(follow=False)]
        assert {"worker_stalled", "ticket_reissued", "worker_returned"} <= set(kinds)
        stats = engine.get_stats()
        assert stats["completed_generation"] == generation + 2
        per_generation = -(-4 // num_envs) * num_envs
        assert stats["successful_episodes"] == kinds.count("published") == (generation + 2) * per_generation
        batch = engine.sample_batch(30, 4)
        assert [window_faults(window) for window in batch] == [""] * 30
        assert batch["ods_generation"].unique().tolist() == [generation + 2]


def test_tolerated_a_generation_completes_by_the_other_when_one_is_killed_during_its_ticket() -> None:
    """B12: at once, not after its silence; consumers go on as if nothing had happened."""
    with OnlineDataEngine(config(worker_failure="tolerate")) as engine, Client(engine.endpoints[1]) as client:
        generation = engine.request_refill()
        until(lambda: busy(engine) == {"worker-0", "worker-1"})
        os.kill(engine.pids["worker-1"], signal.SIGKILL)
        engine.wait_for_generation(generation, timeout=60.0)
        status = client.get_status()
        assert status["state"] == "READY"
        assert "signal 9" in status["last_failure"]
        assert {worker["worker_id"]: worker["state"] for worker in status["workers"]}["worker-1"] == "gone"
        assert client.sample_batch(3, 2)["ods_generation"].unique().tolist() == [generation]
        reissued = [event for event in engine.events(follow=False) if event.kind == "ticket_reissued"]
        assert "worker-1 exited" in [event.reason for event in reissued]


@pytest.mark.parametrize("how", ["killed", "exit code 3"])
def test_a_failing_worker_is_raised_by_every_consumer_within_a_second_naming_how_it_ended(
    how: str, tmp_path: Path, consumers: tuple[Consumer, Consumer, Consumer]
) -> None:
    """B10, B12 ("fail"): waiting, streaming or idle; on ipc and tcp; asyncio and blocking; the owner too."""
    marker = tmp_path / "failed"
    env: dict[str, Any] = {"step_delay": 0.25}
    if how != "killed":
        env |= {
            "fail_phase": "step",
            "fail_kind": "exit",
            "fail_episode": 2,
            "fail_step": 5,
            "fail_marker": str(marker),
        }
    engine = OnlineDataEngine(config(env=env, worker_failure="fail", buffer_size=2, num_workers=1))
    engine.start()
    try:
        ipc, tcp = engine.endpoints
        generation = engine.request_refill()
        consumers[0].tell("wait", kind="asyncio", endpoint=ipc, data_path="auto", generation=generation)
        consumers[1].tell("idle", kind="blocking", endpoint=ipc, data_path="shared_memory")
        consumers[2].tell("wait", kind="blocking", endpoint=tcp, data_path="frames", generation=generation)
        for consumer in consumers:
            assert consumer.hear("waiting")
        if how == "killed":
            at = time.monotonic()
            os.kill(engine.pids["worker-0"], signal.SIGKILL)
        else:
            until(marker.exists)
            at = time.monotonic() - (time.time() - marker.stat().st_mtime)
        until(lambda: engine.state is OnlineDataEngineState.FAILED)
        seen = time.monotonic() - at
        consumers[1].write("go on")
        words = "signal 9" if how == "killed" else "exit code 3"
        for consumer in consumers:
            found = consumer.hear("result")
            assert found["error"] == "WorkerExitedError", found
            assert words in found["text"]
            assert "worker-0" in found["text"]
            assert found["fields"]["exit_code"] == (-9 if how == "killed" else 3)
            assert found["at"] - at < 1.0, f"{found} came {found['at'] - at:.2f} s after the event"
        assert seen < 1.0
        with pytest.raises(WorkerExitedError, match=words):
            engine.sample_batch(2, 3)
        failures = [event for event in engine.events(follow=False) if event.kind == "worker_failed"]
        assert [words in failure.message for failure in failures] == [True]
    finally:
        with pytest.raises(WorkerExitedError):
            engine.stop()


def test_streams_of_every_kind_end_with_the_workers_failure_within_a_second(
    consumers: tuple[Consumer, Consumer, Consumer],
) -> None:
    """B10: also what was drawn ahead does not hide it."""
    engine = OnlineDataEngine(config(worker_failure="fail"))
    engine.start()
    try:
        ways = [("asyncio", 0, "auto"), ("blocking", 0, "auto"), ("blocking", 1, "frames")]
        for consumer, (kind, endpoint, data_path) in zip(consumers, ways, strict=True):
            consumer.tell("stream", kind=kind, endpoint=engine.endpoints[endpoint], data_path=data_path)
        for consumer in consumers:
            assert consumer.hear("waiting")
        at = time.monotonic()
        os.kill(engine.pids["worker-1"], signal.SIGKILL)
        for consumer in consumers:
            found = consumer.hear("result")
            assert (found["error"], "signal 9" in found["text"]) == ("WorkerExitedError", True), found
            assert found["at"] - at < 1.0
    finally:
        with pytest.raises(WorkerExitedError):
            engine.stop()


async def test_the_owners_own_waiting_calls_raise_it_too() -> None:
    """B10: whatever the asyncio engine is waiting for."""
    engine = AsyncOnlineDataEngine(config(worker_failure="fail"))
    await engine.start()
    generation = await engine.request_refill()
    waiting = [asyncio.ensure_future(engine.wait_for_generation(generation, timeout=60.0)) for _ in range(3)]
    await asyncio.sleep(0)
    at = time.monotonic()
    os.kill(engine.pids["worker-0"], signal.SIGKILL)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - at < 1.0
    assert [type(outcome) for outcome in outcomes] == [WorkerExitedError] * 3
    with pytest.raises(WorkerExitedError):
        await engine.stop()


@pytest.mark.parametrize("length", [5, 31])
def test_workers_that_hand_in_their_last_rollout_and_exit_lose_nothing(length: int, tmp_path: Path) -> None:
    """C46: two programs, ended by a signal while the broker cannot even read; each rollout made is published."""
    image = [256, 512, 3] if length > 30 else None  # 12 MB a rollout, more than any socket holds
    env = {"min_length": length, "max_length": length, "image_shape": image, "step_delay": 0.6 / length}
    path = settings(
        tmp_path,
        buffer_size=3,
        max_episode_steps=33,
        refill_policy="continuous",
        gym_config={"id": "ods_async/Counting-v0", "kwargs": env},
        endpoint=f"ipc://{tmp_path / 'b.sock'}",
    )
    with started("broker", path, "--json") as broker:
        (endpoint,) = line_of(broker)["endpoints"]
        with (
            started("worker", path, "--connect", endpoint, "--id", "left") as left,
            started("worker", path, "--connect", endpoint, "--id", "right") as right,
            Client(endpoint) as client,
        ):
            until(lambda: client.get_stats()["completed_generation"] >= 2)
            # A worker may be without an order while the other makes the last rollout of a generation: left must be
            # at the beginning of a new one, which takes it longer than stopping the broker takes us.
            before = handed_in_by(client)["left"]
            until(lambda: handed_in_by(client)["left"] > before and "left" in busy(client))
            with stopped(broker.pid):
                until(lambda: is_stopped(broker.pid))
                # It makes its rollout, hands it in, and hears nothing.
                made = time.monotonic() + 1.0
                until(lambda: time.monotonic() > made)
                left.send_signal(signal.SIGTERM)
                right.send_signal(signal.SIGTERM)
                with pytest.raises(subprocess.TimeoutExpired):
                    left.wait(0.7)  # its rollout has no verdict yet
            assert ends(left, 30.0)[0] == 0, left.stderr.read() if left.stderr else ""
            assert ends(right, 30.0)[0] == 0, right.stderr.read() if right.stderr else ""
            until(lambda: all(w["state"] == "gone" for w in client.get_status()["workers"]))
            found = client.get_stats()
            handed_in = handed_in_by(client)
            events = list(client.events(since=0, follow=False))
            assert sum(handed_in.values()) == found["successful_episodes"]
            published = [event.episode_id for event in events if event.kind == "published"]
            assert published == list(range(found["successful_episodes"]))
            left_events = [event.reason for event in events if event.kind == "worker_left"]
            assert len(left_events) == 2
            # What the workers made and what was published agree: nobody left anything unjudged.
            assert found["extra"]["refused_rollouts"] == 0
        assert run_json("stop", endpoint)
        assert ends(broker, 10.0)[0] == 0
