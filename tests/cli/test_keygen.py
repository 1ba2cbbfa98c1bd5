"""``keygen`` and ``--keys``, as programs of their own (C18, C19, C45)."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ods_async.testing import COUNTING_ID
from ods_async.transport.curve import CurveKeys, read_public_key
from tests.cli.programs import ends, line_of, run, run_json, settings, started


def keygen(folder: Path, *clients: str) -> Path:
    names = [part for name in clients for part in ("--client", name)]
    done = run("keygen", str(folder), *names)
    assert done.returncode == 0, done.stderr
    return folder


class Place(NamedTuple):
    endpoint: str
    keys: Path
    config: str
    tmp: Path


@contextlib.contextmanager
def serving(tmp: Path) -> Iterator[Place]:
    """A broker on tcp with keys, as a process, and settings for workers."""
    keys = keygen(tmp / "keys", "alice", "robot")
    config = settings(
        tmp,
        name="keys",
        buffer_size=3,
        max_episode_steps=40,
        heartbeat_interval=0.1,
        gym_config={"id": COUNTING_ID, "imports": ["ods_async.testing"]},
    )
    # Beyond loopback on purpose: keys are what allows it.
    with started("broker", config, "--endpoint", "tcp://0.0.0.0:0", "--keys", str(keys), "--json") as broker:
        endpoint = line_of(broker)["endpoints"][0].replace("0.0.0.0", "127.0.0.1")
        yield Place(endpoint, keys, config, tmp)
        broker.send_signal(signal.SIGTERM)
        assert ends(broker, 5.0)[0] == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Without a worker, so that it has no buffer that a test could seem to leave behind."""
    with serving(tmp_path_factory.mktemp("place")) as place:
        yield place


def test_keygen_makes_private_files_and_says_what_goes_where(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    done = run("keygen", str(folder))
    assert done.returncode == 0
    for words in ("server.key", "client.key and server.pub", "server_keys", "CurveKeys.load", "shut a client out"):
        assert words in done.stdout
    assert (folder / "server.key").stat().st_mode & 0o777 == 0o600
    keys = CurveKeys.load(folder)
    assert keys.secret not in done.stdout + done.stderr
    again = run_json("keygen", str(folder), "--client", "bob")
    assert again["kept"] == [str(folder / "server.key")]
    assert CurveKeys.load(folder) == keys


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((), "DIR"), (("/proc/nowhere",), "/proc/nowhere"), (("DIR", "--client", "../up"), "client's name")],
)
def test_keygen_refuses_what_cannot_be(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run("keygen", *(str(tmp_path / "k") if word == "DIR" else word for word in arguments))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_workers_and_consumers_with_listed_keys_are_served(tmp_path: Path) -> None:
    """C19: over processes: the worker fills the buffer, others draw, look and watch."""
    with serving(tmp_path) as place:
        robot = str(place.keys / "robot.key")
        with started("worker", place.config, "--connect", place.endpoint, "--keys", robot) as worker:
            alice = ("--keys", str(place.keys / "alice.key"))
            drawn = run("sample", place.endpoint, "-b", "4", "-c", "3", "--data-path", "frames", *alice)
            assert drawn.returncode == 0, drawn.stderr
            assert run_json("stats", place.endpoint, *alice)["stats"]["successful_episodes"] >= 1
            events = run("events", place.endpoint, "--json", *alice)
            assert '"worker_joined"' in events.stdout
            worker.send_signal(signal.SIGTERM)
            assert ends(worker, 10.0)[0] == 0


VERBS = {
    "stats": ("stats",),
    "events": ("events", "--follow"),
    "sample": ("sample",),
    "worker": ("worker",),
}
CASES = {
    "wrong server key": (1, "is another broker's"),
    "unlisted key": (1, "does not know the key"),
    "no keys": (1, "serves clients with keys only"),
    "public for secret": (2, "in place of the secret one"),
    "missing file": (2, "no such file"),
    "39 characters": (2, "has 39 characters; a key has 40"),
}


def spoiled(place: Place, case: str) -> Path | None:
    folder = place.tmp / case.replace(" ", "-")
    file = folder / "mallory.key"
    if case == "no keys":
        return None
    if case == "missing file" or file.exists():
        return file
    public = read_public_key(place.keys / "server.pub")
    keys = CurveKeys.generate(public)
    if case == "wrong server key":
        keys = CurveKeys.generate(keys.public)
    keys.save(folder, "mallory")
    if case == "public for secret":
        file.write_text(f"public {keys.public}\nsecret {keys.public}\n")
    elif case == "39 characters":
        file.write_text(f"public {keys.public}\nsecret {keys.secret[:-1]}\n")
    return file


TRIED = [
    *(("stats", case) for case in CASES),
    *(("events", case) for case in list(CASES)[:3]),
    *(("worker", case) for case in CASES),
    ("sample", "no keys"),
]


@pytest.mark.parametrize(("verb", "case"), TRIED)
def test_keys_that_do_not_fit_end_the_program_with_a_reason(place: Place, verb: str, case: str) -> None:
    """C18: endpoint and key file named, non-zero exit code, nothing hangs at exit."""
    code, words = CASES[case]
    file = spoiled(place, case)
    arguments = ["worker", place.config, "--connect", place.endpoint]
    if verb != "worker":
        arguments = [*VERBS[verb], place.endpoint, "--timeout", "5"]
    before = time.monotonic()
    done = run(*arguments, *(("--keys", str(file)) if file is not None else ()), seconds=30.0)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert place.endpoint in done.stderr
    assert file is None or str(file) in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - before < 15.0  # five, and the start of an interpreter with torch on a busy machine


def test_a_keyed_client_against_a_plain_broker(place: Place, tmp_path: Path) -> None:
    """C18: it was given keys to be sure of the broker, so it does not speak in the clear."""
    config = settings(tmp_path, name="plain", gym_config={"id": COUNTING_ID})
    with started("broker", config, "--endpoint", "tcp://127.0.0.1:0", "--json") as broker:
        endpoint = line_of(broker)["endpoints"][0]
        for verb in ("stats", "events"):
            done = run(verb, endpoint, "--keys", str(place.keys / "alice.key"), "--timeout", "5")
            assert done.returncode == 1
            assert "uses no keys" in done.stderr
            assert str(place.keys / "alice.key") in done.stderr
        broker.send_signal(signal.SIGTERM)
        assert ends(broker, 5.0)[0] == 0


def test_a_broker_beyond_loopback_without_keys_does_not_start(tmp_path: Path) -> None:
    """C45"""
    config = settings(tmp_path, gym_config={"id": COUNTING_ID})
    done = run("broker", config, "--endpoint", "tcp://0.0.0.0:0")
    assert done.returncode == 2
    assert "keygen" in done.stderr
    assert "allow_insecure_bind" in done.stderr
    keys = keygen(tmp_path / "keys")
    (keys / "server.key").chmod(0o644)
    done = run("broker", config, "--endpoint", "tcp://0.0.0.0:0", "--keys", str(keys))
    assert done.returncode == 2
    assert f"chmod 600 {keys / 'server.key'}" in done.stderr


def test_an_engine_with_keys_on_tcp_keeps_its_own_workers_on_ipc(place: Place, tmp_path: Path) -> None:
    """Local workers and the owner need no key files; who comes by tcp does."""
    from ods_async.client.sync import Client
    from ods_async.config import OnlineDataEngineCfg
    from ods_async.engine import OnlineDataEngine
    from ods_async.errors import AuthenticationError

    values = json.loads(Path(place.config).read_text()) | {
        "name": "keyed-engine",
        "endpoint": "tcp://127.0.0.1:0",
        "server_keys": str(place.keys),
        "client_keys": str(tmp_path / "not-there-and-not-needed"),
    }
    with OnlineDataEngine(OnlineDataEngineCfg.from_dict(values)) as engine:
        assert engine.sample_batch(4, 3).batch_size == (4, 3)
        with Client(engine.endpoint, keys=CurveKeys.load(place.keys, "alice")) as client:
            assert client.sample_batch(4, 3).batch_size == (4, 3)
        with contextlib.closing(Client(engine.endpoint)) as client, pytest.raises(AuthenticationError):
            client.get_stats()
