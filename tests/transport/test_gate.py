"""The gate: listed keys are let in, on every socket; nobody else is (C19)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq

from ods_async.errors import AuthenticationError
from ods_async.transport.curve import CurveKeys, CurveServer, make_keys, read_public_key
from ods_async.transport.gate import AllowList, Gate, Refusal
from ods_async.transport.probe import mechanism_of
from ods_async.transport.sockets import Channel, ChannelKind, ChannelOptions, Hub, open_channel
from ods_async.transport.watch import ConnectionWatch, handshake_error, watch_connection

OPPOSITE: dict[str, ChannelKind] = {"router": "req", "push": "pull", "pull": "push", "pub": "sub"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ("alice", "bob"))
    return tmp_path / "keys"


@pytest.fixture
def hubs() -> Iterator[tuple[Hub, Hub]]:
    with Hub() as server, Hub() as client:
        yield server, client


@contextlib.asynccontextmanager
async def gate(hub: Hub, allowed: Path | None, refused: list[Refusal]) -> AsyncIterator[Gate]:
    it = Gate(hub, allowed, refused.append)
    it.open()
    try:
        yield it
    finally:
        it.close()


def served(hub: Hub, keys: CurveServer, kind: ChannelKind = "router", *more: str) -> Channel:
    options = ChannelOptions(curve=keys, zap_domain=f"the {kind}", watched=True)
    return open_channel(hub, kind, bind=["tcp://127.0.0.1:0", *more], options=options)


async def outcome(hub: Hub, endpoint: str, keys: CurveKeys | None, kind: ChannelKind = "req") -> ConnectionWatch:
    """Dial, and wait until it is known what became of it, in every case; the loop goes on meanwhile."""
    channel = open_channel(hub, kind, connect=[endpoint], options=ChannelOptions(curve=keys, watched=True))
    watch = watch_connection(channel)
    async with asyncio.timeout(5):
        while not (watch.connected or watch.hopeless):
            await asyncio.sleep(0.005)
            watch.poll()
            if watch.doubtful:
                watch.probed(await asyncio.to_thread(mechanism_of, endpoint))
    return watch


def told(watch: ConnectionWatch, keys: CurveKeys | None) -> str:
    error = handshake_error("tcp://there:1", keys, watch)
    assert isinstance(error, AuthenticationError)
    assert error.endpoint == "tcp://there:1"
    assert error.key_file == ("" if keys is None else keys.path or "the keys given")
    return str(error)


@pytest.mark.parametrize("kind", sorted(OPPOSITE))
async def test_every_kind_of_socket_serves_listed_keys_only(hubs: tuple[Hub, Hub], folder: Path, kind: str) -> None:
    """C19: events and tickets too; the refusal has address, socket and key."""
    refused: list[Refusal] = []
    stranger = CurveKeys.generate(read_public_key(folder / "server.pub"))
    async with gate(hubs[0], folder / "clients", refused):
        bound = served(hubs[0], CurveServer.load(folder), kind)  # type: ignore[arg-type]
        endpoint = bound.endpoints[0]
        assert (await outcome(hubs[1], endpoint, CurveKeys.load(folder, "alice"), OPPOSITE[kind])).connected
        assert refused == []
        watch = await outcome(hubs[1], endpoint, stranger, OPPOSITE[kind])
        assert watch.failure == "refused"
        assert refused[0] == Refusal(f"the {kind}", "127.0.0.1", stranger.public, refused[0].reason)
        assert "not on the allow-list" in refused[0].reason
        wrong = dataclasses.replace(CurveKeys.load(folder, "alice"), server_public=stranger.public)
        for keys, words in ((None, "with keys only, and none were given"), (wrong, "is another broker's")):
            watch = await outcome(hubs[1], endpoint, keys, OPPOSITE[kind])
            assert words in told(watch, keys)
            assert not watch.connected


async def test_a_key_counts_from_the_moment_its_file_is_there_until_it_is_removed(
    hubs: tuple[Hub, Hub], folder: Path
) -> None:
    """C19"""
    refused: list[Refusal] = []
    late = CurveKeys.generate(read_public_key(folder / "server.pub"))
    async with gate(hubs[0], folder / "clients", refused):
        endpoint = served(hubs[0], CurveServer.load(folder)).endpoints[0]
        assert (await outcome(hubs[1], endpoint, late)).failure == "refused"
        listed = folder / "clients" / "late.pub"
        listed.write_text(late.public)
        assert (await outcome(hubs[1], endpoint, late)).connected
        listed.write_text(CurveKeys.load(folder, "bob").public)
        assert (await outcome(hubs[1], endpoint, late)).failure == "refused"
        listed.write_text(f"public {late.public}\n")
        assert (await outcome(hubs[1], endpoint, late)).connected
        listed.unlink()
        assert (await outcome(hubs[1], endpoint, late)).failure == "refused"
        assert (await outcome(hubs[1], endpoint, CurveKeys.load(folder, "alice"))).connected


@pytest.mark.parametrize("case", ["empty", "gone", "none", "a file", "no keys in it"])
async def test_no_list_means_nobody(hubs: tuple[Hub, Hub], folder: Path, case: str) -> None:
    """C19: never everybody."""
    allowed: Path | None = folder / "clients"
    assert allowed is not None
    if case == "none":
        allowed = None
    else:
        shutil.rmtree(allowed)
        if case == "a file":
            allowed.write_text(CurveKeys.load(folder, "bob").public)
        elif case != "gone":
            allowed.mkdir()
        if case == "no keys in it":
            (allowed / "bob.pub").write_text("bob\n")
            os.mkfifo(allowed / "pipe.pub")
    async with gate(hubs[0], allowed, []):
        keys = dataclasses.replace(CurveServer.load(folder, folder), allowed=allowed)
        endpoint = served(hubs[0], keys).endpoints[0]
        assert (await outcome(hubs[1], endpoint, CurveKeys.load(folder, "bob"))).failure == "refused"


async def test_without_a_gate_keys_let_nobody_in(hubs: tuple[Hub, Hub], folder: Path) -> None:
    """C19: zmq's own default would be everybody who knows the server's public key."""
    bound = served(hubs[0], CurveServer.load(folder))
    options = ChannelOptions(curve=CurveKeys.load(folder, "bob"), watched=True)
    open_channel(hubs[1], "req", connect=bound.endpoints, options=options)
    watch = watch_connection(bound)
    async with asyncio.timeout(5):
        while not watch.handshakes_failed:
            await asyncio.sleep(0.005)
            watch.poll()
    assert not watch.connected


async def test_ipc_needs_no_keys_where_tcp_does(hubs: tuple[Hub, Hub], folder: Path, ipc_folder: Path) -> None:
    """The rights of its file guard an ipc socket, whichever was asked for first; keys given there are not used."""
    ipc = f"ipc://{ipc_folder}/b.sock"
    async with gate(hubs[0], folder / "clients", []):
        bound = served(hubs[0], CurveServer.load(folder), "router", ipc)
        assert bound.endpoints[1] == ipc
        assert (await outcome(hubs[1], ipc, None)).connected
        assert (await outcome(hubs[1], ipc, CurveKeys.load(folder, "bob"))).connected
        assert "with keys only" in told(await outcome(hubs[1], bound.endpoints[0], None), None)
        assert (ipc_folder / "b.sock").stat().st_mode & 0o777 == 0o600


def test_a_list_is_read_again_only_where_it_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listed = AllowList(folder / "clients")
    assert listed.keys() == {CurveKeys.load(folder, name).public for name in ("alice", "bob")}
    (folder / "clients" / "bad.pub").write_text("x")
    before = listed.keys()
    monkeypatch.setattr("ods_async.transport.gate.read_public_key", lambda path: pytest.fail(f"read {path} again"))
    assert listed.keys() == before
    assert caplog.text.count("bad.pub") == 1
    (folder / "clients" / "alice.pub").unlink()
    assert len(listed.keys()) == 1


async def test_a_stranger_who_tries_again_and_again_does_not_fill_the_log(
    hubs: tuple[Hub, Hub], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused: list[Refusal] = []
    began = time.monotonic()
    async with gate(hubs[0], folder / "clients", refused):
        endpoint = served(hubs[0], CurveServer.load(folder)).endpoints[0]
        stranger = CurveKeys.generate(read_public_key(folder / "server.pub"))
        for _ in range(5):
            await outcome(hubs[1], endpoint, stranger)
    assert len(refused) >= 5
    assert 1 <= caplog.text.count("refused a connection") <= 1 + (time.monotonic() - began)


def test_zmq_is_asked_for_encryption_that_it_has() -> None:
    assert zmq.has("curve")
