"""The life of an engine, blocking or not: its states, its start, its end, and what must outlive the broker (B6–B9)."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.language import KINDS
from ods_async.core.requests import (
    BudgetSnapshot,
    Done,
    Drain,
    GetBudget,
    GetLanguage,
    GetStats,
    LanguageEntries,
    Records,
    Stats,
    WaitReady,
)
from ods_async.core.states import OnlineDataEngineState as State
from ods_async.errors import OdsError, OwnerOnlyError, RequestTimeoutError, StartCancelledError, StateError
from ods_async.supervise.line import Line
from ods_async.supervise.supervisor import Supervisor

__all__ = ["Owner", "again"]

_log = logging.getLogger(__name__)

_SLICE = 0.25
_REPORT_SECONDS = 5.0
_ASK_SECONDS = 5.0
_TERMINAL = (State.STOPPED, State.FAILED)


def again(error: Exception) -> Exception:
    """A copy to raise: one exception raised twice would gather the tracebacks of both, in any number of threads."""
    try:
        twin = copy.copy(error)
    except Exception:  # an exception whose constructor wants more than its args
        return error
    if type(twin) is not type(error) or str(twin) != str(error):
        return error
    twin.__cause__ = error.__cause__
    return twin


class Owner:
    """States and processes of one engine; blocking, and safe to use from several threads.

    Args:
        cfg: the settings, checked again here.

    Raises:
        ConfigError: a setting that cannot be, or workers are wanted and no environment is named.
        EndpointError: an endpoint that cannot be used.
    """

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        cfg.validate()
        if cfg.num_workers:
            cfg.require_environment()
        self.cfg = cfg.replace(worker_failure=cfg.worker_failure or "fail")
        self.run_id = 1 + secrets.randbelow(2**63 - 1)
        self.last_budget: BudgetSnapshot | None = None
        self.last_stats: Stats | None = None
        self.words: list[LanguageEntries] = []
        self.undrained: list[dict[str, object]] = []
        me = weakref.ref(self)

        def ended(error: Exception | None) -> None:
            owner = me()  # the supervisor's thread must not keep a forgotten engine alive
            if owner is not None:
                owner.service_ended(error)

        self.supervisor = Supervisor(self.cfg, run_id=self.run_id, on_end=ended)
        self.cancelled = threading.Event()
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._ending = threading.Lock()
        self._ended = False
        self._state = State.CREATED
        self._failure: Exception | None = None

    # --- states -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Where in its life the engine is."""
        return self._state

    @property
    def failure(self) -> Exception | None:
        """What made it fail."""
        return self._failure

    @property
    def ended(self) -> bool:
        """Whether the processes are gone for good."""
        return self._ended

    def require_process(self, operation: str) -> None:
        """Refuse in a forked child.

        Raises:
            OwnerOnlyError: this process did not make the engine.
        """
        if os.getpid() != self._pid:
            raise OwnerOnlyError(
                f"{operation}() is for the process that made the engine only; connect a Client to engine.endpoint here",
                operation=operation,
            )

    def require_ready(self, operation: str) -> None:
        """Refuse outside READY; a failure comes first (B23).

        Raises:
            Exception: what made the engine fail.
            StateError: it is not READY.
        """
        if self._state is State.READY:
            return
        if self._failure is not None and self._state is State.FAILED:
            raise again(self._failure)
        raise self.wrong_state(operation, State.READY)

    def wrong_state(self, operation: str, required: State) -> StateError:
        """The error of B6, naming the operation, the state it needs and the current one."""
        remedy = ": enter it with a with block, or call start()" if self._state is State.CREATED else ""
        return StateError(
            f"{operation}() needs the state {required.value}; the engine is {self._state.value}{remedy}",
            operation=operation,
            required=required.value,
            current=self._state.value,
        )

    def service_ended(self, error: Exception | None) -> None:
        """The service has failed, or (None) was stopped from elsewhere. The first cause stays."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
            if self._state is State.READY:
                self._set(State.STOPPED if error is None else State.FAILED)
            elif error is None and self._state is State.STARTING:
                self.cancelled.set()

    def wait(self, timeout: float) -> bool:
        """Wait until the state is terminal; False when it is not after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state in _TERMINAL, timeout)

    def _set(self, state: State) -> None:
        with self._changed:
            if self._state not in _TERMINAL:
                self._state = state
            self._changed.notify_all()

    # --- start ------------------------------------------------------------------------------------------------------

    def start(self, on_listening: Callable[[], None] | None = None) -> None:
        """Start the processes and wait for the first generation (B7).

        Args:
            on_listening: called when the broker can be connected to, before the wait.

        Raises:
            StateError: it was started before.
            StartCancelledError: :meth:`stop` was called meanwhile.
            RequestTimeoutError: ``initialization_timeout`` passed.
            Exception: what a worker, or the broker, failed with.
        """
        self.require_process("start")
        with self._changed:
            if self._state is not State.CREATED:
                raise self.wrong_state("start", State.CREATED)
            self._set(State.STARTING)
        try:
            deadline = self.cfg.initialization_timeout + time.monotonic()
            self.supervisor.start_broker(self.cfg.initialization_timeout, self.cancelled)
            if on_listening is not None:
                on_listening()
            self.supervisor.start_workers()
            self._wait_ready(deadline)
            with self._changed:
                if self._failure is not None:
                    raise again(self._failure)
                if self.cancelled.is_set():
                    raise self._cancellation()
                self._set(State.READY)
        except BaseException as error:
            self._abandon(error)
            raise

    def _wait_ready(self, deadline: float) -> None:
        missing = ""
        next_report = time.monotonic() + _REPORT_SECONDS
        with Line(self.supervisor.local_endpoint, role="owner", name="start") as line:
            while True:
                if self.cancelled.is_set():
                    raise self._cancellation()
                if self._failure is not None:
                    raise again(self._failure)
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                try:
                    line.ask(WaitReady(), Done, min(_SLICE, left))
                    return
                except RequestTimeoutError as error:
                    missing = str(error.fields.get("missing") or missing)
                    if time.monotonic() >= next_report:
                        next_report = time.monotonic() + _REPORT_SECONDS
                        _log.info("waiting for the first generation: %s", missing)
                except ConnectionError:
                    # A broker that is gone is reported by its exit, with more to say than "unreachable".
                    self.cancelled.wait(_SLICE)
        seconds = self.cfg.initialization_timeout
        raise RequestTimeoutError(
            f"start(): the first generation was not complete within initialization_timeout={seconds:g} s: {missing}",
            operation="start",
            timeout=seconds,
            missing=missing,
        )

    def _cancellation(self) -> StartCancelledError:
        return StartCancelledError("stop() was called while start() was waiting for the first generation")

    def _abandon(self, error: BaseException) -> None:
        cancelled = isinstance(error, StartCancelledError)
        if isinstance(error, Exception) and not cancelled:
            self._failure = self._failure or error
        try:
            found = self.supervisor.stop(self._collect)
            if found is not None and str(found) != str(error):
                error.add_note(f"ending the processes brought up: {found}")
                if cancelled:
                    self._failure, cancelled = found, False
        finally:
            self._ended = True
            self._set(State.STOPPED if cancelled else State.FAILED)

    # --- end --------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End everything (B8). Again: no effect.

        Raises:
            Exception: the failure of a worker that nobody has been told by ``stop`` yet, or what ending brought to
                light; a ``ForcedShutdownError`` when force was needed.
        """
        self.require_process("stop")
        with self._changed:
            if self._state is State.CREATED:
                self._ended = True
                self._set(State.STOPPED)
            if self._state is State.STARTING:
                self.cancelled.set()
                self._changed.wait_for(lambda: self._state is not State.STARTING)
        with self._ending:
            if self._ended:
                return
            found: Exception | None = None
            try:
                found = self.supervisor.stop(self._collect)
            finally:
                self._ended = True
                error = self._failure or found
                if error is not None and found is not None and str(found) != str(error):
                    error.add_note(f"ending the processes brought up: {found}")
                self._failure = error
                self._set(State.FAILED if error is not None else State.STOPPED)
        if error is not None:
            raise again(error)

    def blame(self, error: Exception, timeout: float = 3.0) -> Exception:
        """What to raise for a consumer's ``error``: when the broker's process is gone, that says more."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, timeout)
            return error if self._failure is None else again(self._failure)

    def let_go(self) -> None:
        """For a forgotten engine: tell the processes to end by themselves, without waiting."""
        if os.getpid() == self._pid:
            self.supervisor.let_go()

    def kill(self) -> None:
        """End all processes at once and remove what they leave. Takes no lock: a signal handler may call it."""
        if os.getpid() == self._pid:
            self.supervisor.kill()

    def _collect(self) -> None:
        """Fetch what must be readable after the end: the budget, the counters, the texts, the owner's log.

        Raises:
            BrokerUnreachableError: there is nobody to fetch it from.
        """
        with Line(self.supervisor.local_endpoint, role="owner", name="collect", connect_timeout=1.0) as line:
            line.connect()
            with contextlib.suppress(Exception):
                self.last_stats = line.ask(GetStats(), Stats, _ASK_SECONDS)
            with contextlib.suppress(Exception):
                self.last_budget = line.ask(GetBudget(), BudgetSnapshot, _ASK_SECONDS)
            for kind in KINDS:
                with contextlib.suppress(Exception):
                    self._collect_words(line, kind)
            if self.cfg.lifecycle_event_capacity:
                with contextlib.suppress(OdsError, TimeoutError):
                    self._collect_records(line)

    def _collect_records(self, line: Line) -> None:
        token, received = self.supervisor.owner_token, 0
        while records := line.ask(Drain(token, received=received), Records, _ASK_SECONDS).events:
            self.undrained += records
            received = 1 + max(int(str(record["sequence"])) for record in records)

    def _collect_words(self, line: Line, kind: str) -> None:
        since = 0
        while True:
            entries = line.ask(GetLanguage(kind, since), LanguageEntries, _ASK_SECONDS)
            if not entries.entries:
                return
            self.words.append(entries)
            since += len(entries.entries)

    def take_undrained(self) -> list[dict[str, Any]]:
        """Lifecycle records that were still pending when the service ended, once."""
        taken, self.undrained = self.undrained, []
        return taken
