"""The fault model in docs/faults.md is whole, and each of its rows names proofs that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTIES = ("Owner", "Broker", "Worker", "Consumer", "Subscriber")
FAULTS = (
    "raise",
    "exit",
    "SIGKILL",
    "SIGSTOP, SIGCONT",
    "slow",
    "network cut without a close",
    "network delay",
    "clock set back",
    "disk or /dev/shm full",
    "garbage",
    "second broker on the endpoint",
)
CLOCKS = re.compile(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow)\(|time\.(localtime|gmtime|ctime)\(")
# Where the wall clock may be read: the stamp on accepted episodes, and names of test runs.
WALL_CLOCK = {"ods_async/broker/service.py", "ods_async/testing"}


def sections() -> dict[str, dict[str, list[str]]]:
    """Party -> fault -> the other cells of its row."""
    found: dict[str, dict[str, list[str]]] = {}
    party = ""
    for line in (ROOT / "docs" / "faults.md").read_text().splitlines():
        if line.startswith("## "):
            party = line[3:].strip()
        elif line.startswith("| ") and party in PARTIES:
            fault, *rest = [cell.strip() for cell in line.strip("|").split("|")]
            found.setdefault(party, {})[fault] = rest
    return found


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("party", PARTIES)
def test_every_fault_of_every_party_is_described_and_names_its_proof(party: str) -> None:
    rows = sections()[party]
    assert [fault for fault in rows if fault != "fault" and not fault.startswith("-")] == list(FAULTS)
    for fault in FAULTS:
        *words, proofs = rows[fault]
        assert len(words) == 4, fault
        assert all(words), fault
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", proofs)
        assert named or proofs.startswith("–"), f"{party}, {fault}: no proof"
        for path, function in named:
            assert (ROOT / path).is_file(), f"{party}, {fault}: {path} is missing"
            assert not function or function in functions(ROOT / path), (
                f"{party}, {fault}: {path}::{function} is missing"
            )


def test_no_duration_and_no_deadline_comes_from_a_clock_that_can_be_set() -> None:
    """C33: the wall clock is read in one place only, for the stamp that says when an episode was accepted."""
    reading = {
        str(path.relative_to(ROOT)) for path in (ROOT / "ods_async").rglob("*.py") if CLOCKS.search(path.read_text())
    }
    assert {name for name in reading if not any(name.startswith(place) for place in WALL_CLOCK)} == set()
    assert len(CLOCKS.findall((ROOT / "ods_async/broker/service.py").read_text())) == 1
