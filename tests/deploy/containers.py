"""Programs as process 1 of a pid namespace with a host name of its own: what a container engine does, without one."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.programs import environment

PYTHON = sys.executable
ODS = (PYTHON, "-m", "ods_async")
_NEW = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child=SIGKILL")
_FORMS = (_NEW, (*_NEW, "--user", "--map-root-user"))


@functools.cache
def _form() -> tuple[str, ...] | str:
    reasons = []
    for form in _FORMS:
        try:
            done = subprocess.run(
                [*form, "hostname", "probe"], capture_output=True, text=True, timeout=20.0, check=False
            )
        except OSError as error:
            return f"no unshare here: {error}"
        if done.returncode == 0:
            return form
        reasons.append(done.stderr.strip())
    return f"namespaces are not permitted here: {'; '.join(reasons)}"


def need_namespaces() -> None:
    if isinstance(form := _form(), str):
        pytest.skip(form)


class Contained:
    """One program; everything it says is kept in ``said``, standard output and error together."""

    def __init__(self, command: Sequence[str], hostname: str, extra: Mapping[str, str]) -> None:
        form = _form()
        assert not isinstance(form, str)
        self._outer = subprocess.Popen(
            [*form, "sh", "-c", 'hostname "$0" && exec "$@"', hostname, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(PYTHONUNBUFFERED="1", **extra),
            start_new_session=True,
        )
        self.hostname = hostname
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        inside = eventually(lambda: psutil.Process(self._outer.pid).children(), f"{command} to start")
        self.pid: int = inside[0].pid

    def _read(self) -> None:
        assert self._outer.stdout is not None
        for line in self._outer.stdout:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()

    @property
    def said(self) -> str:
        with self._news:
            return "".join(self._lines)

    def hear(self, words: str, times: int = 1, seconds: float = 60.0) -> None:
        """Wait until so many lines hold ``words``."""
        with self._news:
            heard = self._news.wait_for(lambda: sum(words in line for line in self._lines) >= times, seconds)
        assert heard, f"{words!r} was not said {times} times, but: {self.said}"

    def handles(self, number: int) -> bool:
        """Whether the program has asked for this signal yet."""
        words = Path(f"/proc/{self.pid}/status").read_text().split()
        return bool(int(words[words.index("SigCgt:") + 1], 16) >> (number - 1) & 1)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, within: float) -> tuple[int, float]:
        """Exit code, and the seconds until then."""
        before = time.monotonic()
        try:
            code = self._outer.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {within} s and said: {self.said}") from None
        took = time.monotonic() - before
        self._reader.join()
        return code, took

    def inside(self, command: Sequence[str], seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a further command in this container, as ``docker exec`` and health checks do."""
        enter = ["nsenter", "--target", str(self.pid), "--pid", "--uts", "--mount"]
        if "--user" in (_form() or ()):
            enter += ["--user", "--preserve-credentials"]
        return subprocess.run(
            [*enter, *command], capture_output=True, text=True, timeout=seconds, env=environment(), check=False
        )

    def close(self) -> None:
        if self._outer.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._outer.wait()
        self._reader.join()
        assert self._outer.stdout is not None
        self._outer.stdout.close()


@contextlib.contextmanager
def contained(*command: str, hostname: str = "box", **extra: str) -> Iterator[Contained]:
    program = Contained(command, hostname, extra)
    try:
        yield program
    finally:
        program.close()


def eventually(look: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """The first true answer of ``look``."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)
    return found
