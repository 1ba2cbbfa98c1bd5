from __future__ import annotations

import os
from pathlib import Path

import pytest

from ods_async.testing import soak
from ods_async.testing.soak import growth_of
from ods_async.testing.trial.house import figures_of


def samples(memory: list[int], fds: list[int], threads: list[int]) -> list[dict[str, object]]:
    rows = zip(memory, fds, threads, strict=True)
    return [{"process": "p", "private_bytes": m, "fds": f, "threads": t} for m, f, t in rows]


def test_growth_compares_the_medians_of_the_first_and_last_quarter() -> None:
    flat = growth_of(samples([5_000_000, 9_000_000] * 8, [7] * 16, [3] * 16), 1.0, 0, 0)
    assert [growth.too_much for growth in flat] == [False] * 3
    grown = growth_of(samples([1_000_000 * n for n in range(16)], list(range(16)), [3] * 15 + [90]), 8.0, 5, 0)
    assert {growth.figure: growth.too_much for growth in grown} == {
        "private_bytes": True,
        "fds": True,
        "threads": False,
    }
    assert {growth.figure: (growth.first, growth.last, growth.most) for growth in grown}["fds"] == (1.5, 13.5, 15)


def test_figures_of_this_process_and_of_none() -> None:
    figures = figures_of(os.getpid())
    assert figures is not None
    assert figures.private_bytes > 1_000_000
    assert figures.fds >= 3
    assert figures.threads >= 1
    assert figures_of(2**22 + 1) is None


@pytest.mark.slow
def test_a_short_soak_runs_and_finds_no_torn_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself; what a minute says about memory is nothing, so growth is allowed here."""
    log = tmp_path / "soak.jsonl"
    arguments = ["--minutes", "0.1", "--rate", "5", "--every", "1", "--log", str(log)]
    assert soak.main([*arguments, "--memory-mb", "1000", "--fds", "100", "--threads", "100"]) == 0
    told = capsys.readouterr().out
    assert "0 torn" in told
    for name in ("broker", "worker-1", "asyncio-shared", "blocking-shared", "blocking-frames"):
        assert name in told
        assert name in log.read_text()
