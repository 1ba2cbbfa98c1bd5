"""What is shown of a service: its own counters, what its events add up to, and how well it can be seen. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ods_async.core.events import Event, to_plain
from ods_async.core.requests import ServiceStatus, Stats
from ods_async.observe.fold import Snapshot
from ods_async.observe.sequence import EventsLost

__all__ = ["View", "lost_in_words", "to_json"]


@dataclass(frozen=True, slots=True)
class View:
    """A service at one moment, as somebody sees it who asks and listens.

    Attributes:
        endpoint: its address.
        connected: it answered the last time it was asked.
        problem: why it did not, or why its events cannot be had; empty when all is well.
        silent_for: seconds since it last answered; None: never yet.
        runs: how many runs were seen; a broker that was started anew is another one.
        stats: its counters, as last told.
        status: its state and workers, as last told.
        snapshot: what the events of this run add up to.
        origin_ns: the broker's clock at the first event of this run that was seen.
        events: the last few, newest last.
        gaps: the last few stretches of events that cannot be had any more, newest last.
        missed_events: how many events are known to be missing, of all runs.
        windows_per_second: how many windows were drawn lately, or None while that is not known.
        rates: the same for the last looks, oldest first.
    """

    endpoint: str
    connected: bool = False
    problem: str = ""
    silent_for: float | None = None
    runs: int = 0
    stats: Stats | None = None
    status: ServiceStatus | None = None
    snapshot: Snapshot = dataclasses.field(default_factory=Snapshot)
    origin_ns: int = 0
    events: tuple[Event | EventsLost, ...] = ()
    gaps: tuple[EventsLost, ...] = ()
    missed_events: int = 0
    windows_per_second: float | None = None
    rates: tuple[float | None, ...] = ()


def lost_in_words(gap: EventsLost) -> str:
    """``missed 7 events from number 3 on: …``."""
    count = "an unknown number of" if gap.count is None else str(gap.count)
    return f"run {gap.run_id}: missed {count} events from number {gap.first} on: {gap.reason}"


def to_json(view: View) -> dict[str, Any]:
    """The view for programs; slots by their number only. Numbers that JSON has no word for are null."""
    snapshot = {field.name: getattr(view.snapshot, field.name) for field in dataclasses.fields(view.snapshot)}
    slots: Mapping[int, tuple[int, int, int]] = snapshot.pop("slots")
    snapshot |= {"occupied_slots": len(slots), "retained_steps": sum(steps for _, _, steps in slots.values())}
    shown = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
    found: dict[str, Any] = _plain(shown | {"snapshot": snapshot, "events": [_event(event) for event in view.events]})
    return found


def _event(event: Event | EventsLost) -> dict[str, Any]:
    if isinstance(event, EventsLost):
        return {"kind": event.kind} | dataclasses.asdict(event)
    plain = to_plain(event)
    return {key: value for key, value in plain.items() if not key.endswith("_indices")}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)
