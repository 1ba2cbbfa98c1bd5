"""Processes under measurement: started with ``python -m benchmarks.ROLE``, spoken to in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent


class Child:
    """A process of its own. ``ask`` sends a command and waits for what it returns.

    Raises:
        RuntimeError: the command failed there (with its traceback), or the process ended, or it took too long.
    """

    def __init__(self, role: str, *args: object, python: str = sys.executable, **config: Any) -> None:
        self.role = role
        command = [python, "-m", f"benchmarks.{role}", *map(str, args)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.hello = self.ask("begin", **config)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, command: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()

    def answer(self, timeout: float = 180.0) -> Any:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise RuntimeError(f"{self.role} did not answer within {timeout:g} s") from None
        if line is None:
            raise RuntimeError(f"{self.role} ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.role}: {answer['error']}")
        return answer["result"]

    def ask(self, command: str, timeout: float = 180.0, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.answer(timeout)

    def end(self) -> None:
        self.tell("end")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put(None)


def serve(handlers: dict[str, Callable[..., Any]]) -> None:
    """Carry out commands until told to end or until the asker is gone."""
    handlers = {"memory": memory, **handlers}
    for line in sys.stdin:
        arguments = json.loads(line)
        command = arguments.pop("command")
        if command == "end":
            return
        try:
            answer = {"result": handlers[command](**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        print(json.dumps(answer), flush=True)


def memory() -> dict[str, int]:
    """Bytes in memory of this process: its own (``private``), and mapped from a segment that others map too."""
    kinds = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmHWM"):
            kinds[name] = int(value.split()[0]) * 1024
    return {"private": kinds["RssAnon"], "shared": kinds["RssShmem"], "code": kinds["RssFile"], "rss": kinds["VmRSS"]}
