"""From CREATED to the end, and what everybody sees of a failure (B6 to B13, B48)."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

import ods_async as ods
from ods_async.testing.conformance.checks import check_windows, until, varied
from ods_async.testing.conformance.ways import CLIENT_WAYS, LoopThread, Service, Way, make_engine, open_client

State = ods.OnlineDataEngineState


def _counting(**kwargs: Any) -> dict[str, Any]:
    return {"id": "ods_async/Counting-v0", "kwargs": {"min_length": 4, "max_length": 9, **kwargs}}


def test_b6_b7_states_from_created_to_stopped(engine_way: str, loop: LoopThread) -> None:
    """B6, B7, B8: verbs in the wrong state name operation, state needed and current one; stop is idempotent."""
    engine = make_engine(engine_way, varied(), loop)
    assert (engine.state, engine.is_init) == (State.CREATED, False)
    for verb, arguments in (("sample_batch", (1, 1)), ("get_stats", ()), ("check_health", ()), ("request_refill", ())):
        with pytest.raises(ods.StateError, match=rf"{verb}\(\) needs the state READY.*CREATED") as caught:
            getattr(engine, verb)(*arguments)
        assert (caught.value.operation, caught.value.required, caught.value.current) == (verb, "READY", "CREATED")
        assert isinstance(caught.value, RuntimeError)
    engine.start()
    assert (engine.state, engine.is_init) == (State.READY, True)
    assert engine.get_stats()["completed_generation"] == 1
    with pytest.raises(ods.StateError, match="CREATED"):
        engine.start()
    engine.stop()
    engine.stop()
    assert (engine.state, engine.is_init) == (State.STOPPED, False)
    with pytest.raises(ods.StateError, match="STOPPED"):
        engine.sample_batch(1, 1)
    assert engine.get_stats()["completed_generation"] == 1


def test_b7_start_gives_up_after_its_time_out_or_when_stopped(engine_way: str, loop: LoopThread) -> None:
    """B7: ``TimeoutError`` and FAILED; a cancellation error and STOPPED."""
    slow = varied(env={"delay": 1.0})
    engine = make_engine(engine_way, slow.replace(initialization_timeout=1.5), loop)
    with pytest.raises(TimeoutError, match="initialization_timeout"):
        engine.start()
    assert engine.state is State.FAILED
    engine = make_engine(engine_way, slow, loop)

    def end() -> None:
        until(lambda: engine.state is State.STARTING)
        time.sleep(0.3)
        engine.stop()

    stopper = threading.Thread(target=end)
    stopper.start()
    with pytest.raises(ods.StartCancelledError):
        engine.start()
    stopper.join()
    assert engine.state is State.STOPPED


@pytest.mark.parametrize("kind", ["unknown", "builtin"])
def test_b7_b11_start_raises_what_the_worker_raised(kind: str, engine_way: str, loop: LoopThread) -> None:
    """B7, B11: a builtin as itself, any other in words: type, message, traceback, worker, phase, step."""
    arguments = {"nonsense": 1} if kind == "builtin" else {"fail_phase": "step", "fail_step": 2}
    engine = make_engine(engine_way, varied(gym_config=_counting(**arguments)), loop)
    if kind == "builtin":
        with pytest.raises(TypeError, match="nonsense"):
            engine.start()
    else:
        with pytest.raises(ods.OnlineDataWorkerError) as caught:
            engine.start()
        error = caught.value
        assert (error.type_name, error.phase, error.step, error.worker_id) == ("CountingError", "step", 2, "worker-0")
        assert "told to fail in step" in error.detail
        assert "counting.py" in error.traceback_text
    assert engine.state is State.FAILED


def test_b8_b9_force_and_a_failing_close_are_raised_but_never_over_the_bodys_error(loop: LoopThread) -> None:
    """B8, B9: ends as FAILED; with an error from the body, the cleanup's is a note."""
    engine = make_engine("engine", varied(gym_config=_counting(fail_phase="close")), loop)
    with pytest.raises(KeyError, match="the body's own") as body, engine.face:
        raise KeyError("the body's own")
    assert "CountingError" in "".join(body.value.__notes__)
    assert engine.state is State.FAILED
    hang = _counting(fail_phase="step", fail_kind="hang", fail_episode=4)
    engine = make_engine("async-engine", varied(gym_config=hang, shutdown_timeout=0.5), loop)
    engine.start()
    engine.request_refill()
    until(lambda: engine.get_status()["workers"][0]["state"] == "busy")
    with pytest.raises(ods.ForcedShutdownError, match="worker-0"):
        engine.stop()
    assert engine.state is State.FAILED
    engine.stop()


def test_b10_b12_a_killed_worker_is_seen_by_everybody_as_the_same_failure(loop: LoopThread) -> None:
    """B10, B12: within a second, without anyone sampling; failures come before arguments are judged (B23)."""
    service = Service(varied(), loop)
    try:
        consumers = [open_client(way, service.owner_of("engine").endpoints, loop) for way in CLIENT_WAYS]
        ways: list[Way] = [service.owner_of("engine"), service.owner_of("async-engine"), *consumers]
        for way in ways:
            way.sample_batch(1, 1)
        for owner in ways[:2]:
            os.kill(owner.pids["worker-0"], signal.SIGKILL)
        for owner in ways[:2]:
            assert until(lambda owner=owner: owner.state is State.FAILED) < 1.5  # type: ignore[misc]
        for way in ways:
            for verb, arguments in (("sample_batch", (0, 1)), ("check_health", ()), ("wait_for_generation", (1,))):
                with pytest.raises(ods.WorkerExitedError, match="signal 9") as caught:
                    getattr(way, verb)(*arguments)
                assert (caught.value.worker_id, caught.value.exit_code) == ("worker-0", -9)
        for consumer in consumers:
            assert consumer.get_status()["state"] == "FAILED"
            consumer.close()
    finally:
        with pytest.raises(ods.WorkerExitedError):
            service.stop()


def test_b12_tolerated_failures_are_told_and_sampling_goes_on(engine_way: str, loop: LoopThread) -> None:
    """B12: ``worker_failure="tolerate"``: the ticket goes to another worker, status counts the living."""
    engine = make_engine(engine_way, varied(num_workers=2, worker_failure="tolerate"), loop)
    engine.start()
    try:
        os.kill(engine.pids["worker-0"], signal.SIGKILL)
        engine.wait_for_generation(engine.request_refill(), timeout=60.0)
        check_windows(engine.sample_batch(20, 2), "episode")
        assert engine.state is State.READY

        def states() -> dict[str, str]:
            return {worker["worker_id"]: worker["state"] for worker in engine.get_status()["workers"]}

        # The other worker may have filled the buffer alone before this one said hello or its end was noticed.
        until(lambda: states().get("worker-0") == "gone")
        assert states()["worker-1"] in ("idle", "busy")
        with engine.events(since=0, follow=False) as subscriber:
            assert "worker_exited" in {event.kind for event in subscriber}
    finally:
        engine.stop()


def test_b13_only_the_owner_may_refill_drain_and_stop(plain: Way) -> None:
    """B13: another consumer gets an error that says so, and the service goes on."""
    if not plain.owns:
        for verb in ("request_refill", "drain_lifecycle_events", "stop"):
            with pytest.raises(ods.OwnerOnlyError, match="owner"):
                getattr(plain, verb)()
    plain.check_health()


def test_b48_plans_are_lazy_validated_and_judged_after_every_step() -> None:
    """B48: segments planned from what the last one reached, ``should_stop`` before every step, progress shown."""
    from ods_async.testing.conformance.environments import VariedEnv, story_of

    env, shown, asked = VariedEnv(min_length=6, max_length=9), [], []

    def progress(actions: Any, name: str) -> Any:
        shown.append(name)
        return actions

    def should_stop() -> bool:
        asked.append(1)
        return False

    result = ods.execute_demo_episode(env, seed=3, capacity=9, progress=progress, should_stop=should_stop)
    (episode,) = result.episodes
    tale = story_of(int(episode.arrays["obs", "fingerprint"][0]), 6, 9)
    assert (result.completed, result.all_success, episode.length) == (True, True, tale.length)
    assert len(asked) >= tale.length
    assert shown == [f"part {index}" for index in range(len(tale.parts))]
    assert [(s.start, s.end, s.accepted) for s in episode.segments] == [
        (p.start, p.end, p.accepted) for p in tale.parts
    ]
    interrupted = ods.execute_demo_episode(env, seed=3, capacity=9, should_stop=lambda: len(asked) > 0)
    assert (interrupted.completed, interrupted.terminal_reason, interrupted.episodes) == (False, "interrupted", ())
