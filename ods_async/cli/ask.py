"""The verbs that ask one thing: stats, budget, refill, stop."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from ods_async.cli.output import print_json, print_pairs, to_json
from ods_async.cli.tokens import find_token
from ods_async.core.requests import (
    BudgetSnapshot,
    Done,
    GenerationPromise,
    GetBudget,
    GetStats,
    GetStatus,
    Refill,
    ServiceStatus,
    Stats,
    Stop,
    WaitGeneration,
)
from ods_async.errors import ClosedError, PeerError, RequestTimeoutError
from ods_async.supervise.line import Line

__all__ = ["budget", "refill", "stats", "stop"]

_LOOK_SECONDS = 0.05
_WELL = ("starting", "idle", "busy")


def _line(options: argparse.Namespace) -> Line:
    return Line(
        options.endpoint,
        role="observer",
        name=f"ods-async {options.verb}",
        connect_timeout=options.timeout,
        keys=options.keys,
    )


def stats(options: argparse.Namespace) -> int:
    """Print the counters and the service's state."""
    with _line(options) as line:
        counters = to_json(line.ask(GetStats(), Stats, options.timeout))
        status = to_json(line.ask(GetStatus(), ServiceStatus, options.timeout))
    ill = _ailments(status, options.worker) if options.check or options.worker else []
    for words in ill:
        print(f"ods-async: error: {words}", file=sys.stderr)
    if options.json:
        print_json({"endpoint": options.endpoint, "stats": counters, "status": status})
        return int(bool(ill))
    workers: list[dict[str, Any]] = status.pop("workers")
    print_pairs({"endpoint": options.endpoint} | status)
    more: dict[str, Any] = counters.pop("extra")
    print_pairs({key: value for key, value in (counters | more).items() if key not in status})
    for worker in workers:
        print(
            f"worker {worker['worker_id']}: {worker['state']}, {worker['rollouts']} rollouts, "
            f"{worker['failures']} failures, {worker['restarts']} restarts, heard {worker['silent_for']:.1f} s ago"
        )
    return int(bool(ill))


def _ailments(status: dict[str, Any], names: list[str]) -> list[str]:
    """Why a service, or one of the named workers, does not do what it is there for."""
    found = []
    if status["state"] not in ("STARTING", "READY"):
        found.append(
            f"the service is {status['state']}" + (f": {status['last_failure']}" * bool(status["last_failure"]))
        )
    states = {worker["worker_id"]: worker["state"] for worker in status["workers"]}
    told = {name: states.get(name, "not known to the broker") for name in names}
    return found + [f"worker {name} is {state}" for name, state in told.items() if state not in _WELL]


def budget(options: argparse.Namespace) -> int:
    """Print the budget audit."""
    with _line(options) as line:
        snapshot = line.ask(GetBudget(), BudgetSnapshot, options.timeout)
    if options.json:
        print_json(snapshot)
        return 0
    if not snapshot.enabled:
        print("sampling budgets are off: episodes may be drawn without bound")
        return 0
    print(f"{'slot':>6} {'episode':>10} {'generation':>10} {'assigned':>10} {'delivered':>10} {'remaining':>10}")
    for row in snapshot.rows:
        numbers = (row.episode_id, row.generation, row.assigned, row.delivered, row.remaining)
        print(f"{row.slot:>6} " + " ".join(f"{number:>10}" for number in numbers) + (" locked" if row.locked else ""))
    print(f"remaining {snapshot.unlocked_remaining_chunks}, delivered in all {snapshot.total_delivered_chunks}")
    return 0


def refill(options: argparse.Namespace) -> int:
    """Ask for the next generation; with ``--wait`` return when it is complete."""
    token = find_token(options.endpoint, "refill")
    deadline = time.monotonic() + options.timeout
    with _line(options) as line:
        generation = line.ask(Refill(token), GenerationPromise, options.timeout).generation
        if options.wait:
            line.ask(WaitGeneration(generation), Done, max(0.001, deadline - time.monotonic()))
    if options.json:
        print_json({"generation": generation, "complete": bool(options.wait)})
    else:
        print(f"generation {generation} {'is complete' if options.wait else 'was requested'}")
    return 0


def stop(options: argparse.Namespace) -> int:
    """End the service; fails with the reason when the service had failed."""
    token = find_token(options.endpoint, "stop")
    with _line(options) as line:
        line.connect()
        if not options.json:
            print(f"asking workers to end (up to {options.grace:g} s)", file=sys.stderr)
        line.ask(Stop(token, options.grace), Done, options.grace + options.timeout)
        _wait_until_gone(line, token, options.timeout)
    if options.json:
        print_json({"stopped": options.endpoint})
    else:
        print(f"stopped {options.endpoint}")
    return 0


def _wait_until_gone(line: Line, token: bytes, timeout: float) -> None:
    """Return when the broker's address is free again, so that a new one can be started at once."""
    deadline = time.monotonic() + timeout
    again: Stop | GetStatus = Stop(token, 0.0)  # the second time means: do not stay for late questions
    while (left := deadline - time.monotonic()) > 0:
        try:
            line.ask(again, Done if isinstance(again, Stop) else ServiceStatus, min(left, 1.0))
        except ClosedError:
            pass
        except (PeerError, RequestTimeoutError):
            return
        again = GetStatus()
        time.sleep(_LOOK_SECONDS)
