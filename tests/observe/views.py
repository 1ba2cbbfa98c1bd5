"""Views to show: made up, with whatever workers call themselves."""

from __future__ import annotations

from typing import Any

from ods_async.core import events as ev
from ods_async.core.requests import ServiceStatus, Stats, WorkerStatus
from ods_async.observe.fold import fold_all
from ods_async.observe.sequence import EventsLost
from ods_async.observe.view import View

HOSTILE = (
    "w\"0'",
    "<script>alert(1)</script>",
    "back\\slash",
    "line\nend",
    "</td></table><img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    'x" onmouseover="alert(1)',
    "\x00\x1b[31m",
    "–é☕",
)
"""What a worker may call itself."""


def failure(sequence: int, worker_id: str, message: str = "bad") -> ev.WorkerFailure:
    return ev.WorkerFailure(
        sequence=sequence,
        run_id=7,
        monotonic_ns=10**9 * sequence,
        worker_id=worker_id,
        module="builtins",
        type_name="ValueError",
        message=message,
        traceback_text="Traceback …\n  line",
        phase="step",
        step=3,
    )


def stats(**changes: Any) -> Stats:
    values: dict[str, Any] = {
        "run_id": 7,
        "requested_generation": 3,
        "completed_generation": 2,
        "successful_episodes": 11,
        "failed_episodes": 1,
        "generated_frames": 220,
        "production_seconds": 1.5,
        "sampled_chunks": 64_000,
        "valid_frames": 210,
        "extra": {"state": "READY", "sampled_batches": 1000, "retained_episodes": 4, "sessions": 5},
    }
    return Stats(**(values | changes))


def status(*workers: WorkerStatus, **changes: Any) -> ServiceStatus:
    values: dict[str, Any] = {
        "run_id": 7,
        "state": "READY",
        "requested_generation": 3,
        "completed_generation": 2,
        "episodes": 4,
        "slots": 6,
        "waiting": "",
        "last_failure": "",
        "workers": workers,
        "malformed_messages": 0,
        "refused_rollouts": 0,
        "open_leases": 2,
    }
    return ServiceStatus(**(values | changes))


def view_of(*names: str, **changes: Any) -> View:
    """A view of a service whose workers have these names; each has failed once, with its name for a reason."""
    events = [failure(number, name, name) for number, name in enumerate(names)]
    workers = [WorkerStatus(name, "idle", 5 + number, 1, 2, 0.25) for number, name in enumerate(names)]
    values: dict[str, Any] = {
        "connected": True,
        "silent_for": 0.1,
        "runs": 1,
        "stats": stats(),
        "status": status(*workers),
        "snapshot": fold_all(events),
        "events": tuple(events),
        "windows_per_second": 1234.5,
        "rates": (None, 3.0, 1234.5),
    }
    return View("tcp://sim-host:5555", **(values | changes))


def lost(count: int | None = 5, reason: str = "the broker holds no more of them") -> EventsLost:
    return EventsLost(run_id=7, first=3, count=count, reason=reason)
