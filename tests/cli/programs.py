"""Runs the command line as a user does: as programs of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ods_async.supervise.children import import_path

SECONDS = 60.0


def environment(**extra: str) -> dict[str, str]:
    cleaned = {key: value for key, value in os.environ.items() if key != "ODS_OWNER_TOKEN"}
    return cleaned | {"PYTHONPATH": import_path()} | extra


def run(*arguments: str, seconds: float = SECONDS, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ods_async", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment(**extra), check=False
    )


def run_json(*arguments: str) -> Any:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program that goes on; ended at the end if it is still there."""
    command = [sys.executable, "-m", "ods_async", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as program:
        try:
            yield program
        finally:
            if program.poll() is None:
                program.terminate()
                try:
                    program.wait(10.0)
                except subprocess.TimeoutExpired:
                    os.killpg(program.pid, signal.SIGKILL)
            program.communicate()


def line_of(program: subprocess.Popen[str]) -> dict[str, Any]:
    """The next JSON line."""
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, program.stderr.read() if program.stderr is not None else ""
    found: dict[str, Any] = json.loads(line)
    return found


def ends(program: subprocess.Popen[str], within: float) -> tuple[int, float]:
    """The exit code, and how long it took."""
    before = time.monotonic()
    code = program.wait(within)
    return code, time.monotonic() - before


def settings(folder: Path, **values: Any) -> str:
    path = folder / "settings.json"
    path.write_text(json.dumps(values))
    return str(path)
