"""ConnectionWatch: what happens to a channel's connections, from zmq's socket monitor.

It tells "nobody listens there" from "wrong key" from "the broker went away", which look the same through the channel.
A connecting channel tries again by itself after all of these but two: when the other end sent too large a message, and
when it does not speak our protocol (or only one end has keys). Then no "retrying" follows: open a new channel.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from typing import Final, Literal

import zmq

from ods_async.errors import ClosedError
from ods_async.transport.options import can_read, get_int
from ods_async.transport.sockets import Channel

__all__ = ["ConnectionEvent", "ConnectionWatch", "watch_connection"]

EventKind = Literal["connected", "disconnected", "handshake_failed", "retrying", "accept_failed"]

_AUTH_CODES: Final = {300: "try again later", 400: "the key is not on the list of allowed clients", 500: "server error"}


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """One thing that happened. ``reason`` is for people; empty where there is nothing to say."""

    kind: EventKind
    endpoint: str
    reason: str = ""


def watch_connection(channel: Channel) -> ConnectionWatch:
    """The watch of ``channel``: of its whole life if it was opened with ``watched=True``, else from now on."""
    return ConnectionWatch(channel)


class ConnectionWatch:
    """Counts and keeps what :meth:`poll` has read so far. It belongs to the thread of its channel and ends with it.

    Attributes:
        connections: open connections (handshake done).
        disconnects: connections lost so far. A peer that sent too large a message is cut off, and counted here.
        handshakes_failed: handshakes that came to nothing so far.
        retries: tries to connect that found nobody.
        last_failure: why the last handshake failed, or empty.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._monitor = channel._attach_monitor()
        self.connections = 0
        self.disconnects = 0
        self.handshakes_failed = 0
        self.retries = 0
        self.last_failure = ""
        self._failing = 0

    @property
    def _socket(self) -> zmq.Socket[bytes]:
        return self._monitor

    @property
    def connected(self) -> bool:
        """True if at least one connection stood when :meth:`poll` last looked."""
        return self.connections > 0

    @property
    def fileno(self) -> int:
        """Edge-triggered, as the channel's: poll until nothing comes."""
        return get_int(self._monitor, zmq.FD)

    def poll(self) -> list[ConnectionEvent]:
        """Everything that happened since the last call; never waits. Call it now and then: events wait in memory.

        Raises:
            ClosedError: the channel is closed.
        """
        if self._channel.closed:
            raise ClosedError("the watched channel is closed", what="channel")
        events: list[ConnectionEvent] = []
        while can_read(self._monitor):
            head, endpoint = self._monitor.recv_multipart(zmq.NOBLOCK)
            number, value = struct.unpack("=Hi", head)
            if (event := self._read(number, value, endpoint.decode(errors="replace"))) is not None:
                events.append(event)
        return events

    def _read(self, number: int, value: int, endpoint: str) -> ConnectionEvent | None:
        if number == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connections += 1
            return ConnectionEvent("connected", endpoint)
        if number == zmq.EVENT_DISCONNECTED:
            if self._failing:  # zmq reports the end of a connection that never stood as well
                self._failing -= 1
                return None
            self.connections = max(0, self.connections - 1)
            self.disconnects += 1
            return ConnectionEvent("disconnected", endpoint)
        if number == zmq.EVENT_CONNECT_RETRIED:
            self.retries += 1
            return ConnectionEvent("retrying", endpoint)
        if number == zmq.EVENT_ACCEPT_FAILED:
            return ConnectionEvent("accept_failed", endpoint, os.strerror(value))
        if number in _FAILURES:
            self.handshakes_failed += 1
            self._failing += 1
            self.last_failure = _failure(number, value)
            return ConnectionEvent("handshake_failed", endpoint, self.last_failure)
        return None


_FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


def _failure(number: int, value: int) -> str:
    if number == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"refused by the server's allow-list ({value}: {_AUTH_CODES.get(value, 'unknown')})"
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "one end uses CURVE keys and the other does not"
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "wrong key: what the other end sent cannot be decrypted with it"
    if number == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return f"the other end does not speak the same protocol (code 0x{value:x})"
    if value in (errno.EPIPE, errno.ECONNRESET, 0):
        return "the other end closed the connection during the handshake: a wrong key, or no broker of this kind"
    if value == errno.EAGAIN:
        return "the other end took the connection and said nothing: no broker of this kind, or a stopped one"
    return f"the handshake failed: {os.strerror(value)}"
