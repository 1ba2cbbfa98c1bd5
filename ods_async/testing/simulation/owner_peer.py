"""The simulated owner: one thread of it rules, another takes the lifecycle records."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ods_async.core.requests import (
    Done,
    GenerationPromise,
    Refill,
    ReportExit,
    Request,
    Stop,
)
from ods_async.testing.simulation.asker import Asker
from ods_async.testing.simulation.broker_peer import OWNER

if TYPE_CHECKING:
    from ods_async.testing.simulation.service import Service

__all__ = ["SimDrainer", "SimOwner"]


class SimOwner(Asker):
    """The owner: refills, reports exits, stops. One thing after another.

    Args:
        service: the simulated service.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service, "owner", shared=False, owner=OWNER)
        self.exits: list[ReportExit] = []
        self.asked_to: list[tuple[Request, type[Any], float, Callable[[Any, BaseException | None], None]]] = []
        self.world.after(0.1, self.process, self._go_on)

    def _go_on(self) -> None:
        self.world.after(self.world.rng.uniform(0.05, 0.4), self.process, self._go_on)
        if self.driver.busy:
            return
        rng = self.world.rng
        if self.exits:
            self.ask(self.exits[0], Done, 2.0, self._reported)
        elif self.asked_to:
            request, expected, timeout, done = self.asked_to.pop(0)
            self.ask(request, expected, timeout, done)
        elif not self.world.calm and rng.random() < 0.3:
            self.ask(Refill(OWNER), GenerationPromise, 2.0, lambda _answer, _error: None)
        self.maybe_cancel(0.1)

    def _reported(self, answer: object, _: BaseException | None) -> None:
        if answer is not None and self.exits:
            self.exits.pop(0)

    def stop(self, done: Callable[[Any, BaseException | None], None]) -> None:
        """End the run."""
        self.asked_to.append((Stop(OWNER, 3.0), Done, 6.0, done))


class SimDrainer(Asker):
    """The owner's other thread, which takes the lifecycle records.

    Args:
        service: the simulated service.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service, "drainer", shared=False, owner=OWNER)
        self.received: dict[int, int] = {}  # run id -> records received
        self.empty = False
        if service.scenario.settings.lifecycle_event_capacity:
            self.world.after(0.1, self.process, self._go_on)

    @property
    def able(self) -> bool:
        """Whether it runs and waits for nothing: it asks again soon."""
        return not self.process.stopped and not self.driver.busy

    def _go_on(self) -> None:
        rng = self.world.rng
        self.world.after(rng.uniform(0.1, 0.9), self.process, self._go_on)
        if self.driver.busy:
            return
        limit = 4096 if self.world.calm else rng.choice((1, 3, 4096))
        self.start(lambda session: self.exchange.drain(session, limit), 2.0, self._drained)
        self.maybe_cancel(0.2)

    def _drained(self, records: list[dict[str, Any]] | None, _: BaseException | None) -> None:
        self.empty = records == []
        for record in records or ():
            run = next(run for run in self.service.runs if run.run_id == record["run_id"])
            done = self.received.get(run.run_id, 0)
            self.received[run.run_id] = run.ledger.records_received([int(record["sequence"])], done)
