"""A broker with keys and everybody who speaks to it: who is served, and what everyone else is told (C18, C19)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ods_async.client.aio import AsyncClient
from ods_async.client.dataset import OnlineDataset
from ods_async.client.sync import Client
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.events import ClientRefused, Event
from ods_async.errors import AuthenticationError, BrokerUnreachableError, ConfigError, EndpointError, PeerError
from ods_async.observe.subscriber import EventSubscriber
from ods_async.testing import COUNTING_ID
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.transport.curve import CurveKeys, make_keys

ROOT = Path(__file__).parents[2]
WORKER = """
import json, sys
from ods_async.config import OnlineDataEngineCfg
from ods_async.worker.runtime import run_worker
settings, endpoint, options = json.loads(sys.argv[1])
sys.exit(run_worker(OnlineDataEngineCfg.from_dict(settings), endpoint, "w1", **options))
"""


def config(**changes: Any) -> OnlineDataEngineCfg:
    settings: dict[str, Any] = {
        "buffer_size": 3,
        "max_episode_steps": 40,
        "refill_policy": "manual",
        "heartbeat_interval": 0.1,
        "gym_config": {"id": COUNTING_ID},
    }
    return OnlineDataEngineCfg(**(settings | changes))


def work(endpoint: str, keys: CurveKeys | None, seconds: float = 30.0, **options: Any) -> tuple[int, str]:
    """A worker as a process, until it ends by itself: exit code and what it said."""
    settings = config(client_keys=keys.path if keys is not None else None).to_dict()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WORKER, json.dumps([settings, endpoint, options])],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stderr


class House(NamedTuple):
    """A broker with keys, one without, and the keys."""

    keyed: RunningBroker
    plain: RunningBroker
    folder: Path

    @property
    def listed(self) -> CurveKeys:
        return CurveKeys.load(self.folder, "alice")

    def keys(self, name: str) -> CurveKeys:
        """Keys out of a file of their own, made once."""
        file = self.folder.parent / "other" / f"{name}.key"
        if not file.exists():
            CurveKeys.generate(self.listed.server_public).save(file.parent, name)
        return CurveKeys.load(file)

    def case(self, name: str) -> tuple[str, CurveKeys | None, str]:
        """The endpoint to dial, the keys to dial it with, and words of what must be said about it."""
        if name == "unlisted key":
            return self.keyed.endpoint, self.keys("stranger"), "does not know the key"
        if name == "wrong server key":
            folder = self.folder.parent / "elsewhere"
            make_keys(folder)
            return self.keyed.endpoint, CurveKeys.load(folder), "is another broker's"
        if name == "no keys":
            return self.keyed.endpoint, None, "serves clients with keys only"
        return self.plain.endpoint, self.listed, "uses no keys"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, ("alice", "bob"))
    with run_broker(config(server_keys=str(folder))) as keyed, run_broker(config()) as plain:
        yield House(keyed, plain, folder)


def by_client(endpoint: str, keys: CurveKeys | None) -> None:
    with contextlib.closing(Client(endpoint, keys=keys)) as client:
        client.get_stats(timeout=5.0)


def by_async_client(endpoint: str, keys: CurveKeys | None) -> None:
    async def ask() -> None:
        client = AsyncClient(endpoint, keys=keys)
        try:
            await client.get_stats(timeout=5.0)
        finally:
            await client.close()

    asyncio.run(ask())


def by_subscriber(endpoint: str, keys: CurveKeys | None) -> None:
    with EventSubscriber(endpoint, since=0, follow=False, keys=keys) as events:
        list(events)


def by_async_subscriber(endpoint: str, keys: CurveKeys | None) -> None:
    async def follow() -> None:
        async with EventSubscriber(endpoint, since=0, follow=False, keys=keys) as events:
            async for _ in events:
                pass

    asyncio.run(follow())


def by_stream(endpoint: str, keys: CurveKeys | None) -> None:
    client = Client(endpoint, keys=keys)
    with contextlib.closing(client), contextlib.closing(client.stream(2, 3, timeout=5.0)) as stream:
        next(iter(stream))


def by_dataset(endpoint: str, keys: CurveKeys | None) -> None:
    next(iter(OnlineDataset(endpoint, 3, timeout=5.0, keys=keys)))


PARTIES: list[Callable[[str, CurveKeys | None], None]] = [
    by_client,
    by_async_client,
    by_subscriber,
    by_async_subscriber,
    by_stream,
    by_dataset,
]
CASES = ["unlisted key", "wrong server key", "no keys", "keys against a plain broker"]


def check(error: PeerError, endpoint: str, keys: CurveKeys | None, words: str) -> None:
    assert isinstance(error, AuthenticationError), repr(error)
    assert not isinstance(error, BrokerUnreachableError)
    assert words in str(error)
    assert endpoint in str(error)
    assert error.endpoint == endpoint
    assert error.key_file == ("" if keys is None else keys.path)
    assert error.key_file in str(error)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("party", PARTIES)
def test_keys_that_do_not_fit_are_told_within_five_seconds(
    house: House, party: Callable[[str, CurveKeys | None], None], case: str
) -> None:
    """C18: an authentication error that names endpoint and key file, never silence and never 'no broker'."""
    endpoint, keys, words = house.case(case)
    before = time.monotonic()
    with pytest.raises(AuthenticationError) as caught:
        party(endpoint, keys)
    assert time.monotonic() - before < 5.0
    check(caught.value, endpoint, keys, words)


@pytest.mark.parametrize("case", CASES)
def test_a_worker_whose_keys_do_not_fit_says_so_and_ends(house: House, case: str) -> None:
    """C18: exit code, one line, no hang at the end."""
    endpoint, keys, words = house.case(case)
    before = time.monotonic()
    code, said = work(endpoint, keys)
    assert code == 1
    assert "AuthenticationError" in said
    for part in (words, endpoint, keys.path if keys is not None else ""):
        assert part in said
    assert "Traceback" not in said
    assert time.monotonic() - before < 10.0  # five, and an interpreter's start on a busy machine


def test_nobody_there_is_still_nobody_there(house: House) -> None:
    """C18: a refused connection is no refused key."""
    with run_broker(config()) as gone:
        endpoint = gone.endpoint
    client = Client(endpoint, keys=house.listed, connect_timeout=0.5)
    with pytest.raises(BrokerUnreachableError, match=endpoint):
        client.connect()
    client.close()


def test_listed_clients_and_workers_are_served_and_the_data_is_whole(house: House) -> None:
    """C19: over every socket: tickets, rollouts, verdicts, events, batches."""
    alice, bob = house.listed, CurveKeys.load(house.folder, "bob")
    with run_broker(config(server_keys=str(house.folder))) as broker:
        assert work(broker.endpoint, bob, max_rollouts=3) == (0, "")
        with Client(broker.endpoint, keys=alice, data_path="frames") as client:
            client.wait_ready(10.0)
            assert client.sample_batch(5, 3).batch_size == (5, 3)
            assert client.get_stats()["successful_episodes"] == 3
        with EventSubscriber(broker.endpoint, since=0, follow=False, keys=house.folder / "alice.key") as events:
            assert "worker_joined" in {event.kind for event in events if isinstance(event, Event)}


def test_refusals_are_counted_and_told_with_address_and_key(house: House) -> None:
    """C18, C19: in the stats, and as an event."""
    stranger = house.keys("counted")
    with Client(house.keyed.endpoint, keys=house.listed) as client:
        before = client.get_stats()["extra"]["refused_connections"]
        with pytest.raises(AuthenticationError):
            by_client(house.keyed.endpoint, stranger)
        assert client.get_stats()["extra"]["refused_connections"] > before
        with EventSubscriber(house.keyed.endpoint, since=0, follow=False, keys=house.listed) as events:
            told = [event for event in events if isinstance(event, ClientRefused) and event.key == stranger.public]
    assert told[0].address == "127.0.0.1"
    assert told[0].socket == "requests"
    assert "allow-list" in told[0].reason
    assert told[0].total > before


def test_a_client_taken_off_the_list_is_refused_at_its_next_connection(tmp_path: Path) -> None:
    """C19: while the broker runs; those who stay are served on."""
    folder = tmp_path / "keys"
    make_keys(folder, ("alice", "bob"))
    alice, bob = CurveKeys.load(folder, "alice"), CurveKeys.load(folder, "bob")
    with run_broker(config(server_keys=str(folder))) as broker:
        by_client(broker.endpoint, bob)
        (folder / "clients" / "bob.pub").unlink()
        with pytest.raises(AuthenticationError):
            by_client(broker.endpoint, bob)
        by_client(broker.endpoint, alice)
        (folder / "clients" / "bob.pub").write_text(bob.public)
        by_client(broker.endpoint, bob)


@pytest.mark.parametrize("case", ["empty", "missing"])
def test_an_empty_list_is_nobody_and_a_missing_one_no_start(tmp_path: Path, case: str) -> None:
    """C19: never everybody."""
    folder = tmp_path / "keys"
    make_keys(folder)
    listed = tmp_path / "listed"
    cfg = config(server_keys=str(folder / "server.key"), allowed_clients=str(listed))
    if case == "missing":
        with pytest.raises(ConfigError, match="nobody could come in"), run_broker(cfg):
            pass
        return
    listed.mkdir()
    with run_broker(cfg) as broker, pytest.raises(AuthenticationError, match="does not know the key"):
        by_client(broker.endpoint, CurveKeys.load(folder))


def test_beyond_loopback_keys_are_needed_or_the_flag_that_says_what_it_is(tmp_path: Path) -> None:
    """C45"""
    make_keys(tmp_path / "keys")
    with pytest.raises(EndpointError, match=r"ods-async keygen.*allow_insecure_bind"):
        asyncio.run(_bind("tcp://0.0.0.0:0", config()))
    asyncio.run(_bind("tcp://0.0.0.0:0", config(server_keys=str(tmp_path / "keys"))))
    with pytest.raises(ConfigError, match="together with server_keys"):
        config(allowed_clients=str(tmp_path))


async def _bind(endpoint: str, cfg: OnlineDataEngineCfg) -> None:
    from ods_async.broker.service import Broker

    async with Broker(cfg, endpoints=[endpoint]):
        pass


def test_ipc_of_a_broker_with_keys_needs_none_and_keeps_other_users_out(house: House, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    with run_broker(config(server_keys=str(folder)), ipc=True) as broker:
        ipc = next(endpoint for endpoint in broker.endpoints if endpoint.startswith("ipc://"))
        by_client(ipc, None)
        by_client(ipc, house.listed)
        path = Path(ipc.removeprefix("ipc://"))
        for what in ("", ".tickets", ".rollouts", ".events"):
            found = [p for p in path.parent.iterdir() if p.name.startswith(path.name + what)]
            assert found, what
            assert all(p.stat().st_mode & 0o077 == 0 for p in found)
        with pytest.raises(AuthenticationError):
            by_client(broker.endpoint, None)


def test_keys_given_as_a_path_that_is_wrong_fail_before_anything_is_dialled(tmp_path: Path) -> None:
    """C18: with the file and the endpoint."""
    for make in (Client, AsyncClient, EventSubscriber):
        with pytest.raises(ConfigError, match=r"nowhere.key: cannot be read") as caught:
            make("tcp://127.0.0.1:1", keys=tmp_path / "nowhere.key")
        assert "tcp://127.0.0.1:1" in caught.value.__notes__[0]
    code, said = work("tcp://127.0.0.1:1", dataclasses.replace(_fresh(), path=str(tmp_path / "nowhere.key")))
    assert code == 1
    assert "nowhere.key: cannot be read" in said


def _fresh() -> CurveKeys:
    return CurveKeys.generate(CurveKeys.generate("0" * 40).public)
