"""C34, C43: the cause of a worker's failure, told once and whole; C33: one that is busy for long is not written off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ods_async import Client, LimitExceededError, OnlineDataEngine, OnlineDataEngineCfg, OnlineDataWorkerError
from ods_async.core.events import WorkerExited, WorkerFailure, WorkerReturned, WorkerStalled
from ods_async.testing import window_faults
from tests.e2e.test_recovery import SECONDS, until, values

STEP_7 = {"min_length": 9, "fail_phase": "step", "fail_step": 7, "fail_episode": 4}
# Four steps of a row whose process ends at its third step in its third episode; each process counts its own.
ROW = {"fail_phase": "step", "fail_step": 2, "fail_episode": 2}
ASYNC = {"num_envs": 2, "vectorization": "async", "policy": "tests.worker.test_environments:_count"}


@pytest.mark.parametrize(
    ("env", "gym", "type_name", "step", "words"),
    [
        (STEP_7 | {"stderr_bytes": 1_000_000}, {}, "CountingError", 7, r"told to fail in step \(step 7 of episode 4\)"),
        (ROW | {"fail_kind": "kill"}, ASYNC, "RuntimeError", 2, "a row's process ended"),
        (ROW, ASYNC, "RuntimeError", 2, r"CountingError: told to fail in step \(step 2 of episode 2\)"),
    ],
    ids=["a megabyte of stderr first", "killed row", "raising row"],
)
def test_c34_one_event_has_the_whole_cause_and_no_half_episode_is_stored(
    env: dict[str, Any], gym: dict[str, Any], type_name: str, step: int, words: str
) -> None:
    """C34: worker, phase, step, type, message and trace; the same in what is raised; bounded."""
    given = values(env=env)
    given["gym_config"] |= gym
    engine = OnlineDataEngine(OnlineDataEngineCfg(**given))
    engine.start()
    try:
        generation = engine.request_refill()
        with pytest.raises((OnlineDataWorkerError, RuntimeError), match=words):
            engine.wait_for_generation(generation, timeout=SECONDS)
        (told,) = [event for event in engine.events(follow=False) if isinstance(event, WorkerFailure)]
        assert (told.worker_id, told.phase, told.step, told.type_name) == ("worker-0", "step", step, type_name)
        assert "Traceback" in told.traceback_text
        assert len(told.traceback_text.encode()) + len(told.message.encode()) < 65_536
        assert engine.get_stats()["successful_episodes"] == 4
    finally:
        with pytest.raises((OnlineDataWorkerError, RuntimeError)):
            engine.stop()


def test_c34_an_environment_whose_renderer_cannot_be_imported_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C34: the start raises it, with the name of what is missing."""
    (tmp_path / "renders_with_it.py").write_text("import no_such_renderer\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = values()
    given["gym_config"]["imports"] = ["renders_with_it"]
    engine = OnlineDataEngine(OnlineDataEngineCfg(**given))
    with pytest.raises(ModuleNotFoundError, match="no_such_renderer") as caught:
        engine.start()
    assert "worker-0" in "".join(caught.value.__notes__)
    engine.stop()


def test_c43_an_episode_over_the_limit_fails_its_worker_with_both_sizes() -> None:
    """C43: a real worker, told the limit by its broker: nothing vanishes on the way."""
    env = {"image_shape": [512, 512, 3], "min_length": 7, "max_length": 7}
    engine = OnlineDataEngine(OnlineDataEngineCfg(**values(env=env, limits={"rollout_bytes": 1_000_000})))
    with pytest.raises(LimitExceededError, match=r"55\d{5} bytes of a rollout, the broker takes at most 1000000;"):
        engine.start()
    engine.stop()


def test_c33_a_reset_of_five_time_outs_and_a_broker_busy_copying_cost_nobody_its_place() -> None:
    """C33: big batches are copied as frames meanwhile; a worker that is heard too late is back at once, and counts."""
    env = {"reset_delay": 2.5, "image_shape": [256, 256, 3]}
    given = values(env=env, buffer_size=1, heartbeat_interval=0.1, heartbeat_timeout=0.5)
    with OnlineDataEngine(OnlineDataEngineCfg(**given)) as engine:
        with Client(engine.endpoint, data_path="frames", timeout=SECONDS) as client:
            generation = engine.request_refill()
            drawn = 0
            while engine.get_stats()["completed_generation"] < generation:
                batch = client.sample_batch(48, 5)  # 47 MB
                drawn += 1
            assert drawn > 0
            assert [found for window in batch if (found := window_faults(window))] == []
        assert engine.get_stats()["successful_episodes"] == generation
        until(lambda: engine.get_status()["workers"][0]["state"] != "stalled")
        told = list(engine.events(follow=False))
        stalled = [event for event in told if isinstance(event, WorkerStalled)]
        assert len(stalled) == len([event for event in told if isinstance(event, WorkerReturned)])
        assert [event for event in told if isinstance(event, WorkerExited | WorkerFailure)] == []
