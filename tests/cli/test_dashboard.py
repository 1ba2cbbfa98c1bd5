"""``dashboard`` as a program, beside a broker that is one."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ods_async.core.requests import Release, Sample, WaitReady
from ods_async.testing.peers import RawConsumer, RawWorker
from tests.cli.programs import ends, line_of, run, run_json, settings, started


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """A broker with a full buffer, whose worker has left."""
    values = {"buffer_size": 4, "max_episode_steps": 12, "refill_policy": "manual"}
    config = settings(tmp_path, **values, endpoint=f"ipc://{tmp_path / 'b.sock'}")
    with started("broker", config, "--json") as program:
        found: str = line_of(program)["endpoints"][0]
        with RawWorker(found, "w0") as worker, RawConsumer(found, timeout=60.0) as consumer:
            worker.work_in_background()
            consumer.ask(WaitReady())
        yield found


def got(url: str, path: str) -> bytes:
    place = url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=60.0)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()
    finally:
        connection.close()


def in_step(url: str, endpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the page and ``stats`` tell of the same moment: between two looks the broker may find a worker silent."""
    deadline = time.monotonic() + 60.0
    while True:
        shown = json.loads(got(url, "/state.json"))
        told: dict[str, Any] = run_json("stats", endpoint)
        for counts in (shown["stats"]["extra"], told["stats"]["extra"]):
            counts.pop("sessions")  # whoever asks is one
        if shown["stats"] == told["stats"] or time.monotonic() > deadline:
            return shown, told


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_c46_signals_end_it_although_a_page_is_open(endpoint: str, number: int, code: int) -> None:
    """C46"""
    with started("dashboard", endpoint, "--bind", "127.0.0.1:0", "--json") as program:
        told = line_of(program)
        assert (told["endpoint"], told["pid"]) == (endpoint, program.pid)
        host, _, port = told["url"].removeprefix("http://").rstrip("/").rpartition(":")
        with socket.create_connection((host, int(port))) as page:
            page.sendall(b"GET /changes HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert page.recv(16).startswith(b"HTTP/1.1 200")
            program.send_signal(number)
            found, seconds = ends(program, 20.0)
        assert program.stderr is not None
        assert (found, program.stderr.read()) == (code, "")
        assert seconds < 2.0 + 2.0


def test_c38_its_counts_are_those_of_stats(endpoint: str) -> None:
    """C38: also after batches were drawn."""
    with RawConsumer(endpoint) as consumer:
        for _ in range(2):
            plans: Any = consumer.ask(Sample(batch_size=3, length=4))
            consumer.send(Release((plans.plans[0].lease_id,)))
    with started("dashboard", endpoint, "--bind", "127.0.0.1:0", "--json") as program:
        url = line_of(program)["url"]
        shown, told = in_step(url, endpoint)
        assert shown["stats"] == told["stats"]
        assert shown["stats"]["sampled_chunks"] == 6
        assert shown["status"]["episodes"] == told["status"]["episodes"] == 4
        assert b"ods_windows_sampled_total 6.0\n" in got(url, "/metrics")
        assert b"<b>4 of 4</b>" in got(url, "/")


def test_c47_a_busy_port_is_said_and_the_broker_goes_on(endpoint: str) -> None:
    """C47"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("dashboard", endpoint, "--bind", place)
        assert done.returncode == 1
        assert f"cannot listen for browsers on {place}: address already in use" in done.stderr.splitlines()[0]
    assert run("stats", endpoint, "--check").returncode == 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--bind", "0.0.0.0:0"), 2, "--allow-insecure-bind"),
        (("--bind", "nowhere"), 2, "HOST:PORT"),
        (("--bind", "127.0.0.1:0", "--timeout", "0.2"), 1, "tcp://127.0.0.1:9"),
        (("--bind", "127.0.0.1:0", "--keys", "/nowhere"), 2, "/nowhere"),
    ],
)
def test_what_cannot_be_is_said(options: tuple[str, ...], code: int, words: str) -> None:
    done = run("dashboard", "tcp://127.0.0.1:9", *options)
    assert (done.returncode, words in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def test_it_goes_by_keys_as_other_commands_do(tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    assert run("keygen", keys).returncode == 0
    config = settings(tmp_path, buffer_size=3, endpoint="tcp://127.0.0.1:0")
    with started("broker", config, "--keys", keys, "--json") as broker:
        endpoint = line_of(broker)["endpoints"][0]
        done = run("dashboard", endpoint, "--bind", "127.0.0.1:0")
        assert (done.returncode, "with keys only" in done.stderr) == (1, True), done.stderr
        with started("dashboard", endpoint, "--bind", "127.0.0.1:0", "--keys", keys, "--json") as program:
            assert json.loads(got(line_of(program)["url"], "/state.json"))["status"]["state"] == "STARTING"


def test_without_its_libraries_it_says_what_to_install(tmp_path: Path) -> None:
    blocked = tmp_path / "prometheus_client"
    blocked.mkdir()
    (blocked / "__init__.py").write_text("raise ModuleNotFoundError('no', name='prometheus_client')\n")
    from ods_async.supervise.children import import_path

    done = run("dashboard", "tcp://127.0.0.1:9", PYTHONPATH=f"{tmp_path}:{import_path()}")
    assert done.returncode == 2
    assert "needs prometheus_client" in done.stderr
    assert "pip install 'ods-async[dashboard]'" in done.stderr
