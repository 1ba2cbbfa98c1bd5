"""A simulated worker: the protocol of the real one, with episodes that anybody can recognise."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ods_async.core.episode import Episode, Rollout, Segment
from ods_async.core.reports import (
    AttemptFailed,
    Goodbye,
    Heartbeat,
    Hello,
    RevokeTickets,
    ServiceBeat,
    ShutDown,
    Ticket,
    TicketStarted,
    Verdict,
    WorkerFailed,
)
from ods_async.core.requests import Connect, FieldDescription, Welcome
from ods_async.core.schema import RECORDED, FieldSpec, Path
from ods_async.core.stimuli import Malformed, RolloutArrived
from ods_async.core.workforce import HELLO_WANTED
from ods_async.testing.simulation.broker_peer import SimBroker
from ods_async.testing.simulation.clockwork import Connection, Process
from ods_async.testing.simulation.shown import MARK

if TYPE_CHECKING:
    from ods_async.testing.simulation.service import Service

__all__ = ["SimWorker"]

_FIELDS = (FieldSpec(MARK, "int64", (2,)), *RECORDED)
_DESCRIBED = tuple(FieldDescription(f.path, f.dtype, f.shape, f.pad, 0) for f in _FIELDS)
_RESEND_SECONDS = 1.0


class SimWorker:
    """One worker process.

    Args:
        service: the simulated service.
        worker_id: its name.
        pid: its number; another one after every restart.
        restarts: how often it was started before.
    """

    def __init__(self, service: Service, worker_id: str, pid: int, restarts: int) -> None:
        self.service = service
        self.world = service.world
        self.scenario = service.scenario
        self.worker_id = worker_id
        self.pid = pid
        self.restarts = restarts
        self.process = Process(worker_id)
        self.exit_code: int | None = None
        self.replaced = False
        self._broker: SimBroker | None = None
        self.link: Connection | None = None
        self._greeted: Connection | None = None
        self._run_id = 0
        self._ready = False
        self._heard = self.world.seconds
        self._queue: deque[Ticket] = deque()
        self._revoked: set[int] = set()
        self._current: Ticket | None = None
        self._kept: dict[int, tuple[RolloutArrived, float]] = {}
        self._attempt = 0
        self._shutting_down = ""
        self.world.after(0.0, self.process, self._connect)
        self.world.after(self.scenario.settings.heartbeat_interval, self.process, self._beat)
        self.world.after(self.world.rng.uniform(0.01, 0.3), self.process, self._environment_made)

    # --- the connection ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        broker = self.service.broker
        if self.link is not None and self.link.open:
            return
        if broker is None or not broker.process.alive:
            self.world.after(0.2, self.process, self._connect)
            return
        self._heard = self.world.seconds
        self._broker = broker
        link = self.link = self.service.network.connect(self.process, broker.process, self._lost)
        self._ask_for_welcome(link)

    def _ask_for_welcome(self, link: Connection) -> None:
        broker = self._broker
        if link is not self.link or not link.open or broker is None or self._greeted is link:
            return
        connect = Connect("sim://", "worker", self.worker_id, 1)
        link.up("requests", broker.asked, link, self._on_answer, 1, connect, 1.0)
        self.world.after(1.0, self.process, self._ask_for_welcome, link)

    def _on_answer(self, request_id: int, answer: object, payload: object) -> None:
        link, broker = self.link, self._broker
        if not isinstance(answer, Welcome) or link is None or broker is None or self._greeted is link:
            return
        self._greeted = link
        if answer.run_id != self._run_id:
            self._run_id = answer.run_id
            self._queue.clear()
            self._kept.clear()
            self._current = None
        broker.worker_opened(link, self._on_ticket)
        broker.listen(link, self._on_broadcast, self.worker_id)
        self._hello()
        for arrived, _ in list(self._kept.values()):
            self._hand_in(arrived)

    def _hello(self) -> None:
        fields = _DESCRIBED if self._ready else ()
        self._report(
            Hello(self.worker_id, self.pid, "host", self.scenario.settings.num_envs, fields, "env", self.restarts)
        )

    def _lost(self, link: Connection) -> None:
        if link is self.link:
            self.link = None
            self.world.after(0.05, self.process, self._connect)

    def _report(self, report: object) -> None:
        if self.link is not None and self._broker is not None and self._greeted is self.link:
            self.link.up("reports", self._broker.reported, report)

    def _beat(self) -> None:
        current = self._current.ticket_id if self._current is not None else None
        if self._greeted is self.link:
            self._report(Heartbeat(self.worker_id, "idle" if self._ready else "make", current, 0))
        now = self.world.seconds
        for arrived, due in list(self._kept.values()):
            if due <= now:
                self._hand_in(arrived)
        if now - self._heard > 3 * self.scenario.settings.heartbeat_timeout and self.link is not None:
            link, self.link = self.link, None
            link.close()
            self._connect()
        self.world.after(self.scenario.settings.heartbeat_interval, self.process, self._beat)

    # --- what it is told --------------------------------------------------------------------------------------------

    def _environment_made(self) -> None:
        self._ready = True
        self._hello()
        self._next()

    def _on_ticket(self, ticket: Ticket) -> None:
        if ticket.run_id == self._run_id:
            self._queue.append(ticket)
            self._next()

    def _on_broadcast(self, what: object) -> None:
        self._heard = self.world.seconds
        if isinstance(what, Verdict) and what.ticket_id == HELLO_WANTED:
            self._hello()
        elif isinstance(what, Verdict):
            if self._kept.pop(what.ticket_id, None) is not None and what.outcome == "accepted":
                self.service.accepted(self._run_id, what.ticket_id)
        elif isinstance(what, RevokeTickets):
            self._queue = deque(ticket for ticket in self._queue if ticket.ticket_id not in what.ticket_ids)
        elif isinstance(what, ShutDown):
            if not self._shutting_down:
                self._shutting_down = what.reason
                self._queue.clear()
                self._current = None
                self.world.after(0.02, self.process, self._leave)
        elif isinstance(what, ServiceBeat) and what.run_id != self._run_id:
            self.link = None
            self._connect()

    def _leave(self) -> None:
        self._report(Goodbye(self.worker_id, self._shutting_down))
        self._exit(0)

    def _exit(self, code: int) -> None:
        self.process.alive = False
        if self.link is not None:
            # What was sent still arrives: a process that ends in good order flushes its sockets.
            self.world.after(0.3, None, self.link.close)
        self.service.worker_exited(self, code)

    # --- work -------------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self._current is not None or not self._queue or not self._ready or self._shutting_down:
            return
        ticket = self._current = self._queue.popleft()
        self._attempt = 1
        self._report(TicketStarted(self.worker_id, ticket.ticket_id))
        self._work(ticket)

    def _work(self, ticket: Ticket) -> None:
        rng = self.world.rng
        slow = 4.0 if not self.world.calm and rng.random() < 0.05 else 1.0
        self.world.after(slow * self.scenario.step_seconds * rng.uniform(0.5, 4.0), self.process, self._worked, ticket)

    def _worked(self, ticket: Ticket) -> None:
        if self._current is not ticket:
            return
        world, scenario = self.world, self.scenario
        if not world.calm and world.chance(scenario.attempt_fails):
            self._report(AttemptFailed(self.worker_id, ticket.ticket_id, self._attempt, 1, "simulated"))
            if self._attempt < scenario.settings.max_generation_attempts:
                self._attempt += 1
                self._work(ticket)
            else:
                self._fail(ticket, "RuntimeError", "no attempt succeeded")
            return
        if not world.calm and world.chance(scenario.crash):
            if world.chance(0.5):
                self._fail(ticket, "ValueError", "simulated failure")
            else:
                self.service.kill_worker(self)
            return
        self._current = None
        self._hand_in(self._make(ticket))
        self._next()

    def _fail(self, ticket: Ticket, kind: str, message: str) -> None:
        self._report(WorkerFailed(self.worker_id, ticket.ticket_id, "builtins", kind, message, "", "step", 3))
        self._exit(1)

    def _hand_in(self, arrived: RolloutArrived) -> None:
        if self._greeted is not self.link or self.link is None or self._broker is None:
            self._kept[arrived.rollout.ticket_id] = (arrived, 0.0)
            return
        self._kept[arrived.rollout.ticket_id] = (arrived, self.world.seconds + _RESEND_SECONDS)
        sent: RolloutArrived | Malformed = arrived
        if not self.world.calm and self.world.chance(self.scenario.bad_rollout / 2):
            sent = Malformed("rollouts", "simulated", self.worker_id, arrived.rollout.ticket_id)
        self.link.up("reports", self._broker.rollout, sent)

    def _make(self, ticket: Ticket) -> RolloutArrived:
        count = self.scenario.settings.num_envs
        rng = self.world.rng
        bad = not self.world.calm and rng.random() < self.scenario.bad_rollout
        if bad and rng.random() < 0.3:
            count += 1
        episodes = [self._episode() for _ in range(count)]
        if bad and count == self.scenario.settings.num_envs:
            first = episodes[0]
            arrays = dict(first.arrays)
            arrays["rewards",] = arrays["rewards",].astype(np.float64)
            episodes[0] = Episode(first.length, arrays, first.segments, first.instruction)
        return RolloutArrived(Rollout(ticket.ticket_id, self.worker_id, tuple(episodes), self._attempt, 0.5))

    def _episode(self) -> Episode:
        rng = self.world.rng
        capacity = self.scenario.settings.max_episode_steps
        long = rng.random() < self.scenario.max_length_share
        length = rng.randint(max(1, capacity - 2), capacity) if long else rng.randint(1, capacity)
        mark = self.service.next_mark()
        marks = np.empty((length, 2), np.int64)
        marks[:, 0] = mark
        marks[:, 1] = np.arange(length)
        continuity = np.zeros(length, np.int64)
        if rng.random() < 0.2:
            continuity[rng.randrange(length) :] = rng.choice((1, -1))
        ends = np.zeros(length, np.bool_)
        ends[-1] = True
        arrays: dict[Path, Any] = {
            MARK: marks,
            ("rewards",): np.ones(length, np.float32),
            ("terminated",): ends,
            ("truncated",): np.zeros(length, np.bool_),
            ("continuity_id",): continuity,
        }
        segments: tuple[Segment, ...] = ()
        if rng.random() < 0.6:
            cut = rng.randint(0, length)
            segments = (
                Segment("reach", 0, cut, "reach", rng.random() < 0.8),
                Segment("grasp", cut, length, None, rng.random() < 0.8),
            )
        instruction = rng.choice(("pick", "place", None))
        if rng.random() < self.scenario.new_instruction:
            instruction = str(mark).rjust(self.scenario.long_instruction, "t")
        episode = Episode(length, arrays, segments, instruction)
        self.service.works.add(episode, mark)
        return episode
