"""A simulated subscriber: the real sequencer puts events in order, and each one is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ods_async.core.events import Event
from ods_async.core.reports import ServiceBeat
from ods_async.core.requests import (
    GetStats,
    Records,
    Replay,
    Stats,
)
from ods_async.observe.sequence import EventsLost, Sequencer
from ods_async.testing.simulation.asker import Asker
from ods_async.testing.simulation.broker_peer import SimBroker

if TYPE_CHECKING:
    from ods_async.testing.simulation.service import Service

__all__ = ["SimSubscriber"]


class SimSubscriber(Asker):
    """A subscriber: puts events in order, replays what it missed, and is told what is lost.

    Args:
        service: the simulated service.
        name: its name.
    """

    def __init__(self, service: Service, name: str) -> None:
        super().__init__(service, name, shared=False)
        self.sequencer = Sequencer(0)
        self.seen: dict[int, int] = {}  # run id -> the number that comes next
        self._listening: SimBroker | None = None
        self._beat_at = 0.0
        self.world.after(0.05, self.process, self._go_on)

    def _go_on(self) -> None:
        self.world.after(0.2, self.process, self._go_on)
        broker = self.service.broker
        if self.driver.busy or broker is None or not broker.process.alive:
            return
        silent = self.world.seconds - self._beat_at > 3 * self.service.scenario.settings.heartbeat_timeout
        link = self.driver.link
        if self._listening is None or self.sequencer.restarted or link is None or not link.open or silent:
            self._beat_at = self.world.seconds
            self.ask(GetStats(), Stats, 1.0, self._acquainted)
        elif self.sequencer.wanted is not None:
            self.ask(Replay(self.sequencer.wanted, 5), Records, 1.0, self._replayed)

    def has_seen(self, run_id: int, count: int) -> bool:
        """Whether it was given, or told the loss of, the first ``count`` events of the run."""
        return self.seen.get(run_id, 0) >= count

    def _acquainted(self, stats: Any, _: BaseException | None) -> None:
        link, broker = self.driver.link, self.driver.broker
        if stats is None or link is None or broker is None or not link.open:
            self._listening = None
            return
        self._listening = broker
        broker.listen(link, self._on_broadcast, None)
        self.sequencer.begin(stats.run_id, int(stats.extra["events"]))
        self._take()

    def _on_broadcast(self, what: object) -> None:
        if isinstance(what, Event):
            self.sequencer.take_event(what)
        elif isinstance(what, ServiceBeat):
            self._beat_at = self.world.seconds
            self.sequencer.take_beat(what)
        self._take()

    def _replayed(self, records: Any, _: BaseException | None) -> None:
        if records is not None and self.sequencer.run_id is not None:
            self.sequencer.take_records(records)
            self._take()

    def _take(self) -> None:
        ready = self.sequencer.ready
        while ready:
            event = ready.popleft()
            run_id = event.run_id
            due = self.seen.get(run_id, 0)
            found = event.first if isinstance(event, EventsLost) else event.sequence
            if found != due:
                self.service.fail("sequence", f"{self.name} was given {event} where {due} of run {run_id} was due")
            count = (event.count or 0) if isinstance(event, EventsLost) else 1
            self.seen[run_id] = due + count
