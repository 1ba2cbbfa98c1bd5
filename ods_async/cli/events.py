"""``events``: print the run's numbered events, those held and, with ``--follow``, those to come."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from ods_async.cli.output import print_json
from ods_async.core.events import to_plain
from ods_async.observe.subscriber import EventsLost, EventSubscriber

__all__ = ["run"]

_COMMON = ("kind", "sequence", "run_id", "monotonic_ns")


def run(options: argparse.Namespace) -> int:
    """Print events until there are no more, or, following, until the service or a signal ends it."""
    wanted = None if options.kind is None else set(options.kind)
    since = 0 if options.since is None else options.since
    subscriber = EventSubscriber(
        options.endpoint,
        since=since,
        follow=options.follow,
        connect_timeout=options.timeout,
        keys=options.keys,
        reconnect_timeout=options.timeout,
    )
    first: int | None = None
    with subscriber:
        for item in subscriber:
            if isinstance(item, EventsLost):
                lost = {"kind": "events_lost"} | dataclasses.asdict(item)
                print_json(lost) if options.json else print(_line(lost, None), flush=True)
            elif wanted is None or item.kind in wanted:
                first = item.monotonic_ns if first is None else first
                print_json(to_plain(item)) if options.json else print(_line(to_plain(item), first), flush=True)
    return 0


def _line(plain: Mapping[str, Any], first_ns: int | None) -> str:
    """``    12  +3.402 s  published          slot=3 …``; long lists by their length, long texts by their first line.

    Which steps are valid and eligible is for programs (``--json``); people see how many.
    """
    if first_ns is None:
        head = f"{'':>7}  {'':>10}"
    else:
        head = f"{plain['sequence']:>7}  {(plain['monotonic_ns'] - first_ns) * 1e-9:>+9.3f}s"
    told = {key: value for key, value in plain.items() if key not in _COMMON and not key.endswith("_indices")}
    rest = " ".join(f"{key}={_short(value)}" for key, value in told.items())
    return f"{head}  {plain['kind']:<20} {rest}"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple) and len(value) > 4:
        return f"[{len(value)}]"
    if isinstance(value, str):
        lines = value.splitlines() or [""]
        return repr(lines[0][:120] + (" …" if len(lines) > 1 or len(lines[0]) > 120 else ""))
    return str(value)
