"""Simulated trainers, the owner, and a subscriber: each speaks as the real one does, and checks what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ods_async.client.exchange import Exchange, Session, Talk
from ods_async.core.events import Event
from ods_async.core.reports import ServiceBeat
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
    Records,
    Refill,
    Replay,
    ReportExit,
    Request,
    Sample,
    ServiceStatus,
    Stats,
    Stop,
    WaitGeneration,
    WaitReady,
)
from ods_async.errors import ArgumentError, OdsError
from ods_async.observe.sequence import EventsLost, Sequencer
from ods_async.testing.simulation.broker_peer import OWNER, SimBroker
from ods_async.testing.simulation.clockwork import Process
from ods_async.testing.simulation.lane import Cancelled, Driver, SimMemory, Views

if TYPE_CHECKING:
    from ods_async.testing.simulation.service import Service

__all__ = ["SimConsumer", "SimDrainer", "SimOwner", "SimSubscriber"]

_LOOKS: tuple[tuple[Request, type[Any]], ...] = (
    (GetStats(), Stats),
    (GetStatus(), ServiceStatus),
    (GetFlow(), FlowStatus),
    (GetBudget(), BudgetSnapshot),
    (CheckHealth(), Done),
    (WaitReady(), Done),
)


class _Asker:
    """What all of them share: a process, a driver, an exchange."""

    def __init__(self, service: Service, name: str, *, shared: bool, owner: bytes | None = None) -> None:
        self.service = service
        self.world = service.world
        self.name = name
        self.process = Process(name)
        self.driver = Driver(service, self.process)
        self.exchange: Exchange[Views] = Exchange(
            endpoint="sim://",
            role="consumer" if owner is None else "owner",
            name=name,
            owner=owner,
            connect_timeout=1.0,
            make_memory=lambda welcome, description: self._memory(welcome, description, shared),
        )

    def _memory(self, welcome: Any, description: Any, shared: bool) -> SimMemory:
        return self.driver.make_memory(welcome, description, shared=shared)

    def ask(
        self,
        request: Request,
        expected: type[Any],
        timeout: float,
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Ask one question."""
        self.start(lambda session: self.exchange.plain(session, request, expected), timeout, done)

    def start(
        self, talk: Callable[[Session], Talk[Any]], timeout: float, done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Begin a conversation."""
        self.driver.start(talk, timeout, done)

    def maybe_cancel(self, probability: float) -> None:
        """While faults last, now and then give up soon what has just begun."""
        if not self.world.calm and self.world.chance(probability):
            self.world.after(self.world.rng.uniform(0.0, 0.2), self.process, self._cancel)

    def _cancel(self) -> None:
        if not self.world.calm:
            self.driver.cancel()


class SimConsumer(_Asker):
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
        if error is not None and not isinstance(error, OdsError | Cancelled):
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


class SimOwner(_Asker):
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


class SimDrainer(_Asker):
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


class SimSubscriber(_Asker):
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
