"""When the owner dies, broker and workers end by themselves and leave nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ods_async.supervise.children import import_path

OWNER = """
import json, os, sys, time
import ods_async as ods
cfg = ods.OnlineDataEngineCfg(
    buffer_size=4, max_episode_steps=12, num_workers=2, initialization_timeout=60.0,
    gym_config={"id": "ods_async/Counting-v0", "kwargs": {"max_length": 9}},
)
engine = ods.OnlineDataEngine(cfg)
engine.start()
print(json.dumps({"pids": engine.pids, "endpoint": engine.endpoint}), flush=True)
if sys.argv[1] == "return":
    sys.exit(0)
if sys.argv[1] == "fork" and os.fork() == 0:
    time.sleep(30)
time.sleep(30)
"""


@pytest.mark.parametrize("how", ["kill", "fork", "return"])
def test_b10_nothing_outlives_the_owner(how: str) -> None:
    """Killed, killed while a process it forked lives on, or gone without ``stop()``."""
    command = [sys.executable, "-c", OWNER, how]
    environment = os.environ | {"PYTHONPATH": import_path()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment) as owner:
        assert owner.stdout is not None
        told = json.loads(owner.stdout.readline())
        processes = [psutil.Process(pid) for pid in told["pids"].values()]
        assert len(processes) == 3
        try:
            before = time.monotonic()
            if how != "return":
                owner.kill()
            _, alive = psutil.wait_procs(processes, timeout=10.0)
            assert alive == []
            assert time.monotonic() - before < 8.0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(owner.pid, signal.SIGKILL)
    assert list(Path("/dev/shm").glob(f"ods-*-{told['pids']['broker']}-*")) == []
    socket = Path(told["endpoint"].removeprefix("ipc://"))
    assert list(socket.parent.glob(f"{socket.name}*")) == []
