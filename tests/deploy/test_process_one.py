"""C46, ``docker stop``: every program as process 1 of a pid namespace, which only signals that it asked for reach."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ods_async.cli.signals import SAME_SECONDS
from ods_async.core.requests import GetStats, GetStatus, WaitReady
from ods_async.testing import COUNTING_ID
from ods_async.testing.peers import RawConsumer
from ods_async.transport.shm import FOLDER, sweep_segments
from tests.cli.programs import ends, settings, started
from tests.deploy.containers import ODS, Contained, contained, eventually, need_namespaces

TRAINER = str(Path(__file__).parents[2] / "deploy" / "trainer.py")
PYTHON = ODS[0]


@pytest.fixture(autouse=True)
def _permitted() -> None:
    need_namespaces()


@pytest.fixture
def config(ipc_folder: Path, tmp_path: Path) -> Iterator[Any]:
    """Settings with small values; afterwards the sockets' folder must be as empty as it was."""

    def write(**changes: Any) -> str:
        env = {"imports": ["ods_async.testing"], "kwargs": {"max_length": 9, **changes.pop("env", {})}}
        values = {
            "buffer_size": 4,
            "max_episode_steps": 12,
            "refill_policy": "manual",
            "gym_config": {"id": COUNTING_ID, **env},
            "endpoint": f"ipc://{ipc_folder / 'b.sock'}",
            "shutdown_timeout": 2.0,
        }
        return settings(tmp_path, **(values | changes))

    yield write
    assert list(ipc_folder.iterdir()) == []


def segments(program: Contained) -> list[Path]:
    """The shared memory of the run that the program told of; other runs on this machine have theirs."""
    found = re.search(r"\(run (\d+)\)", program.said)
    assert found, program.said
    return list(FOLDER.glob(f"ods-*-{int(found[1]):x}-*"))


def let_it_be_another() -> None:
    """A second signal right behind the first would count as the same."""
    now = time.monotonic()
    eventually(lambda: time.monotonic() > now + 2 * SAME_SECONDS, "the next signal")


def hang(marker: Path) -> dict[str, Any]:
    """What makes the environment hang in a step once the buffer of four is full; the file appears right before."""
    return {"fail_phase": "step", "fail_kind": "hang", "fail_episode": 4, "fail_marker": str(marker)}


def draws_from_shared_memory(program: Contained) -> bool:
    return str(FOLDER) in Path(f"/proc/{program.pid}/maps").read_text()


STARTS = {
    "broker": (*ODS, "broker", "CONFIG"),
    "up": (*ODS, "up", "CONFIG"),
    "worker": (*ODS, "worker", "CONFIG", "--connect", "tcp://127.0.0.1:9"),
    "dashboard": (*ODS, "dashboard", "tcp://127.0.0.1:9", "--bind", "127.0.0.1:0", "--timeout", "60"),
    "events": (*ODS, "events", "tcp://127.0.0.1:9", "--follow", "--timeout", "60"),
    "trainer": (PYTHON, TRAINER, "tcp://127.0.0.1:9"),
}


@pytest.mark.parametrize("name", STARTS)
def test_c46_sigterm_during_start_up_ends_it_with_code_0(name: str, config: Any) -> None:
    """C46: from the first moment that Python lets a program have."""
    path = config()
    with contained(*(path if word == "CONFIG" else word for word in STARTS[name])) as program:
        eventually(lambda: program.handles(signal.SIGTERM), "the handler")
        program.signal(signal.SIGTERM)
        code, seconds = program.end(20.0)
        assert (code, "Traceback" in program.said) == (0, False), program.said
        assert seconds < 2.0 + 2.0


@pytest.mark.slow
def test_c46_sigterm_during_a_push_and_during_a_sample_ends_each_in_order(config: Any, ipc_folder: Path) -> None:
    """C46: the service works at full speed meanwhile: episodes are pushed and batches drawn without a pause."""
    path, endpoint = config(refill_policy="continuous"), f"ipc://{ipc_folder / 'b.sock'}"
    draw = (*ODS, "sample", endpoint, "-b", "4", "-c", "3", "-n", "100000000", "--data-path")
    with contextlib.ExitStack() as stack, contained(*ODS, "broker", path) as broker:
        broker.hear("broker listens")
        with (
            contained(*ODS, "worker", path, "--connect", endpoint, hostname="one") as one,
            contained(*ODS, "worker", path, "--connect", endpoint, hostname="two") as two,
            contained(*draw, "frames") as far,
            RawConsumer(endpoint, timeout=60.0) as consumer,
        ):
            consumer.ask(WaitReady(), 60.0)
            eventually(lambda: consumer.ask(GetStats()).sampled_chunks, "batches as frames")
            near = stack.enter_context(contained(*draw, "shared_memory", hostname="near"))
            eventually(lambda: draws_from_shared_memory(near), "batches out of shared memory")
            for program, number, wanted in (
                (one, signal.SIGTERM, 0),
                (near, signal.SIGTERM, 130),
                (two, signal.SIGHUP, 0),
            ):
                program.signal(number)
                code, seconds = program.end(20.0)
                assert (code, program.said) == (wanted, "") or "refused" in program.said, program.said
                assert seconds < 2.0 + 2.0
            # Their goodbyes go another way than what is asked here.
            gone = {("one-1", "gone"), ("two-1", "gone")}
            eventually(
                lambda: {(worker.worker_id, worker.state) for worker in consumer.ask(GetStatus()).workers} == gone,
                "goodbyes of both",
            )
            broker.signal(signal.SIGTERM)
            code, seconds = broker.end(20.0)
            assert (code, seconds < 2.0 + 2.0) == (0, True), broker.said
            assert far.end(20.0)[0] == 1
            assert "ods-async: error:" in far.said
    assert segments(broker) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_c46_up_ends_its_children_and_itself(number: int, code: int, config: Any) -> None:
    """C46"""
    with contained(*ODS, "up", config()) as program:
        program.hear("ready on")
        program.signal(number)
        found, seconds = program.end(20.0)
        assert (found, seconds < 2.0 + 2.0) == (code, True), program.said
    assert segments(program) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_c46_a_dashboard_ends_and_its_broker_goes_on(number: int, code: int, config: Any, ipc_folder: Path) -> None:
    """C46"""
    endpoint = f"ipc://{ipc_folder / 'b.sock'}"
    with contained(*ODS, "broker", config()) as broker:
        broker.hear("broker listens")
        with contained(*ODS, "dashboard", endpoint, "--bind", "127.0.0.1:0") as program:
            program.hear("dashboard of")
            program.signal(number)
            found, seconds = program.end(20.0)
            assert (found, seconds < 2.0 + 2.0) == (code, True), program.said
        broker.signal(signal.SIGTERM)
        assert broker.end(20.0)[0] == 0


def test_c46_a_second_signal_ends_up_and_its_children_at_once(config: Any, tmp_path: Path) -> None:
    """C46: although a worker hangs and a minute of grace is set; not even then is anything left behind."""
    path = config(env=hang(tmp_path / "hangs"), shutdown_timeout=60.0, refill_policy="continuous")
    with contained(*ODS, "up", path) as program:
        program.hear("ready on")
        eventually((tmp_path / "hangs").exists, "the worker to hang")
        program.signal(signal.SIGTERM)
        program.hear("ending")
        let_it_be_another()
        program.signal(signal.SIGTERM)
        code, seconds = program.end(20.0)
        assert (code, seconds < 1.0) == (128 + signal.SIGTERM, True), program.said
    assert segments(program) == []


def test_c46_a_second_signal_ends_a_broker_at_once(config: Any, ipc_folder: Path, tmp_path: Path) -> None:
    """C46: a worker that hangs in a step would have kept it for a minute."""
    path, endpoint = (
        config(env=hang(tmp_path / "hangs"), shutdown_timeout=60.0, refill_policy="continuous"),
        f"ipc://{ipc_folder}/b.sock",
    )
    with contained(*ODS, "broker", path) as broker:
        broker.hear("broker listens")
        with contained(*ODS, "worker", path, "--connect", endpoint), RawConsumer(endpoint, timeout=60.0) as consumer:
            consumer.ask(WaitReady(), 60.0)
            eventually((tmp_path / "hangs").exists, "the worker to hang")
            assert segments(broker)
            broker.signal(signal.SIGINT)
            eventually(lambda: consumer.ask(GetStatus()).state == "STOPPED", "the first signal's effect")
            let_it_be_another()
            broker.signal(signal.SIGINT)
            code, seconds = broker.end(20.0)
            assert (code, seconds < 1.0) == (130, True), broker.said
    assert segments(broker) == []


def test_c46_one_signal_that_comes_twice_is_one(config: Any, ipc_folder: Path) -> None:
    """``timeout`` and terminals send a signal to the program and to its group: that is no second thought."""
    with contained(*ODS, "broker", config()) as broker:
        broker.hear("broker listens")
        for _ in range(2):
            broker.signal(signal.SIGTERM)
        assert broker.end(20.0)[0] == 0
        assert "ended: stopped" in broker.said


def test_c46_under_a_shell_that_execs_the_program_gets_the_signal(config: Any) -> None:
    """C46"""
    with contained("sh", "-c", 'exec "$@"', "sh", *ODS, "broker", config()) as program:
        program.hear("broker listens")
        program.signal(signal.SIGTERM)
        assert program.end(20.0)[0] == 0


def test_c46_under_a_shell_that_does_not_the_next_start_clears_up(config: Any, ipc_folder: Path) -> None:
    """C46: such a shell passes no signal on, and in the end everything is killed. The next start clears up."""
    path = config()
    with contained("sh", "-c", '"$@"; true', "sh", *ODS, "up", path) as program:
        program.hear("ready on")
        program.signal(signal.SIGTERM)
        program.signal(signal.SIGKILL)
        program.end(20.0)
        assert any(ipc_folder.iterdir())
    sweep_segments()  # what a broker does first
    assert segments(program) == []
    with started("broker", path) as broker:
        assert broker.stdout is not None
        assert "broker listens" in broker.stdout.readline()
        broker.send_signal(signal.SIGTERM)
        assert ends(broker, 20.0)[0] == 0


def test_c46_a_shells_group_is_signalled_as_a_whole(config: Any) -> None:
    """Ctrl-C, and batch systems: wrapper and program both get it, and the program ends as it would alone."""
    with subprocess.Popen(
        ["sh", "-c", '"$@"; echo "code $?"', "sh", *ODS, "broker", config()],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        assert shell.stdout is not None
        assert "broker listens" in shell.stdout.readline()
        os.killpg(shell.pid, signal.SIGINT)
        assert "ended: stopped" in shell.stdout.read()
