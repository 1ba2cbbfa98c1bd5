"""``up``, ``broker`` and ``worker`` as programs, with real workers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ods_async.transport.shm import start_time
from tests.cli.programs import ends, line_of, run, run_json, settings, started


def config(folder: Path, **changes: Any) -> str:
    env = changes.pop("env", {})
    values: dict[str, Any] = {
        "buffer_size": 4,
        "max_episode_steps": 12,
        "refill_policy": "manual",
        "num_workers": 2,
        "gym_config": {"id": "ods_async/Counting-v0", "kwargs": {"max_length": 9, **env}},
        "endpoint": f"ipc://{folder / 'u.sock'}",
        "shutdown_timeout": 2.0,
    }
    return settings(folder, **(values | changes))


def first_with(program: Any, key: str) -> dict[str, Any]:
    while key not in (told := line_of(program)):
        pass
    return told


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_c46_up_runs_until_a_signal_and_leaves_nothing(number: int, code: int, tmp_path: Path) -> None:
    """C46: within two seconds and the grace."""
    with started("up", config(tmp_path), "--json") as program:
        told = first_with(program, "pids")
        (endpoint,) = told["endpoints"]
        assert set(told["pids"]) == {"broker", "worker-0", "worker-1"}
        assert run_json("stats", endpoint)["status"]["state"] == "READY"
        assert run_json("refill", endpoint, "--wait") == {"generation": 2, "complete": True}
        status = first_with(program, "status")["status"]
        assert status["slots"] == 4
        program.send_signal(number)
        assert ends(program, 6.0)[0] == code
        assert not any(psutil.pid_exists(pid) for pid in told["pids"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_up_ends_when_its_service_is_stopped(tmp_path: Path) -> None:
    with started("up", config(tmp_path), "--json") as program:
        (endpoint,) = first_with(program, "pids")["endpoints"]
        assert run("stop", endpoint).returncode == 0
        assert ends(program, 6.0)[0] == 0


def test_c34_up_fails_with_the_workers_reason(tmp_path: Path) -> None:
    """C34: code 1, one line of reason, then the detail."""
    done = run("up", config(tmp_path, env={"fail_phase": "reset"}))
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("ods-async: error:")]
    assert len(lines) == 1
    assert "CountingError" in lines[0]
    assert "  Traceback" in done.stderr


def test_up_fails_when_a_worker_is_killed(tmp_path: Path) -> None:
    with started("up", config(tmp_path), "--json") as program:
        os.kill(first_with(program, "pids")["pids"]["worker-0"], signal.SIGKILL)
        assert ends(program, 10.0)[0] == 1
        assert program.stderr is not None
        assert "signal 9" in program.stderr.read()


def test_c46_two_signals_end_up_at_once(tmp_path: Path) -> None:
    """C46."""
    env = {"fail_phase": "step", "fail_kind": "hang", "fail_episode": 4}
    with started("up", config(tmp_path, env=env, num_workers=1, shutdown_timeout=60.0), "--json") as program:
        told = first_with(program, "pids")
        run("refill", told["endpoints"][0])
        program.send_signal(signal.SIGINT)
        with pytest.raises(Exception, match="timed out"):
            ends(program, 1.0)
        program.send_signal(signal.SIGINT)
        code, seconds = ends(program, 5.0)
        assert (code, seconds < 1.0) == (130, True)
        assert not [pid for pid in told["pids"].values() if start_time(pid) >= 0]
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_broker_and_worker_as_two_programs(tmp_path: Path) -> None:
    path = config(tmp_path, endpoint="tcp://127.0.0.1:0")
    with started("broker", path, "--json") as broker:
        (endpoint,) = line_of(broker)["endpoints"]
        with (
            started("worker", path, "--connect", endpoint, "--id", "left hand") as one,
            started("worker", path, "--connect", endpoint) as two,
        ):
            deadline = time.monotonic() + 30.0
            while (found := run_json("stats", endpoint)["status"])["state"] != "READY":
                assert time.monotonic() < deadline
            assert "left hand" in {worker["worker_id"] for worker in found["workers"]}
            one.send_signal(signal.SIGTERM)
            assert ends(one, 6.0)[0] == 0
            assert run("refill", endpoint, "--wait", "--timeout", "30").returncode == 0
            two.send_signal(signal.SIGINT)
            assert ends(two, 6.0)[0] == 130
        assert run("stop", endpoint).returncode == 0
        assert ends(broker, 6.0)[0] == 0


def test_c21_a_worker_without_a_broker_ends_and_says_where_it_looked(tmp_path: Path) -> None:
    """C21."""
    done = run("worker", config(tmp_path), "--connect", "tcp://127.0.0.1:9", seconds=60.0)
    assert done.returncode == 1
    assert "tcp://127.0.0.1:9" in done.stderr
