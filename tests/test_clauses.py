"""The table of promises and tests is complete and up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_promise_has_a_test_and_the_table_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "scripts/clauses", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_promises_are_numbered_without_a_gap() -> None:
    numbers = [
        int(number) for number in re.findall(r"^- \*\*B(\d+)\*\*", (ROOT / "docs/promises.md").read_text(), re.M)
    ]
    assert numbers == list(range(1, 49))


def test_every_promise_has_a_test_in_the_published_suite() -> None:
    without = re.findall(r"^\| \*\*(B\d+)\*\* [^|]*\|  \|", (ROOT / "docs/clauses.md").read_text(), re.M)
    assert without == []
