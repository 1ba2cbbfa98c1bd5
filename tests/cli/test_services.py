"""The command line against a broker started by it: every verb, its exit code, its two outputs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ods_async.core.requests import Plans, Release, Sample, WaitReady
from ods_async.testing.peers import RawConsumer, RawWorker
from tests.cli.programs import ends, line_of, run, run_json, settings, started


class Service(NamedTuple):
    program: subprocess.Popen[str]
    ipc: str
    tcp: str
    run_id: int


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    config = settings(
        tmp_path,
        buffer_size=5,
        max_episode_steps=12,
        refill_policy="manual",
        endpoint=f"ipc://{tmp_path / 'b.sock'}",
        extra_endpoints=["tcp://127.0.0.1:0"],
        episode_sample_budget=50,
        episode_sample_hard_limit=60,
    )
    with started("broker", config, "--json") as program:
        told = line_of(program)
        yield Service(program, *told["endpoints"], told["run_id"])


@pytest.fixture
def filled(service: Service) -> Iterator[Service]:
    with RawWorker(service.ipc) as worker:
        worker.work_in_background()
        with RawConsumer(service.ipc) as consumer:
            consumer.ask(WaitReady())
            for _ in range(2):
                plans = consumer.ask(Sample(batch_size=3, length=4))
                assert isinstance(plans, Plans)
                consumer.send(Release((plans.plans[0].lease_id,)))
        yield service


def test_an_empty_service_can_be_looked_at(service: Service) -> None:
    found = run_json("stats", service.tcp)
    assert (found["stats"]["run_id"], found["status"]["state"]) == (service.run_id, "STARTING")
    assert "worker" in found["status"]["waiting"]
    done = run("stats", service.ipc)
    assert done.returncode == 0
    assert str(service.run_id) in done.stdout


def test_c35_sampling_from_an_empty_buffer_says_what_is_missing(service: Service) -> None:
    """C35."""
    done = run("sample", service.ipc, "--timeout", "0.5")
    assert done.returncode == 1
    assert "0 of 5 episodes" in done.stderr.splitlines()[0]


def test_samples_are_described(filled: Service) -> None:
    for endpoint in (filled.ipc, filled.tcp):
        found = run_json("sample", endpoint, "-b", "3", "-c", "4", "-n", "5", "--data-path", "frames")
        assert found["fields"]["obs.state"] == {"dtype": "torch.float32", "shape": [3, 4, 3]}
        assert (found["batches"], found["batch_size"], found["data_path"]) == (5, [3, 4], "frames")
        assert found["batches_per_second"] > 0
    done = run("sample", filled.ipc, "-b", "2", "--history", "3", "--horizon", "5")
    assert done.returncode == 0, done.stderr
    assert "loss_mask" in done.stdout
    assert "[2, 7]" in done.stdout


def test_a_refill_can_be_asked_and_waited_for(filled: Service) -> None:
    assert run_json("refill", filled.ipc, "--wait") == {"generation": 2, "complete": True}
    done = run("refill", filled.tcp)
    assert (done.returncode, done.stdout.strip()) == (0, "generation 3 was requested")


def test_budgets_are_shown(filled: Service) -> None:
    found = run_json("budget", filled.ipc)
    assert found["enabled"]
    assert sum(row["delivered"] for row in found["rows"]) == found["total_delivered_chunks"] == 6
    assert "remaining" in run("budget", filled.ipc).stdout


def test_events_held_are_printed(filled: Service) -> None:
    done = run("events", filled.ipc, "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["sequence"] for event in events] == list(range(len(events)))
    assert {"generation_requested", "worker_joined", "published", "generation_completed"} <= {e["kind"] for e in events}
    done = run("events", filled.ipc, "--kind", "published", "--since", "1")
    assert len(done.stdout.splitlines()) == 5


def test_followed_events_come_as_they_happen_until_a_signal(filled: Service) -> None:
    with started("events", filled.ipc, "--follow", "--json", "--kind", "generation_completed") as program:
        assert line_of(program)["generation"] == 1
        assert run("refill", filled.ipc).returncode == 0
        assert line_of(program)["generation"] == 2
        program.send_signal(signal.SIGINT)
        assert ends(program, 5.0)[0] == 130


def test_b13_only_the_owner_may_steer(service: Service, tmp_path: Path) -> None:
    """B13: the token is in a private file; without it the verbs say so."""
    token = tmp_path / "b.sock.owner"
    assert token.stat().st_mode & 0o777 == 0o600
    kept = token.read_text().split()[0]
    token.unlink()
    for verb in ("refill", "stop"):
        done = run(verb, service.ipc)
        assert done.returncode == 1
        assert "owner" in done.stderr
    token.write_text(kept)
    token.chmod(0o644)
    assert "not a private file" in run("stop", service.ipc).stderr
    token.unlink()
    done = run("stop", service.ipc, ODS_OWNER_TOKEN="00ff")
    assert done.returncode == 1
    assert "owner" in done.stderr
    assert run("stop", service.ipc, ODS_OWNER_TOKEN=kept).returncode == 0


def test_a_stopped_service_leaves_nothing_and_its_address_free(service: Service, tmp_path: Path) -> None:
    assert run_json("stop", service.tcp) == {"stopped": service.tcp}
    assert ends(service.program, 5.0)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_c46_a_signal_ends_a_broker_in_good_order(service: Service, tmp_path: Path, number: int, code: int) -> None:
    """C46: within about two seconds and the grace, sockets removed."""
    service.program.send_signal(number)
    assert ends(service.program, 6.0)[0] == code
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_a_second_broker_on_the_address_is_refused(service: Service, tmp_path: Path) -> None:
    config = settings(tmp_path, endpoint=service.ipc)
    done = run("broker", config)
    assert done.returncode == 1, "the settings are right, the moment is not"
    assert service.ipc in done.stderr
    assert run("stats", service.ipc).returncode == 0


NOWHERE: Any = [("stats",), ("budget",), ("events",), ("events", "--follow")]


@pytest.mark.parametrize(
    ("verb", "scheme"), [*((verb, scheme) for verb in NOWHERE for scheme in ("ipc", "tcp")), (("sample",), "tcp")]
)
def test_c21_nobody_there_is_said_within_the_time_out_with_the_address(
    verb: tuple[str, ...], scheme: str, tmp_path: Path
) -> None:
    """C21."""
    endpoint = f"ipc://{tmp_path / 'x.sock'}" if scheme == "ipc" else "tcp://127.0.0.1:9"
    done = run(verb[0], endpoint, *verb[1:], "--timeout", "0.5", seconds=30.0)
    assert done.returncode == 1
    assert endpoint in done.stderr.splitlines()[0]


def test_what_is_printed_may_be_cut_off(filled: Service) -> None:
    """``ods-async events … | head -1``: no traceback."""
    with started("events", filled.ipc, "--follow") as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.stdout.close()
        run("refill", filled.ipc, "--wait")
        assert ends(program, 10.0)[0] == 0
        assert program.stderr is not None
        assert program.stderr.read() == ""
        program.stdout = None


def test_the_owners_token_is_not_in_the_process_list(service: Service, tmp_path: Path) -> None:
    command_line = Path(f"/proc/{service.program.pid}/cmdline").read_bytes()
    assert (tmp_path / "b.sock.owner").read_text().split()[0].encode() not in command_line
    assert os.path.lexists(tmp_path / "b.sock")


def test_a_stop_from_elsewhere_ends_up_without_a_complaint(tmp_path: Path) -> None:
    config = settings(
        tmp_path,
        buffer_size=5,
        max_episode_steps=12,
        endpoint=f"ipc://{tmp_path / 'b.sock'}",
        num_workers=2,
        gym_config={"id": "ods_async/Counting-v0", "kwargs": {"min_length": 3, "max_length": 11}},
    )
    with started("up", config, "--json") as program:
        while "endpoints" not in (told := line_of(program)):
            pass
        assert run("stop", told["endpoints"][0]).returncode == 0
        assert program.wait(20.0) == 0
        assert program.stderr is not None
        assert program.stderr.read() == ""
