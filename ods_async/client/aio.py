"""The asyncio client: the twin of :class:`~ods_async.client.sync.Client`, method for method."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import torch
from tensordict import TensorDict

from ods_async.client.arguments import checked_ahead
from ods_async.client.batch import landing_for
from ods_async.client.core import ClientCore, StreamPlan
from ods_async.client.drive import drive_async
from ods_async.client.exchange import Talk
from ods_async.client.handback import hand_back
from ods_async.client.prefetch import LAST_WORDS_SECONDS, Feed, Seeds
from ods_async.client.session import HOLD_SECONDS, Session
from ods_async.client.shapes import budget_dict, flow_dict, record_list, stats_dict, status_dict
from ods_async.core.requests import (
    BudgetSnapshot,
    CheckHealth,
    Done,
    FlowStatus,
    GenerationPromise,
    GetBudget,
    GetFlow,
    GetStats,
    GetStatus,
    Refill,
    ReportExit,
    Request,
    ServiceStatus,
    Stats,
    Stop,
    WaitGeneration,
    WaitReady,
)
from ods_async.errors import BrokerUnreachableError, RequestTimeoutError
from ods_async.observe.subscriber import EventSubscriber
from ods_async.transport.lane import AsyncLane, Lane
from ods_async.transport.sockets import Hub
from ods_async.wire.asking import checked_timeout

__all__ = ["AsyncBatchStream", "AsyncClient"]

A = TypeVar("A")

_MOST_AT_ONCE: Final = 16


class AsyncClient(ClientCore):
    """A consumer of a broker, awaiting. Arguments: see :class:`~ods_async.client.core.ClientCore`.

    It connects at the first call, or at :meth:`connect`, in the loop that is running then. Tasks may share it: every
    call under way has a socket of its own, sixteen of them at most. Any call may be cancelled at any time; a cancelled
    or timed-out call leaves the client usable, and the next answer is its own. Large batches are copied in a thread.

    What calls raise is what :class:`~ods_async.client.sync.Client` says.
    """

    def _begin(self) -> None:
        super()._begin()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)
        self._idle: list[tuple[AsyncLane, Session]] = []
        self._settling: asyncio.TimerHandle | None = None
        self._busy: set[AsyncLane] = set()
        self._streams: weakref.WeakSet[AsyncBatchStream] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _end, self._hub, os.getpid())

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self, timeout: float | None = None) -> None:
        """Say hello to the broker and learn about its run; further calls only check that it is there."""
        await self._drive(lambda session: self._exchange.greet(session), timeout)

    async def close(self) -> None:
        """Close all sockets; calls under way in other tasks raise ``ClosedError``. Batches stay valid."""
        if self._closed or self._pid != os.getpid():
            self._closed = True
            return
        self._closed = True
        for stream in list(self._streams):
            await stream.aclose()
        for lane, session in self._idle:
            self._retire(lane, session)
        self._idle.clear()
        if self._settling is not None:
            self._settling.cancel()
        for lane in list(self._busy):
            lane.close()
        self._finalizer()
        self._let_go()

    # --- sampling ---------------------------------------------------------------------------------------------------

    async def sample_batch(
        self,
        batch_size: int,
        chunk_size: int,
        sampling_mode: str = "episode",
        *,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        device: object = None,
        pin_memory: bool = False,
        out: TensorDict | None = None,
    ) -> TensorDict:
        """As :meth:`Client.sample_batch <ods_async.client.sync.Client.sample_batch>`."""
        wanted = self._chunks(batch_size, chunk_size, sampling_mode, generator, seed)
        landing = landing_for(device, pin_memory, out)
        return await self._drive(lambda session: self._exchange.sample(session, wanted, landing), timeout)

    async def sample_batch_with_context(
        self,
        batch_size: int,
        history_length: int,
        prediction_horizon: int,
        *,
        generator: torch.Generator | None = None,
        sampling_mode: str = "episode",
        generations: Sequence[int] | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        device: object = None,
        pin_memory: bool = False,
        out: TensorDict | None = None,
    ) -> TensorDict:
        """As :meth:`Client.sample_batch_with_context <ods_async.client.sync.Client.sample_batch_with_context>`."""
        wanted = self._contexts(
            batch_size, history_length, prediction_horizon, sampling_mode, generations, generator, seed
        )
        landing = landing_for(device, pin_memory, out)
        return await self._drive(lambda session: self._exchange.sample(session, wanted, landing), timeout)

    def stream(
        self,
        batch_size: int,
        chunk_size: int,
        sampling_mode: str = "episode",
        *,
        prefetch: int = 4,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        timeout: float | None = None,
        device: object = None,
        pin_memory: bool = False,
    ) -> AsyncBatchStream:
        """As :meth:`Client.stream <ods_async.client.sync.Client.stream>`, for ``async for``."""
        self._check_open()
        plan = StreamPlan(
            self._chunks(batch_size, chunk_size, sampling_mode, None, None),
            self._seed(generator, seed),
            landing_for(device, pin_memory),
            checked_timeout(timeout, self._timeout),
        )
        stream = AsyncBatchStream(self, plan, checked_ahead(prefetch))
        self._streams.add(stream)
        return stream

    # --- waiting and looking ----------------------------------------------------------------------------------------

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Return when the first generation is published; raises the service's failure."""
        await self._ask(WaitReady(), Done, timeout)

    async def wait_for_generation(self, generation: int, timeout: float | None = None) -> None:
        """Return when ``generation`` is complete; ``ArgumentError`` for one that was never requested."""
        await self._ask(WaitGeneration(self._number("generation", generation)), Done, timeout)

    async def check_health(self, timeout: float | None = None) -> None:
        """Return if the service is READY; raises a worker's failure, or ``StateError``."""
        await self._ask(CheckHealth(), Done, timeout)

    async def get_stats(self, timeout: float | None = None) -> dict[str, Any]:
        """Counters of production and sampling (B47)."""
        return stats_dict(await self._ask(GetStats(), Stats, timeout))

    async def get_flow_status(self, timeout: float | None = None) -> dict[str, int | None]:
        """The few counters a training loop steers by (B47); needs READY."""
        return flow_dict(await self._ask(GetFlow(), FlowStatus, timeout))

    async def get_sampling_budget_snapshot(self, timeout: float | None = None) -> dict[str, Any]:
        """The audit of per-episode budgets (B38)."""
        return budget_dict(await self._ask(GetBudget(), BudgetSnapshot, timeout))

    async def get_status(self, timeout: float | None = None) -> dict[str, Any]:
        """State, workers, the last failure, and counters of faults."""
        return status_dict(self._note_state(await self._ask(GetStatus(), ServiceStatus, timeout)))

    async def resolve_language(self, batch: TensorDict, timeout: float | None = None) -> dict[str, Any]:
        """As :meth:`Client.resolve_language <ods_async.client.sync.Client.resolve_language>`."""
        needed = self._language_needed(batch)
        if self._words_missing(needed):
            await self._drive(lambda session: self._exchange.language(session, needed), timeout)
        return self._resolve(batch)

    def events(self, since: int | None = None, **options: Any) -> EventSubscriber:
        """The run's numbered events, for ``async for``; see :class:`~ods_async.observe.subscriber.EventSubscriber`."""
        return EventSubscriber(self._endpoint, since=since, keys=self._keys, **options)

    # --- the owner's verbs ------------------------------------------------------------------------------------------

    async def request_refill(self, timeout: float | None = None) -> int:
        """Ask for the next generation; returns its number, to wait for. Owner only."""
        owner = self._owned("request_refill")
        return (await self._ask(Refill(owner), GenerationPromise, timeout)).generation

    async def drain_lifecycle_events(self, limit: int = 4096, timeout: float | None = None) -> list[dict[str, Any]]:
        """Take the pending ``published`` and ``evicted`` records, oldest first, at most ``limit`` (B39). Owner only."""
        self._owned("drain_lifecycle_events")
        most = self._number("limit", limit)
        return record_list(await self._drive(lambda session: self._exchange.drain(session, most), timeout))

    async def stop(self, grace: float = 5.0, timeout: float | None = None) -> None:
        """End the run: workers get ``grace`` seconds to end between two steps. Owner only.

        The stopped service can be asked for two seconds more, for a last drain say, or until it is told to stop again.
        """
        owner = self._owned("stop")
        grace = checked_timeout(grace, 5.0)
        await self._ask(Stop(owner, grace), Done, self._timeout + grace if timeout is None else timeout)

    async def report_exit(
        self, worker_id: str, exit_code: int, *, will_restart: bool = False, pid: int = 0, timeout: float | None = None
    ) -> None:
        """Tell that a local worker's process ended (``exit_code`` negative: by that signal). Owner only."""
        owner = self._owned("report_exit")
        await self._ask(ReportExit(worker_id, exit_code, will_restart, owner, pid), Done, timeout)

    # --- underneath -------------------------------------------------------------------------------------------------

    async def _ask(self, request: Request, expected: type[A], timeout: float | None) -> A:
        self._check_open()
        if self._loop is asyncio.get_running_loop():
            self._settle()
        return await self._drive(lambda session: self._exchange.plain(session, request, expected), timeout)

    async def _drive(self, talk: Callable[[Session], Talk[A]], timeout: float | None) -> A:
        self._check_open()
        limit = checked_timeout(timeout, self._timeout)
        deadline = time.monotonic() + limit
        self._settle_in_loop()
        try:
            async with asyncio.timeout(limit if self._turns.locked() else None):
                await self._turns.acquire()
        except TimeoutError:
            raise RequestTimeoutError(
                f"{_MOST_AT_ONCE} calls of this client are under way already, and none ended within {limit:.3g} s",
                operation="waiting for a turn",
                timeout=limit,
                missing="a free socket",
            ) from None
        try:
            while True:
                self._check_open()
                lane, session = self._take_lane()
                try:
                    return await drive_async(talk(session), lane, deadline)
                except BrokerUnreachableError:
                    if not (session.overslept and lane.lost):
                        raise
                finally:
                    self._put_back(lane, session)
        finally:
            self._turns.release()

    def _settle_in_loop(self) -> None:
        """Sockets belong to one loop; in another one (``asyncio.run`` called again) they are made anew."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            for lane, _ in self._idle:
                lane.close()
            self._idle.clear()
            self._settling = None
            self._turns = asyncio.Semaphore(_MOST_AT_ONCE)
        self._loop = loop

    def _take_lane(self) -> tuple[AsyncLane, Session]:
        while self._idle:
            lane, session = self._idle.pop()
            if lane.check() is None:
                self._busy.add(lane)
                session.resume(time.monotonic())
                return lane, session
            lane.close()
        lane = AsyncLane(self._hub, self._endpoint, self._options())
        self._busy.add(lane)
        return lane, Session()

    def _put_back(self, lane: AsyncLane, session: Session) -> None:
        self._busy.discard(lane)
        if self._closed or lane.lost:
            self._retire(lane, session)
            return
        session.pause(time.monotonic())
        self._idle.append((lane, session))
        if session.owes and self._settling is None and self._loop is not None:
            self._settling = self._loop.call_later(HOLD_SECONDS, self._settle_gently)

    def _settle(self, *, gently: bool = False) -> None:
        """Hand back what the connections that are not in use owe."""
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        for lane, session in self._idle:
            if session.owes:
                hand_back(lane, session, gently=gently)
        if self._loop is not None and any(session.owes for _, session in self._idle):
            self._settling = self._loop.call_later(HOLD_SECONDS, self._settle_gently)

    def _settle_gently(self) -> None:
        self._settle(gently=True)

    @staticmethod
    def _retire(lane: AsyncLane, session: Session) -> None:
        hand_back(lane, session)
        lane.close(LAST_WORDS_SECONDS)

    def _feed(self, plan: StreamPlan, ahead: int, notify: Callable[[], None]) -> Feed:
        self._check_open()
        exchange, hub, endpoint, options = self._exchange, self._hub, self._endpoint, self._options()
        return Feed(exchange, lambda wake: Lane(hub, endpoint, options, wake), plan, ahead, notify)

    def _forget_parent(self) -> None:
        """Nothing to do: :meth:`_begin` has replaced what the parent had."""


class AsyncBatchStream:
    """Batches without end, for ``async for``; made by :meth:`AsyncClient.stream`.

    An error is raised once; whoever goes on iterating tries again.
    """

    def __init__(self, client: AsyncClient, plan: StreamPlan, ahead: int) -> None:
        self._client = client
        self._plan = plan
        self._ahead = ahead
        self._closed = False
        self._feed: Feed | None = None
        self._seeds = Seeds(plan.seed)
        self._pid = os.getpid()
        self._news = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TensorDict:
        if self._closed:
            raise StopAsyncIteration
        if self._ahead == 0:
            wanted = dataclasses.replace(self._plan.wanted, seed=self._seeds.next())
            exchange, landing = self._client._exchange, self._plan.landing
            talk = functools.partial(exchange.sample, wanted=wanted, landing=landing)
            return await self._client._drive(talk, self._plan.timeout)
        if self._feed is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._news = asyncio.Event()
            self._feed = self._client._feed(self._plan, self._ahead, _notifier(self._news))
            weakref.finalize(self, self._feed.stop)
        while not self._closed:
            self._news.clear()
            batch = self._feed.take(wait=False)
            if batch is not None:
                return batch
            await self._news.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the thread and hand back what was drawn ahead. Again: no effect."""
        self._closed = True
        self._news.set()
        if self._feed is not None and self._pid == os.getpid():
            await asyncio.to_thread(self._feed.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


def _notifier(news: asyncio.Event) -> Callable[[], None]:
    """Set ``news`` from another thread, as long as this loop runs."""
    loop = asyncio.get_running_loop()

    def notify() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits any more
            loop.call_soon_threadsafe(news.set)

    return notify


def _end(hub: Hub, pid: int) -> None:
    if pid == os.getpid():
        hub.close()
