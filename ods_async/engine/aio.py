"""The asyncio engine: the twin of the blocking one, verb for verb."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from tensordict import TensorDict

from ods_async.client.aio import AsyncBatchStream, AsyncClient
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.states import OnlineDataEngineState
from ods_async.engine.base import ALL_RECORDS, GENERATION_SECONDS, EngineBase, note_cleanup, teach
from ods_async.errors import BrokerUnreachableError, ClosedError

__all__ = ["AsyncOnlineDataEngine"]

T = TypeVar("T")


class AsyncOnlineDataEngine(EngineBase):
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
                note_cleanup(error, cleanup)
            raise

    async def stop(self) -> None:
        """As :meth:`OnlineDataEngine.stop`. It is carried through even when it is cancelled."""
        try:
            await _in_thread(self._owner.stop, lambda: None)
        finally:
            if self._owner.ended and self._client is not None:
                teach(self._client, self._owner)
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
            note_cleanup(error, cleanup)

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

    async def wait_for_generation(self, generation: int, timeout: float = GENERATION_SECONDS) -> None:
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
            return self._left_records(self._client)
        return await self._ask(
            "drain_lifecycle_events",
            lambda client: client.drain_lifecycle_events(ALL_RECORDS, timeout),
            lambda: self._left_records(self._client),
        )

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
