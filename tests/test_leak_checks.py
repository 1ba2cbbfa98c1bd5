"""The checks in conftest.py see what they are there for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ods_async.transport.shm import sweep_segments
from tests.conftest import _sockets_in

LEAKS = {
    "channel": (
        "from ods_async.transport.sockets import Hub, open_channel\nKEEP = []",
        "KEEP.append(open_channel(Hub(), 'pull', bind=['tcp://127.0.0.1:0']))",
        "1 open channels",
    ),
    "context": (
        "import zmq\nKEEP = []",
        "KEEP.append(zmq.Context()); KEEP.append(KEEP[0].socket(zmq.PULL))",
        "context",
    ),
    "thread": (
        "import threading\nSTOP = threading.Event()",
        "threading.Thread(target=STOP.wait, args=(60,), name='forgotten', daemon=True).start()",
        "thread 'forgotten'",
    ),
    "child": (
        "import subprocess, sys\nKEEP = []",
        "KEEP.append(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE))",
        "process",
    ),
    "orphan": (
        "import subprocess, sys",
        "subprocess.run([sys.executable, '-c', 'import subprocess, sys; "
        'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)\'])',
        "process",
    ),
    "segment": (
        "from ods_async.transport.shm import create_segment\nKEEP = []",
        "KEEP.append(create_segment(5000, 1, bytes(32)))",
        "file /dev/shm/ods-",
    ),
    "socket file": (
        "import socket\nKEEP = []",
        "KEEP.append(socket.socket(socket.AF_UNIX)); KEEP[0].bind(str(ipc_folder / 'x.sock'))",
        "x.sock",
    ),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_fails_the_test_and_is_named(kind: str, tmp_path: Path) -> None:
    head, leak, told = LEAKS[kind]
    module = tmp_path / "test_leaky.py"
    module.write_text(f"{head}\n\ndef test_leaky(ipc_folder):\n    {leak}\n\ndef test_clean():\n    pass\n")
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", "pyproject.toml", "-W", "ignore"),
            *("-p", "no:cacheprovider", "-p", "no:faulthandler", str(module)),
        ],
        cwd=root,
        env=os.environ | {"ODS_TEST_PATIENCE": "0.3"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    sweep_segments()  # what the run of the "segment" case left for good
    assert run.returncode == 1, run.stdout + run.stderr
    assert "the test left behind" in run.stdout
    assert told in run.stdout
    assert "2 passed, 1 error" in run.stdout or "2 passed, 2 errors" in run.stdout


def test_a_folder_that_another_run_removes_during_the_look_does_not_disturb_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "b.sock.lock").touch()
    looking = _sockets_in(tmp_path)
    first = next(looking)
    other = tmp_path / ("two" if first.parent.name == "one" else "one")
    shutil.rmtree(other)
    assert list(looking) == []
    shutil.rmtree(first.parent)
