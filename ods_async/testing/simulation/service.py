"""One schedule: a service, the faults that befall it, and the check that it comes to rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ods_async.core.requests import Done, GenerationPromise, Refill, ReportExit, WaitGeneration, WaitReady
from ods_async.core.states import OnlineDataEngineState as State
from ods_async.testing.simulation.broker_peer import OWNER, Segment, SimBroker
from ods_async.testing.simulation.clockwork import Network, Violation, World
from ods_async.testing.simulation.consumer_peer import SimConsumer
from ods_async.testing.simulation.ledger import Works
from ods_async.testing.simulation.over_the_wire import over_the_wire
from ods_async.testing.simulation.owner_peer import SimDrainer, SimOwner
from ods_async.testing.simulation.scenario import Scenario
from ods_async.testing.simulation.subscriber_peer import SimSubscriber
from ods_async.testing.simulation.worker_peer import SimWorker

__all__ = ["Outcome", "Service", "simulate"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a schedule amounted to."""

    seed: int
    steps: int
    seconds: float
    batches: int
    episodes: int
    answers: int
    runs: int
    failed: bool


class Service:
    """Everything that takes part in one schedule.

    Args:
        seed: of the schedule.
        trace: called with a line for everything that happens, or None.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.scenario = scenario = Scenario.draw(seed)
        self.world = world = World(seed, trace)
        loss = {"broadcast": scenario.loss, "answers": scenario.loss / 2}
        self.network = Network(world, loss, scenario.delay, scenario.repeat, over_the_wire if scenario.wire else None)
        self.works = Works()
        self.segments: dict[str, Segment] = {}
        self.runs: list[SimBroker] = []
        self.broker: SimBroker | None = None
        self.batches = 0
        self._marks = 0
        self._pids = 0
        self._restarts: dict[str, int] = {}
        self.worker_trouble = scenario.bad_rollout > 0
        world.note("scenario", scenario)
        self.workers: dict[str, SimWorker] = {}
        self.start_broker()
        for number in range(scenario.workers):
            self.start_worker(f"w{number}", 0)
        self.consumers = [SimConsumer(self, f"c{number}") for number in range(scenario.consumers)]
        self.owner = SimOwner(self)
        self.drainer = SimDrainer(self)
        self.subscribers = [SimSubscriber(self, f"s{number}") for number in range(scenario.subscribers)]

    def fail(self, invariant: str, text: str) -> None:
        """Raise a :class:`Violation`."""
        raise Violation(invariant, text)

    # --- peers ------------------------------------------------------------------------------------------------------

    def next_mark(self) -> int:
        """A fingerprint for the next episode."""
        self._marks += 1
        return self._marks

    def start_broker(self) -> None:
        """A broker at the address, unless one is there."""
        if self.broker is None or not self.broker.process.alive:
            self.broker = SimBroker(
                self.world, self.network, self.scenario, self.works, len(self.runs) + 1, self.segments
            )
            self.runs.append(self.broker)
            for worker in list(self.workers.values()):
                if worker.exit_code is not None and not worker.replaced:
                    self.start_worker(worker.worker_id, 0)

    def start_worker(self, worker_id: str, restarts: int) -> None:
        """A worker of that name."""
        self._pids += 1
        self._restarts[worker_id] = restarts
        self.workers[worker_id] = SimWorker(self, worker_id, self._pids, restarts)

    def accepted(self, run_id: int, ticket_id: int) -> None:
        """A worker was told that its rollout is in the buffer."""
        for run in self.runs:
            if run.run_id == run_id and ticket_id not in run.ledger.accepted:
                self.fail("kept", f"ticket {ticket_id} was accepted and its rollout is nowhere")

    def kill_worker(self, worker: SimWorker) -> None:
        """SIGKILL a worker."""
        self.world.kill(worker.process)
        self.network.cut_all_of(worker.process)
        self.worker_exited(worker, -9)

    def worker_exited(self, worker: SimWorker, code: int) -> None:
        """A worker's process ended; whoever watches it starts it again."""
        worker.exit_code = code
        self.worker_trouble |= code != 0
        restarts = self._restarts[worker.worker_id] + 1
        ending = self.broker is not None and not self.broker.state.run.alive
        supervised = worker.worker_id in self.scenario.settings.supervised
        few = self.scenario.tolerant or restarts <= self.scenario.settings.max_worker_restarts
        again = not ending and (few or not supervised)
        if supervised:
            self.owner.exits.append(ReportExit(worker.worker_id, code, again, OWNER, worker.pid))
        if again:
            worker.replaced = True
            self.world.after(self.world.rng.uniform(0.05, 0.6), None, self.start_worker, worker.worker_id, restarts)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        world = self.world
        rng = world.rng
        worker = rng.choice(list(self.workers.values()))
        consumer = rng.choice(self.consumers)
        everyone = [worker.process, worker.process, consumer.process, self.owner.process, self.drainer.process]
        kind = rng.choice(("stop", "stop", "stop", "kill", "kill consumer", "cut", "dark", "clock", "broker"))
        if kind == "stop":
            chosen = rng.choice(everyone)
            self.worker_trouble |= chosen is worker.process
            world.stop(chosen, rng.choice((0.2, 1.0, 2.5)))
        elif kind == "kill" and worker.process.alive:
            self.kill_worker(worker)
        elif kind == "kill consumer":
            world.kill(consumer.process)
            self.network.cut_all_of(consumer.process)
            self.consumers.remove(consumer)
            self.consumers.append(SimConsumer(self, consumer.name + "'"))
        elif kind == "cut" and self.network.connections:
            connection = rng.choice(self.network.connections)
            self.worker_trouble |= connection.peer.name.startswith("w")
            self.network.cut(connection, rng.choice((0.0, 0.3, 0.6)))
        elif kind == "dark" and worker.link is not None:
            self.worker_trouble = True
            channel = rng.choice(("^reports", "^reports", "tickets", "broadcast"))
            self.network.darken(worker.link, channel, rng.choice((0.2, 1.0, 3.0)))
        elif kind == "clock":
            world.note("clock", "set back an hour")
            world.wall_offset -= 3600 * 10**9
        elif kind == "broker" and self.broker is not None:
            if self.scenario.broker_may_die and rng.random() < 0.5:
                self._kill_broker()
            else:
                world.stop(self.broker.process, rng.choice((0.2, 1.0, 2.5)))

    def _kill_broker(self) -> None:
        assert self.broker is not None
        self.world.kill(self.broker.process)
        self.network.cut_all_of(self.broker.process)
        self.owner.exits.clear()
        self.world.after(self.world.rng.uniform(0.1, 1.0), None, self.start_broker)

    # --- the schedule -----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Faults, then calm, then rest, then the end.

        Raises:
            Violation: an invariant does not hold.
        """
        world, scenario = self.world, self.scenario
        for _ in range(scenario.faults):
            world.after(world.rng.uniform(0.0, scenario.fault_seconds), None, self._fault)
        world.pass_time(scenario.fault_seconds)
        world.note("faults", "stop")
        world.calm = True
        self.start_broker()
        assert self.broker is not None
        world.pass_time(0.6)  # silent cuts come to light
        if self.broker.state.run.alive:
            self._come_to_rest()
        self._end()
        return self._outcome()

    def _wait(self, what: str, request: Any, expected: type[Any], limit: float) -> Any:
        """Have the owner ask until it is answered."""
        got: list[Any] = []
        errors: list[Any] = []

        def done(answer: Any, error: BaseException | None) -> None:
            if answer is not None:
                got.append(answer)
                return
            errors.append(error)
            if self._failed:
                got.append(None)
                return
            self.owner.asked_to.append((request, expected, limit, done))

        self.owner.asked_to.append((request, expected, limit, done))
        if not self.world.run(lambda: bool(got), limit):
            self.fail("rest", f"{what}: no answer within {limit} s; {errors[-3:]}; {self._situation()}")
        return got[0]

    @property
    def _failed(self) -> bool:
        return self.broker is not None and self.broker.state.state is State.FAILED

    @property
    def _words_run_out(self) -> bool:
        """Whether the dictionaries may be too small for what workers say."""
        return self.scenario.settings.language_buffer_bytes < 1000 and self.scenario.new_instruction > 0

    def _situation(self) -> str:
        assert self.broker is not None
        run, production = self.broker.state.run, self.broker.state.production
        return (
            f"state {run.state}, generation {production.completed} of {production.requested}, demand "
            f"{run.tickets.demand}, outstanding {run.tickets.outstanding}, {run.holdings()}, {production.pause!r}"
        )

    def _come_to_rest(self) -> None:
        assert self.broker is not None
        settings = self.scenario.settings
        if not self._words_run_out:
            self._wait("the first generation", WaitReady(), Done, 40.0)
            promise = self._wait("a refill", Refill(OWNER), GenerationPromise, 20.0)
            if promise is not None:
                self._wait("the generation asked for", WaitGeneration(promise.generation), Done, 40.0)
        for consumer in self.consumers:
            consumer.pausing = True
        if not self.world.run(lambda: all(consumer.idle for consumer in self.consumers), 8.0):
            self.fail("rest", f"{[c.name for c in self.consumers if not c.idle]} still wait")
        if self._failed or self._words_run_out:
            return
        state = self.broker.state
        if settings.refill_policy != "continuous":

            def quiet() -> bool:
                run, production = state.run, state.production
                return run.tickets.outstanding == run.tickets.demand == 0 and production.idle

            if not self.world.run(quiet, 30.0):
                self.fail("rest", f"queues are not empty: {self._situation()}")
            self.world.pass_time(settings.lease_seconds + 2 * self.scenario.tick)
            store = state.run.store
            if store.open_leases or store.retired or store.spare != settings.spare_rows:
                self.fail("rest", f"{store.open_leases} leases, {store.retired} retired, {store.spare} spare rows")
        self._all_is_told()
        drawn: list[bool] = []
        for consumer in self.consumers:
            consumer.draw_once(drawn.append)
        if not self.world.run(lambda: len(drawn) == len(self.consumers), 10.0) or not all(drawn):
            self.fail("rest", f"the last draws: {drawn} of {len(self.consumers)}")

    def _all_is_told(self) -> None:
        """Subscribers catch up with what there is now."""
        assert self.broker is not None
        run_id, there = self.broker.run_id, len(self.broker.ledger.events)
        for subscriber in self.subscribers:
            if not self.world.run(functools.partial(subscriber.has_seen, run_id, there), 20.0):
                self.fail("sequence", f"{subscriber.name} has {subscriber.seen} and there are {there} events")

    def _end(self) -> None:
        broker = self.broker
        assert broker is not None
        for consumer in self.consumers:
            consumer.pausing = True
        if self._failed and (self.scenario.tolerant or not (self.worker_trouble or self._words_run_out)):
            self.fail("fate", f"the run failed: {broker.state.run.failure}")
        # A stopped service answers two seconds more, so who drains it must not still wait for an answer lost before.
        self.world.run(lambda: self.drainer.able, 6.0)
        stopped: list[object] = []

        def done(answer: Any, error: BaseException | None) -> None:
            if answer is not None or broker.state.quiet:
                stopped.append(answer or error)
            else:
                self.owner.stop(done)

        self.owner.stop(done)
        if not self.world.run(lambda: bool(stopped), 15.0):
            self.fail("rest", f"stop was not answered; {self._situation()}")
        drained = functools.partial(self.drainer.received.get, broker.run_id, 0)
        self.world.run(lambda: drained() == len(broker.ledger.records), 1.9)  # a drain works after the stop, too
        if self.scenario.faults % 2:
            self.owner.stop(lambda _answer, _error: None)  # again: at once
        if not self.world.run(lambda: broker.ended is not None, 10.0):
            self.fail("rest", "the service did not end")
        if broker.ledger.open:
            self.fail("answer", f"{len(broker.ledger.open)} requests were never answered")
        there = len(broker.ledger.records)
        if drained() != there:
            self.fail("log", f"the owner got {drained()} of {there} records")
        for subscriber in self.subscribers:
            seen, there = subscriber.seen.get(broker.run_id, 0), len(broker.ledger.events)
            if seen > there:
                self.fail("sequence", f"{subscriber.name} saw {seen} events of {there}")

    def _outcome(self) -> Outcome:
        return Outcome(
            seed=self.seed,
            steps=self.world.steps,
            seconds=self.world.seconds,
            batches=self.batches,
            episodes=sum(len(run.ledger.published) for run in self.runs),
            answers=sum(run.ledger.answers for run in self.runs),
            runs=len(self.runs),
            failed=self._failed,
        )


def simulate(seed: int, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run the schedule of ``seed`` to its end.

    Raises:
        Violation: an invariant does not hold; the text says which, and the same seed shows it again.
    """
    return Service(seed, trace).run()
