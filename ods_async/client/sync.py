"""The blocking client."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from tensordict import TensorDict

from ods_async.client.arguments import checked_ahead
from ods_async.client.batch import landing_for
from ods_async.client.core import ClientCore, StreamPlan
from ods_async.client.drive import drive
from ods_async.client.exchange import Talk
from ods_async.client.handback import Handback, hand_back
from ods_async.client.prefetch import LAST_WORDS_SECONDS, Feed, Seeds
from ods_async.client.session import Session
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
from ods_async.errors import BrokerUnreachableError
from ods_async.observe.subscriber import EventSubscriber
from ods_async.transport.lane import Lane
from ods_async.transport.sockets import Hub
from ods_async.wire.asking import checked_timeout

__all__ = ["BatchStream", "Client"]

A = TypeVar("A")


class Client(ClientCore):
    """A consumer of a broker, blocking. Arguments: see :class:`~ods_async.client.core.ClientCore`.

    It connects at the first call, or at :meth:`connect`. Threads may share it: every call under way has a socket of
    its own. After a fork, or unpickled elsewhere, it connects anew in the process that uses it.

    Every method takes ``timeout=`` (seconds) and may raise :class:`~ods_async.errors.RequestTimeoutError` when that is
    over, :class:`~ods_async.errors.BrokerUnreachableError` when nobody answers or the broker goes away meanwhile, and
    :class:`~ods_async.errors.RunChangedError`, once, when another run answers than before. A call that failed, was
    interrupted or timed out leaves the client usable.
    """

    def _begin(self) -> None:
        super()._begin()
        self._lock = threading.Lock()
        self._idle: list[tuple[Lane, Session]] = []
        self._busy = 0
        self._handback = Handback(self._settle_gently)
        self._streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._finalizer = weakref.finalize(self, _end, self._hub, self._wake, self._handback, os.getpid())

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def connect(self, timeout: float | None = None) -> None:
        """Say hello to the broker and learn about its run; further calls only check that it is there."""
        self._drive(lambda session: self._exchange.greet(session), timeout)

    def close(self) -> None:
        """Close all sockets; calls under way in other threads raise ``ClosedError``. Batches stay valid."""
        if self._closed or self._pid != os.getpid():
            self._closed = True
            return
        for stream in list(self._streams):
            stream.close()
        self._handback.close()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            os.eventfd_write(self._wake, 1)
            last = self._busy == 0
        for lane, session in idle:
            self._retire(lane, session)
        if last:
            self._end_all()

    # --- sampling ---------------------------------------------------------------------------------------------------

    def sample_batch(
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
        """Draw ``batch_size`` windows of ``chunk_size`` consecutive steps.

        Args:
            batch_size: windows, drawn with replacement.
            chunk_size: steps of each.
            sampling_mode: "episode" (inside one continuous run), "segment" (inside one accepted segment) or "boundary"
                (across a boundary between accepted segments).
            generator: draws the seed of this batch; no global generator is touched.
            seed: the seed itself, 0 to 2**64 - 1.
            timeout: seconds; a request that cannot be served yet waits that long.
            device: move the batch there.
            pin_memory: page-locked memory, where there is an accelerator.
            out: a batch of the same fields and shapes to fill and return.

        Returns:
            A TensorDict ``[batch_size, chunk_size]`` that the caller owns.

        Raises:
            ArgumentError: an argument that no buffer could serve.
            DataUnavailableError: no eligible window, with what the buffer holds.
            OnlineDataBudgetExhaustedError: the episodes' quotas cannot fill the batch.
        """
        wanted = self._chunks(batch_size, chunk_size, sampling_mode, generator, seed)
        landing = landing_for(device, pin_memory, out)
        return self._drive(lambda session: self._exchange.sample(session, wanted, landing), timeout)

    def sample_batch_with_context(
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
        """Draw ``batch_size`` contexts: ``history_length`` steps up to "now", and from "now" on ``prediction_horizon``.

        ``sampling_mode`` is "episode" or "segment"; ``generations`` restricts to those (needs provenance); the rest is
        as for :meth:`sample_batch`.

        Returns:
            A TensorDict ``[batch_size, history_length + prediction_horizon - 1]``; "now" is at ``history_length - 1``,
            ``valid`` marks real steps and ``loss_mask`` real steps from "now" on.
        """
        wanted = self._contexts(
            batch_size, history_length, prediction_horizon, sampling_mode, generations, generator, seed
        )
        landing = landing_for(device, pin_memory, out)
        return self._drive(lambda session: self._exchange.sample(session, wanted, landing), timeout)

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
    ) -> BatchStream:
        """Batches without end, ``prefetch`` of them drawn ahead in a thread with its own socket (0: none, no thread).

        Half of them are asked for at once, so batches of half a megabyte come faster with 32 ahead than with 4.
        Seeded, it repeats for the same buffer content and the same ``prefetch``. ``timeout`` is for every batch. Close
        the stream (or use it in a ``with`` block) to hand back what was drawn ahead.
        """
        self._check_open()
        plan = StreamPlan(
            self._chunks(batch_size, chunk_size, sampling_mode, None, None),
            self._seed(generator, seed),
            landing_for(device, pin_memory),
            checked_timeout(timeout, self._timeout),
        )
        stream = BatchStream(self, plan, checked_ahead(prefetch))
        self._streams.add(stream)
        return stream

    # --- waiting and looking ----------------------------------------------------------------------------------------

    def wait_ready(self, timeout: float | None = None) -> None:
        """Return when the first generation is published; raises the service's failure."""
        self._ask(WaitReady(), Done, timeout)

    def wait_for_generation(self, generation: int, timeout: float | None = None) -> None:
        """Return when ``generation`` is complete.

        Raises:
            ArgumentError: a generation that was never requested.
        """
        self._ask(WaitGeneration(self._number("generation", generation)), Done, timeout)

    def check_health(self, timeout: float | None = None) -> None:
        """Return if the service is READY; raises a worker's failure, or ``StateError``."""
        self._ask(CheckHealth(), Done, timeout)

    def get_stats(self, timeout: float | None = None) -> dict[str, Any]:
        """Counters of production and sampling (B47)."""
        return stats_dict(self._ask(GetStats(), Stats, timeout))

    def get_flow_status(self, timeout: float | None = None) -> dict[str, int | None]:
        """The few counters a training loop steers by (B47); needs READY."""
        return flow_dict(self._ask(GetFlow(), FlowStatus, timeout))

    def get_sampling_budget_snapshot(self, timeout: float | None = None) -> dict[str, Any]:
        """The audit of per-episode budgets (B38)."""
        return budget_dict(self._ask(GetBudget(), BudgetSnapshot, timeout))

    def get_status(self, timeout: float | None = None) -> dict[str, Any]:
        """State, workers, the last failure, and counters of faults."""
        return status_dict(self._note_state(self._ask(GetStatus(), ServiceStatus, timeout)))

    def resolve_language(self, batch: TensorDict, timeout: float | None = None) -> dict[str, Any]:
        """The texts of a batch's ``task_index`` and ``subtask_index``: ``{"task": …, "subtask": …}``, nested like it.

        Works without the broker for every batch that was drawn by this client.

        Raises:
            ArgumentError: no language indices, padding (-1) among them, or unknown ones.
        """
        needed = self._language_needed(batch)
        if self._words_missing(needed):
            self._drive(lambda session: self._exchange.language(session, needed), timeout)
        return self._resolve(batch)

    def events(self, since: int | None = None, **options: Any) -> EventSubscriber:
        """The run's numbered events, to iterate over; see :class:`~ods_async.observe.subscriber.EventSubscriber`."""
        return EventSubscriber(self._endpoint, since=since, keys=self._keys, **options)

    # --- the owner's verbs ------------------------------------------------------------------------------------------

    def request_refill(self, timeout: float | None = None) -> int:
        """Ask for the next generation; returns its number, to wait for. Owner only."""
        owner = self._owned("request_refill")
        return self._ask(Refill(owner), GenerationPromise, timeout).generation

    def drain_lifecycle_events(self, limit: int = 4096, timeout: float | None = None) -> list[dict[str, Any]]:
        """Take the pending ``published`` and ``evicted`` records, oldest first, at most ``limit`` (B39). Owner only."""
        self._owned("drain_lifecycle_events")
        most = self._number("limit", limit)
        return record_list(self._drive(lambda session: self._exchange.drain(session, most), timeout))

    def stop(self, grace: float = 5.0, timeout: float | None = None) -> None:
        """End the run: workers get ``grace`` seconds to end between two steps. Owner only.

        The stopped service can be asked for two seconds more, for a last drain say, or until it is told to stop again.
        """
        owner = self._owned("stop")
        grace = checked_timeout(grace, 5.0)
        self._ask(Stop(owner, grace), Done, self._timeout + grace if timeout is None else timeout)

    def report_exit(
        self, worker_id: str, exit_code: int, *, will_restart: bool = False, pid: int = 0, timeout: float | None = None
    ) -> None:
        """Tell that a local worker's process ended (``exit_code`` negative: by that signal). Owner only."""
        owner = self._owned("report_exit")
        self._ask(ReportExit(worker_id, exit_code, will_restart, owner, pid), Done, timeout)

    # --- underneath -------------------------------------------------------------------------------------------------

    def _ask(self, request: Request, expected: type[A], timeout: float | None) -> A:
        self._check_open()
        self._settle()
        return self._drive(lambda session: self._exchange.plain(session, request, expected), timeout)

    def _drive(self, talk: Callable[[Session], Talk[A]], timeout: float | None) -> A:
        self._check_open()
        deadline = time.monotonic() + checked_timeout(timeout, self._timeout)
        while True:
            lane, session = self._take_lane()
            try:
                return drive(talk(session), lane, deadline)
            except BrokerUnreachableError:
                if not (session.overslept and lane.lost):
                    raise
            finally:
                self._put_back(lane, session)

    def _take_lane(self) -> tuple[Lane, Session]:
        with self._lock:
            self._check_open()
            now = time.monotonic()
            while self._idle:
                lane, session = self._idle.pop()
                if lane.recheck(now) is None:
                    self._busy += 1
                    session.resume(now)
                    return lane, session
                lane.close()
            lane = Lane(self._hub, self._endpoint, self._options(), self._wake)
            self._busy += 1
            return lane, Session()

    def _put_back(self, lane: Lane, session: Session) -> None:
        with self._lock:
            self._busy -= 1
            if not self._closed and not lane.lost:
                session.pause(time.monotonic())
                self._idle.append((lane, session))
                if session.owes:
                    self._handback.owed()
                return
            last = self._closed and self._busy == 0
        self._retire(lane, session)
        if last:
            self._end_all()

    def _settle(self, *, gently: bool = False) -> bool:
        """Hand back what the connections that are not in use owe; False if that is nothing."""
        with self._lock:
            owing = [(lane, session) for lane, session in self._idle if session.owes and not lane.lost]
            for lane, session in owing:
                hand_back(lane, session, gently=gently)
        return bool(owing)

    def _settle_gently(self) -> bool:
        return self._settle(gently=True)

    @staticmethod
    def _retire(lane: Lane, session: Session) -> None:
        hand_back(lane, session)
        lane.close(LAST_WORDS_SECONDS)

    def _end_all(self) -> None:
        self._finalizer()
        self._let_go()

    def _feed(self, plan: StreamPlan, ahead: int) -> Feed:
        self._check_open()
        exchange, hub, endpoint, options = self._exchange, self._hub, self._endpoint, self._options()
        return Feed(exchange, lambda wake: Lane(hub, endpoint, options, wake), plan, ahead)

    def _forget_parent(self) -> None:
        """Nothing to do: :meth:`_begin` has replaced what the parent had."""


class BatchStream:
    """Batches without end, to iterate over; made by :meth:`Client.stream`.

    An error is raised once; whoever goes on iterating tries again.
    """

    def __init__(self, client: Client, plan: StreamPlan, ahead: int) -> None:
        self._client = client
        self._plan = plan
        self._ahead = ahead
        self._closed = False
        self._feed: Feed | None = None
        self._seeds = Seeds(plan.seed)
        self._pid = os.getpid()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TensorDict:
        if self._closed:
            raise StopIteration
        if self._ahead == 0:
            wanted = dataclasses.replace(self._plan.wanted, seed=self._seeds.next())
            exchange, landing = self._client._exchange, self._plan.landing
            return self._client._drive(lambda session: exchange.sample(session, wanted, landing), self._plan.timeout)
        if self._feed is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._feed = self._client._feed(self._plan, self._ahead)
            weakref.finalize(self, self._feed.stop)
        batch = self._feed.take(wait=True)
        assert batch is not None
        return batch

    def close(self) -> None:
        """End the thread and hand back what was drawn ahead. Again: no effect."""
        self._closed = True
        if self._feed is not None and self._pid == os.getpid():
            self._feed.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _end(hub: Hub, wake: int, handback: Handback, pid: int) -> None:
    if pid == os.getpid():
        handback.close()  # at the interpreter's end its thread still runs, and uses the sockets
        hub.close()
    os.close(wake)
