"""Key files that are wrong, for everybody who is given one, and every socket of a broker with keys (C18, C19)."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ods_async import AsyncClient, Client, CurveKeys, EventSubscriber, OnlineDataEngineCfg, OnlineDataset, Worker
from ods_async.core.events import ClientRefused
from ods_async.core.requests import Connect, Welcome
from ods_async.errors import AuthenticationError, ConfigError
from ods_async.testing import COUNTING_ID
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.transport.curve import make_keys
from ods_async.transport.sockets import Channel, ChannelKind, ChannelOptions, Hub, open_channel
from ods_async.transport.watch import watch_connection
from ods_async.wire.codec import decode_answer, encode_request
from ods_async.wire.messages import PROTOCOL
from tests.e2e.programs import until

COUNTERS = ("refused_connections", "malformed_messages")
TOPICS = (b"event.", b"tickets", b"verdict.", b"beat", b"stop")


def config(**changes: Any) -> OnlineDataEngineCfg:
    return OnlineDataEngineCfg(buffer_size=2, max_episode_steps=9, gym_config={"id": COUNTING_ID}, **changes)


# --- files ----------------------------------------------------------------------------------------------------------


def as_client(endpoint: str, keys: Path) -> None:
    Client(endpoint, keys=keys).close()


def as_async_client(endpoint: str, keys: Path) -> None:
    async def make() -> None:
        await AsyncClient(endpoint, keys=keys).close()

    asyncio.run(make())


def as_subscriber(endpoint: str, keys: Path) -> None:
    EventSubscriber(endpoint, keys=keys).close()


def as_dataset(endpoint: str, keys: Path) -> None:
    next(iter(OnlineDataset(endpoint, 3, keys=keys)))


def as_worker(endpoint: str, keys: Path) -> None:
    async def work() -> None:
        async with Worker(config(), endpoint, keys=keys):
            raise AssertionError("not reached")

    asyncio.run(work())


def as_worker_by_its_settings(endpoint: str, keys: Path) -> None:
    async def work() -> None:
        async with Worker(config(client_keys=str(keys)), endpoint):
            raise AssertionError("not reached")

    asyncio.run(work())


FILES = {
    "missing": "no such file|cannot be read",
    "39 characters": "has 39 characters; a key has 40",
    "public in place of secret": "the public key in place of the secret one",
    "public only": "holds a public key only",
}


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize(
    "party", [as_client, as_async_client, as_subscriber, as_dataset, as_worker, as_worker_by_its_settings]
)
def test_c18_a_key_file_that_is_wrong_is_said_before_anything_is_dialled(
    tmp_path: Path, party: Callable[[str, Path], None], case: str
) -> None:
    """C18: file and endpoint named, the same to everybody, at once, and never the key itself."""
    make_keys(tmp_path, ("bob",))
    file = tmp_path / "bob.key"
    keys = CurveKeys.load(tmp_path, "bob")
    if case == "missing":
        file.unlink()
    else:
        secret = {"39 characters": keys.secret[:-1], "public in place of secret": keys.public, "public only": ""}[case]
        file.write_text(f"public {keys.public}\n" + (f"secret {secret}\n" if secret else ""))
    began = time.monotonic()
    with pytest.raises(ConfigError, match=FILES[case]) as caught:
        party("tcp://127.0.0.1:9", file)
    assert time.monotonic() - began < 5.0
    assert str(file) in str(caught.value)
    assert "tcp://127.0.0.1:9" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert keys.secret[:-1] not in str(caught.value)


# --- sockets --------------------------------------------------------------------------------------------------------


class Addresses(NamedTuple):
    """The four sockets of a broker, by what a stranger would have to open to use them."""

    req: str
    pull: str
    push: str
    sub: str


NAMES = {"req": "requests", "pull": "tickets", "push": "rollouts", "sub": "events"}


def dial(hub: Hub, kind: ChannelKind, endpoint: str, keys: CurveKeys | None) -> Channel:
    topics = TOPICS if kind == "sub" else ()
    return open_channel(hub, kind, connect=[endpoint], options=ChannelOptions(curve=keys, watched=True, topics=topics))


def admitted(kind: ChannelKind, endpoint: str, keys: CurveKeys | None, seconds: float = 30.0) -> bool:
    """Whether that socket lets one in."""
    with Hub() as hub, dial(hub, kind, endpoint, keys) as channel:
        watch = watch_connection(channel)
        deadline = time.monotonic() + seconds
        while not (watch.connected or (watch.failure is not None if keys is None else watch.failure == "refused")):
            watch.poll()
            assert time.monotonic() < deadline, "no outcome"
            channel.wait(0.01)
        assert kind != "sub" or watch.connected or channel.receive() is None
        return watch.connected


class Keyed(NamedTuple):
    broker: RunningBroker
    folder: Path
    addresses: Addresses

    def keys(self, name: str) -> CurveKeys:
        return CurveKeys.load(self.folder, name)


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Keyed]:
    folder = tmp_path / "keys"
    make_keys(folder, ("alice", "bob"))
    with run_broker(config(server_keys=str(folder), heartbeat_interval=0.1)) as broker, Hub() as hub:
        channel = dial(hub, "req", broker.endpoint, CurveKeys.load(folder, "alice"))
        assert channel.wait(20.0, write=True)
        assert channel.send([encode_request(1, 9.0, Connect(broker.endpoint, "consumer", "", PROTOCOL))])
        assert channel.wait(20.0)
        welcome = decode_answer((channel.receive() or [b""])[0])[1]
        assert isinstance(welcome, Welcome)
        yield Keyed(broker, folder, Addresses(broker.endpoint, welcome.tickets, welcome.rollouts, welcome.events))


def test_c19_every_socket_of_the_broker_refuses_unlisted_keys_and_none_and_says_so(keyed: Keyed) -> None:
    """C19: to one who knows all addresses; events and tickets too; counted, and told with the socket's name."""
    stranger = CurveKeys.generate(keyed.keys("alice").server_public)
    for kind, endpoint in keyed.addresses._asdict().items():
        assert admitted(kind, endpoint, keyed.keys("bob")), kind
        assert not admitted(kind, endpoint, stranger), kind
        assert not admitted(kind, endpoint, None), kind
    with Client(keyed.broker.endpoint, keys=keyed.keys("alice")) as client:
        # Who speaks without keys and hangs up first is a handshake that was broken off: a malformed message.
        until(lambda: sum(client.get_stats()["extra"][name] for name in COUNTERS) >= 8)
        assert client.get_stats()["extra"]["refused_connections"] >= 4
    with EventSubscriber(keyed.broker.endpoint, 0, follow=False, keys=keyed.keys("alice")) as events:
        told = [event for event in events if isinstance(event, ClientRefused)]
    # Events of refusals are limited in rate; the counter is not.
    assert {event.socket for event in told if event.key == stranger.public} <= set(NAMES.values())
    assert "requests" in {event.socket for event in told}


@pytest.mark.parametrize("how", ["his key removed", "the list emptied", "the list removed"])
def test_c19_who_is_taken_off_the_list_while_it_runs_is_refused_on_every_socket(keyed: Keyed, how: str) -> None:
    """C19: an empty or missing list is nobody, never everybody."""
    listed = keyed.folder / "clients"
    bob, alice = keyed.keys("bob"), keyed.keys("alice")
    if how == "his key removed":
        (listed / "bob.pub").unlink()
    else:
        shutil.rmtree(listed)
        if how == "the list emptied":
            listed.mkdir()
    for kind, endpoint in keyed.addresses._asdict().items():
        assert not admitted(kind, endpoint, bob), kind
        assert admitted(kind, endpoint, alice) == (how == "his key removed"), kind
    client = Client(keyed.broker.endpoint, keys=bob)
    with contextlib.closing(client), pytest.raises(AuthenticationError, match="does not know the key"):
        client.get_stats(timeout=5.0)
