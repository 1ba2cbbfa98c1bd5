from __future__ import annotations

import json

from benchmarks.table import BEGIN, END, README, RESULTS, replaced, section


def test_every_figure_in_the_readme_comes_from_the_newest_full_benchmark() -> None:
    found = json.loads(RESULTS.read_text())
    assert found["quick"] is False
    assert not found["commit"].endswith("+"), "measured on a commit, not on changed files"
    text = README.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert section(found) in text, "run python -m benchmarks.table --write"
    assert replaced(text, section(found)) == text
