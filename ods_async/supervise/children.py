"""Child processes of an owner: how they are started, watched and ended.

A child is ``sys.executable -m ods_async _child``, never a fork and no ``multiprocessing``: nothing is pickled and the
user's main module is not imported again. Three pipes tie it to its owner: its standard input brings one JSON document
(what to be, with which settings) and then only stays open, so that its end tells the child that the owner is gone; a
report pipe carries the child's own words back; the process id is waited for in a thread, so that an exit is noticed at
once. Children live in a session of their own: Ctrl-C in a terminal reaches the owner alone, and whatever a child
started can be ended with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ods_async.errors import OdsError

__all__ = ["Child", "end_all", "exit_in_words", "import_path"]

_MAX_REPORT_BYTES = 1 << 20
_TERMINATE_SECONDS = 1.0


def exit_in_words(exit_code: int) -> str:
    """``exit code 3``, or ``signal 9 (SIGKILL)`` for a negative code."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"signal {-exit_code}"


def import_path() -> str:
    """This process's ``sys.path`` as a ``PYTHONPATH`` for children, so that the user's own modules import there too."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    kept: list[str] = []
    for entry in sys.path:
        place = str(Path(entry or ".").absolute())
        known = any(place == root or place == f"{root}/lib-dynload" for root in standard)
        if not known and not place.endswith(".zip") and os.pathsep not in place and place not in kept:
            kept.append(place)
    return os.pathsep.join(kept)


class Child:
    """One child process, started by the constructor.

    Args:
        name: for messages and threads: ``broker``, ``worker-0``.
        document: what the child is told; plain data. ``import_path`` and the like are added here.
        on_exit: called once with this child, in the child's waiting thread, when the process has ended.
        command: what to run instead of this package.

    Raises:
        OdsError: the interpreter cannot be started.
    """

    def __init__(
        self,
        name: str,
        document: dict[str, Any],
        on_exit: Callable[[Child], None] | None = None,
        *,
        command: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.exit_code: int | None = None
        self.forced = False
        self._on_exit = on_exit
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._heard = bytearray()
        if not sys.executable:
            raise OdsError("sys.executable is empty: the Python interpreter for child processes is not known")
        report_read, report_write = os.pipe()
        alive_read, alive_write = os.pipe()
        environment = os.environ | {"PYTHONPATH": import_path()}
        told = document | {
            "owner_pid": os.getpid(),
            "report_fd": report_write,
            "python_path": os.environ.get("PYTHONPATH"),
        }
        text = json.dumps(told).encode()
        try:
            # -P: the working directory must not shadow modules unless the owner's own sys.path has it.
            self._process = subprocess.Popen(
                command or [sys.executable, "-P", "-m", "ods_async", "_child", name],
                stdin=alive_read,
                stdout=2,  # what a child prints must not get between the lines of an owner's --json
                env=environment,
                pass_fds=(report_write,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(report_read)
            os.close(alive_write)
            raise OdsError(f"cannot start {name} with {sys.executable}: {error}") from error
        finally:
            os.close(report_write)
            os.close(alive_read)
        self._report = report_read
        self._alive = alive_write
        _CHILDREN.add(self)
        os.set_blocking(report_read, False)
        self._waiter = threading.Thread(target=self._wait, name=f"ods-wait-{name}", daemon=True)
        self._waiter.start()
        view = memoryview(len(text).to_bytes(8, "big") + text)
        with contextlib.suppress(OSError):  # a child that is already gone is reported by its exit
            while view:
                view = view[os.write(alive_write, view) :]

    @property
    def pid(self) -> int:
        """The process id (of a process that may have ended)."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return not self._ended.is_set()

    def _wait(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        # Not reaped yet, so its number is still its own: what it started goes with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with self._lock:
            self.exit_code = self._process.wait()
        self._ended.set()
        if self._on_exit is not None:
            self._on_exit(self)

    # --- the child's own words ---

    def hear(self, timeout: float) -> list[dict[str, Any]]:
        """Reports that came since the last call; waits up to ``timeout`` seconds for the first.

        Returns an empty list when none came, also when the child is gone. Never raises for what a child wrote.
        """
        deadline = time.monotonic() + timeout
        while True:
            closed = self._read()
            *lines, rest = bytes(self._heard).split(b"\n")
            self._heard[:] = rest
            found = [report for line in lines if isinstance(report := _parsed(line), dict)]
            if found:
                return found
            left = deadline - time.monotonic()
            if closed or left <= 0:
                return []
            select.select([self._report], [], [], left)

    def _read(self) -> bool:
        if self._report < 0:
            return True
        while len(self._heard) < _MAX_REPORT_BYTES:
            try:
                data = os.read(self._report, 65_536)
            except BlockingIOError:
                return False
            if not data:
                os.close(self._report)
                self._report = -1
                return True
            self._heard += data
        return True

    # --- ending it ---

    def let_go(self) -> None:
        """Close the pipe that says the owner lives: the child ends by itself, in good order."""
        alive, self._alive = self._alive, -1
        if alive >= 0:
            os.close(alive)

    def signal(self, number: int) -> None:
        """Send a signal to the process if it has not ended."""
        with self._lock:
            if self.exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and everything it started. Takes no lock: a signal handler may call it."""
        if self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> bool:
        """Wait until the process has ended; False when it has not after ``timeout`` seconds."""
        return self._ended.wait(None if timeout == math.inf else max(0.0, timeout))

    def close(self) -> None:
        """Give back what is held here for a process that has ended."""
        self.let_go()
        if threading.current_thread() is not self._waiter:
            self._waiter.join()
        self._read()
        if self._report >= 0:
            os.close(self._report)
            self._report = -1


def end_all(children: Sequence[Child], deadline: float) -> list[Child]:
    """Let the children go, wait for them until ``deadline`` (monotonic seconds), then terminate, then kill.

    Returns:
        Those that had to be ended by force. All are gone afterwards, with everything they started.
    """
    for child in children:
        child.let_go()
    forced = [child for child in children if not child.wait(deadline - time.monotonic())]
    for child in forced:
        child.forced = True
        child.signal(signal.SIGTERM)
        child.signal(signal.SIGCONT)  # a stopped process takes no SIGTERM
    last = time.monotonic() + _TERMINATE_SECONDS
    for child in forced:
        if not child.wait(last - time.monotonic()):
            child.signal(signal.SIGKILL)
    for child in children:
        child.wait(math.inf)
        child.close()
    return forced


_CHILDREN: weakref.WeakSet[Child] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # An inherited copy would tell the children that their owner lives when it does not.
    for child in _CHILDREN:
        child.let_go()
        child._report = -1
    _CHILDREN.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
