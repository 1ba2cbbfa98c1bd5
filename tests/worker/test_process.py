"""A worker as a process: exit codes, signals, and a death of any kind (B8, C21, C34, C46)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ods_async.core.reports import Goodbye, Heartbeat, RolloutReport, Verdict, WorkerFailed
from ods_async.testing import COUNTING_ID

PROGRAM = """
import json, sys
from ods_async.config import OnlineDataEngineCfg
from ods_async.worker.runtime import run_worker
settings, endpoint, options = json.loads(sys.argv[1])
code = run_worker(OnlineDataEngineCfg.from_dict(settings), endpoint, "w1", **options)
assert "torch" not in sys.modules and "tensordict" not in sys.modules
sys.exit(code)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts workers; what is left of them is killed in the end."""
    made: list[subprocess.Popen[str]] = []

    def begin(endpoint: str, kwargs: dict[str, Any] | None = None, **options: Any) -> subprocess.Popen[str]:
        fds = [options["alive_fd"]] if "alive_fd" in options else []
        settings = {"buffer_size": 2, "gym_config": {"id": COUNTING_ID, "kwargs": kwargs or {}}, "seed": 3}
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROGRAM, json.dumps([settings, endpoint, options])],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            pass_fds=fds,
        )
        made.append(process)
        return process

    yield begin
    for process in made:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def ended(process: subprocess.Popen[str], timeout: float = 20.0) -> tuple[int, str]:
    _, errors = process.communicate(timeout=timeout)
    return process.returncode, errors


SLOW = {"endless": True, "step_delay": 0.01}


def stepping(peer: Any) -> None:
    """Wait until the worker is in the middle of an episode."""
    peer.ready()
    peer.ticket(1)
    peer.until(lambda: [b for b in peer.said(Heartbeat) if b.phase == "step"])


def test_it_ends_with_zero_after_what_was_wanted(peer: Any, start: Start) -> None:
    process = start(peer.endpoint, max_rollouts=2)
    peer.ready()
    peer.ticket(1)
    peer.ticket(2)
    assert ended(process) == (0, "")
    assert [r.ticket_id for r in peer.rollouts] == [1, 2]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_c46_a_signal_ends_it_between_two_steps(peer: Any, start: Start, number: signal.Signals, code: int) -> None:
    process = start(peer.endpoint, SLOW)
    stepping(peer)
    process.send_signal(number)
    assert ended(process) == (code, "")
    assert peer.rollouts == []
    assert peer.first(Goodbye).reason == number.name


def test_c46_a_signal_right_after_the_last_rollout_loses_nothing(make_peer: Any, start: Start) -> None:
    peer = make_peer(judge=False)
    process = start(peer.endpoint)
    peer.ready()
    peer.ticket(1)
    peer.first(RolloutReport)
    process.send_signal(signal.SIGTERM)
    peer.tell(Verdict(1, "w1", "accepted"))
    assert ended(process) == (0, "")


def test_c46_a_signal_while_the_environment_is_made_ends_it_at_once(peer: Any, start: Start) -> None:
    process = start(peer.endpoint, {"fail_phase": "make", "fail_kind": "hang"})
    peer.until(lambda: [b for b in peer.said(Heartbeat) if b.phase == "make"])
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (0, "")
    assert peer.first(Goodbye).reason == "SIGTERM"


def test_c46_a_second_signal_ends_it_at_once(peer: Any, start: Start) -> None:
    process = start(peer.endpoint, {"fail_phase": "step", "fail_kind": "hang"})
    stepping(peer)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM


def test_the_owners_death_ends_it(peer: Any, start: Start) -> None:
    read, write = os.pipe()
    process = start(peer.endpoint, SLOW, alive_fd=read)
    os.close(read)
    stepping(peer)
    os.close(write)
    assert ended(process) == (0, "")


def test_c34_a_failure_is_told_and_said_and_the_exit_code_is_one(peer: Any, start: Start) -> None:
    process = start(peer.endpoint, {"fail_phase": "step", "fail_step": 2, "stderr_bytes": 1_000_000})
    peer.ready()
    peer.ticket(1)
    code, errors = ended(process)
    assert code == 1
    assert peer.first(WorkerFailed).message == "told to fail in step (step 2 of episode 0)"
    assert "worker w1: failed: CountingError: told to fail in step" in errors[1_000_000:]
    assert len(errors) < 1_010_000


@pytest.mark.parametrize(("kind", "code"), [("exit", 3), ("kill", -signal.SIGKILL)])
def test_c34_a_sudden_death_leaves_its_code(peer: Any, start: Start, kind: str, code: int) -> None:
    process = start(peer.endpoint, {"fail_phase": "step", "fail_step": 2, "fail_kind": kind})
    peer.ready()
    peer.ticket(1)
    assert process.wait(20) == code
    assert peer.rollouts == []


def test_c21_without_a_broker_it_ends_with_one_and_names_the_endpoint(start: Start) -> None:
    code, errors = ended(start("tcp://127.0.0.1:9", connect_timeout=0.5))
    assert code == 1
    assert errors.count("\n") == 1
    assert "tcp://127.0.0.1:9" in errors


def test_c21_the_death_of_the_broker_ends_it_and_says_so(make_peer: Any, start: Start) -> None:
    peer = make_peer(judge=False)
    peer.heartbeat = (0.05, 0.3)
    process = start(peer.endpoint)
    peer.ready()
    peer.ticket(1)
    peer.first(RolloutReport)
    peer.close()
    code, errors = ended(process)
    assert code == 1
    assert "has been silent for" in errors
    assert "tickets [1]" in errors


def test_c33_a_worker_that_was_stopped_and_continued_goes_on(peer: Any, start: Start) -> None:
    peer.heartbeat = (0.05, 0.2)
    process = start(peer.endpoint, SLOW | {"endless": False})
    stepping(peer)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.2)  # twice what the worker would take as the end of a broker
    process.send_signal(signal.SIGCONT)
    peer.first(RolloutReport)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (0, "")
