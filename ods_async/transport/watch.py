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

from ods_async.errors import AuthenticationError, BrokerUnreachableError, ClosedError, PeerError
from ods_async.transport.curve import CurveKeys
from ods_async.transport.options import can_read, get_int
from ods_async.transport.sockets import Channel

__all__ = ["ConnectionEvent", "ConnectionWatch", "handshake_error", "watch_connection"]

EventKind = Literal["connected", "disconnected", "handshake_failed", "retrying", "accept_failed"]

FailureKind = Literal["refused", "undecipherable", "one-sided", "closed", "silent", "foreign"]

_AUTH_CODES: Final = {300: "try again later", 400: "the key is not on the list of allowed clients", 500: "server error"}


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """One thing that happened. ``reason`` is for people; empty where there is nothing to say.

    ``failure`` sorts handshakes that failed: the key was "refused" by the allow-list, what came was "undecipherable",
    keys were "one-sided", the other end "closed" without a word (a wrong key of its server looks like that), stayed
    "silent", or is "foreign".
    """

    kind: EventKind
    endpoint: str
    reason: str = ""
    failure: FailureKind | None = None


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
        failure: the same as a kind, see :class:`ConnectionEvent`.
        mechanism: the security that the other end demands, if that had to be found out.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._monitor = channel._attach_monitor()
        self.connections = 0
        self.disconnects = 0
        self.handshakes_failed = 0
        self.retries = 0
        self.last_failure = ""
        self.failure: FailureKind | None = None
        self.mechanism: str | None = None
        self._probed = False
        self._failing = 0

    @property
    def _socket(self) -> zmq.Socket[bytes]:
        return self._monitor

    @property
    def connected(self) -> bool:
        """True if at least one connection stood when :meth:`poll` last looked."""
        return self.connections > 0

    @property
    def hopeless(self) -> bool:
        """No connection stands, and a handshake failed in a way that trying again cannot mend."""
        return (
            not self.connected and self.failure is not None and (self.failure != "closed" or self.mechanism is not None)
        )

    @property
    def doubtful(self) -> bool:
        """Handshakes end without a word: set ``mechanism`` to what :func:`mechanism_of` says, once, to know more.

        One may have been a broker in the moment of its end, so that it takes two.
        """
        closed = not self.connected and self.failure == "closed" and self.handshakes_failed > 1
        return closed and not self._probed

    def probed(self, mechanism: str | None) -> None:
        """What the other end was found to demand; None: it did not say."""
        self.mechanism, self._probed = mechanism, True

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
            self.failure, self.last_failure = _failure(number, value)
            return ConnectionEvent("handshake_failed", endpoint, self.last_failure, self.failure)
        return None


_FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


def _failure(number: int, value: int) -> tuple[FailureKind, str]:
    if number == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "refused", f"refused by the server's allow-list ({value}: {_AUTH_CODES.get(value, 'unknown')})"
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "one-sided", "one end uses CURVE keys and the other does not"
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "undecipherable", "wrong key: what the other end sent cannot be decrypted with it"
    if number == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "foreign", f"the other end does not speak the same protocol (code 0x{value:x})"
    if value in (errno.EPIPE, errno.ECONNRESET, 0):
        return (
            "closed",
            "the other end closed the connection during the handshake: a wrong key, or no broker of this kind",
        )
    if value == errno.EAGAIN:
        return "silent", "the other end took the connection and said nothing: no broker of this kind, or a stopped one"
    return "foreign", f"the handshake failed: {os.strerror(value)}"


def handshake_error(endpoint: str, keys: CurveKeys | None, watch: ConnectionWatch) -> PeerError:
    """Why a broker at ``endpoint`` was reached and yet cannot be spoken to (``watch.failure`` is not None).

    Returns:
        An :class:`~ods_async.errors.AuthenticationError` if it is the keys, as far as that can be told, else a
        ``BrokerUnreachableError``, naming endpoint and key file.
    """
    file = "" if keys is None else keys.path or "the keys given"
    failure, reason = watch.failure, watch.last_failure
    if failure == "closed" and watch.mechanism is not None:
        failure = "undecipherable" if (watch.mechanism == "CURVE") == (keys is not None) else "one-sided"
    if failure == "refused" and keys is not None:
        words = (
            f"the broker at {endpoint} does not know the key of {file}: put its public key, {keys.public}, into a "
            "NAME.pub file in the broker's allow-list"
        )
    elif failure == "one-sided" and keys is None:
        words = (
            f"the broker at {endpoint} serves clients with keys only, and none were given; give the folder of keys "
            "(keys=, --keys) that `ods-async keygen` made for it"
        )
    elif failure == "one-sided":
        words = (
            f"what listens at {endpoint} uses no keys, but {file} was given to make sure that it is the right broker; "
            "start the broker with its keys (server_keys), or connect without"
        )
    elif failure == "undecipherable" and keys is not None:
        words = (
            f"the broker at {endpoint} cannot be spoken to with the keys of {file}: the server's public key beside it "
            "(server.pub) is another broker's"
        )
    else:
        words = f"{endpoint} was reached, but {reason}"
        return BrokerUnreachableError(words, endpoint=endpoint, timeout=0.0, reason=reason)
    return AuthenticationError(words, endpoint=endpoint, key_file=file, reason=reason)
