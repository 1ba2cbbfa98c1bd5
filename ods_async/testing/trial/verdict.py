"""What a trial must show afterwards: pure checks over what was printed and counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ods_async.testing.trial.witness import RunBook

__all__ = ["events_faults", "fatal_words", "run_faults", "sum_of"]


def events_faults(starts: Sequence[Sequence[str]]) -> tuple[int, list[str]]:
    """Look at what a subscriber printed: per start and run, numbers without a gap that was not told.

    Args:
        starts: the lines of every start of the program, JSON and others.

    Returns:
        How many events there were, and what is wrong.
    """
    count, faults = 0, []
    for lines in starts:
        due: dict[int, int] = {}
        for line in lines:
            if not line.startswith("{"):
                continue
            try:
                event = json.loads(line)
            except ValueError:
                continue  # cut off in the middle, when the program was killed
            run = event["run_id"]
            if event["kind"] == "events_lost":
                due[run] = event["first"] + (event["count"] or 0)
                continue
            count += 1
            if event["sequence"] != due.get(run, event["sequence"]):
                faults.append(f"run {run}: event {due[run]} was due, {event['sequence']} came")
            due[run] = event["sequence"] + 1
    return count, faults


def run_faults(books: Iterable[RunBook]) -> list[str]:
    """What cannot be in the books of a witness."""
    faults = []
    for book in books:
        if book.twice:
            faults.append(f"run {book.run_id}: episodes {book.twice[:5]} were published twice")
        if book.backwards:
            faults.append(f"run {book.run_id}: {book.backwards} events came out of order")
    return faults


def fatal_words(starts: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a program that must never raise: its tracebacks, with what stands around them."""
    found = []
    for lines in starts:
        for number, line in enumerate(lines):
            if line.startswith("{"):
                continue  # an event that tells of somebody else's
            if "Traceback" in line or "Fatal Python error" in line or "the broker erred" in line:
                found.append("\n".join(lines[max(0, number - 2) : number + 25]))
                break
    return found


def sum_of(reports: Iterable[dict[str, Any]]) -> tuple[Counter[str], Counter[str], list[str], float]:
    """The consumers' counts, errors and faults together, and the longest that any call took."""
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    faults: list[str] = []
    slowest = 0.0
    for report in reports:
        counts.update(report["counts"])
        errors.update(report["errors"])
        faults += report["faults"]
        slowest = max(slowest, report["slowest"])
    return counts, errors, faults, slowest
