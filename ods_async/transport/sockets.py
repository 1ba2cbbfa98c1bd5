"""Sockets: one context a process, channels whose options are all set before they bind or connect.

A :class:`Channel` belongs to one thread. Nothing here blocks but :meth:`Channel.wait` and :func:`wait_any`, and a
channel never lingers unless told to. After a fork the child may make channels of its own; the parent's are dead to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Literal, Protocol, Self

import zmq

from ods_async.core.stimuli import Peer
from ods_async.errors import ClosedError, EndpointError, EndpointInUseError, ProtocolError
from ods_async.transport.claims import IpcClaim, claim_ipc
from ods_async.transport.endpoint import Endpoint, is_loopback, parse_endpoint, resolve_for_bind
from ods_async.transport.hub import Hub, abandon, open_channel_count, process_id
from ods_async.transport.options import (
    NOBLOCK,
    NOBLOCK_MORE,
    POLLIN,
    POLLOUT,
    ChannelKind,
    ChannelOptions,
    apply_keys,
    apply_nearness,
    apply_options,
    attach_monitor,
    can_read,
    get_int,
    milliseconds,
)

__all__ = [
    "Channel",
    "ChannelKind",
    "ChannelOptions",
    "Frame",
    "Hub",
    "Waitable",
    "join_envelope",
    "open_channel",
    "open_channel_count",
    "open_inside",
    "split_envelope",
    "wait_any",
]

Frame = bytes | memoryview

BIG_FRAME: Final = 64 * 1024
MAX_FRAMES: Final = 64
_KINDS: Final[dict[str, int]] = {
    "router": zmq.ROUTER,
    "req": zmq.REQ,
    "push": zmq.PUSH,
    "pull": zmq.PULL,
    "pub": zmq.PUB,
    "sub": zmq.SUB,
}
# So many leading frames are headers (envelope, message header) and always copied; what follows may be a payload.
_HEADERS: Final[dict[str, int]] = {"router": 4, "req": 1, "pull": 1, "sub": 2, "push": 1, "pub": 1}


class Channel:
    """One socket. Made by :func:`open_channel`; used by one thread at a time.

    Attributes:
        kind: what it is.
        endpoints: the real addresses it bound (ports filled in), or those it connects to.
        unroutable: answers that were not sent because their peer was gone ("router").
        last_refusal: why the last send returned False: "full" (try again when writable), "gone" (the peer is), or "".
    """

    def __init__(self, hub: Hub, kind: ChannelKind, options: ChannelOptions) -> None:
        socket = hub.context.socket(_KINDS[kind])
        self._hub = hub
        self._socket = socket
        self._pid = process_id()
        self._options = options
        self._headers = _HEADERS[kind]
        self._claims: list[IpcClaim] = []
        self._fileno = get_int(socket, zmq.FD)
        self._monitor: zmq.Socket[bytes] | None = None
        self.kind: ChannelKind = kind
        self.endpoints: tuple[str, ...] = ()
        self.unroutable = 0
        self.last_refusal: Literal["", "full", "gone"] = ""

    @property
    def closed(self) -> bool:
        """True after :meth:`close`, and in a forked child."""
        return self._socket.closed or self._pid != process_id()

    @property
    def fileno(self) -> int:
        """The descriptor that becomes readable when the channel's state *changes*: edge-triggered; see AsyncPump."""
        return self._fileno

    @property
    def readable(self) -> bool:
        """True if :meth:`receive` would return a message."""
        return can_read(self._live())

    @property
    def writable(self) -> bool:
        """True if :meth:`send` would be taken (a "router" always says so: its peers differ)."""
        return bool(get_int(self._live(), zmq.EVENTS) & POLLOUT)

    @property
    def ready(self) -> tuple[bool, bool]:
        """``(readable, writable)`` by one look."""
        events = get_int(self._live(), zmq.EVENTS)
        return bool(events & POLLIN), bool(events & POLLOUT)

    def send(self, frames: Sequence[Frame], *, copy: bool = True) -> bool:
        """Send one message of one or more frames, whole or not at all.

        With ``copy=False`` frames of 64 KiB and more leave without being copied: their memory must not change until
        zmq has let go of it (it holds a reference until then).

        Returns:
            False if it was not taken: no peer, queue full, or ("router") the peer is gone; see ``last_refusal``.

        Raises:
            ClosedError: the channel is closed, or belongs to the parent process.
        """
        socket = self._live()
        last = len(frames) - 1
        if last < 0:
            raise ValueError("a message has at least one frame")
        index = 0
        try:
            for index, frame in enumerate(frames):
                flags = NOBLOCK if index == last else NOBLOCK_MORE
                big = not copy and (frame.nbytes if isinstance(frame, memoryview) else len(frame)) >= BIG_FRAME
                socket.send(frame, flags, copy=not big)
        except zmq.Again:
            self.last_refusal = "full"
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self.unroutable += 1
                self.last_refusal = "gone"
                return False
            raise self._ended(error) from error
        except BaseException:
            if index:  # Ctrl-C between two frames: the next message would be glued to the torn one
                self.close(0.0)
            raise
        self.last_refusal = ""
        return True

    def receive(self) -> list[Frame] | None:
        """The next message, or None if there is none (yet).

        Payload frames of 64 KiB and more come as writable memoryviews of zmq's own memory, others as bytes. Of a
        message with more than 64 frames the rest is dropped, so that whoever reads it sees a wrong number of frames.

        Raises:
            ClosedError: the channel is closed, or belongs to the parent process.
        """
        socket = self._live()
        try:
            frames: list[Frame] = [socket.recv(NOBLOCK)]
            while socket.get(zmq.RCVMORE):
                if len(frames) < self._headers:
                    frames.append(socket.recv(NOBLOCK))
                    continue
                frame = socket.recv(NOBLOCK, copy=False)
                if len(frames) < MAX_FRAMES:
                    frames.append(frame.buffer if len(frame) >= BIG_FRAME else frame.bytes)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno == zmq.EFSM:  # a "req" that asked nothing
                return None
            raise self._ended(error) from error
        return frames

    def wait(self, timeout: float, write: bool = False) -> bool:
        """Wait until a message is there (or, with ``write``, until a send would be taken).

        Args:
            timeout: seconds; 0 looks only, infinity waits for ever.
            write: wait for room instead.

        Returns:
            False when the time is up.

        Raises:
            ClosedError: the channel is closed, or belongs to the parent process.
        """
        try:
            socket, flag = self._live(), zmq.POLLOUT if write else zmq.POLLIN
            return bool(zmq.zmq_poll([(socket, flag)], milliseconds(timeout)))
        except zmq.ZMQError as error:
            raise self._ended(error) from error

    def subscribe(self, topic: bytes) -> None:
        """Want messages whose first frame begins with ``topic`` ("sub" only)."""
        self._live().set(zmq.SUBSCRIBE, topic)

    def unsubscribe(self, topic: bytes) -> None:
        """Take one :meth:`subscribe` back."""
        self._live().set(zmq.UNSUBSCRIBE, topic)

    def close(self, linger: float | None = None) -> None:
        """Close; what is still to be sent may go on for ``linger`` seconds (None: as the options say). Never raises."""
        claims, self._claims = self._claims, []
        if self._pid == process_id() and not self._socket.closed:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
            seconds = self._options.linger if linger is None else linger
            self._socket.close(linger=milliseconds(seconds))
            self._hub.discard(self)
        for claim in claims:
            claim.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _live(self) -> zmq.Socket[bytes]:
        if self._pid != process_id():
            raise ClosedError(
                f"this {self.kind} channel was opened in another process (a parent, before a fork); open one here",
                what="channel",
            )
        if self._socket.closed:
            raise ClosedError(f"this {self.kind} channel is closed", what="channel")
        return self._socket

    def _ended(self, error: zmq.ZMQError) -> Exception:
        if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
            return ClosedError(f"this {self.kind} channel is closed", what="channel")
        return error

    def _abandon(self) -> None:
        for socket in (self._socket, self._monitor):
            if socket is not None:
                abandon(socket)
        self._claims = []

    def _attach_monitor(self) -> zmq.Socket[bytes]:
        if self._monitor is None:
            self._monitor = attach_monitor(self._live())
        return self._monitor


def open_channel(
    hub: Hub,
    kind: ChannelKind,
    *,
    bind: Iterable[str] = (),
    connect: Iterable[str] = (),
    options: ChannelOptions | None = None,
) -> Channel:
    """A new socket, bound or connected to every endpoint given; on any failure nothing stays open.

    Args:
        hub: whose context to use.
        kind: "req" may send again without having received (a time-out, a notice), and drops late answers.
        bind: endpoints to listen on; tcp ports may be 0.
        connect: endpoints to dial; whether anybody is there shows later.
        options: see :class:`ChannelOptions`.

    Raises:
        EndpointError: an endpoint that cannot be used, is taken, or belongs to a live broker.
        ClosedError: the hub is closed.
    """
    options = ChannelOptions() if options is None else options
    bound, dialled = [parse_endpoint(text) for text in bind], [parse_endpoint(text) for text in connect]
    channel = Channel(hub, kind, options)
    socket = channel._socket
    hub.add(channel)
    try:
        apply_options(socket, kind, options, ipv6=any(":" in endpoint.host for endpoint in bound + dialled))
        if options.watched:
            channel._attach_monitor()
        channel.endpoints = _attach(channel, bound, dialled)
    except BaseException:
        channel.close(0.0)
        raise
    return channel


def open_inside(hub: Hub, kind: ChannelKind, address: str, options: ChannelOptions) -> Channel:
    """A channel bound to an address inside the hub's own context (``inproc://…``), which nobody else can reach."""
    channel = Channel(hub, kind, options)
    hub.add(channel)
    try:
        apply_options(channel._socket, kind, options, ipv6=False)
        channel._socket.bind(address)
    except BaseException:
        channel.close(0.0)
        raise
    return channel


def _attach(channel: Channel, bound: Sequence[Endpoint], dialled: Sequence[Endpoint]) -> tuple[str, ...]:
    everything = [*((endpoint, True) for endpoint in bound), *((endpoint, False) for endpoint in dialled)]
    real = [str(endpoint) for endpoint, _ in everything]

    def attach(scheme: str) -> None:
        for index, (endpoint, binding) in enumerate(everything):
            if endpoint.scheme != scheme:
                continue
            if scheme == "tcp":
                apply_nearness(channel._socket, loopback=is_loopback(endpoint))
            if binding:
                real[index] = _bind(channel, endpoint)
            else:
                channel._socket.connect(str(endpoint))

    attach("ipc")  # guarded by the rights of its file; keys count for all that is attached once they are set
    apply_keys(channel._socket, channel._options)
    attach("tcp")
    return tuple(real)


def _bind(channel: Channel, endpoint: Endpoint) -> str:
    if endpoint.scheme == "ipc":
        claim = claim_ipc(endpoint)
        channel._claims.append(claim)
        _listen(channel._socket, f"ipc://{claim.passage}", endpoint)
        claim.publish()
        return str(endpoint)
    real = resolve_for_bind(endpoint)
    _listen(channel._socket, str(real), endpoint)
    last = channel._socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(last, bytes)
    return str(Endpoint("tcp", real.host, int(last.rstrip(b"\0").decode().rpartition(":")[2])))


def _listen(socket: zmq.Socket[bytes], address: str, endpoint: Endpoint) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        taken = error.errno == zmq.EADDRINUSE
        raise (EndpointInUseError if taken else EndpointError)(
            f"cannot listen on {endpoint}: {os.strerror(error.errno or 0).lower()}"
            + ("; another program has this port, choose another or 0 for any" if taken else ""),
            argument="endpoint",
            value=str(endpoint),
            rule="a free address of this machine",
        ) from error


class Waitable(Protocol):
    """What :func:`wait_any` can wait for: a channel or a connection watch."""

    @property
    def _socket(self) -> zmq.Socket[bytes]: ...


def wait_any(readers: Sequence[Waitable | int], timeout: float) -> list[Waitable | int]:
    """Wait until one of several channels, watches or plain file descriptors can be read.

    Args:
        readers: channels, watches, descriptors (an eventfd or a pipe to wake the waiting thread).
        timeout: seconds; infinity waits for ever.

    Returns:
        Those that can be read; empty when the time is up.

    Raises:
        ClosedError: one of them is closed.
    """
    items = [(reader if isinstance(reader, int) else reader._socket, zmq.POLLIN) for reader in readers]
    try:
        ready = zmq.zmq_poll(items, milliseconds(timeout))
    except zmq.ZMQError as error:
        if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
            raise ClosedError("one of the channels waited for is closed", what="channel") from error
        raise
    found = {item if isinstance(item, int) else id(item) for item, _ in ready}
    return [reader for reader in readers if (reader if isinstance(reader, int) else id(reader._socket)) in found]


def split_envelope(frames: Sequence[Frame]) -> tuple[Peer, list[Frame]]:
    """Take a message of a "router" apart: who asked, and the frames of the message itself.

    Raises:
        ProtocolError: no empty frame ends the envelope, or the envelope is longer than any honest one.
    """
    for index in range(1, min(len(frames), 6)):
        if len(frames[index]) == 0:
            envelope = tuple(bytes(frame) for frame in frames[1:index])
            if all(len(frame) <= 255 for frame in envelope):
                return Peer(bytes(frames[0]), envelope), list(frames[index + 1 :])
    raise ProtocolError("a request without an envelope; ask with a REQ socket", reason="no envelope")


def join_envelope(peer: Peer, body: Sequence[Frame]) -> list[Frame]:
    """The message that a "router" sends to bring ``body`` to ``peer``."""
    return [peer.identity, *peer.envelope, b"", *body]
