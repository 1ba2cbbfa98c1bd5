"""Garbage for every port: bytes of another protocol, and well-formed messages of this transport that make no sense."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
from collections.abc import Callable
from typing import Final

from ods_async.core.reports import Heartbeat
from ods_async.core.requests import GetStats, Sample, Welcome
from ods_async.transport.endpoint import parse_endpoint
from ods_async.transport.sockets import ChannelKind, Hub, open_channel
from ods_async.wire.codec import encode_report, encode_request

__all__ = ["NOISES", "make_noise"]

_GREETING: Final = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48)
_SECONDS: Final = 2.0


class _Harmful:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return open, ("/tmp/ods-pickle-was-run",)


def _raw_bytes(rng: random.Random) -> bytes:
    return rng.choice(
        (
            b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(32),
            rng.randbytes(rng.randint(1, 4000)),
            _GREETING[: rng.randint(1, len(_GREETING))],
            _GREETING + b"\x02\xff\xff\xff\xff\xff\xff\xff\xff" + rng.randbytes(100),
            _GREETING + rng.randbytes(rng.randint(1, 500)),
        )
    )


def _frames(rng: random.Random) -> list[bytes]:
    valid = encode_request(rng.randrange(2**31), 1.0, rng.choice((GetStats(), Sample(rng.choice((-1, 10**9)), 5))))
    beat = encode_report(Heartbeat("nobody", "step", None, 3))
    broken = bytearray(rng.choice((valid, beat)))
    broken[rng.randrange(len(broken))] ^= rng.randint(1, 255)
    return rng.choice(
        (
            [b""],
            [b"x"] * 50,
            [rng.randbytes(rng.randint(1, 2000))],
            [pickle.dumps(_Harmful())],
            [b"\x91" * 10_000],
            [valid[: rng.randrange(len(valid))]],
            [bytes(broken)],
            [valid, b"a payload"],
            [beat, b"a payload", b"and another"],
            [beat, beat],
        )
    )


def _shout(rng: random.Random, welcome: Welcome, main: str) -> str:
    """Bytes of no protocol at all to one port, left open or closed."""
    place = rng.choice((main, welcome.tickets, welcome.rollouts, welcome.events))
    parsed = parse_endpoint(place)
    with contextlib.suppress(OSError):
        if parsed.scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as sock:
                _shout_at(sock, parsed.path, rng)
        else:
            with socket.socket() as sock:
                _shout_at(sock, (parsed.host, parsed.port), rng)
    return "bytes"


def _shout_at(sock: socket.socket, address: object, rng: random.Random) -> None:
    sock.settimeout(_SECONDS)
    sock.connect(address)  # type: ignore[arg-type]
    for _ in range(rng.randint(1, 4)):
        sock.sendall(_raw_bytes(rng))
    if rng.random() < 0.5:
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


def _mumble(rng: random.Random, welcome: Welcome, main: str) -> str:
    """Messages that mean nothing, over the transport itself."""
    kind: ChannelKind = rng.choice(("push", "req"))
    address = welcome.rollouts if kind == "push" else main
    with Hub() as hub:
        channel = open_channel(hub, kind, connect=[address])
        for _ in range(rng.randint(1, 30)):
            if not channel.wait(_SECONDS, write=True) or not channel.send(_frames(rng)):
                break
        channel.close(0.2)
    return "messages"


def _steal(rng: random.Random, welcome: Welcome, main: str) -> str:
    """Take tickets and do nothing with them."""
    with Hub() as hub:
        channel = open_channel(hub, "pull", connect=[welcome.tickets])
        for _ in range(rng.randint(1, 4)):
            if channel.wait(rng.random()):
                channel.receive()
    return "tickets stolen"


NOISES: Final = (_shout, _mumble, _steal)


def make_noise(rng: random.Random, welcome: Welcome, main: str) -> str:
    """One piece of nonsense at one of the broker's sockets.

    Args:
        rng: chooses.
        welcome: names the sockets beside the answering one.
        main: the answering one.

    Returns:
        What it was, in words.
    """
    return rng.choices(NOISES, (4, 4, 1))[0](rng, welcome, main)
