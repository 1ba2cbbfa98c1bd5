"""Keeps a :class:`~ods_async.observe.view.View` of a service up to date: asks it now and then, follows its events.

It never gives up: a broker that is lost, or was started anew, is looked for until it is there again, and the view says
so meanwhile. What it holds is bounded, however long it runs and however many workers come and go.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import time
from typing import Final, TypeVar

from ods_async.core.events import Event
from ods_async.core.requests import Answer, Connect, GetStats, GetStatus, Request, ServiceStatus, Stats, Welcome
from ods_async.errors import BrokerUnreachableError, OdsError, ProtocolError, RequestTimeoutError, SessionLostError
from ods_async.observe.fold import Snapshot, fold
from ods_async.observe.sequence import EventsLost
from ods_async.observe.subscriber import EventSubscriber
from ods_async.observe.view import View
from ods_async.transport.curve import CurveKeys, as_keys
from ods_async.transport.endpoint import parse_address
from ods_async.transport.lane import AsyncLane
from ods_async.transport.sockets import ChannelOptions, Hub
from ods_async.wire.messages import LIMITS, PROTOCOL

__all__ = ["ServiceWatch"]

A = TypeVar("A", bound=Answer)

_ANSWER_SECONDS: Final = 3.0
_FOR_EVER: Final = 1e9
_AT_ONCE: Final = 100  # events folded before others in the loop have their turn
KEPT_EVENTS: Final = 50
KEPT_GAPS: Final = 10
KEPT_RATES: Final = 120


class ServiceWatch:
    """Watches one service. :meth:`connect` says at once whether it is there; :meth:`run` goes on until cancelled.

    Args:
        endpoint: the broker's address.
        keys: CURVE keys for a tcp endpoint, or the path of their folder or file.
        interval: seconds between two looks at its counters.
        name: how the broker calls this watcher when it speaks to people.

    Raises:
        EndpointError: the address cannot be used.
        ConfigError: keys that cannot be read.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        keys: CurveKeys | str | os.PathLike[str] | None = None,
        interval: float = 1.0,
        name: str = "watch",
    ) -> None:
        self.endpoint = str(parse_address(endpoint))
        self.version = 0
        self._keys = as_keys(keys, self.endpoint)
        self._interval = interval
        self._hello = Connect(via=self.endpoint, role="observer", name=name, protocol=PROTOCOL)
        self._hub = Hub()
        self._lane: AsyncLane | None = None
        self._news = asyncio.Event()
        self._view = View(self.endpoint)
        self._snapshot = Snapshot()
        self._origin_ns = 0
        self._events: collections.deque[Event | EventsLost] = collections.deque(maxlen=KEPT_EVENTS)
        self._gaps: collections.deque[EventsLost] = collections.deque(maxlen=KEPT_GAPS)
        self._missed = 0
        self._rates: collections.deque[float | None] = collections.deque(maxlen=KEPT_RATES)
        self._sampled: tuple[int, int, float] | None = None
        self._heard: float | None = None
        self._trouble = ""

    @property
    def view(self) -> View:
        """The service as it is known now."""
        silent = None if self._heard is None else time.monotonic() - self._heard
        return dataclasses.replace(
            self._view,
            problem=self._view.problem or self._trouble,
            silent_for=silent,
            snapshot=self._snapshot,
            origin_ns=self._origin_ns,
            events=tuple(self._events),
            gaps=tuple(self._gaps),
            missed_events=self._missed,
            rates=tuple(self._rates),
        )

    async def changed(self, since: int) -> int:
        """Wait until :attr:`version` is another than ``since``; returns it."""
        while self.version == since:
            await self._news.wait()
        return self.version

    async def connect(self, timeout: float) -> None:
        """Look at the service for the first time.

        Raises:
            BrokerUnreachableError: nobody answers within ``timeout`` seconds.
            AuthenticationError: keys that do not fit.
            ProtocolError: somebody answers who is no broker of this version.
        """
        await self._look(timeout)

    async def run(self) -> None:
        """Go on for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_for_ever())
            tasks.create_task(self._follow_for_ever())

    def close(self) -> None:
        """Hang up. Again: no effect."""
        self._drop()
        self._hub.close()

    # --- asking -----------------------------------------------------------------------------------------------------

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self._look(_ANSWER_SECONDS)
            except (OdsError, TimeoutError) as error:
                self._drop()
                self._sampled = None
                self._rates.append(None)
                self._view = dataclasses.replace(
                    self._view, connected=False, problem=str(error), windows_per_second=None
                )
            self._tell()
            await asyncio.sleep(self._interval)

    async def _look(self, timeout: float) -> None:
        try:
            stats, status = await self._ask_both(timeout)
        except SessionLostError:
            self._drop()
            stats, status = await self._ask_both(timeout)
        now = time.monotonic()
        before = self._view.stats
        another = before is None or before.run_id != stats.run_id
        rate: float | None = None
        if self._sampled is not None and self._sampled[0] == stats.run_id:
            rate = max(0, stats.sampled_chunks - self._sampled[1]) / max(now - self._sampled[2], 1e-3)
        self._sampled = (stats.run_id, stats.sampled_chunks, now)
        self._rates.append(rate)
        self._heard = now
        self._view = dataclasses.replace(
            self._view,
            connected=True,
            problem="",
            runs=self._view.runs + another,
            stats=stats,
            status=status,
            windows_per_second=rate,
        )

    async def _ask_both(self, timeout: float) -> tuple[Stats, ServiceStatus]:
        deadline = time.monotonic() + timeout
        return await self._ask(GetStats(), Stats, deadline), await self._ask(GetStatus(), ServiceStatus, deadline)

    async def _ask(self, request: Request, expected: type[A], deadline: float) -> A:
        if self._lane is not None and (lost := self._lane.check()) is not None:
            raise lost  # said at once: looking for another broker takes its time
        if self._lane is None:
            options = ChannelOptions(max_message_bytes=LIMITS.header_bytes, heartbeat_ms=1000, curve=self._keys)
            self._lane = AsyncLane(self._hub, self.endpoint, options)
            try:
                welcome = (await self._lane.ask(self._hello, deadline)).answer
            except RequestTimeoutError as error:
                raise BrokerUnreachableError(
                    f"no broker answers at {self.endpoint} within {error.timeout:.3g} s; is it running, and is the "
                    "address right?",
                    endpoint=self.endpoint,
                    timeout=error.timeout,
                ) from None
            if not isinstance(welcome, Welcome) or welcome.protocol != PROTOCOL:
                raise self._foreign("greeting")
        answer = (await self._lane.ask(request, deadline)).answer
        if not isinstance(answer, expected):
            raise self._foreign("kind of answer")
        return answer

    def _foreign(self, reason: str) -> ProtocolError:
        return ProtocolError(
            f"{self.endpoint} does not speak protocol {PROTOCOL}; install the same version on both sides",
            reason=reason,
        )

    def _drop(self) -> None:
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    # --- events -----------------------------------------------------------------------------------------------------

    async def _follow_for_ever(self) -> None:
        while True:
            subscriber = EventSubscriber(self.endpoint, since=0, keys=self._keys, reconnect_timeout=_FOR_EVER)
            try:
                count = 0
                async for item in subscriber:
                    self._trouble = ""
                    self._take(item)
                    count += 1
                    if count % _AT_ONCE == 0:
                        await asyncio.sleep(0)
            except (OdsError, TimeoutError) as error:
                self._trouble = f"events: {error}"
            finally:
                subscriber.close()
            # Here the service has ended, or has never been there, or does not let us in: its next run begins anew.
            self._tell()
            await asyncio.sleep(self._interval)

    def _take(self, item: Event | EventsLost) -> None:
        known = item.run_id == self._snapshot.run_id
        if isinstance(item, EventsLost):
            if known and item.count is not None and item.first < self._snapshot.next_sequence:
                # Told again by a new subscription: only what nobody had seen before is lost.
                first = self._snapshot.next_sequence
                item = dataclasses.replace(item, first=first, count=max(0, item.first + item.count - first))
                if not item.count:
                    return
            self._gaps.append(item)
            self._missed += item.count or 0
        else:
            if known and item.sequence < self._snapshot.next_sequence:
                return
            if not known:
                self._origin_ns = item.monotonic_ns
        self._snapshot = fold(self._snapshot, item)
        self._events.append(item)
        self._tell()

    def _tell(self) -> None:
        self.version += 1
        self._news.set()
        self._news.clear()
