"""The run's events, without a gap that nobody tells about.

Events are numbered. What the PUB socket dropped, or sent before we came, is seen by its missing number (the service's
beats tell numbers too), asked for again, and, where the broker no longer holds it, reported as ``EventsLost``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
import time
import weakref
from collections.abc import Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from ods_async.core.events import Event, StateChanged
from ods_async.core.reports import ServiceBeat
from ods_async.core.requests import Connect, Records, Replay, Request, Welcome
from ods_async.errors import (
    ArgumentError,
    AuthenticationError,
    BrokerUnreachableError,
    ClosedError,
    PeerError,
    ProtocolError,
    RequestTimeoutError,
)
from ods_async.observe.sequence import EventsLost, Sequencer
from ods_async.transport.curve import CurveKeys, as_keys
from ods_async.transport.endpoint import parse_address
from ods_async.transport.lane import AsyncLane, Lane
from ods_async.transport.pump import AsyncPump
from ods_async.transport.sockets import Channel, ChannelOptions, Frame, Hub, open_channel
from ods_async.transport.watch import ConnectionWatch, handshake_error, watch_connection
from ods_async.wire.asking import checked_timeout
from ods_async.wire.codec import BEAT_TOPIC, EVENT_TOPIC, decode_broadcast
from ods_async.wire.messages import PROTOCOL

__all__ = ["EventSubscriber", "EventsLost"]

_NOWHERE: Final = 2**62  # a number no event has: a replay from there only tells how far the numbers are
_QUEUE: Final = 10_000
_LOOK_SECONDS: Final = 0.25
_ASK_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Ask:
    request: Request
    seconds: float


@dataclass(frozen=True, slots=True)
class _Open:
    events: str


@dataclass(frozen=True, slots=True)
class _Listen:
    seconds: float


@dataclass(frozen=True, slots=True)
class _Pause:
    seconds: float


_Step = _Ask | _Open | _Listen | _Pause


class EventSubscriber:
    """Iterate over it, plainly or with ``async for``; it yields events (``core.events``) and :class:`EventsLost`.

    Iteration ends when the service has ended, or with ``follow=False`` when everything the broker holds was told.
    One subscriber is iterated over in one way, by one thread or task.

    Args:
        endpoint: the broker's address, the same that clients use.
        since: the number of the first event wanted (they begin at 0); None: only what happens from now on.
        follow: go on waiting for new events.
        keys: this client's CURVE keys for a tcp endpoint, or the path of their folder or file; not used on ipc.
        connect_timeout: seconds within which the broker must answer at first.
        reconnect_timeout: seconds to look for a broker that went away or fell silent, before giving up.

    Raises:
        EndpointError: the address cannot be used.
        ArgumentError: another argument is wrong.
    """

    def __init__(
        self,
        endpoint: str,
        since: int | None = None,
        *,
        follow: bool = True,
        keys: CurveKeys | str | os.PathLike[str] | None = None,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 60.0,
    ) -> None:
        if since is not None and (isinstance(since, bool) or not isinstance(since, int) or since < 0):
            raise ArgumentError(
                f"since is {since!r}; it must be the number of an event, 0 or more, or None",
                argument="since",
                value=repr(since),
                rule="0 or more, or None",
            )
        self.endpoint = str(parse_address(endpoint))
        self.malformed = 0
        self._follow = follow
        self._connect_timeout = checked_timeout(connect_timeout, 5.0)
        self._reconnect_timeout = checked_timeout(reconnect_timeout, 60.0)
        self._keys = as_keys(keys, self.endpoint)
        self._options = ChannelOptions(heartbeat_ms=1000, heartbeat_timeout_ms=4000, curve=self._keys)
        self._hub = Hub()
        self._finalizer = weakref.finalize(self, self._hub.close)
        self._sequencer = Sequencer(since)
        self._welcome: Welcome | None = None
        self._connected = False
        self._ended = False
        self._closed = False
        self._heard = 0.0
        self._pid = os.getpid()
        self._lane: Lane | AsyncLane | None = None
        self._channel: Channel | None = None
        self._watch: ConnectionWatch | None = None
        self._pump: AsyncPump | None = None
        self._messages: collections.deque[list[Frame]] = collections.deque()
        self._arrived: asyncio.Event | None = None

    @property
    def run_id(self) -> int | None:
        """The run whose events come, once connected."""
        return self._sequencer.run_id

    def close(self) -> None:
        """Close the sockets; iteration ends. Again: no effect."""
        self._closed = True
        self._disconnect()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    # --- plain iteration --------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event | EventsLost:
        script = self._script()
        try:
            step = next(script)
            while True:
                try:
                    outcome = self._do(step)
                except (PeerError, RequestTimeoutError) as error:
                    step = script.throw(error)
                else:
                    step = script.send(outcome)
        except StopIteration as done:
            found: Event | EventsLost | None = done.value
        if found is None:
            raise StopIteration
        return found

    def _do(self, step: _Step) -> object:
        if isinstance(step, _Ask):
            if self._lane is None:
                self._lane = Lane(self._hub, self.endpoint, self._options)
            assert isinstance(self._lane, Lane)
            return self._lane.ask(step.request, time.monotonic() + step.seconds).answer
        if isinstance(step, _Open):
            self._subscribe(step.events)
            return None
        if isinstance(step, _Pause):
            time.sleep(step.seconds)
            return None
        assert self._channel is not None
        frames = self._channel.receive()
        if frames is None and self._channel.wait(step.seconds):
            frames = self._channel.receive()
        if frames is None:  # what came before the connection was lost is read first
            self._check_connection()
        return frames

    # --- asyncio ----------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event | EventsLost:
        script = self._script()
        try:
            step = next(script)
            while True:
                try:
                    outcome = await self._do_async(step)
                except (PeerError, RequestTimeoutError) as error:
                    step = script.throw(error)
                else:
                    step = script.send(outcome)
        except StopIteration as done:
            found: Event | EventsLost | None = done.value
        finally:
            script.close()
        if found is None:
            raise StopAsyncIteration
        return found

    async def _do_async(self, step: _Step) -> object:
        if isinstance(step, _Ask):
            if self._lane is None:
                self._lane = AsyncLane(self._hub, self.endpoint, self._options)
            assert isinstance(self._lane, AsyncLane)
            return (await self._lane.ask(step.request, time.monotonic() + step.seconds)).answer
        if isinstance(step, _Open):
            self._arrived = asyncio.Event()
            self._pump = AsyncPump(self._subscribe(step.events), self._on_message)
            return None
        if isinstance(step, _Pause):
            await asyncio.sleep(step.seconds)
            return None
        assert self._arrived is not None
        if not self._messages:
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(step.seconds):
                    await self._arrived.wait()
        if self._messages:
            return self._messages.popleft()
        self._check_connection()
        return None

    def _on_message(self, frames: list[Frame]) -> None:
        if len(self._messages) < _QUEUE:  # what does not fit is missed, noticed by its number, and replayed
            self._messages.append(frames)
        if self._arrived is not None:
            self._arrived.set()

    # --- what both do -----------------------------------------------------------------------------------------------

    def _script(self) -> Generator[_Step, Any, Event | EventsLost | None]:
        """The way to the next event; None when there will be none."""
        while not self._closed:
            sequencer = self._sequencer
            if sequencer.ready:
                found = sequencer.ready.popleft()
                if isinstance(found, StateChanged) and found.state in ("STOPPED", "FAILED"):
                    self._ended = True
                return found
            try:
                if not self._connected:
                    yield from self._connect()
                    continue
                since = sequencer.wanted
                if since is not None:
                    answer = yield _Ask(Replay(since), _ASK_SECONDS)
                    if not isinstance(answer, Records):
                        raise ProtocolError("a replay was answered with something else", reason="kind of answer")
                    sequencer.take_records(answer)
                    continue
                if not self._follow:
                    return None
                frames = yield _Listen(_LOOK_SECONDS)
                if frames is not None:
                    self._take(frames)
                if sequencer.restarted:
                    self._disconnect()
                elif self._silent():
                    self._disconnect()
                    self._heard = time.monotonic()
            except (ProtocolError, AuthenticationError):
                raise
            except (PeerError, RequestTimeoutError):
                self._disconnect()
                if self._ended:
                    return None
                if self._welcome is None or time.monotonic() - self._heard > self._reconnect_timeout:
                    raise
                yield _Pause(min(_LOOK_SECONDS, self._reconnect_timeout))
        return None

    def _connect(self) -> Generator[_Step, Any, None]:
        name = f"{socket.gethostname()}:{os.getpid()}"
        hello = Connect(via=self.endpoint, role="observer", name=name, protocol=PROTOCOL)
        try:
            welcome = yield _Ask(hello, self._time_to_connect())
        except RequestTimeoutError as error:
            raise BrokerUnreachableError(
                f"no broker answers at {self.endpoint} within {error.timeout:.3g} s; is it running, and is the "
                "address right?",
                endpoint=self.endpoint,
                timeout=error.timeout,
            ) from None
        if not isinstance(welcome, Welcome) or welcome.protocol != PROTOCOL:
            raise ProtocolError(
                f"{self.endpoint} does not speak protocol {PROTOCOL}; install the same version on both sides",
                reason="protocol version",
            )
        self._welcome = welcome
        self._heard = time.monotonic()  # from now on it is looked for again, should it go away before the next answer
        # Listening begins before the numbers are asked for, so that nothing can fall in between.
        yield _Open(welcome.events)
        records = yield _Ask(Replay(_NOWHERE, 1), self._connect_timeout)
        if not isinstance(records, Records):
            raise ProtocolError("a replay was answered with something else", reason="kind of answer")
        self._sequencer.begin(welcome.run_id, records.next)
        self._heard = time.monotonic()
        self._connected = True

    def _time_to_connect(self) -> float:
        if self._welcome is None:
            return self._connect_timeout
        left = self._heard + self._reconnect_timeout - time.monotonic()
        return min(self._connect_timeout, max(0.05, left))

    def _take(self, frames: list[Frame]) -> None:
        self._heard = time.monotonic()
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a broadcast of {len(frames)} frames", reason="frames")
            what = decode_broadcast(frames[0], frames[1])
        except ProtocolError:
            self.malformed += 1
            return
        if isinstance(what, Event):
            self._sequencer.take_event(what)
        elif isinstance(what, ServiceBeat):
            self._sequencer.take_beat(what)

    def _silent(self) -> bool:
        """No beat for too long: the link may be dead without having been closed."""
        return self._welcome is not None and time.monotonic() - self._heard > self._welcome.heartbeat_timeout

    def _subscribe(self, events: str) -> Channel:
        options = ChannelOptions(
            high_water_mark=_QUEUE,
            curve=self._options.curve,
            topics=(EVENT_TOPIC, BEAT_TOPIC),
            watched=True,
        )
        if self._closed:
            raise ClosedError("this subscriber is closed", what="subscriber")
        self._channel = open_channel(self._hub, "sub", connect=(events,), options=options)
        self._watch = watch_connection(self._channel)
        return self._channel

    def _check_connection(self) -> None:
        if self._watch is None:
            return
        self._watch.poll()
        if self._watch.disconnects:
            raise BrokerUnreachableError(
                f"the broker at {self.endpoint} went away", endpoint=self.endpoint, timeout=0.0
            )
        if self._watch.hopeless:
            raise handshake_error(self.endpoint, self._keys, self._watch)

    def _disconnect(self) -> None:
        self._connected = False
        self._watch = None
        if self._pump is not None:
            self._pump.stop()
            self._pump = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._lane is not None:
            self._lane.close()
            self._lane = None
        self._messages.clear()
