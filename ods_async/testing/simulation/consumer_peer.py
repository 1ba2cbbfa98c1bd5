"""A simulated trainer: draws and streams as the real client does, and has every window checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ods_async.core.requests import (
    BudgetSnapshot,
    CheckHealth,
    Done,
    FlowStatus,
    GenerationPromise,
    GetBudget,
    GetFlow,
    GetStats,
    GetStatus,
    Refill,
    Request,
    Sample,
    ServiceStatus,
    Stats,
    WaitGeneration,
    WaitReady,
)
from ods_async.errors import ArgumentError, OdsError
from ods_async.testing.simulation.asker import Asker
from ods_async.testing.simulation.lane import FAILURES, Cancelled, Views

if TYPE_CHECKING:
    from ods_async.testing.simulation.service import Service

__all__ = ["SimConsumer"]

_LOOKS: tuple[tuple[Request, type[Any]], ...] = (
    (GetStats(), Stats),
    (GetStatus(), ServiceStatus),
    (GetFlow(), FlowStatus),
    (GetBudget(), BudgetSnapshot),
    (CheckHealth(), Done),
    (WaitReady(), Done),
)


class SimConsumer(Asker):
    """A trainer: draws, streams, waits, looks, gives up, asks for nonsense.

    Args:
        service: the simulated service.
        name: its name.
    """

    def __init__(self, service: Service, name: str) -> None:
        super().__init__(service, name, shared=service.world.chance(0.6))
        self.batches = 0
        self.pausing = False
        self._stream: list[tuple[int | None, Views]] = []
        self.world.after(self.world.rng.uniform(0.0, 0.5), self.process, self._go_on)

    @property
    def idle(self) -> bool:
        """Whether it waits for nothing."""
        return not self.driver.busy and not self._stream

    def draw_once(self, done: Callable[[bool], None]) -> None:
        """Draw one window; ``done(whether there was a batch or a good reason why not)``."""
        wanted = Sample(1, 1)

        def over(batch: Views | None, error: BaseException | None) -> None:
            if batch is not None:
                self._received(batch, wanted)
            done(batch is not None or isinstance(error, OdsError))

        self.start(lambda session: self.exchange.sample(session, wanted, None), 5.0, over)

    def _wanted(self) -> Sample:
        rng = self.world.rng
        settings = self.service.scenario.settings
        steps = settings.max_episode_steps
        size = rng.choice((1, 2, 5))
        seed = rng.choice((None, None, rng.getrandbits(60)))
        if rng.random() < 0.4:
            history, horizon = rng.randint(1, 3), rng.randint(1, steps)
            generations: tuple[int, ...] = ()
            if settings.include_provenance and rng.random() < 0.3:
                generations = tuple(range(rng.randint(1, 3), 5))
            mode = rng.choice(("episode", "segment"))
            return Sample(size, history + horizon - 1, mode, history, horizon, generations, seed)
        mode = rng.choice(("episode", "episode", "segment", "boundary"))
        length = rng.randint(1 if mode != "boundary" else 2, max(2, steps // 2))
        return Sample(size, length, mode, seed=seed)

    def _go_on(self) -> None:
        """Do the next thing."""
        if self.pausing or self.driver.busy:
            return
        rng = self.world.rng
        kind = rng.random()
        timeout = rng.choice((0.05, 0.5, 3.0))
        if kind < 0.6:
            wanted = self._wanted()
            self.start(
                lambda session: self.exchange.sample(session, wanted, None),
                timeout,
                lambda batch, error: self._drawn(batch, error, wanted),
            )
        elif kind < 0.75:
            self._begin_stream(timeout)
        elif kind < 0.8:
            bad = rng.choice((Sample(0, 1), Sample(1, 10_000), Sample(1, 1, "boundary"), Sample(1, 2, "no mode")))
            self.ask(bad, object, timeout, self._refused)
        elif kind < 0.85:
            self.ask(WaitGeneration(rng.randint(0, 3)), Done, timeout, self._finished)
        elif kind < 0.88:
            self.ask(Refill(b"guess"), GenerationPromise, timeout, self._refused)
        else:
            request, expected = rng.choice(_LOOKS)
            self.ask(request, expected, timeout, self._finished)
        self.maybe_cancel(0.1)

    def _later(self) -> None:
        self.world.after(self.world.rng.expovariate(1 / 0.15), self.process, self._go_on)

    def _finished(self, _: object, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, (OdsError, Cancelled, *FAILURES)):
            raise error
        self._later()

    def _refused(self, answer: object, error: BaseException | None) -> None:
        if answer is not None:
            self._ledger_fail(f"{self.name} was given {answer} for a request that makes no sense")
        self._later()

    def _ledger_fail(self, text: str) -> None:
        broker = self.driver.broker
        assert broker is not None
        broker.ledger.fail("answer", text)

    def _received(self, batch: Views, wanted: Sample) -> None:
        broker = self.driver.broker
        assert broker is not None
        self.batches += 1
        self.service.batches += 1
        broker.ledger.batch_received(batch, wanted, self.name)

    def _drawn(self, batch: Views | None, error: BaseException | None, wanted: Sample) -> None:
        if batch is not None:
            self._received(batch, wanted)
        elif isinstance(error, ArgumentError):
            self._ledger_fail(f"{wanted} was refused: {error}")
        self._later()

    # --- streaming --------------------------------------------------------------------------------------------------

    def _begin_stream(self, timeout: float) -> None:
        wanted = self._wanted()
        several = Sample(
            wanted.batch_size,
            wanted.length,
            wanted.mode,
            wanted.history,
            wanted.horizon,
            wanted.generations,
            wanted.seed,
            count=self.world.rng.randint(1, 4),
        )

        def over(drawn: list[tuple[int | None, Views]] | None, error: BaseException | None) -> None:
            if drawn:
                self._stream = drawn
                self._use(wanted)
            else:
                self._finished(None, error)

        self.start(lambda session: self.exchange.draw(session, several, None), timeout, over)

    def _use(self, wanted: Sample) -> None:
        """Use what was drawn ahead, one after the other; sometimes stop in the middle."""
        session = self.driver.session
        if self.pausing or (not self.world.calm and self.world.chance(0.1)):
            session.undelivered += [lease for lease, _ in self._stream if lease is not None]
            self._stream = []
            self._later()
            return
        lease, batch = self._stream.pop(0)
        self._received(batch, wanted)
        if lease is not None:
            session.finished.append(lease)
        if self._stream:
            self.world.after(self.world.rng.expovariate(1 / 0.1), self.process, self._use, wanted)
        else:
            self._later()
