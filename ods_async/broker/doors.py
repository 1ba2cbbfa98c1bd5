"""The broker's four sockets, and which address of each a peer should be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ods_async.core.requests import Limits
from ods_async.core.stimuli import ConnectionRefused, Malformed
from ods_async.errors import EndpointError
from ods_async.transport.curve import CurveServer
from ods_async.transport.endpoint import Endpoint, for_peer, is_loopback, parse_endpoint, sibling
from ods_async.transport.gate import Gate, Refusal
from ods_async.transport.pump import AsyncPump
from ods_async.transport.sockets import Channel, ChannelKind, ChannelOptions, Frame, Hub, open_channel
from ods_async.transport.watch import ConnectionWatch, watch_connection

__all__ = ["Doors", "Siblings", "check_binds", "doors_hub"]

# Who asks must not wait until the bytes of a rollout are in, nor for a thread that has been busy with them so long that
# the kernel lets others go first: rollouts have a thread of their own, and it lets others go first anyway.
_IO_THREADS = 2
_ANSWERING_THREAD, _ROLLOUTS_THREAD = range(_IO_THREADS)
# Messages held for one peer. Answers to a consumer that asks one thing at a time; orders for a worker; whole rollouts
# of one worker (each may be large, so few); events for a subscriber that pauses.
_ANSWERS_HELD = 64
_TICKETS_HELD = 64
_ROLLOUTS_HELD = 8
_EVENTS_HELD = 8192
_PAYLOAD_SLACK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Siblings:
    """Where the tickets, rollouts and events of one answering endpoint are, as its clients must dial them."""

    tickets: str
    rollouts: str
    events: str


def check_binds(endpoints: Sequence[str], *, insecure: bool, keys: bool = False) -> None:
    """Refuse endpoints that cannot be used, or that would open the broker to the network unprotected (C45).

    Args:
        endpoints: what is to be bound.
        insecure: the user allowed it.
        keys: tcp is encrypted and serves listed clients only.

    Raises:
        EndpointError: naming the endpoint and the remedy.
    """
    for text in endpoints:
        if not is_loopback(parse_endpoint(text)) and not insecure and not keys:
            raise EndpointError(
                f"endpoint {text!r} can be reached from other machines, and nothing is encrypted or authenticated; "
                "make keys (`ods-async keygen DIR`) and set server_keys, bind to tcp://127.0.0.1:PORT or ipc://PATH, "
                "or set allow_insecure_bind=True",
                argument="endpoint",
                value=repr(text),
                rule="loopback or ipc, unless server_keys or allow_insecure_bind",
            )


def doors_hub() -> Hub:
    """A hub with the threads that :class:`Doors` divide the work among."""
    return Hub(_IO_THREADS, stepping_back=(_ROLLOUTS_THREAD,))


class Doors:
    """Opens everything in ``__init__`` and starts to serve with :meth:`open`. Belongs to one loop.

    Args:
        hub: whose sockets to use; best one of :func:`doors_hub`.
        endpoints: where to answer requests; the other sockets are bound beside each of them.
        limits: bytes that a peer may send.
        keys: the broker's keys: on tcp only listed clients are served then, on all four sockets.
        on_refused: told of each connection that was not let in.

    Raises:
        EndpointError: an endpoint cannot be bound; nothing stays open then.
    """

    requests: AsyncPump
    tickets: AsyncPump
    rollouts: AsyncPump
    events: AsyncPump

    def __init__(
        self,
        hub: Hub,
        endpoints: Sequence[str],
        limits: Limits,
        *,
        keys: CurveServer | None = None,
        on_refused: Callable[[Refusal], None] = lambda refusal: None,
    ) -> None:
        parsed = [parse_endpoint(text) for text in endpoints]

        def beside(what: Literal["tickets", "rollouts", "events"]) -> list[str]:
            return [str(sibling(endpoint, what)) for endpoint in parsed]

        def options(name: str, held: int, most: int) -> ChannelOptions:
            return ChannelOptions(
                high_water_mark=held,
                max_message_bytes=most,
                heartbeat_ms=2000,
                watched=True,
                curve=keys,
                zap_domain=name,
                io_thread=_ROLLOUTS_THREAD if name == "rollouts" else _ANSWERING_THREAD,
            )

        header, rollout = limits.header_bytes, limits.rollout_bytes + _PAYLOAD_SLACK
        wanted: list[tuple[ChannelKind, list[str], ChannelOptions]] = [
            ("router", list(endpoints), options("requests", _ANSWERS_HELD, header)),
            ("push", beside("tickets"), options("tickets", _TICKETS_HELD, header)),
            ("pull", beside("rollouts"), options("rollouts", _ROLLOUTS_HELD, rollout)),
            ("pub", beside("events"), options("events", _EVENTS_HELD, header)),
        ]
        self._opened: list[Channel] = []
        self._gate = Gate(hub, keys.allowed, on_refused) if keys is not None else None
        try:
            for kind, bind, option in wanted:
                self._opened.append(open_channel(hub, kind, bind=bind, options=option))
        except BaseException:
            for channel in self._opened:
                channel.close()
            if self._gate is not None:
                self._gate.close()
            raise
        answering, tickets, rollouts, events = (channel.endpoints for channel in self._opened)
        self.endpoints: tuple[str, ...] = tuple(answering)
        """The answering socket's real addresses, in the order asked for."""
        self._bound = [parse_endpoint(text) for text in self.endpoints]
        self._siblings = [Siblings(*three) for three in zip(tickets, rollouts, events, strict=True)]
        self._watches: dict[str, ConnectionWatch] = {}
        self._rollouts_pump: Callable[[], AsyncPump] | None = None
        self._pauses = 0
        self._closed = False

    def open(
        self,
        on_request: Callable[[list[Frame]], None],
        on_report: Callable[[list[Frame]], None],
        on_room_for_tickets: Callable[[], None],
    ) -> None:
        """Serve all sockets in the running loop."""
        if self._gate is not None:
            self._gate.open()
        router, push, pull, pub = self._opened
        names = ("requests", "tickets", "rollouts", "events")
        self._watches = {name: watch_connection(channel) for name, channel in zip(names, self._opened, strict=True)}
        self.requests = AsyncPump(router, on_request)
        self.tickets = AsyncPump(push, on_writable=on_room_for_tickets)
        self.events = AsyncPump(pub)
        self._rollouts_pump = lambda: AsyncPump(pull, on_report, burst=8)
        self.rollouts = self._rollouts_pump()

    def siblings_for(self, via: str) -> Siblings:
        """The other addresses for a client that dialled ``via``: beside that endpoint, at the host it used.

        A client that came by an address nobody bound (a forwarded port, say) gets those of the first endpoint of the
        same kind, at its own host.
        """
        try:
            dialled = parse_endpoint(via)
        except EndpointError:
            return self._siblings[0]
        index = self._index_of(dialled)
        found = self._siblings[index]
        return Siblings(
            *(
                str(for_peer(parse_endpoint(address), dialled))
                for address in (found.tickets, found.rollouts, found.events)
            )
        )

    def failed_handshakes(self) -> Iterator[Malformed | ConnectionRefused]:
        """Every handshake that failed since the last call, but for those that the allow-list ended (told already)."""
        for name, watch in self._watches.items():
            for event in watch.poll():
                if event.kind != "handshake_failed" or event.failure == "refused":
                    continue
                if event.failure in ("one-sided", "undecipherable"):
                    yield ConnectionRefused(name, f"{event.reason} (at {event.endpoint})")
                else:
                    yield Malformed(name, f"a connection ended in its handshake ({event.reason})")

    @property
    def visited(self) -> bool:
        """Whether a client is connected to the answering socket now."""
        watch = self._watches.get("requests")
        if watch is None:
            return False
        watch.poll()
        return watch.connected

    def pause_rollouts(self, pause: bool) -> None:
        """Stop reading what workers send, or go on; senders are held back by the queue's bound.

        Several may ask for a pause; it lasts until each of them has ended its own.
        """
        self._pauses += 1 if pause else -1
        if pause:
            self.rollouts.stop()
        elif not self._pauses and not self._closed and self._rollouts_pump is not None:
            self.rollouts = self._rollouts_pump()

    def close(self, linger: float) -> None:
        """Close all sockets; what was sent may go on leaving for ``linger`` seconds. Doing it twice is fine."""
        self._closed = True
        if self._rollouts_pump is not None:
            for pump in (self.requests, self.tickets, self.rollouts, self.events):
                pump.stop()
        for channel in self._opened:
            channel.close(linger)
        if self._gate is not None:
            self._gate.close()

    def _index_of(self, dialled: Endpoint) -> int:
        def likeness(index: int) -> int:
            bound = self._bound[index]
            if bound.scheme != dialled.scheme:
                return 0
            if bound.scheme == "tcp":
                return 1 + 2 * (bound.port == dialled.port) + (bound.host == dialled.host)
            return 1 + 2 * (bound.path == dialled.path)

        return max(range(len(self._bound)), key=lambda index: (likeness(index), -index))
