"""C46 for the trials: what they started is ended with them, also when a shell had them ignore SIGINT."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ods_async.supervise.children import import_path


@pytest.mark.parametrize(
    ("trial", "number"),
    [("soak", signal.SIGTERM), ("chaos", signal.SIGINT)],
    ids=["soak-SIGTERM", "chaos-SIGINT"],
)
def test_c46_a_trial_that_is_told_to_end_ends_its_programs(trial: str, number: int, tmp_path: Path) -> None:
    """C46"""
    arguments = ["--log", "figures.jsonl"] if trial == "soak" else []
    in_background = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    with subprocess.Popen(
        [*in_background, sys.executable, "-m", f"ods_async.testing.{trial}", "--minutes", "9", *arguments],
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": import_path(), "TMPDIR": str(tmp_path)},
    ) as program:
        deadline, tick = time.monotonic() + 60.0, threading.Event()
        while not (children := psutil.Process(program.pid).children(recursive=True)):
            assert program.poll() is None
            assert time.monotonic() < deadline
            tick.wait(0.02)
        program.send_signal(number)
        assert program.wait(60.0) == 128 + number
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
