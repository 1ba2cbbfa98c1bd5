"""The owner's processes: one broker and the local workers, from their start to their end.

A supervisor starts them, notices at once when one ends, tells the broker, starts failed workers anew as far as
``max_worker_restarts`` allows, and ends everything: ask, wait, terminate, kill.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.requests import CheckHealth, Done, GetStatus, ReportExit, ServiceStatus, Stop
from ods_async.core.states import OnlineDataEngineState
from ods_async.errors import (
    ClosedError,
    ForcedShutdownError,
    OdsError,
    OnlineDataWorkerError,
    PeerError,
    RequestTimeoutError,
    StartCancelledError,
    WorkerExitedError,
)
from ods_async.supervise.children import Child, end_all, exit_in_words
from ods_async.supervise.line import Line
from ods_async.transport.claims import sweep_ipc, sweep_private
from ods_async.transport.endpoint import default_ipc, parse_endpoint, sibling
from ods_async.transport.shm import sweep_segments
from ods_async.wire.errors import own_type, restore_error
from ods_async.wire.messages import ErrorReport

__all__ = ["Supervisor", "worker_names"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 10.0
_TELL_SECONDS = 2.0
_BROKER_SECONDS = 5.0
_SLICE = 0.1
_KILL_SECONDS = 0.5
_KILL_LOOK_SECONDS = 0.005


def worker_names(cfg: OnlineDataEngineCfg) -> tuple[str, ...]:
    """How the local workers are called: ``worker-0``, ``worker-1``, …"""
    return tuple(f"worker-{index}" for index in range(cfg.num_workers))


@dataclass(slots=True)
class _Post:
    """A local worker's place, whoever fills it at the moment."""

    worker_id: str
    child: Child | None = None
    restarts: int = 0
    start_at: float | None = None
    exit_codes: list[int] = field(default_factory=list)


class Supervisor:
    """Starts, watches and ends the processes behind an engine. Belongs to the process that made it.

    Args:
        cfg: the settings; ``worker_failure`` must not be None.
        run_id: number of the run.
        on_end: called (in a thread of the supervisor) once, when the service has ended without being asked to here:
            with the error when it failed, with None when somebody else with the owner's token stopped it.

    Attributes:
        owner_token: the secret that the owner's requests carry.
        endpoints: every address that answers, ports filled in once the broker is ``listening``.
    """

    def __init__(
        self, cfg: OnlineDataEngineCfg, *, run_id: int, on_end: Callable[[Exception | None], None] | None = None
    ) -> None:
        self._cfg = cfg
        self._run_id = run_id
        self._on_end = on_end
        self.owner_token = secrets.token_bytes(32)
        self._private: str | None = None
        self._asked = self._choose_endpoints()
        self.endpoints: tuple[str, ...] = tuple(self._asked)
        self.listening = False
        self._broker: Child | None = None
        self._untold: deque[ReportExit] = deque()
        self._posts = [_Post(name) for name in worker_names(cfg)]
        self._exits: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
        self._line: Line | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._forgotten = False
        self._failure: Exception | None = None

    def _choose_endpoints(self) -> list[str]:
        cfg = self._cfg
        asked = [e for e in (cfg.endpoint, *cfg.extra_endpoints) if e is not None]
        for endpoint in asked:
            parse_endpoint(endpoint)
        # Whoever is on this machine uses ipc: faster, and there whatever else is bound.
        if not any(e.startswith("ipc://") for e in asked):
            self._private = str(default_ipc(f"{cfg.name[:16]}-{secrets.token_hex(6)}"))
            asked.insert(0 if cfg.endpoint is None else len(asked), self._private)
        return list(dict.fromkeys(asked))

    @property
    def endpoint(self) -> str:
        """Where consumers connect."""
        return self.endpoints[0]

    @property
    def local_endpoint(self) -> str:
        """The ipc address, which this process and the local workers use."""
        return next(e for e in self.endpoints if e.startswith("ipc://"))

    @property
    def failure(self) -> Exception | None:
        """What made the service fail, as far as is known here."""
        return self._failure

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the broker and the workers that run at the moment."""
        children = [self._broker, *(post.child for post in self._posts)]
        return {child.name: child.pid for child in children if child is not None and child.running}

    # --- starting ---------------------------------------------------------------------------------------------------

    def start_broker(self, timeout: float, cancelled: threading.Event) -> None:
        """Start the broker and wait until it listens.

        Raises:
            StartCancelledError: ``cancelled`` was set meanwhile.
            RequestTimeoutError: it took longer than ``timeout`` seconds.
            Exception: what the broker process failed with.
        """
        deadline = time.monotonic() + timeout
        if self._private is not None:
            sweep_private(Path(parse_endpoint(self._private).path).parent)
        self._broker = Child("broker", self._broker_document(), self._exits.put)
        while True:
            for report in self._broker.hear(min(_SLICE, max(0.0, deadline - time.monotonic()))):
                if "error" in report:
                    raise _restored(report["error"])
                if "endpoints" in report:
                    self.endpoints = tuple(str(e) for e in report["endpoints"])
                    self.listening = True
                    self._line = Line(self.local_endpoint, role="owner", name="supervisor")
                    # Connected now, so that whoever counts sockets after start() has seen them all.
                    with contextlib.suppress(OdsError, TimeoutError):
                        self._line.connect()
                    return
            if cancelled.is_set():
                raise StartCancelledError("stop() was called while the broker was being started")
            if not self._broker.running and not self._broker.hear(0.0):
                raise self._broker_gone(self._broker)
            if time.monotonic() >= deadline:
                raise RequestTimeoutError(
                    f"the broker process did not listen within initialization_timeout={timeout:g} s",
                    operation="start",
                    timeout=timeout,
                    missing="the broker process",
                )

    def start_workers(self) -> None:
        """Start the local workers and keep watch from now on."""
        for post in self._posts:
            self._fill(post)
        self._thread = threading.Thread(target=self._watch, name="ods-supervisor", daemon=True)
        self._thread.start()

    def _broker_document(self) -> dict[str, Any]:
        return {
            "role": "broker",
            "cfg": self._cfg.to_dict(),
            "endpoints": self._asked,
            "owner_token": self.owner_token.hex(),
            "run_id": self._run_id,
            "supervised": list(worker_names(self._cfg)),
        }

    def _fill(self, post: _Post) -> None:
        post.start_at = None
        document = {
            "role": "worker",
            "cfg": self._cfg.to_dict(),
            "endpoint": self.local_endpoint,
            "worker_id": post.worker_id,
            "restarts": post.restarts,
        }
        post.child = Child(post.worker_id, document, self._exits.put)

    # --- watching ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        look_at = time.monotonic() + self._cfg.heartbeat_interval
        while True:
            waiting = [post.start_at for post in self._posts if post.start_at is not None]
            timeout = max(0.0, min([look_at, *waiting]) - time.monotonic())
            try:
                child = self._exits.get(timeout=timeout)
            except queue.Empty:
                pass
            else:
                if child is None:
                    break
                self._ended(child)
            now = time.monotonic()
            with self._lock:
                if not self._stopping.is_set():
                    for post in self._posts:
                        if post.start_at is not None and post.start_at <= now:
                            self._fill(post)
            if now >= look_at:
                self._look()
                look_at = time.monotonic() + self._cfg.heartbeat_interval
        if self._forgotten and self._line is not None:
            self._line.close()

    def _ended(self, child: Child) -> None:
        if child is self._broker:
            if child.exit_code == 0 and self._failure is None and self._on_end is not None:
                self._on_end(None)
            elif not self._stopping.is_set():
                self._fail(self._broker_gone(child))
            return
        post = next(post for post in self._posts if post.child is child)
        assert child.exit_code is not None
        post.exit_codes.append(child.exit_code)
        again = child.exit_code != 0 and post.restarts < self._cfg.max_worker_restarts
        again = again and not self._stopping.is_set() and self._failure is None
        if again:
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**post.restarts)
            post.restarts += 1
            post.start_at = time.monotonic() + pause
        self._untold.append(ReportExit(post.worker_id, child.exit_code, again, self.owner_token, child.pid))
        told = self._tell()
        if not told and not again and child.exit_code and self._cfg.worker_failure == "fail":
            if not self._stopping.is_set():
                self._fail(_worker_gone(child))
            return
        if told:
            self._look()

    def _tell(self) -> bool:
        """Tell the broker of the exits it has not heard of; False if it does not answer. Tried again at every look."""
        assert self._line is not None
        while self._untold:
            report = self._untold[0]
            if self._broker is None or not self._broker.running:
                return False
            try:
                self._line.ask(report, Done, _TELL_SECONDS)
            except (PeerError, TimeoutError) as error:
                if not self._stopping.is_set() and self._broker is not None and self._broker.running:
                    _log.warning("cannot tell the broker that %s ended: %s", report.worker_id, error)
                return False
            except ClosedError:
                pass  # the owner's stop came from elsewhere: workers are meant to end, and nobody is left to be told
            except OdsError as error:
                _log.warning("the broker would not hear that %s ended: %s", report.worker_id, error)
            self._untold.popleft()
        return True

    def _look(self) -> None:
        """Ask the broker how things are: a failure elsewhere (a remote worker, the broker itself) is noticed here."""
        if self._line is None or self._failure is not None or self._stopping.is_set() or not self._tell():
            return
        try:
            status = self._line.ask(GetStatus(), ServiceStatus, _TELL_SECONDS)
        except (OdsError, TimeoutError):
            return  # a dead broker is seen by its exit, a busy one answers later
        if status.state == OnlineDataEngineState.FAILED.value:
            self._fail(self._cause(status))

    def _cause(self, status: ServiceStatus) -> Exception:
        assert self._line is not None
        try:
            self._line.ask(CheckHealth(), Done, _TELL_SECONDS)
        except (PeerError, RequestTimeoutError):
            pass
        except Exception as error:
            return error
        return OnlineDataWorkerError(status.last_failure or "the service failed")

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        self._failure = error
        if self._on_end is not None:
            self._on_end(error)

    def _broker_gone(self, child: Child) -> Exception:
        assert child.exit_code is not None
        return OnlineDataWorkerError(
            f"the broker process (pid {child.pid}) ended unexpectedly with {exit_in_words(child.exit_code)}; "
            "its standard error says more",
            worker_id="broker",
            exit_code=child.exit_code,
        )

    # --- ending -----------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Tell all processes to end by themselves; waits for nothing."""
        self._forgotten = True
        self._stopping.set()
        self._exits.put(None)
        for child in (self._broker, *(post.child for post in self._posts)):
            if child is not None:
                child.let_go()

    def stop(self, collect: Callable[[], None] | None = None) -> Exception | None:
        """End everything, and return the failure that this brought to light, if any.

        Args:
            collect: called when production has ended and the broker still answers, to fetch what is needed later.

        Returns:
            The worker's failure (of its environment's ``close()``, say), a ``ForcedShutdownError`` when a process had
            to be ended by force, or None. Never raises for what the processes do.
        """
        with self._lock:
            self._stopping.set()
            for post in self._posts:
                post.start_at = None
        grace = self._cfg.shutdown_timeout
        deadline = time.monotonic() + grace
        found = self._ask_to_stop(grace)
        forced = end_all([post.child for post in self._posts if post.child is not None], deadline)
        if self._thread is not None:
            self._exits.put(None)
            self._thread.join()
        if collect is not None:
            with contextlib.suppress(Exception):
                collect()
        if self._broker is not None:
            forced += self._end_broker(self._broker)
        if self._line is not None:
            self._line.close()
        if not forced:
            return found
        names = ", ".join(child.name for child in forced)
        error = ForcedShutdownError(
            f"{names} did not end within shutdown_timeout={grace:g} s and had to be ended by force; what its "
            "environment should have written (recordings, videos) may be incomplete",
            worker_id=names,
        )
        if found is not None:
            found.add_note(str(error))
        return found or error

    def _ask_to_stop(self, grace: float) -> Exception | None:
        if self._broker is None or not self._broker.running or not self.listening:
            return None
        # A line of its own: while it waits, exits are still reported on the other one.
        with Line(self.local_endpoint, role="owner", name="stop") as line:
            try:
                line.ask(Stop(self.owner_token, grace), Done, grace + _TELL_SECONDS)
            except (PeerError, RequestTimeoutError) as error:
                _log.warning("the broker did not take the request to stop: %s", error)
            except Exception as error:
                return error
        return None

    def _end_broker(self, broker: Child) -> list[Child]:
        if self._line is not None and broker.running:
            with contextlib.suppress(OdsError, TimeoutError):  # the second time means: at once
                self._line.ask(Stop(self.owner_token, 0.0), Done, _TELL_SECONDS)
        forced = end_all([broker], time.monotonic() + _BROKER_SECONDS)
        if broker.exit_code == -signal.SIGKILL:
            self._tidy()
        return forced

    def kill(self) -> None:
        """Kill all processes and remove what they leave. Takes no lock: a signal handler may call it."""
        children = [child for child in (self._broker, *(post.child for post in self._posts)) if child is not None]
        for child in children:
            child.kill()
        last = time.monotonic() + _KILL_SECONDS
        # Not a look at /proc: a process whose first thread is gone may have others that still hold its locks.
        while any(child.running for child in children) and time.monotonic() < last:
            time.sleep(_KILL_LOOK_SECONDS)
        if self._broker is not None:
            self._tidy()

    def _tidy(self) -> None:
        """Remove what a killed broker could not: its segment and its ipc sockets."""
        with contextlib.suppress(OSError):
            sweep_segments()
        for text in self._asked:
            if text.startswith("ipc://"):
                for endpoint in (parse_endpoint(text), *_siblings(text)):
                    sweep_ipc(endpoint)


def _siblings(endpoint: str) -> list[Any]:
    return [sibling(endpoint, "tickets"), sibling(endpoint, "rollouts"), sibling(endpoint, "events")]


def _worker_gone(child: Child) -> WorkerExitedError:
    assert child.exit_code is not None
    return WorkerExitedError(
        f"{child.name} (pid {child.pid}) ended with {exit_in_words(child.exit_code)}",
        worker_id=child.name,
        exit_code=child.exit_code,
    )


def _restored(described: dict[str, Any]) -> Exception:
    described["notes"] = tuple(described.get("notes", ()))
    return own_type(restore_error(ErrorReport(**described)))
