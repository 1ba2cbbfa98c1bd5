"""Consumers in processes of their own, as their test sees them."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ods_async.supervise.children import import_path

ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], object], within: float = 90.0) -> None:
    """Look again and again until it is so."""
    deadline, tick = time.monotonic() + within, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        tick.wait(0.01)


class Consumer:
    """One consumer program (``tests/e2e/consumer.py``); ``pid`` for whoever wants to stop it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.consumer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": import_path()},
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._read = b""
        self.pid = self._process.pid

    def tell(self, do: str, **arguments: Any) -> None:
        """Give it a job."""
        self.write(json.dumps({"do": do, **arguments}))

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, key: str, within: float = 90.0) -> Any:
        """What it says about ``key`` next."""
        deadline = time.monotonic() + within
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._read.partition(b"\n")
                if newline:
                    self._read = rest
                    said = json.loads(line)
                    assert key in said, f"expected {key}, the consumer says {said}"
                    return said[key]
                left = deadline - time.monotonic()
                assert left > 0, f"the consumer says nothing about {key} for {within} s"
                selector.select(left)
                more = self._process.stdout.read()
                assert more != b"", f"the consumer ended with {self._process.wait()}"
                self._read += more or b""

    def end(self) -> None:
        """No more jobs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
