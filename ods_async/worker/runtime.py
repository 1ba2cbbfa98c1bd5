"""A worker from its first word to its last: as a process (:func:`run_worker`) or inside another (:class:`Worker`)."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Self

import numpy as np

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.reports import Goodbye
from ods_async.core.requests import Limits
from ods_async.errors import ForcedShutdownError
from ods_async.transport.curve import CurveKeys, as_keys
from ods_async.wire.errors import worker_failure
from ods_async.worker.desk import LinkSettings
from ods_async.worker.environments import DemoEnvironment
from ods_async.worker.link import Link
from ods_async.worker.plans import Policy
from ods_async.worker.production import Production
from ods_async.worker.signals import insisting
from ods_async.worker.trace import Trace

__all__ = ["EXIT_FAILED", "EXIT_FINE", "EXIT_INTERRUPTED", "Worker", "run_worker"]

EXIT_FINE: Final = 0
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130

_SAME_SIGNAL_SECONDS = 0.02

_log = logging.getLogger("ods_async.worker")


class _StopNowError(BaseException):
    """A signal came while the environment was being made, when there is nothing to lose yet."""


class _Shift:
    """One run of one worker, in whatever thread calls :meth:`work`."""

    def __init__(
        self,
        cfg: OnlineDataEngineCfg,
        settings: LinkSettings,
        *,
        policy: Policy | None,
        flush_timeout: float,
        max_rollouts: int | None,
        say: Callable[[str], None],
    ) -> None:
        self.trace = Trace()
        self.link = Link(settings, self.trace, say)
        self.failure: BaseException | None = None
        self.lost: tuple[int, ...] = ()
        self.production = Production(cfg, settings, self.link, self.trace, policy, max_rollouts)
        self._worker_id = settings.worker_id
        self._flush_timeout = flush_timeout
        self._say = say

    def work(self) -> int:
        """Do everything; never raises. Returns the exit code, with the reason of a failure in ``failure``."""
        link, trace = self.link, self.trace
        environment: DemoEnvironment | None = None
        link.start()
        try:
            welcome = link.wait_connected()
            if welcome is not None:
                environment = self.production.make(welcome)
                self.production.run(environment)
        except _StopNowError:
            pass
        except BaseException as error:
            self._failed(error)
        if environment is not None:
            trace.phase, trace.step = "close", None
            try:
                environment.close()
            except BaseException as error:
                self._failed(error)
            trace.phase = "idle"
        reason = link.stop_reason or ("all wanted rollouts are made" if self.failure is None else "failed")
        goodbye = Goodbye(self._worker_id, reason[:500]) if self.failure is None else None
        self.lost = link.finish(goodbye, self._flush_timeout)
        if self.failure is None and link.error is not None:
            self.failure = link.error
        if self.lost:
            self._say(
                f"gave up waiting for the verdict on {len(self.lost)} rollout(s) after {self._flush_timeout:g} s: "
                f"tickets {list(self.lost)}; whether they were published is not known"
            )
        return EXIT_FAILED if self.failure is not None or self.lost else EXIT_FINE

    def _failed(self, error: BaseException) -> None:
        """Tell the broker at once, unless the way to it is what failed."""
        link, trace = self.link, self.trace
        if self.failure is not None:
            self.failure.add_note(f"and in {trace.phase}: {type(error).__name__}: {error}")
            return
        self.failure = error
        if error is link.error:
            return
        welcome = link.desk.welcome
        # Some simulators raise at a limit of their own instead of truncating; this tells the limit that was set here.
        if trace.step is not None:
            error.add_note(f"at step {trace.step}; the limit is {self.production.capacity} steps")
        link.report(
            worker_failure(
                error,
                worker_id=self._worker_id,
                phase="step" if trace.phase == "idle" else trace.phase,
                step=trace.step,
                ticket_id=link.desk.ticket_id,
                limits=welcome.limits if welcome is not None else Limits(),
            )
        )


def run_worker(
    cfg: OnlineDataEngineCfg,
    endpoint: str,
    worker_id: str | None = None,
    *,
    restarts: int = 0,
    keys: CurveKeys | str | os.PathLike[str] | None = None,
    alive_fd: int | None = None,
    flush_timeout: float = 5.0,
    connect_timeout: float = 10.0,
    patience: float = 0.0,
    max_rollouts: int | None = None,
) -> int:
    """Be a worker until told to end: the whole of a worker's process. Call it in the main thread.

    SIGTERM, SIGHUP and SIGINT end it between two steps (at once while it is still making its environment), after the
    verdicts on what was handed in have come; a second signal ends it at once. What went wrong is said on stderr: one
    line, then the detail.

    Args:
        cfg: the settings.
        endpoint: where the broker answers.
        worker_id: unique within the run; None makes one of host and process.
        restarts: how often it was started before.
        keys: this worker's CURVE keys, or the path of their folder or file; None: ``cfg.client_keys``.
        alive_fd: a descriptor whose end of file means that the owner is gone.
        flush_timeout: seconds to wait for missing verdicts at the end.
        connect_timeout: seconds to find the broker in.
        patience: seconds to look for a broker that fell silent; 0: end at once.
        max_rollouts: end after so many, or None.

    Returns:
        0: ended in good order. 1: failed, or gave up waiting for verdicts. 130: interrupted by SIGINT.
    """
    worker_id = worker_id or default_worker_id()
    if cfg.seed is not None:
        # Environments that draw from the global generators: other numbers in every worker, the same in every run.
        words = np.random.SeedSequence([cfg.seed, zlib.crc32(worker_id.encode()), restarts]).generate_state(2)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))

    def say(text: str) -> None:
        print(f"worker {worker_id}: {text}", file=sys.stderr, flush=True)

    own = _keys_for(cfg, endpoint, keys)
    settings = LinkSettings(endpoint, worker_id, restarts, own, alive_fd, connect_timeout, patience)
    shift = _Shift(cfg, settings, policy=None, flush_timeout=flush_timeout, max_rollouts=max_rollouts, say=say)
    received: list[int] = []
    received_at: list[float] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received:
            # `timeout` and terminals send one signal to a program and once more to its group.
            if number != received[0] or time.monotonic() - received_at[0] > _SAME_SIGNAL_SECONDS:
                os._exit(128 + number)
            return
        received.append(number)
        received_at.append(time.monotonic())
        shift.link.request_stop(signal.Signals(number).name)
        if shift.trace.phase == "make":
            raise _StopNowError

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in signals}
    try:
        with insisting(lambda: bool(received)):
            code = shift.work()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if shift.failure is not None:
        say(f"failed: {type(shift.failure).__name__}: {shift.failure}")
        if shift.failure is not shift.link.error:
            traceback.print_exception(shift.failure)
    return EXIT_INTERRUPTED if code == EXIT_FINE and received[:1] == [signal.SIGINT] else code


def default_worker_id() -> str:
    """A name that no other worker has: host, process, and a few random letters."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(3)}"


def _keys_for(
    cfg: OnlineDataEngineCfg, endpoint: str, keys: CurveKeys | str | os.PathLike[str] | None
) -> CurveKeys | None:
    if keys is None and endpoint.startswith("tcp:"):
        keys = cfg.client_keys
    return as_keys(keys, endpoint)


class Worker:
    """A worker inside another program: ``async with Worker(cfg, endpoint): …``, simulation and sockets in threads.

    Entering returns when the broker has answered. Leaving ends the work between two steps, waits for the verdicts on
    what was handed in, and raises what the worker failed of (unless the body raised something itself).

    Args:
        cfg: the settings.
        endpoint: where the broker answers.
        worker_id: unique within the run; None makes one.
        policy: a callable instead of the configured policy.
        keys: this worker's CURVE keys, or the path of their folder or file; None: ``cfg.client_keys``.
        flush_timeout: seconds to wait for missing verdicts at the end.
        connect_timeout: seconds to find the broker in.
        patience: seconds to look for a broker that fell silent; 0: end at once.
        max_rollouts: end after so many, or None.

    Raises:
        BrokerUnreachableError: on entering, when nobody answers.
    """

    def __init__(
        self,
        cfg: OnlineDataEngineCfg,
        endpoint: str,
        *,
        worker_id: str | None = None,
        policy: Policy | None = None,
        keys: CurveKeys | str | os.PathLike[str] | None = None,
        flush_timeout: float = 5.0,
        connect_timeout: float = 10.0,
        patience: float = 0.0,
        max_rollouts: int | None = None,
    ) -> None:
        self.worker_id = worker_id or default_worker_id()
        own = _keys_for(cfg, endpoint, keys)
        self._cfg = cfg
        self._flush_timeout = flush_timeout
        settings = LinkSettings(endpoint, self.worker_id, keys=own, connect_timeout=connect_timeout, patience=patience)
        self._shift = _Shift(
            cfg,
            settings,
            policy=policy,
            flush_timeout=flush_timeout,
            max_rollouts=max_rollouts,
            say=lambda text: _log.warning("worker %s: %s", self.worker_id, text),
        )
        self._code: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"ods-worker-{self.worker_id}", daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """What the worker failed of, once it ended."""
        return self._shift.failure

    @property
    def lost(self) -> tuple[int, ...]:
        """Tickets whose rollout had no verdict when the worker ended."""
        return self._shift.lost

    @property
    def rollouts(self) -> int:
        """Rollouts handed in so far."""
        return self._shift.production.made

    @property
    def steps(self) -> int:
        """Environment steps so far."""
        return self._shift.trace.steps

    async def wait(self, timeout: float | None = None) -> int:
        """Wait until the worker has ended by itself. Returns its exit code.

        Raises:
            TimeoutError: it has not.
        """
        if not await asyncio.to_thread(self._ended.wait, timeout):
            raise TimeoutError(f"worker {self.worker_id} still works after {timeout} s")
        assert self._code is not None
        return self._code

    async def stop(self) -> int:
        """End the work between two steps, and wait for it. Returns the exit code; again: the same.

        Raises:
            ForcedShutdownError: the environment did not come back in time; its thread is left to itself.
        """
        self._shift.link.request_stop("stopped")
        patience = self._cfg.shutdown_timeout + self._flush_timeout + 2.0
        try:
            return await self.wait(patience)
        except TimeoutError:
            raise ForcedShutdownError(
                f"worker {self.worker_id} did not end within {patience:g} s: it is in {self._shift.trace.phase}",
                worker_id=self.worker_id,
                phase=self._shift.trace.phase,
            ) from None

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            await asyncio.to_thread(self._shift.link.wait_connected)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        failure: Any = None
        try:
            await self.stop()
            failure = self.failure
        except ForcedShutdownError as forced:
            failure = forced
        if failure is None:
            return
        if error is None:
            raise failure
        error.add_note(f"and worker {self.worker_id} failed: {type(failure).__name__}: {failure}")

    def _work(self) -> None:
        self._code = self._shift.work()
        self._ended.set()
