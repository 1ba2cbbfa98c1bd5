"""What a socket must know before it binds or connects, and putting it there."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final, Literal

import zmq

from ods_async.errors import EndpointError
from ods_async.transport.curve import CurveKeys, CurveServer

__all__ = [
    "NOBLOCK",
    "NOBLOCK_MORE",
    "POLLIN",
    "POLLOUT",
    "ChannelKind",
    "ChannelOptions",
    "apply_keys",
    "apply_nearness",
    "apply_options",
    "attach_monitor",
    "can_read",
    "get_int",
    "milliseconds",
]

_WATCHED: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_ACCEPT_FAILED
)
# What is sent but not read yet then stays in a processor's own cache (1 MiB, as Linux doubles the figure) instead of
# going through memory twice: frames of 57 MB at 5.0 instead of 3.4 GB/s. Other hosts need the kernel's own measure.
_LOOPBACK_SEND_BYTES: Final = 450_000
_KERNELS_MEASURE: Final = -1
# Plain numbers: combining pyzmq's flags makes an enum member each time, for every frame of every message.
NOBLOCK: Final = int(zmq.NOBLOCK)
NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
POLLIN: Final = int(zmq.POLLIN)
POLLOUT: Final = int(zmq.POLLOUT)
ChannelKind = Literal["router", "req", "push", "pull", "pub", "sub"]


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Everything a socket must know before it binds or connects.

    Attributes:
        high_water_mark: messages held for one peer, in each direction; a send beyond it returns False.
        max_message_bytes: a peer that sends a longer frame is cut off before anything is allocated; None: no limit.
        linger: seconds that a close may go on sending, unless :meth:`Channel.close` says otherwise.
        heartbeat_ms: silence after which the peer is asked whether it lives; 0: never. Without effect on "pub" and
            "sub": a subscriber that does not read would be cut off, and libzmq ends its process (an assertion) when a
            full queue is read after its connection was made anew. Beats show there that the other end lives.
        heartbeat_timeout_ms: how long it may take to answer; None: four times ``heartbeat_ms``.
        handshake_ms: time for a connection to finish its handshake.
        reconnect_ms: pause before the first new try to connect; it doubles up to ``reconnect_max_ms``.
        curve: keys for tcp, or None for no encryption. ipc never uses them.
        zap_domain: name of a socket with the broker's keys, as the gate hears it.
        topics: what a "sub" channel wants, by prefix; more with :meth:`Channel.subscribe`.
        watched: watch the connection from its first moment on (:func:`~ods_async.transport.watch.watch_connection`).
        io_thread: which of the hub's own threads moves the bytes, counted round from 0; None: who has least to do.
    """

    high_water_mark: int = 1000
    max_message_bytes: int | None = None
    linger: float = 0.0
    heartbeat_ms: int = 0
    heartbeat_timeout_ms: int | None = None
    handshake_ms: int = 5000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 1000
    curve: CurveServer | CurveKeys | None = None
    zap_domain: str = "ods"
    topics: tuple[bytes, ...] = ()
    watched: bool = False
    io_thread: int | None = None


def apply_options(socket: zmq.Socket[bytes], kind: ChannelKind, options: ChannelOptions, *, ipv6: bool) -> None:
    """Set all but the keys on a fresh socket of that kind; ``ipv6`` if an address needs it."""
    socket.set(zmq.SNDHWM, options.high_water_mark)
    socket.set(zmq.RCVHWM, options.high_water_mark)
    socket.set(zmq.MAXMSGSIZE, -1 if options.max_message_bytes is None else options.max_message_bytes)
    socket.set(zmq.LINGER, milliseconds(options.linger))
    if options.io_thread is not None:
        socket.set(zmq.AFFINITY, 1 << options.io_thread % int(socket.context.get(zmq.IO_THREADS)))
    socket.set(zmq.HANDSHAKE_IVL, options.handshake_ms)
    socket.set(zmq.RECONNECT_IVL, options.reconnect_ms)
    socket.set(zmq.RECONNECT_IVL_MAX, options.reconnect_max_ms)
    if options.heartbeat_ms and kind not in ("pub", "sub"):
        answer_within = options.heartbeat_timeout_ms or 4 * options.heartbeat_ms
        socket.set(zmq.HEARTBEAT_IVL, options.heartbeat_ms)
        socket.set(zmq.HEARTBEAT_TIMEOUT, answer_within)
        socket.set(zmq.HEARTBEAT_TTL, min(answer_within, 6_553_500))
    if ipv6:  # not always: with it, "localhost" would dial ::1 where the broker listens on 127.0.0.1
        socket.set(zmq.IPV6, 1)
    if kind == "req":
        socket.set(zmq.REQ_RELAXED, 1)
        socket.set(zmq.REQ_CORRELATE, 1)
    if kind in ("req", "push"):  # with nobody connected a send is refused instead of queued for whoever comes
        socket.set(zmq.IMMEDIATE, 1)
    if kind == "router":  # an answer that cannot be sent is counted instead of dropped silently
        socket.set(zmq.ROUTER_MANDATORY, 1)
    for topic in options.topics:
        socket.set(zmq.SUBSCRIBE, topic)


def apply_keys(socket: zmq.Socket[bytes], options: ChannelOptions) -> None:
    """Set the keys, if there are any. They count for the addresses bound or dialled afterwards, and only for those.

    Raises:
        EndpointError: this libzmq was built without CURVE.
    """
    curve = options.curve
    if curve is None:
        return
    if not zmq.has("curve"):
        raise EndpointError(
            "keys were given, but the libzmq of this machine was built without CURVE; install pyzmq from its wheel",
            argument="keys",
            value=curve.path,
            rule="a libzmq with CURVE",
        )
    socket.set(zmq.CURVE_PUBLICKEY, curve.public.encode())
    socket.set(zmq.CURVE_SECRETKEY, curve.secret.encode())
    if isinstance(curve, CurveServer):
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.ZAP_DOMAIN, options.zap_domain.encode())
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate nobody gets in, instead of everybody
    else:
        socket.set(zmq.CURVE_SERVERKEY, curve.server_public.encode())


def apply_nearness(socket: zmq.Socket[bytes], *, loopback: bool) -> None:
    """Fit the kernel's buffer to whom the tcp addresses bound or dialled next lead: to this machine alone or any."""
    socket.set(zmq.SNDBUF, _LOOPBACK_SEND_BYTES if loopback else _KERNELS_MEASURE)


def attach_monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Start the monitor of ``socket`` and return the socket its events arrive on."""
    address = f"inproc://ods-watch-{id(socket)}-{os.urandom(8).hex()}"
    socket.monitor(address, _WATCHED)
    receiver: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    receiver.set(zmq.LINGER, 0)
    receiver.set(zmq.RCVHWM, 0)  # a full monitor would block zmq's own thread, and every socket with it
    receiver.connect(address)
    return receiver


def get_int(socket: zmq.Socket[bytes], option: int) -> int:
    """A socket option that is a number."""
    value = socket.get(option)
    assert isinstance(value, int)
    return value


def can_read(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there: cheaper than to try and to have an exception made."""
    return bool(get_int(socket, zmq.EVENTS) & POLLIN)


def milliseconds(seconds: float) -> int:
    """Seconds as zmq wants them: rounded up, -1 for infinity."""
    return -1 if math.isinf(seconds) else max(0, math.ceil(min(seconds, 2_000_000.0) * 1000))
