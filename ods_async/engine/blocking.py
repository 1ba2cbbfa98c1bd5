"""The blocking engine: users of the original in-process engine find its verbs here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from tensordict import TensorDict

from ods_async.client.sync import BatchStream, Client
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.states import OnlineDataEngineState
from ods_async.engine.base import ALL_RECORDS, GENERATION_SECONDS, EngineBase, note_cleanup, teach
from ods_async.errors import BrokerUnreachableError, ClosedError

__all__ = ["OnlineDataEngine"]

T = TypeVar("T")


class OnlineDataEngine(EngineBase):
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
                teach(self._client, self._owner)
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
            note_cleanup(error, cleanup)

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

    def wait_for_generation(self, generation: int, timeout: float = GENERATION_SECONDS) -> None:
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
            return self._left_records(self._client)
        return self._ask(
            "drain_lifecycle_events",
            lambda client: client.drain_lifecycle_events(ALL_RECORDS, timeout),
            lambda: self._left_records(self._client),
        )

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
