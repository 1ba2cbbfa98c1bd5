"""README's figures, made from ``benchmarks/results/latest.json`` and from nothing else.

``python -m benchmarks.table`` prints the section, ``--write`` puts it into README.md; a test sees that they agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

__all__ = ["BEGIN", "END", "section"]

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results" / "latest.json"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- figures: written by python -m benchmarks.table -->"
END: Final = "<!-- figures: end -->"

_SHOWN: Final = (
    ("shared memory, one at a time", "{} blocking"),
    ("shared memory, one at a time, asyncio", "{} asyncio"),
    ("shared memory, 8 drawn ahead", "{} prefetch"),
    ("shared memory, 32 drawn ahead", "{} prefetch 32"),
    ("shared memory, in a DataLoader without workers", "{} DataLoader, 0 workers"),
    ("frames over tcp, one at a time", "{} tcp blocking"),
    ("frames over tcp, drawn ahead", "{} tcp prefetch"),
    ("*memcpy of the same bytes, by one thread*", "memcpy {}"),
    ("*raw ZeroMQ frames over tcp, asked for*", "raw zmq tcp ask {}"),
)
_PEERS: Final = (": S", ": I")


def section(found: dict[str, Any]) -> str:
    """The section for the results of one run (not a quick one), as Markdown."""
    rows = {row["name"]: row for row in found["rows"]}
    works, machine, versions = found["workloads"], found["machine"], found["versions"]
    lines = [
        BEGIN,
        "",
        f"Medians of {found['rounds']} rounds at commit {found['commit']}, on {machine['processors']} processors "
        f"({machine['processor']}),",
        f"with Python {versions['python']}, torch {versions['torch']} and pyzmq {versions['pyzmq']}; leases, stamps, "
        "events are on.",
        "S, I and V are batches of "
        + ", ".join(f"{works[name]['batch_bytes'] / 1e6:.1f} MB ({_what(works[name])})" for name in "SIV")
        + ".",
        "",
        "| | S | I | V |",
        "|---|---:|---:|---:|",
    ]
    for words, name in _SHOWN:
        cells = [_cell(rows.get(name.format(letter))) for letter in "SIV"]
        if any(cells):
            lines.append(f"| {words} | {' | '.join(cells)} |")
    for peer in sorted({name.rsplit(": ", 1)[0] for name in rows if name.endswith(_PEERS)}):
        cells = [_cell(rows.get(f"{peer}: {letter}")) for letter in "SI"]
        lines.append(f"| *{peer}* | {' | '.join(cells)} | |")
    lines += ["", *_remarks(rows), "", END]
    return "\n".join(lines)


def _what(work: dict[str, Any]) -> str:
    return f"{work['batch']} windows of {work['chunk']} steps, {work['fields']} fields"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or "batches_s" not in row:
        return ""
    rate = row["batches_s"]["median"]
    shown = f"{rate:,.0f}" if rate >= 100 else f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
    return f"{shown}/s, {row['gb_s']['median']:.1f} GB/s" if "gb_s" in row else f"{shown}/s"


def _remarks(rows: dict[str, dict[str, Any]]) -> list[str]:
    remarks = []
    if (ingest := rows.get("ingest ipc I")) is not None:
        remarks.append(
            f"A worker hands in rollouts of 57 MB at {ingest['gb_s']['median']:.1f} GB/s over ipc; the broker's loop "
            f"was held up for {ingest['loop']['worst_ms']:.1f} ms at worst, "
            f"{ingest['loop']['worst_without_waiting_ms']:.1f} apart from waits for a processor."
        )
    few, many = rows.get("S at 64 rows"), rows.get("S at 65536 rows")
    if few is not None and many is not None:
        times = few["batches_s"]["median"] / many["batches_s"]["median"]
        remarks.append(f"A batch S out of 65,536 episodes takes {times:.2f} times as long as out of 64.")
    one, four = rows.get("I, 1 consumers"), rows.get("I, 4 consumers")
    if one is not None and four is not None:
        remarks.append(
            f"Four trainers together draw {four['gb_s']['median']:.1f} GB/s of I, one alone "
            f"{one['gb_s']['median']:.1f}."
        )
    return [" ".join(remarks)] if remarks else []


def replaced(text: str, fresh: str) -> str:
    """``text`` with the section between the marks replaced."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + fresh + tail


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    arguments = parser.parse_args()
    fresh = section(json.loads(RESULTS.read_text()))
    if not arguments.write:
        print(fresh)
        return 0
    text = README.read_text()
    if BEGIN not in text or END not in text:
        print(f"README.md has no place for it: put {BEGIN} and {END} where it belongs", file=sys.stderr)
        return 1
    README.write_text(replaced(text, fresh))
    return 0


if __name__ == "__main__":
    sys.exit(main())
