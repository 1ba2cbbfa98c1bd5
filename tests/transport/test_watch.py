"""Telling "nobody there", "wrong key" and "gone" apart (C18), and what cuts a connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from ods_async.transport.curve import CurveKeys, CurveServer
from ods_async.transport.options import ChannelOptions
from ods_async.transport.sockets import Channel, Hub, join_envelope, open_channel, split_envelope, wait_any
from ods_async.transport.watch import ConnectionEvent, ConnectionWatch, watch_connection

WATCHED = ChannelOptions(watched=True)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


def keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def until(watch: ConnectionWatch, *kinds: str) -> list[ConnectionEvent]:
    events: list[ConnectionEvent] = []
    while not any(event.kind in kinds for event in events):
        assert wait_any([watch], 5), f"no {kinds} among {events}"
        events += watch.poll()
    return events


def dial(hub: Hub, endpoint: str, curve: CurveKeys | None = None) -> tuple[Channel, ConnectionWatch]:
    channel = open_channel(hub, "req", connect=[endpoint], options=ChannelOptions(watched=True, curve=curve))
    return channel, watch_connection(channel)


def test_nobody_there(hub: Hub, ipc_folder: Path) -> None:
    _, watch = dial(hub, f"ipc://{ipc_folder}/nobody.sock")
    until(watch, "retrying")
    assert (watch.connected, watch.handshakes_failed, watch.last_failure) == (False, 0, "")
    assert watch.retries >= 1


def test_a_broker_that_goes_away_and_comes_back(hub: Hub, ipc_folder: Path) -> None:
    endpoint = f"ipc://{ipc_folder}/b.sock"
    router = open_channel(hub, "router", bind=[endpoint])
    channel, watch = dial(hub, endpoint)
    until(watch, "connected")
    assert watch.connected
    assert watch.connections == 1
    router.close()
    until(watch, "disconnected")
    assert (watch.connected, watch.disconnects) == (False, 1)
    assert not channel.writable
    open_channel(hub, "router", bind=[endpoint])
    until(watch, "connected")
    assert channel.wait(5, write=True)


@pytest.mark.parametrize("case", ["wrong server key", "no keys", "keys against a plain server"])
def test_wrong_keys_are_told_within_seconds_at_both_ends(hub: Hub, case: str) -> None:
    """C18: an outcome, not silence."""
    (public, secret), (mine, my_secret), (other, _) = keys(), keys(), keys()
    server = None if case == "keys against a plain server" else CurveServer(public, secret)
    client: CurveKeys | None = CurveKeys(mine, my_secret, public)
    if case == "wrong server key":
        client = CurveKeys(mine, my_secret, other)
    elif case == "no keys":
        client = None
    router = open_channel(hub, "router", bind=["tcp://127.0.0.1:0"], options=ChannelOptions(curve=server, watched=True))
    channel, watch = dial(hub, router.endpoints[0], client)
    seen_by_server = watch_connection(router)
    failed = next(event for event in until(watch, "handshake_failed") if event.kind == "handshake_failed")
    until(seen_by_server, "handshake_failed")
    assert failed.endpoint == router.endpoints[0]
    assert ("wrong key" if case == "wrong server key" else "one end uses CURVE keys") in failed.reason
    assert watch.last_failure == failed.reason
    assert seen_by_server.handshakes_failed >= 1
    assert not channel.send([b"x"])
    assert not router.readable


def test_a_program_that_is_no_broker(hub: Hub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        channel = open_channel(
            hub,
            "req",
            connect=[f"tcp://127.0.0.1:{mute.getsockname()[1]}"],
            options=ChannelOptions(watched=True, handshake_ms=200),
        )
        watch = watch_connection(channel)
        until(watch, "handshake_failed")
        assert "no broker" in watch.last_failure


def test_garbage_is_cut_off_and_good_traffic_goes_on(hub: Hub) -> None:
    router = open_channel(hub, "router", bind=["tcp://127.0.0.1:0"], options=WATCHED)
    watch = watch_connection(router)
    port = int(router.endpoints[0].rpartition(":")[2])
    for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(range(256)) * 10, b"\xff" + bytes(8) + b"\x01\x7f"):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(garbage)
            with contextlib.suppress(OSError):  # it may be cut off already
                raw.shutdown(socket.SHUT_WR)
            until(watch, "handshake_failed", "disconnected")  # some of it passes for ZMTP 1.0 at first
    channel, _ = dial(hub, router.endpoints[0])
    assert channel.wait(5, write=True)
    assert channel.send([b"question"])
    assert router.wait(5)


def test_too_large_an_answer_ends_the_connection_for_good_and_shows(hub: Hub) -> None:
    """C43: the broker must send an error instead; if it does not, a new channel is needed."""
    router = open_channel(hub, "router", bind=["tcp://127.0.0.1:0"])
    options = ChannelOptions(watched=True, max_message_bytes=1000)
    channel = open_channel(hub, "req", connect=router.endpoints, options=options)
    watch = watch_connection(channel)
    assert channel.wait(5, write=True)
    channel.send([b"question"])
    assert router.wait(5)
    peer, _ = split_envelope(router.receive() or [])
    router.send(join_envelope(peer, [bytes(1001)]))
    until(watch, "disconnected")
    assert channel.receive() is None
    channel.close()
    with open_channel(hub, "req", connect=router.endpoints, options=options) as fresh:
        assert fresh.wait(5, write=True)


def test_a_peer_that_hangs_is_noticed_by_heartbeats(hub: Hub) -> None:
    """A peer whose network is cut, or that is stopped, closes nothing: only its silence tells."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = ChannelOptions(watched=True, heartbeat_ms=50, heartbeat_timeout_ms=150)
        channel = open_channel(hub, "push", connect=[f"tcp://127.0.0.1:{server.getsockname()[1]}"], options=options)
        watch = watch_connection(channel)
        connection, _ = server.accept()
        with connection:
            # The greeting and READY of a PULL socket without encryption, then silence.
            connection.sendall(b"\xff" + bytes(7) + b"\x01\x7f\x03\x01NULL" + bytes(16) + b"\0" + bytes(31))
            body = b"\x05READY" + b"\x0bSocket-Type" + b"\x00\x00\x00\x04PULL"
            connection.sendall(b"\x04" + bytes([len(body)]) + body)
            until(watch, "connected")
            until(watch, "disconnected")
