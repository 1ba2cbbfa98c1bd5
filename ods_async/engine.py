"""The engines: an owner's client, and the broker and worker processes behind it (B6–B13).

Users of the original in-process engine find its verbs here. Sampling goes through a client, so that whatever a consumer
elsewhere sees, the owner sees too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from tensordict import TensorDict

from ods_async.client.aio import AsyncBatchStream, AsyncClient
from ods_async.client.core import budget_dict, stats_dict
from ods_async.client.sync import BatchStream, Client
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.states import OnlineDataEngineState
from ods_async.errors import BrokerUnreachableError, ClosedError
from ods_async.observe.subscriber import EventSubscriber
from ods_async.supervise.owner import Owner

__all__ = ["AsyncOnlineDataEngine", "OnlineDataEngine"]

T = TypeVar("T")

_GENERATION_SECONDS = 300.0


class _Engine:
    """What both engines have: settings, states, and what they know without asking."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        self._owner = Owner(cfg)
        # Runs at the interpreter's exit too, and never waits: the processes see their pipe end and leave by themselves.
        self._finalizer = weakref.finalize(self, self._owner.let_go)

    @property
    def cfg(self) -> OnlineDataEngineCfg:
        """The settings."""
        return self._owner.cfg

    @property
    def state(self) -> OnlineDataEngineState:
        """``CREATED → STARTING → READY → STOPPED``, or ``FAILED`` (B6)."""
        return self._owner.state

    @property
    def is_init(self) -> bool:
        """Whether there is data to sample, that is, the state is READY."""
        return self._owner.state is OnlineDataEngineState.READY

    @property
    def run_id(self) -> int:
        """The run's number, 1 to 2**63-1, new for every engine."""
        return self._owner.run_id

    @property
    def endpoint(self) -> str:
        """Where consumers in other processes connect; a tcp port of 0 is filled in once the broker listens."""
        return self._owner.supervisor.endpoint

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All addresses that answer."""
        return self._owner.supervisor.endpoints

    @property
    def buffer_size(self) -> int:
        """Episodes that the buffer holds."""
        return self._owner.cfg.buffer_size

    @property
    def device(self) -> torch.device:
        """Where the buffer is: always the CPU (B5)."""
        return torch.device("cpu")

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the broker and the local workers that run at the moment, by name."""
        return self._owner.supervisor.pids

    def events(self, since: int | None = 0, **options: Any) -> EventSubscriber:
        """The run's numbered events, to iterate over (B41); from the first one on unless ``since`` says otherwise."""
        return EventSubscriber(self._owner.supervisor.local_endpoint, since=since, **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run_id={self.run_id}, state={self.state.value}, endpoint={self.endpoint!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} owns processes and cannot be pickled; give the other process engine.endpoint and "
            "let it make a Client"
        )

    def _final_stats(self) -> dict[str, Any] | None:
        return None if self._owner.last_stats is None else stats_dict(self._owner.last_stats)

    def _final_budget(self) -> dict[str, Any] | None:
        if self._owner.failure is not None:
            raise self._owner.blame(self._owner.failure, 0.0)
        return None if self._owner.last_budget is None else budget_dict(self._owner.last_budget)

    def _records(self) -> list[dict[str, Any]]:
        """Records that were pending at the end, in the shape of ``Client.drain_lifecycle_events``."""
        return [
            {key: list(value) if isinstance(value, tuple) else value for key, value in record.items()}
            for record in self._owner.take_undrained()
        ]


class OnlineDataEngine(_Engine):
    """A broker and its local workers, and sampling from them; blocking.

    Use it as a context manager, or call :meth:`start` and :meth:`stop`. Any number of threads may sample.

    Args:
        cfg: the settings. ``worker_failure`` is "fail" unless given.

    Raises:
        ConfigError: a setting that cannot be.
    """

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        super().__init__(cfg)
        self._client: Client | None = None

    # --- lifecycle --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes; returns when the first generation is published (B7).

        Raises:
            StateError: it was started or stopped before.
            RequestTimeoutError: (a ``TimeoutError``) it took longer than ``initialization_timeout``.
            StartCancelledError: :meth:`stop` was called in another thread; the state is STOPPED then.
            Exception: what the worker or the broker failed with; the state is FAILED then.
        """
        try:
            self._owner.start(self._connect)
        except BaseException:
            if self._owner.ended and self._client is not None:
                self._client.close()
            raise

    def _connect(self) -> None:
        supervisor = self._owner.supervisor
        self._client = Client(supervisor.local_endpoint, owner=supervisor.owner_token, name="engine")
        self._client.connect()

    def stop(self) -> None:
        """End workers and broker: ask, wait ``shutdown_timeout``, terminate, kill (B8). Again: no effect.

        Raises:
            ForcedShutdownError: a process had to be ended by force; what it should have recorded may be incomplete.
            Exception: a worker's failure, its environment's ``close()`` included.
        """
        try:
            self._owner.stop()
        finally:
            if self._owner.ended and self._client is not None:
                _teach(self._client, self._owner)
                self._client.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.stop()
            return
        try:
            self.stop()
        except Exception as cleanup:
            _note(error, cleanup)

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
        """Draw windows; see :meth:`Client.sample_batch <ods_async.client.sync.Client.sample_batch>`. Needs READY."""
        return self._ready(
            "sample_batch",
            lambda client: client.sample_batch(
                batch_size,
                chunk_size,
                sampling_mode,
                generator=generator,
                seed=seed,
                timeout=timeout,
                device=device,
                pin_memory=pin_memory,
                out=out,
            ),
        )

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
        """Draw contexts; see :meth:`Client.sample_batch_with_context
        <ods_async.client.sync.Client.sample_batch_with_context>`. Needs READY.
        """
        return self._ready(
            "sample_batch_with_context",
            lambda client: client.sample_batch_with_context(
                batch_size,
                history_length,
                prediction_horizon,
                generator=generator,
                sampling_mode=sampling_mode,
                generations=generations,
                seed=seed,
                timeout=timeout,
                device=device,
                pin_memory=pin_memory,
                out=out,
            ),
        )

    def stream(
        self, batch_size: int, chunk_size: int, sampling_mode: str = "episode", *, prefetch: int = 4, **options: Any
    ) -> BatchStream:
        """Batches without end; see :meth:`Client.stream <ods_async.client.sync.Client.stream>`. Needs READY."""
        return self._ready(
            "stream",
            lambda client: client.stream(batch_size, chunk_size, sampling_mode, prefetch=prefetch, **options),
        )

    # --- refill, looking --------------------------------------------------------------------------------------------

    def request_refill(self, timeout: float | None = None) -> int:
        """Ask for the next generation (or the one that is outstanding); returns its number (B32). Needs READY."""
        self._owner.require_process("request_refill")
        return self._ready("request_refill", lambda client: client.request_refill(timeout))

    def wait_for_generation(self, generation: int, timeout: float = _GENERATION_SECONDS) -> None:
        """Return when ``generation`` is complete (B32). Needs READY.

        Raises:
            ArgumentError: it was never requested, or the time-out is no time-out.
            RequestTimeoutError: it was not complete in time.
        """
        self._ready("wait_for_generation", lambda client: client.wait_for_generation(generation, timeout))

    def check_health(self, timeout: float | None = None) -> None:
        """Return if the engine is READY and no worker has failed; raises the failure otherwise (B47)."""
        self._ready("check_health", lambda client: client.check_health(timeout))

    def get_stats(self, timeout: float | None = None) -> dict[str, Any]:
        """Counters of production and sampling (B47); after the end, the last ones."""
        return self._ask("get_stats", lambda client: client.get_stats(timeout), self._final_stats)

    def get_flow_status(self, timeout: float | None = None) -> dict[str, int | None]:
        """The few counters a training loop steers by (B47). Needs READY."""
        return self._ready("get_flow_status", lambda client: client.get_flow_status(timeout))

    def get_status(self, timeout: float | None = None) -> dict[str, Any]:
        """State, workers, last failure and faults, as the broker sees them."""
        return self._ask("get_status", lambda client: client.get_status(timeout), lambda: None)

    def get_sampling_budget_snapshot(self, timeout: float | None = None) -> dict[str, Any]:
        """The audit of per-episode budgets (B38); after a clean stop, the last one."""
        return self._ask(
            "get_sampling_budget_snapshot",
            lambda client: client.get_sampling_budget_snapshot(timeout),
            self._final_budget,
        )

    def drain_lifecycle_events(self, timeout: float | None = None) -> list[dict[str, Any]]:
        """Take all pending ``published`` and ``evicted`` records, in order (B39, B40); also after stop and failure."""
        self._owner.require_process("drain_lifecycle_events")
        if self._owner.ended:
            return self._records()
        return self._ask("drain_lifecycle_events", lambda client: _drain(client, timeout), self._records)

    def resolve_language(self, batch: TensorDict, timeout: float | None = None) -> dict[str, Any]:
        """The texts of a batch's language indices (B43); also after the engine has stopped."""
        if self._client is None:
            raise self._owner.wrong_state("resolve_language", OnlineDataEngineState.READY)
        return self._client.resolve_language(batch, timeout)

    # --- underneath -------------------------------------------------------------------------------------------------

    def _ready(self, operation: str, ask: Callable[[Client], T]) -> T:
        self._owner.require_ready(operation)
        assert self._client is not None
        try:
            return ask(self._client)
        except (BrokerUnreachableError, ClosedError) as error:
            raise self._owner.blame(error) from error

    def _ask(self, operation: str, ask: Callable[[Client], T], after: Callable[[], T | None]) -> T:
        if not self._owner.ended and self._client is not None:
            try:
                return ask(self._client)
            except (BrokerUnreachableError, ClosedError) as error:
                raise self._owner.blame(error) from error
        last = after()
        if last is None:
            raise self._owner.wrong_state(operation, OnlineDataEngineState.READY)
        return last


class AsyncOnlineDataEngine(_Engine):
    """The twin of :class:`OnlineDataEngine` for asyncio: the same verbs, arguments and errors, awaited."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        super().__init__(cfg)
        self._client: AsyncClient | None = None

    # --- lifecycle --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """As :meth:`OnlineDataEngine.start`. Cancelled, it ends what it has started; the state is STOPPED then."""
        await _in_thread(self._owner.start, self._owner.cancelled.set)
        supervisor = self._owner.supervisor
        self._client = AsyncClient(supervisor.local_endpoint, owner=supervisor.owner_token, name="engine")
        try:
            await self._client.connect()
        except BaseException as error:
            try:
                await self.stop()
            except Exception as cleanup:
                _note(error, cleanup)
            raise

    async def stop(self) -> None:
        """As :meth:`OnlineDataEngine.stop`. It is carried through even when it is cancelled."""
        try:
            await _in_thread(self._owner.stop, lambda: None)
        finally:
            if self._owner.ended and self._client is not None:
                _teach(self._client, self._owner)
                await self._client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is None:
            await self.stop()
            return
        try:
            await self.stop()
        except Exception as cleanup:
            _note(error, cleanup)

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
        """As :meth:`OnlineDataEngine.sample_batch`."""
        return await self._ready(
            "sample_batch",
            lambda client: client.sample_batch(
                batch_size,
                chunk_size,
                sampling_mode,
                generator=generator,
                seed=seed,
                timeout=timeout,
                device=device,
                pin_memory=pin_memory,
                out=out,
            ),
        )

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
        """As :meth:`OnlineDataEngine.sample_batch_with_context`."""
        return await self._ready(
            "sample_batch_with_context",
            lambda client: client.sample_batch_with_context(
                batch_size,
                history_length,
                prediction_horizon,
                generator=generator,
                sampling_mode=sampling_mode,
                generations=generations,
                seed=seed,
                timeout=timeout,
                device=device,
                pin_memory=pin_memory,
                out=out,
            ),
        )

    def stream(
        self, batch_size: int, chunk_size: int, sampling_mode: str = "episode", *, prefetch: int = 4, **options: Any
    ) -> AsyncBatchStream:
        """As :meth:`OnlineDataEngine.stream`, for ``async for``."""
        self._owner.require_ready("stream")
        assert self._client is not None
        return self._client.stream(batch_size, chunk_size, sampling_mode, prefetch=prefetch, **options)

    # --- refill, looking --------------------------------------------------------------------------------------------

    async def request_refill(self, timeout: float | None = None) -> int:
        """As :meth:`OnlineDataEngine.request_refill`."""
        self._owner.require_process("request_refill")
        return await self._ready("request_refill", lambda client: client.request_refill(timeout))

    async def wait_for_generation(self, generation: int, timeout: float = _GENERATION_SECONDS) -> None:
        """As :meth:`OnlineDataEngine.wait_for_generation`."""
        await self._ready("wait_for_generation", lambda client: client.wait_for_generation(generation, timeout))

    async def check_health(self, timeout: float | None = None) -> None:
        """As :meth:`OnlineDataEngine.check_health`."""
        await self._ready("check_health", lambda client: client.check_health(timeout))

    async def get_stats(self, timeout: float | None = None) -> dict[str, Any]:
        """As :meth:`OnlineDataEngine.get_stats`."""
        return await self._ask("get_stats", lambda client: client.get_stats(timeout), self._final_stats)

    async def get_flow_status(self, timeout: float | None = None) -> dict[str, int | None]:
        """As :meth:`OnlineDataEngine.get_flow_status`."""
        return await self._ready("get_flow_status", lambda client: client.get_flow_status(timeout))

    async def get_status(self, timeout: float | None = None) -> dict[str, Any]:
        """As :meth:`OnlineDataEngine.get_status`."""
        return await self._ask("get_status", lambda client: client.get_status(timeout), lambda: None)

    async def get_sampling_budget_snapshot(self, timeout: float | None = None) -> dict[str, Any]:
        """As :meth:`OnlineDataEngine.get_sampling_budget_snapshot`."""
        return await self._ask(
            "get_sampling_budget_snapshot",
            lambda client: client.get_sampling_budget_snapshot(timeout),
            self._final_budget,
        )

    async def drain_lifecycle_events(self, timeout: float | None = None) -> list[dict[str, Any]]:
        """As :meth:`OnlineDataEngine.drain_lifecycle_events`."""
        self._owner.require_process("drain_lifecycle_events")
        if self._owner.ended:
            return self._records()
        return await self._ask("drain_lifecycle_events", lambda client: _drain_async(client, timeout), self._records)

    async def resolve_language(self, batch: TensorDict, timeout: float | None = None) -> dict[str, Any]:
        """As :meth:`OnlineDataEngine.resolve_language`."""
        if self._client is None:
            raise self._owner.wrong_state("resolve_language", OnlineDataEngineState.READY)
        return await self._client.resolve_language(batch, timeout)

    # --- underneath -------------------------------------------------------------------------------------------------

    async def _ready(self, operation: str, ask: Callable[[AsyncClient], Awaitable[T]]) -> T:
        self._owner.require_ready(operation)
        assert self._client is not None
        try:
            return await ask(self._client)
        except (BrokerUnreachableError, ClosedError) as error:
            raise await asyncio.to_thread(self._owner.blame, error) from error

    async def _ask(
        self, operation: str, ask: Callable[[AsyncClient], Awaitable[T]], after: Callable[[], T | None]
    ) -> T:
        if not self._owner.ended and self._client is not None:
            try:
                return await ask(self._client)
            except (BrokerUnreachableError, ClosedError) as error:
                raise await asyncio.to_thread(self._owner.blame, error) from error
        last = after()
        if last is None:
            raise self._owner.wrong_state(operation, OnlineDataEngineState.READY)
        return last


def _drain(client: Client, timeout: float | None) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []
    while records := client.drain_lifecycle_events(timeout=timeout):
        taken += records
    return taken


async def _drain_async(client: AsyncClient, timeout: float | None) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []
    while records := await client.drain_lifecycle_events(timeout=timeout):
        taken += records
    return taken


def _teach(client: Client | AsyncClient, owner: Owner) -> None:
    """Give the client every text of the run: it will be asked for them when the broker is gone."""
    with contextlib.suppress(Exception):
        while owner.words:
            client.learn(owner.words.pop(0))


def _note(error: BaseException, cleanup: Exception) -> None:
    if str(cleanup) != str(error):
        error.add_note(f"ending the engine failed as well: {type(cleanup).__name__}: {cleanup}")


async def _in_thread(work: Callable[[], None], on_cancel: Callable[[], None]) -> None:
    """Do blocking work in a thread of its own, and see it through when the waiting task is cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as found:
            error = found
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            loop.call_soon_threadsafe(settle, error)

    # Not a pool's thread: a pool may be full of work that waits for this to be over.
    threading.Thread(target=run, name="ods-engine", daemon=True).start()
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
        except BaseException:
            break
    if cancelled is not None:
        if done.exception() is not None:
            cancelled.add_note(f"{type(done.exception()).__name__}: {done.exception()}")
        raise cancelled
    done.result()
