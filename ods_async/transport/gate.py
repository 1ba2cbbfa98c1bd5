"""The gate of a broker with keys: which public keys are let in, decided anew for every connection to any socket.

zmq asks it over ZAP (rfc.zeromq.org/spec/27), on an address inside the broker's own context. It reads the allow-list
again each time, so that a key file that was removed or added counts from the next connection on. Connections that
stand already are not cut.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq.utils.z85

from ods_async.errors import ConfigError
from ods_async.transport.curve import read_public_key
from ods_async.transport.pump import AsyncPump
from ods_async.transport.sockets import ChannelOptions, Frame, Hub, open_inside

__all__ = ["AllowList", "Gate", "Refusal"]

_log = logging.getLogger(__name__)

_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_HELD: Final = 1024
_MOST_FILES: Final = 10_000


@dataclass(frozen=True, slots=True)
class Refusal:
    """A connection that was not let in.

    ``socket`` is the name of the socket it came to, ``address`` where it came from, ``key`` its public key.
    """

    socket: str
    address: str
    key: str
    reason: str


class AllowList:
    """The public keys in the ``*.pub`` files of a folder, as they are at the moment of asking.

    Args:
        folder: the folder; None, one that is empty, gone or cannot be read: nobody is listed.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[str, tuple[tuple[int, ...], str]] = {}
        self._told = ""

    def keys(self) -> set[str]:
        """All listed keys. Files that hold no key count for nothing; they are logged once."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, path in self._files():
            try:
                facts = path.stat()
                version = (facts.st_ino, facts.st_dev, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
                before = self._known.get(name)
                found[name] = before if before and before[0] == version else (version, self._read(path))
            except OSError:
                continue
        self._known = found
        return {key for _, key in found.values() if key}

    def _files(self) -> list[tuple[str, Path]]:
        if self._folder is None:
            return []
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(".pub"))  # noqa: PTH208
        except OSError as error:
            self._tell(f"the allow-list {self._folder} cannot be read, nobody is let in: {error.strerror}")
            return []
        if not names:
            self._tell(f"the allow-list {self._folder} is empty, nobody is let in")
        elif len(names) > _MOST_FILES:
            self._tell(f"the allow-list {self._folder} has more than {_MOST_FILES} keys; the rest is not let in")
        else:
            self._told = ""
        return [(name, self._folder / name) for name in names[:_MOST_FILES]]

    def _read(self, path: Path) -> str:
        try:
            return read_public_key(path)
        except ConfigError as error:
            _log.warning("in the allow-list: %s", error)
            return ""

    def _tell(self, words: str) -> None:
        if words != self._told:
            self._told = words
            _log.warning("%s", words)


class Gate:
    """Decides who may connect to the sockets of a hub. Made before they are bound, working from :meth:`open` on.

    Until then, and when it was closed, nobody gets in: connections wait, and give up in the end.

    Args:
        hub: the context whose sockets it guards.
        allowed: the allow-list.
        on_refusal: told of each connection that was refused.
    """

    def __init__(self, hub: Hub, allowed: Path | None, on_refusal: Callable[[Refusal], None]) -> None:
        self._list = AllowList(allowed)
        self._on_refusal = on_refusal
        self._channel = open_inside(hub, "router", _ADDRESS, ChannelOptions(high_water_mark=_HELD))
        self._pump: AsyncPump | None = None
        self._logged_at = -1.0
        self._unlogged = 0
        self._list.keys()  # an empty list is worth a warning at the start

    def open(self) -> None:
        """Answer zmq's questions in the running loop."""
        self._pump = AsyncPump(self._channel, self._on_question)

    def close(self) -> None:
        """Answer no more. Again: no effect."""
        if self._pump is not None:
            self._pump.stop()
        self._channel.close(0.0)

    def _on_question(self, frames: list[Frame]) -> None:
        assert self._pump is not None
        words = [bytes(frame) for frame in frames]
        if len(words) < 8 or words[1] or words[2] != _VERSION:
            return
        peer, _, version, number, domain, address, _, mechanism, *credentials = words
        refusal = self._judge(domain, address, mechanism, credentials)
        status, reason = (b"200", b"OK") if refusal is None else (b"400", refusal.reason.encode())
        user = zmq.utils.z85.encode(credentials[0]) if refusal is None else b""
        self._pump.send([peer, b"", version, number, status, reason, user, b""])
        if refusal is not None:
            self._log(refusal)
            self._on_refusal(refusal)

    def _log(self, refusal: Refusal) -> None:
        """At most one line a second: a stranger must not fill the log."""
        now = time.monotonic()
        if now - self._logged_at < 1.0:
            self._unlogged += 1
            return
        more = f" (and {self._unlogged} more before)" if self._unlogged else ""
        self._logged_at, self._unlogged = now, 0
        words = f"from {refusal.address} to {refusal.socket}: {refusal.reason} {refusal.key}"
        _log.warning("refused a connection %s%s", words, more)

    def _judge(self, domain: bytes, address: bytes, mechanism: bytes, credentials: list[bytes]) -> Refusal | None:
        socket, place = domain.decode(errors="replace"), _address(address)
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != 32:
            return Refusal(socket, place, "", "it has no keys")
        key = zmq.utils.z85.encode(credentials[0]).decode()
        if key in self._list.keys():  # noqa: SIM118
            return None
        return Refusal(socket, place, key, "its key is not on the allow-list")


def _address(told: bytes) -> str:
    text = told.decode(errors="replace")
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return text[:100]
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
