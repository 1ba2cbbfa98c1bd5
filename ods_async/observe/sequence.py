"""Numbered events in order, and what to do about the gaps. Pure."""

from __future__ import annotations

import collections
from dataclasses import dataclass

from ods_async.core.events import Event
from ods_async.core.reports import ServiceBeat
from ods_async.core.requests import Records
from ods_async.wire.codec import event_from_record

__all__ = ["EventsLost", "Sequencer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsLost:
    """Events that cannot be had any more.

    Attributes:
        run_id: whose events.
        first: the number of the first one lost.
        count: how many, or None when that cannot be known (the broker was restarted).
        reason: in words.
    """

    kind = "events_lost"
    run_id: int
    first: int
    count: int | None
    reason: str


class Sequencer:
    """Puts events from broadcasts and replays in order, each once.

    Args:
        since: the first number wanted; None: what happens from now on.
    """

    def __init__(self, since: int | None) -> None:
        self.run_id: int | None = None
        self.ready: collections.deque[Event | EventsLost] = collections.deque()
        self.restarted = False
        self._since = since
        self._expected = 0
        self._target = 0  # numbers below this exist

    @property
    def expected(self) -> int:
        """The number that comes next."""
        return self._expected

    @property
    def wanted(self) -> int | None:
        """From which number on a replay is needed; None when nothing is missing."""
        return self._expected if self._target > self._expected else None

    def begin(self, run_id: int, next_sequence: int) -> None:
        """Connected to ``run_id``, whose next event will have that number."""
        self.restarted = False
        if self.run_id is None:
            self._expected = next_sequence if self._since is None else self._since
        elif self.run_id != run_id:
            reason = f"the broker was restarted; run {run_id} begins"
            self.ready.append(EventsLost(run_id=self.run_id, first=self._expected, count=None, reason=reason))
            self._expected = 0
        self.run_id = run_id
        self._target = next_sequence

    def take_event(self, event: Event) -> None:
        """An event that was broadcast."""
        if event.run_id != self.run_id:
            self.restarted = True
        elif event.sequence == self._expected:
            self.ready.append(event)
            self._expected += 1
        elif event.sequence > self._expected:
            # It is not kept: the replay that fills the gap brings it again, and memory stays bounded.
            self._target = max(self._target, event.sequence + 1)

    def take_beat(self, beat: ServiceBeat) -> None:
        """A beat tells how far the numbers are, so that a missed last event is missed at once."""
        if beat.run_id != self.run_id:
            self.restarted = True
        else:
            self._target = max(self._target, beat.next_sequence)

    def take_records(self, records: Records) -> None:
        """The answer to a replay from :attr:`wanted` on.

        Raises:
            ProtocolError: an event in it is none.
        """
        assert self.run_id is not None
        before = self._expected
        for event in map(event_from_record, records.events):
            if event.sequence < self._expected or event.run_id != self.run_id:
                continue
            self._lost_until(event.sequence)
            self.ready.append(event)
            self._expected = event.sequence + 1
        self._lost_until(min(records.oldest, records.next))
        self._target = max(self._target, records.next)
        if self._expected == before:
            self._target = self._expected  # the broker has nothing to offer; do not ask for it over and over

    def _lost_until(self, sequence: int) -> None:
        assert self.run_id is not None
        if sequence > self._expected:
            count = sequence - self._expected
            reason = f"missed {count}: the broker holds only newer ones"
            self.ready.append(EventsLost(run_id=self.run_id, first=self._expected, count=count, reason=reason))
            self._expected = sequence
