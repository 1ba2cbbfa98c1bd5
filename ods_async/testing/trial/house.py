"""Real programs under watch: a broker, workers, consumers, each a process of its own, with its output in a file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import ods_async

__all__ = ["Figures", "House", "Program", "child_environment", "figures_of", "until"]

_END_SECONDS: Final = 15.0
_LAST_BYTES: Final = 4000
_MARK: Final = "ODS_TRIAL"
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Figures:
    """What a process holds: ``private_bytes`` is its resident memory without what it shares."""

    private_bytes: int
    fds: int
    threads: int


def figures_of(pid: int) -> Figures | None:
    """What the process holds, or None when it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        resident, shared = map(int, (folder / "statm").read_text().split()[1:3])
        threads = int((folder / "stat").read_text().rpartition(")")[2].split()[17])
        return Figures((resident - shared) * _PAGE, len(list((folder / "fd").iterdir())), threads)
    except (OSError, ValueError, IndexError):
        return None


def child_environment() -> dict[str, str]:
    """Environment variables with which a child finds this very package."""
    root = str(Path(ods_async.__file__).parents[1])
    rest = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{rest}" if rest else root}


class Program:
    """One ``python -m …`` that can be started again and again.

    Args:
        name: for people and for its log file.
        arguments: after the interpreter.
        log: where its standard output and error go (appended, after a line that tells of the start).
        mark: put into its environment, which whatever it starts inherits.

    Attributes:
        doomed: free for whoever kills it, to know later that this end was meant.
        pids: all that it ever had.
    """

    def __init__(self, name: str, arguments: Sequence[str], log: Path, mark: str = "") -> None:
        self.name = name
        self.log = log
        self.doomed = False
        self.pids: set[int] = set()
        self._mark = mark
        self.starts = 0
        self.exit_codes: list[int] = []
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the last start."""
        assert self._process is not None
        return self._process.pid

    @property
    def current_pid(self) -> int | None:
        """The process id, or None when it has ended; it may be read in any thread."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    @property
    def running(self) -> bool:
        """Whether it runs. When it has ended, its exit code stands at the end of ``exit_codes``."""
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        self.exit_codes.append(code)
        self._process = None
        return False

    def start(self) -> None:
        """Start it (it must not be running)."""
        assert not self.running
        self.doomed = False
        with self.log.open("ab") as log:
            log.write(b'{"started": %d}\n' % self.starts)
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment() | {_MARK: self._mark},
                start_new_session=True,
            )
        self.starts += 1
        self.pids.add(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> int | None:
        """The exit code, or None when it has not ended within ``timeout`` seconds."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        return None if self.running else self.exit_codes[-1]

    def end(self, timeout: float = _END_SECONDS) -> bool:
        """Ask it to end, and kill it (and what it started) if it does not; False when it had to be killed."""
        if self._process is None:
            return True
        group = self._process.pid
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        willing = self.wait(timeout) is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        self.wait(_END_SECONDS)
        return willing

    def told(self) -> list[list[str]]:
        """Lines that it printed, one list for every start."""
        starts: list[list[str]] = []
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith('{"started": '):
                starts.append([])
            elif starts:
                starts[-1].append(line)
        return starts

    def words(self) -> str:
        """The last of what it printed since its last start."""
        return "\n".join(self.told()[-1])[-_LAST_BYTES:]


class House:
    """All programs of one trial; leaving the context ends them, the broker last.

    Args:
        folder: for settings, logs and the consumers' reports.
        settings: the broker's settings (also given to workers), as plain data.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.programs: dict[str, Program] = {}
        self.stubborn: list[str] = []
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        self._values = settings
        self._settings = folder / "settings.json"
        self._settings.write_text(json.dumps(settings))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def add_broker(self) -> Program:
        """Start the broker."""
        return self._add("broker", ["-m", "ods_async", "broker", str(self._settings), "--json"])

    def add_worker(self, name: str, endpoint: str, *options: str) -> Program:
        """Start a worker; it reads ``NAME.json`` in the folder at every start, see :meth:`set_environment`."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.set_environment(name, {})
        return self._add(name, ["-m", "ods_async", "worker", str(path), "--connect", endpoint, "--id", name, *options])

    def set_environment(self, name: str, kwargs: dict[str, Any]) -> None:
        """From its next start on the worker ``name`` makes its environment with these arguments besides the usual."""
        gym = self._values["gym_config"]
        own = self._values | {"gym_config": gym | {"kwargs": gym["kwargs"] | kwargs}}
        (self.folder / f"{name}.json").write_text(json.dumps(own))

    def add_events(self, endpoint: str, *options: str) -> Program:
        """Start a subscriber that prints every event."""
        return self._add("subscriber", ["-m", "ods_async", "events", endpoint, "--follow", "--json", *options])

    def add_consumer(self, name: str, endpoint: str, *options: str) -> Program:
        """Start a consumer; its counts are in :meth:`reports`."""
        command = ["-m", "ods_async.testing.trial.consumer", endpoint, "--name", name, "--folder", str(self.folder)]
        return self._add(name, [*command, *options])

    def reports(self) -> Iterator[dict[str, Any]]:
        """The last report of every consumer process there was."""
        for path in sorted(self.folder.glob("*.report")):
            with contextlib.suppress(ValueError):
                yield json.loads(path.read_text())

    def left_over(self) -> list[str]:
        """What is still there after the end, in words: processes, socket and lock files, segments of shared memory."""
        words = [f"process {pid}" for pid in self._marked()]
        keep = (".json", ".log", ".report", ".fresh")
        words += [f"file {path.name}" for path in sorted(self.folder.iterdir()) if path.suffix not in keep]
        pids = {pid for program in self.programs.values() for pid in program.pids}
        for path in Path("/dev/shm").glob("ods-*"):
            parts = path.name.split("-")
            if len(parts) > 3 and parts[2].isdigit() and int(parts[2]) in pids:
                words.append(f"segment {path.name}")
        return words

    def end(self) -> None:
        """End all; those that had to be killed are named in ``stubborn``."""
        for program in sorted(self.programs.values(), key=lambda program: program.name == "broker"):
            if not program.end():
                self.stubborn.append(program.name)

    def _add(self, name: str, arguments: list[str]) -> Program:
        program = Program(name, arguments, self.folder / f"{name}.log", self._mark)
        self.programs[name] = program
        program.start()
        return program

    def _marked(self) -> Iterator[int]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{_MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                        yield int(entry.name)


def until(deadline: float, step: float) -> Iterator[float]:
    """The seconds left, every ``step`` seconds, until the monotonic ``deadline``."""
    while (left := deadline - time.monotonic()) > 0:
        yield left
        time.sleep(min(step, left))
