"""Engines with real processes: B6 to B13."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ods_async import (
    AsyncOnlineDataEngine,
    Client,
    DataUnavailableError,
    ForcedShutdownError,
    OnlineDataEngine,
    OnlineDataEngineCfg,
    OnlineDataEngineState,
    OnlineDataWorkerError,
    OwnerOnlyError,
    RequestTimeoutError,
    StartCancelledError,
    StateError,
    WorkerExitedError,
)
from ods_async.client.exchange import Exchange
from ods_async.core.requests import Drain
from ods_async.testing import window_faults

State = OnlineDataEngineState


def settings(env: dict[str, Any] | None = None, **changes: Any) -> OnlineDataEngineCfg:
    kwargs = {"min_length": 4, "max_length": 11, **(env or {})}
    values: dict[str, Any] = {
        "buffer_size": 5,
        "max_episode_steps": 13,
        "gym_config": {"id": "ods_async/Counting-v0", "kwargs": kwargs},
        "refill_policy": "manual",
        "initialization_timeout": 60.0,
        "num_workers": 1,
    }
    return OnlineDataEngineCfg(**(values | changes))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, segment, socket file or thread may remain."""
    segments = {path.name for path in Path("/dev/shm").glob("ods-*")}
    threads = set(threading.enumerate())
    children = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - children == set()
    mine = {path.name for path in Path("/dev/shm").glob("ods-*")} - segments
    assert [name for name in mine if not psutil.pid_exists(int(name.split("-")[2]))] == []
    ours = [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("ods-")]
    for thread in ours:
        thread.join(2.0)  # one that has done its work and told so may not have ended yet
    assert [thread.name for thread in ours if thread.is_alive()] == []


def faults(batch: Any) -> list[str]:
    """What is wrong with a batch's windows."""
    return [found for window in batch if (found := window_faults(window))]


def until(condition: Callable[[], bool], within: float) -> float:
    """Seconds until the condition held."""
    before = time.monotonic()
    tick = threading.Event()
    while not condition():
        assert time.monotonic() - before < within, "it did not happen in time"
        tick.wait(0.01)
    return time.monotonic() - before


def test_b6_b7_from_created_to_stopped() -> None:
    """B6, B7: start returns when the first generation is published; verbs in the wrong state say which is needed."""
    engine = OnlineDataEngine(settings(num_workers=2, episode_sample_budget=90, episode_sample_hard_limit=90))
    assert (engine.state, engine.is_init, engine.buffer_size, str(engine.device)) == (State.CREATED, False, 5, "cpu")
    with pytest.raises(StateError, match=r"sample_batch\(\) needs the state READY; the engine is CREATED: .*start\(\)"):
        engine.sample_batch(2, 3)
    with pytest.raises(StateError, match="endpoint"):
        _ = engine.endpoint
    with pytest.raises(TypeError, match=r"engine\.endpoint"):
        pickle.dumps(engine)
    engine.start()
    try:
        assert (engine.state, engine.is_init) == (State.READY, True)
        assert engine.get_stats()["completed_generation"] == 1
        with pytest.raises(StateError, match=r"start\(\) needs the state CREATED; the engine is READY"):
            engine.start()
        batch = engine.sample_batch(7, 3)
        assert tuple(batch.batch_size) == (7, 3)
        assert faults(batch) == []
        context = engine.sample_batch_with_context(6, 2, 4)
        assert tuple(context.batch_size) == (6, 5)
        engine.check_health()
        assert engine.get_flow_status()["completed_generation"] == 1
        assert set(engine.pids) == {"broker", "worker-0", "worker-1"}
        assert engine.get_status()["run_id"] == engine.run_id
        with pytest.raises(ValueError, match="batch_size"):
            engine.sample_batch(0, 3)
        with pytest.raises(DataUnavailableError):
            engine.sample_batch(1, 12)
    finally:
        engine.stop()
    assert engine.state is State.STOPPED
    engine.stop()
    with pytest.raises(StateError, match="STOPPED"):
        engine.sample_batch(2, 3)
    with pytest.raises(StateError, match="STOPPED"):
        engine.start()
    assert engine.resolve_language(batch)["task"][0][0]
    assert engine.get_stats()["sampled_chunks"] == 13
    assert engine.get_sampling_budget_snapshot()["total_delivered_chunks"] == 13


def test_b32_refills_are_requested_and_waited_for_and_the_log_is_drained_after_the_end() -> None:
    """B32, B39, B40."""
    with OnlineDataEngine(settings(lifecycle_event_capacity=100)) as engine:
        first = engine.drain_lifecycle_events()
        assert [record["kind"] for record in first] == ["published"] * 5
        assert engine.request_refill() == 2
        engine.wait_for_generation(2, timeout=60.0)
        with pytest.raises(ValueError, match="never requested"):
            engine.wait_for_generation(9)
        with pytest.raises(ValueError, match="timeout"):
            engine.wait_for_generation(2, timeout=float("nan"))
    last = engine.drain_lifecycle_events()
    assert sorted(record["kind"] for record in last) == ["evicted"] * 5 + ["published"] * 5
    assert engine.drain_lifecycle_events() == []


def test_b39_b40_records_whose_receipt_the_broker_never_heard_of_are_returned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B39, B40: no question of a drain after the first one gets through, and then the engine stops."""
    honest = Exchange._ask

    def deaf(exchange: Any, session: Any, request: Any, meanwhile: Any = None) -> Any:
        if isinstance(request, Drain) and request.received:
            raise RequestTimeoutError("no answer", operation="drain", timeout=0.0, missing="an answer")
        return honest(exchange, session, request, meanwhile)

    with OnlineDataEngine(settings(lifecycle_event_capacity=100)) as engine:
        monkeypatch.setattr(Exchange, "_ask", deaf)
        records = engine.drain_lifecycle_events()
        assert [record["slot"] for record in records] == [0, 1, 2, 3, 4]
    assert engine.drain_lifecycle_events() == []


def test_b43_language_of_another_consumers_batch_is_known_after_the_end() -> None:
    """B43."""
    with OnlineDataEngine(settings()) as engine, Client(engine.endpoint) as client:
        batch = client.sample_batch(4, 3)
        expected = client.resolve_language(batch)
    assert engine.resolve_language(batch) == expected


def test_b7_start_raises_what_the_worker_raised() -> None:
    """B7, B11: a builtin as itself."""
    engine = OnlineDataEngine(settings(env={"no_such_argument": 1}))
    with pytest.raises(TypeError, match="no_such_argument") as caught:
        engine.start()
    assert "worker-0" in "".join(caught.value.__notes__)
    assert engine.state is State.FAILED
    with pytest.raises(TypeError, match="no_such_argument"):
        engine.sample_batch(2, 3)
    engine.stop()
    assert engine.state is State.FAILED


@pytest.mark.parametrize("phase", ["reset", "step"])
def test_b11_c34_an_exception_that_cannot_travel_arrives_in_words(phase: str) -> None:
    """B11, C34: type, message, phase and step."""
    engine = OnlineDataEngine(settings(env={"fail_phase": phase, "fail_step": 2}))
    with pytest.raises(OnlineDataWorkerError) as caught:
        engine.start()
    error = caught.value
    assert (error.type_name, error.worker_id, error.phase) == ("CountingError", "worker-0", phase)
    assert error.step == (2 if phase == "step" else None)
    assert "counting.py" in error.traceback_text


def test_b7_start_gives_up_after_its_time_out() -> None:
    """B7."""
    engine = OnlineDataEngine(settings(env={"reset_delay": 0.2, "step_delay": 0.3}, initialization_timeout=2.5))
    with pytest.raises(TimeoutError, match=r"initialization_timeout=2.5 s: \d of 5 episodes"):
        engine.start()
    assert engine.state is State.FAILED


def test_b7_stop_cancels_a_start() -> None:
    """B7: the end state is STOPPED."""
    engine = OnlineDataEngine(settings(env={"step_delay": 0.2}))
    stopper = threading.Thread(target=lambda: (until(lambda: "worker-0" in engine.pids, 30.0), engine.stop()))
    stopper.start()
    with pytest.raises(StartCancelledError):
        engine.start()
    stopper.join()
    assert engine.state is State.STOPPED
    with pytest.raises(StateError, match="STOPPED"):
        engine.start()


def test_b10_a_killed_worker_is_noticed_by_everyone_within_a_second() -> None:
    """B10: without anyone sampling, and with the signal's name."""
    with contextlib.ExitStack() as stack:
        engine = OnlineDataEngine(settings(num_workers=2))
        engine.start()
        client = stack.enter_context(Client(engine.endpoint))
        client.sample_batch(2, 3)
        os.kill(engine.pids["worker-1"], signal.SIGKILL)
        assert until(lambda: engine.state is State.FAILED, 5.0) < 1.0
        with pytest.raises(WorkerExitedError, match="signal 9") as caught:
            engine.sample_batch(2, 3)
        assert (caught.value.worker_id, caught.value.exit_code) == ("worker-1", -9)
        with pytest.raises(WorkerExitedError, match="signal 9") as elsewhere:
            client.sample_batch(2, 3)
        assert elsewhere.value.fields == caught.value.fields
        with pytest.raises(WorkerExitedError):
            engine.check_health()
        with pytest.raises(WorkerExitedError):
            engine.stop()
        engine.stop()
        assert engine.state is State.FAILED


def test_b10_c34_an_exit_is_named_by_its_code() -> None:
    """B10, C34: ``os._exit(3)`` in the sixth episode."""
    env = {"fail_phase": "step", "fail_kind": "exit", "fail_episode": 5}
    with pytest.raises(WorkerExitedError, match="exit code 3"), OnlineDataEngine(settings(env=env)) as engine:
        engine.wait_for_generation(engine.request_refill(), timeout=30.0)


def test_b12_a_failure_is_survived_by_a_restart(tmp_path: Path) -> None:
    """B12: ``max_worker_restarts``."""
    env = {"fail_phase": "step", "fail_kind": "kill", "fail_episode": 2, "fail_marker": str(tmp_path / "once")}
    with OnlineDataEngine(settings(env=env, max_worker_restarts=1)) as engine:
        assert engine.get_status()["workers"][0]["restarts"] == 1
        assert engine.get_stats()["completed_generation"] == 1
        events = [event.kind for event in engine.events(follow=False)]
        assert "worker_restarted" in events


def test_b12_tolerated_the_others_go_on() -> None:
    """B12: the ticket goes to another worker."""
    with OnlineDataEngine(settings(num_workers=2, worker_failure="tolerate")) as engine:
        os.kill(engine.pids["worker-0"], signal.SIGKILL)
        engine.wait_for_generation(engine.request_refill(), timeout=30.0)
        assert engine.state is State.READY
        assert faults(engine.sample_batch(5, 3)) == []


def test_b8_a_stuck_worker_is_ended_by_force_and_stop_says_so() -> None:
    """B8."""
    env = {"fail_phase": "step", "fail_kind": "hang", "fail_episode": 5}
    engine = OnlineDataEngine(settings(env=env, shutdown_timeout=0.5))
    engine.start()
    engine.request_refill()
    until(lambda: engine.get_status()["workers"][0]["state"] == "busy", 10.0)
    before = time.monotonic()
    with pytest.raises(ForcedShutdownError, match="worker-0"):
        engine.stop()
    assert time.monotonic() - before < 6.0
    assert engine.state is State.FAILED
    engine.stop()


def test_b8_a_failing_close_is_raised() -> None:
    """B8: never hidden."""
    engine = OnlineDataEngine(settings(env={"fail_phase": "close"}))
    engine.start()
    with pytest.raises(OnlineDataWorkerError) as caught:
        engine.stop()
    assert caught.value.phase == "close"
    assert engine.state is State.FAILED


def test_b9_the_bodys_error_stays_and_cleanup_is_a_note() -> None:
    """B9."""
    with (
        pytest.raises(KeyError, match="the body's own") as caught,
        OnlineDataEngine(settings(env={"fail_phase": "close"})),
    ):
        raise KeyError("the body's own")
    assert "CountingError" in "".join(caught.value.__notes__)


def test_b10_a_killed_broker_is_named_and_its_leftovers_are_removed() -> None:
    """B10, C32."""
    engine = OnlineDataEngine(settings())
    engine.start()
    broker, socket = engine.pids["broker"], Path(engine.endpoint.removeprefix("ipc://"))
    assert socket.exists()
    os.kill(broker, signal.SIGKILL)
    with pytest.raises(OnlineDataWorkerError, match=r"broker process .*SIGKILL"):
        engine.sample_batch(3, 2, timeout=20.0)
    assert engine.state is State.FAILED
    with pytest.raises(OnlineDataWorkerError, match="broker"):
        engine.stop()
    assert list(socket.parent.glob(f"{socket.name}*")) == []
    assert list(Path("/dev/shm").glob(f"ods-*-{broker}-*")) == []


def test_b13_only_the_owner_may_refill_drain_and_stop() -> None:
    """B13."""
    with OnlineDataEngine(settings(endpoint="tcp://127.0.0.1:0")) as engine, Client(engine.endpoint) as client:
        assert not engine.endpoint.endswith(":0")
        for verb in (client.request_refill, client.drain_lifecycle_events, client.stop):
            with pytest.raises(OwnerOnlyError):
                verb()
        assert faults(client.sample_batch(3, 2)) == []


def test_the_service_may_be_stopped_by_another_holder_of_the_token() -> None:
    engine = OnlineDataEngine(settings())
    engine.start()
    with Client(engine.endpoint, owner=engine._owner.supervisor.owner_token) as client:
        client.stop()
    until(lambda: engine.state is State.STOPPED, 10.0)
    engine.stop()
    assert engine.pids == {}


def test_a_forgotten_engine_takes_its_processes_with_it() -> None:
    """Neither ``__del__`` nor the interpreter's exit may hang."""
    engine = OnlineDataEngine(settings())
    engine.start()
    processes = [psutil.Process(pid) for pid in engine.pids.values()]
    before = time.monotonic()
    del engine
    assert time.monotonic() - before < 1.0
    psutil.wait_procs(processes, timeout=10.0)
    assert not any(process.is_running() and process.status() != "zombie" for process in processes)


async def test_the_asyncio_engine_has_the_same_verbs() -> None:
    """B6, B7, B32, B43, B47."""
    async with AsyncOnlineDataEngine(settings(lifecycle_event_capacity=100)) as engine:
        assert engine.state is State.READY
        batch = await engine.sample_batch(7, 3)
        assert faults(batch) == []
        assert tuple((await engine.sample_batch_with_context(6, 2, 4)).batch_size) == (6, 5)
        drawn = 0
        async with engine.stream(4, 2, prefetch=2) as stream:
            async for _ in stream:
                drawn += 1
                if drawn == 5:
                    break
        await engine.wait_for_generation(await engine.request_refill(), timeout=60.0)
        await engine.check_health()
        assert (await engine.get_flow_status())["completed_generation"] == 2
        assert (await engine.get_status())["state"] == "READY"
        assert len(await engine.drain_lifecycle_events()) == 15
    assert engine.state is State.STOPPED
    assert (await engine.resolve_language(batch))["subtask"][0][0]
    assert (await engine.get_stats())["completed_generation"] == 2
    assert await engine.drain_lifecycle_events() == []
    with pytest.raises(StateError, match="STOPPED"):
        await engine.sample_batch(1, 1)
    await engine.stop()


async def test_b10_the_asyncio_engine_sees_a_kill_within_a_second() -> None:
    """B10."""
    engine = AsyncOnlineDataEngine(settings())
    await engine.start()
    os.kill(engine.pids["worker-0"], signal.SIGKILL)
    await asyncio.to_thread(until, lambda: engine.state is State.FAILED, 1.0)
    with pytest.raises(WorkerExitedError, match="signal 9"):
        await engine.sample_batch(2, 3)
    with pytest.raises(WorkerExitedError):
        await engine.stop()


async def test_b7_a_cancelled_asyncio_start_leaves_nothing() -> None:
    """B7."""
    engine = AsyncOnlineDataEngine(settings(env={"step_delay": 0.2}))
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(until, lambda: "worker-0" in engine.pids, 30.0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert (engine.state, engine.pids) == (State.STOPPED, {})


def test_b7_a_start_that_takes_long_says_what_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B7, C35: whoever logs at INFO sees why start() has not returned yet."""
    monkeypatch.setattr("ods_async.supervise.owner._REPORT_SECONDS", 0.0)
    with caplog.at_level("INFO", logger="ods_async"), OnlineDataEngine(settings()):
        pass
    assert "waiting for the first generation: " in caplog.text
    assert " of 5 episodes" in caplog.text
