"""Every example runs to its last line, as a user would start it. The demo's line has the form README.md promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[0-9]*.py"))
# Enough to run every line of the script; what it teaches a policy shows only in the whole run.
SHORTER = {"01_train_while_it_streams.py": ("--batches", "200", "--evaluations", "1")}


def run(script: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::ResourceWarning"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES)
def test_the_example_runs_to_its_last_line(script: str) -> None:
    assert run(script, *SHORTER.get(script, ())).splitlines()[-1].startswith("example ok: ")


@pytest.mark.slow
@pytest.mark.metaworld
def test_the_demo_streams_three_tasks_over_both_data_paths_while_two_refills_happen() -> None:
    last = run("demo.py").splitlines()[-1]
    found = re.fullmatch(
        r"demo ok: (\d+) episodes, (\d+) generations, (\d+) batches, "
        r"(\d+) batches/s shared memory, (\d+) batches/s tcp",
        last,
    )
    assert found, last
    episodes, generations, batches, *_ = map(int, found.groups())
    assert episodes >= 72
    assert generations >= 3
    assert batches >= 500
