"""Two logs of events: the owner's, which loses nothing and holds the producer back, and everyone's, which is a ring."""

from __future__ import annotations

import dataclasses
from collections import deque
from itertools import islice
from typing import Any, Final

from ods_async.core.events import KINDS, Event

__all__ = ["TEXT_BYTES", "EventLog", "LifecycleLog", "bounded_text"]

TEXT_BYTES: Final = 65_536  # the longest text an event carries (a traceback, say)


class LifecycleLog:
    """The owner's records of published and evicted episodes, kept until the owner has received them (B40).

    Args:
        capacity: how many records it holds; 0 switches it off: there is always room, and nothing is kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._records: deque[Event] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def room_for(self, n: int) -> bool:
        """Whether ``n`` more records fit. While they do not, the producer waits for a drain."""
        return self.capacity == 0 or len(self._records) + n <= self.capacity

    def append(self, record: Event) -> None:
        """Keep one more record.

        Raises:
            ValueError: no room; a record is never dropped, so ask :meth:`room_for` before producing it.
        """
        if self.capacity == 0:
            return
        if len(self._records) >= self.capacity:
            raise ValueError(f"the lifecycle log is full with {self.capacity} records; room_for() was not asked")
        self._records.append(record)

    def forget(self, received: int) -> int:
        """Let go of the records numbered below ``received``, which the owner has; how many those were."""
        gone = 0
        while self._records and self._records[0].sequence < received:
            self._records.popleft()
            gone += 1
        return gone

    def oldest(self, limit: int) -> list[Event]:
        """The oldest records, at most ``limit`` of them, in order. They stay until :meth:`forget`."""
        return list(islice(self._records, max(0, limit)))


class EventLog:
    """The newest events of the run, numbered from 0 without a gap, for subscribers that come late or miss some (B41).

    Args:
        history: how many events to hold, at least 1.
        history_bytes: about how much memory they may take; the oldest go first. The newest event is always held.
    """

    def __init__(self, history: int, history_bytes: int = 64 * 1024 * 1024) -> None:
        if history < 1:
            raise ValueError(f"an event log must hold at least one event, found history={history}")
        self.history = history
        self.history_bytes = history_bytes
        self._events: deque[tuple[Event, int]] = deque()
        self._bytes = 0
        self._next = 0

    @property
    def next(self) -> int:
        """The sequence number the next event will get."""
        return self._next

    @property
    def oldest(self) -> int:
        """The oldest sequence number still held; equal to :attr:`next` while there is none."""
        return self._next - len(self._events)

    def append(self, event: Event) -> Event:
        """Keep the event numbered :attr:`next`; it comes back with its texts bounded.

        Raises:
            ValueError: it has another number.
        """
        if event.sequence != self._next:
            raise ValueError(f"event {event.kind!r} should have sequence {self._next}, found {event.sequence}")
        event, size = _bounded(event)
        self._next += 1
        self._events.append((event, size))
        self._bytes += size
        while len(self._events) > self.history or (self._bytes > self.history_bytes and len(self._events) > 1):
            self._bytes -= self._events.popleft()[1]
        return event

    def since(self, sequence: int, limit: int) -> tuple[list[Event], int, int]:
        """``(events, oldest, next)``: at most ``limit`` events from ``sequence`` on, oldest first.

        When ``oldest > sequence``, events ``sequence … oldest-1`` are lost for good and the list starts at ``oldest``.
        When the last event returned is not ``next - 1``, ask again from the one after it.
        """
        skip = max(0, sequence - self.oldest)
        found = [event for event, _ in islice(self._events, skip, skip + max(0, limit))]
        return found, self.oldest, self._next


def bounded_text(text: str, limit: int = TEXT_BYTES) -> str:
    """``text``, cut in the middle (with a note there) when it takes more than ``limit`` UTF-8 bytes.

    The end is favoured because a traceback says there what happened.
    """
    if len(text) * 4 <= limit:
        return text
    raw = text.encode(errors="replace")
    if len(raw) <= limit:
        return text
    note = f"\n… {len(raw)} bytes, the middle is left out …\n"
    room = max(0, limit - len(note.encode()))
    head = raw[: room // 4].decode(errors="ignore")
    tail = raw[len(raw) - (room - room // 4) :].decode(errors="ignore")
    return head + note + tail


def _named(*types: str) -> dict[type[Event], tuple[str, ...]]:
    return {
        cls: tuple(field.name for field in dataclasses.fields(cls) if field.type in types) for cls in KINDS.values()
    }


_TEXTS: Final = _named("str")
_RUNS: Final = _named("Runs")


def _bounded(event: Event) -> tuple[Event, int]:
    """The event with its texts cut to :data:`TEXT_BYTES`, and about how many bytes it takes."""
    size = 256
    changes: dict[str, Any] = {}
    for name in _TEXTS[type(event)]:
        value = getattr(event, name)
        text = bounded_text(value)
        if text is not value:
            changes[name] = text
        size += 4 * len(text)
    for name in _RUNS[type(event)]:
        size += 120 * len(getattr(event, name))  # pairs of numbers
    return (dataclasses.replace(event, **changes) if changes else event), size
