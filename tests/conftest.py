"""Nothing may stay behind: after every test the process, its children and the machine are as they were before.

Compared are open channels, zmq's native threads, Python threads, processes (also orphans: they inherit a mark in their
environment), segments in /dev/shm, and ipc socket files. What is on its way out is waited for, up to a limit.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import zmq.utils.garbage

from ods_async.transport.shm import FOLDER, start_time
from ods_async.transport.sockets import open_channel_count

PATIENCE = float(os.environ.get("ODS_TEST_PATIENCE", "5"))
MARK = "ODS_TEST_RUN"
RUN = f"{os.getpid()}-{time.time_ns()}"
# Helpers that multiprocessing keeps for the life of the interpreter.
KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True)
class Snapshot:
    channels: int
    zmq_threads: frozenset[int]
    threads: frozenset[threading.Thread]
    processes: frozenset[psutil.Process]
    files: frozenset[str]

    def left_over_since(self, before: Snapshot) -> list[str]:
        """What is here and was not before, in words."""
        words = []
        if self.channels > before.channels:
            words.append(f"{self.channels - before.channels} open channels")
        extra = len(self.zmq_threads) - len(before.zmq_threads)
        if extra > 0:
            told = ", ".join(_describe_thread(number) for number in sorted(self.zmq_threads - before.zmq_threads))
            words.append(f"{extra} native threads of zmq (a context is open): {told}")
        words += [f"thread {thread.name!r}" for thread in self.threads - before.threads]
        words += [f"process {_describe(process)}" for process in self.processes - before.processes]
        words += [f"file {name}" for name in sorted(self.files - before.files)]
        return words


def take_snapshot(folders: tuple[Path, ...] = ()) -> Snapshot:
    processes, strangers = _our_processes()
    pids = {process.pid for process in processes}
    return Snapshot(
        channels=open_channel_count(),
        zmq_threads=frozenset(_zmq_threads()),
        threads=frozenset(t for t in threading.enumerate() if not _is_kept(t)),
        processes=frozenset(processes),
        files=frozenset(_segments(pids, strangers)) | frozenset(_ipc_files(folders, pids, strangers)),
    )


def check_nothing_left(before: Snapshot, folders: tuple[Path, ...], where: str) -> None:
    """Wait until all that came since ``before`` is gone, or fail and say what is not (and end stray processes)."""
    deadline = time.monotonic() + PATIENCE
    after = take_snapshot(folders)
    if after.left_over_since(before):
        gc.collect()
        for thread in after.threads - before.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        strays = list(after.processes - before.processes)
        _, alive = psutil.wait_procs(strays, timeout=max(0.0, deadline - time.monotonic()))
        told = [f"process {_describe(process)}" for process in alive]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(alive, timeout=PATIENCE)
        told += take_snapshot(folders).left_over_since(before)
        if told:
            pytest.fail(f"{where} left behind: " + "; ".join(told), pytrace=False)


def pytest_configure() -> None:
    """Programs under test inherit from here what they do about signals: as from a terminal, not as under nohup."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_by_the_run() -> Iterator[None]:
    os.environ[MARK] = RUN
    zmq.utils.garbage.gc.start()  # pyzmq's own thread lives on after its first use; let it be there from the start
    deadline = time.monotonic() + PATIENCE
    while len(list(_zmq_threads())) < 2 and time.monotonic() < deadline:  # one that carries, one that tidies up
        time.sleep(0.001)  # threads give themselves the names they are known by here a little later
    before = take_snapshot()
    yield
    check_nothing_left(before, (), "the whole run")


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest, _nothing_left_by_the_run: None) -> Iterator[None]:
    folders = tuple(
        request.getfixturevalue(name) for name in ("tmp_path", "ipc_folder") if name in request.fixturenames
    )
    before = take_snapshot(folders)
    yield
    check_nothing_left(before, folders, "the test")


@pytest.fixture
def ipc_folder() -> Iterator[Path]:
    """A private folder with a short path: ipc socket paths are limited to 107 bytes, and tmp_path is not short."""
    folder = Path(tempfile.mkdtemp(prefix="ods-t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _is_kept(thread: threading.Thread) -> bool:
    return isinstance(thread, zmq.utils.garbage.GarbageCollectorThread) or thread is threading.main_thread()


def _zmq_threads() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().startswith("ZMQ"):
                yield int(task.name)


def _describe_thread(number: int) -> str:
    task = Path(f"/proc/self/task/{number}")
    with contextlib.suppress(OSError):
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks(task) / os.sysconf("SC_CLK_TCK")
        name, waits = (task / "comm").read_text().strip(), (task / "wchan").read_text()
        return f"{name} ({number}, begun {age:.1f} s ago, {waits})"
    return f"{number}, ended meanwhile"


def start_ticks(task: Path) -> int:
    return int((task / "stat").read_text().rpartition(")")[2].split()[19])


def _our_processes() -> tuple[list[psutil.Process], bool]:
    """Children, their children, and marked orphans; and whether other test runs are active on this machine."""
    me, mark = os.getpid(), f"{MARK}={RUN}".encode()
    parents: dict[int, int] = {}
    ours: set[int] = set()
    strangers: set[int] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == me:
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            parents[pid] = int(Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            environment = Path(entry.path, "environ").read_bytes()
            if mark in environment:
                ours.add(pid)
            elif (
                MARK.encode() in environment
                or b"ODS_TRIAL=" in environment
                or b"pytest" in Path(entry.path, "cmdline").read_bytes()
            ):
                strangers.add(pid)
    above = os.getppid()
    while above:
        ours.discard(above)
        strangers.discard(above)
        above = parents.get(above, 0)
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if (parent == me or parent in ours) and pid not in ours}
        ours |= more
        grown = bool(more)
    found = []
    for pid in ours:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if not any(kept in part for part in process.cmdline() for kept in KEPT):
                found.append(process)
    return found, bool(strangers - ours)


def _segments(pids: set[int], strangers: bool) -> Iterator[str]:
    for path in FOLDER.glob("ods-*"):
        parts = path.name.split("-")
        owner = int(parts[2]) if len(parts) > 3 and parts[2].isdigit() else 0
        if _may_be_ours(owner, pids, strangers):
            yield str(path)


def _ipc_files(folders: tuple[Path, ...], pids: set[int], strangers: bool) -> Iterator[str]:
    for path in _sockets_in(*folders):
        yield str(path)
    for path in _sockets_in(Path(f"/run/user/{os.getuid()}/ods"), Path(f"/tmp/ods-{os.getuid()}")):
        owner = 0
        with contextlib.suppress(OSError, ValueError):
            owner = int(Path(f"{str(path).removesuffix('.lock')}.lock").read_text())
        if _may_be_ours(owner, pids, strangers):
            yield str(path)


def _may_be_ours(owner: int, pids: set[int], strangers: bool) -> bool:
    # A dead owner may have been another run's: then it cannot be told whose it was.
    return owner == os.getpid() or owner in pids or (start_time(owner) < 0 and not strangers)


def _sockets_in(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        for place, _, names in os.walk(folder):  # which passes over what is removed meanwhile, by another run's tests
            for path in map(Path(place).joinpath, names):
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(path.lstat().st_mode) or path.name.endswith(".sock.lock"):
                        yield path


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:160] or process.name()}"
    return str(process.pid)
