"""The simulated broker process: the real state, its effects carried out on plain memory, slowly and not always well."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ods_async.core.broker_state import BrokerState
from ods_async.core.events import Event
from ods_async.core.gather import GatherProgram
from ods_async.core.memory import BatchLayout, SegmentLayout
from ods_async.core.reports import Report, RevokeTickets, ServiceBeat, Ticket, Verdict
from ods_async.core.requests import Batch, Plan, Request
from ods_async.core.schema import EpisodeSchema, Path
from ods_async.core.stimuli import (
    Announce,
    AnswerLost,
    AnswerRequest,
    AskedFor,
    BufferReady,
    CreateBuffer,
    Effect,
    EndService,
    FrameGathered,
    GatherFrame,
    Malformed,
    MarkEdition,
    Peer,
    PushTicket,
    RefuseRequest,
    Reported,
    RolloutArrived,
    RolloutWritten,
    Stimulus,
    Tick,
    WriteRollout,
)
from ods_async.core.window_plan import WindowPlan
from ods_async.core.write import write_rollout
from ods_async.errors import OdsError
from ods_async.testing.simulation.clockwork import Connection, Network, Process, World
from ods_async.testing.simulation.ledger import RunLedger, Works
from ods_async.testing.simulation.scenario import Scenario

__all__ = ["OWNER", "Copy", "Segment", "SimBroker"]

OWNER = b"owner-token"
_LAYOUTS: dict[tuple[EpisodeSchema, int, int, bool], BatchLayout] = {}
_SEGMENTS: dict[tuple[EpisodeSchema, int, int], SegmentLayout] = {}


class Segment:
    """The buffer's memory. It outlives its broker for whoever has it mapped."""

    def __init__(self, schema: EpisodeSchema, rows: int, steps: int) -> None:
        layout = _SEGMENTS.get((schema, rows, steps))
        if layout is None:
            layout = _SEGMENTS[schema, rows, steps] = SegmentLayout.of(schema, rows, steps)
        self.layout = layout
        self._buffer = bytearray(layout.nbytes)
        self.arrays: dict[Path, NDArray[Any]] = layout.arrays(self._buffer)
        self.stamps = layout.stamps(self._buffer)
        self.edition = layout.edition(self._buffer)
        self.program = GatherProgram(self.arrays)

    def scribble(self, effect: WriteRollout) -> None:
        """The beginning of a write: rows marked as dirty, and half written."""
        rows = list(effect.rows)
        self.stamps[rows] = effect.dirty_stamps
        for array in self.arrays.values():
            array[rows] = 99 if array.dtype != np.bool_ else True

    def batch_layout(self, size: int, length: int, *, context: bool) -> BatchLayout:
        """The layout of a batch of this buffer."""
        key = (self.layout.schema, size, length, context)
        found = _LAYOUTS.get(key)
        if found is None:
            found = _LAYOUTS[key] = BatchLayout.of(self.layout.schema, size, length, context=context)
        return found


class Copy:
    """Copying the windows of a plan, in two halves with time in between."""

    def __init__(self, segment: Segment, plan: Plan) -> None:
        self._segment = segment
        layout = segment.batch_layout(plan.batch_size, plan.length, context=plan.history > 0)
        self._windows, self._stamps = WindowPlan.from_message(plan, segment.layout.rows, segment.layout.steps)
        self.views = layout.views(bytearray(layout.nbytes))
        self._half = (plan.batch_size + 1) // 2

    def first_half(self) -> None:
        """Copy the first windows."""
        self._copy(slice(0, self._half))

    def second_half(self) -> bool:
        """Copy the rest; whether no row changed since the plan was made."""
        self._copy(slice(self._half, None))
        return np.array_equal(self._segment.stamps[self._windows.rows], self._stamps)

    def _copy(self, part: slice) -> None:
        w = self._windows
        bounds = (None if w.first is None else w.first[part], None if w.last is None else w.last[part])
        plan = WindowPlan(w.rows[part], w.starts[part], *bounds, w.length, w.history)
        if len(plan):
            self._segment.program.run(plan, {path: view[part] for path, view in self.views.items()})


class SimBroker:
    """One run of the broker.

    Args:
        world: time and chance.
        network: carries what it sends.
        scenario: its settings and the world's unkindness.
        works: what workers made.
        number: of the run, from 1.
        segments: where mapped memory is found by its path.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        scenario: Scenario,
        works: Works,
        number: int,
        segments: dict[str, Segment],
    ) -> None:
        self.world = world
        self.network = network
        self.scenario = scenario
        self.process = Process(f"broker{number}")
        self.run_id = 1000 + number
        self.state = BrokerState(
            scenario.settings,
            run_id=self.run_id,
            owner_token=OWNER,
            rng=np.random.Generator(np.random.PCG64(world.rng.getrandbits(32))),
            now=world.instant(),
        )
        self.ledger = RunLedger(world, scenario, self.state, works)
        self.segment: Segment | None = None
        self.ended: EndService | None = None
        self.malformed_told = 0
        self._segments = segments
        self._tickets: deque[Ticket] = deque()
        self._workers: deque[tuple[Connection, Callable[[Ticket], None]]] = deque()
        self._listeners: list[tuple[Connection, Callable[[object], None], str | None]] = []
        self._askers: dict[bytes, tuple[Connection, Callable[..., None]]] = {}
        self._stimuli: deque[Stimulus] = deque()
        self._handling = False
        self._tokens = 0
        first = self.state.run.take_effects()
        self.ledger.begin(first)
        for effect in first:
            self._carry_out(effect)
        world.after(scenario.tick, self.process, self._tick)

    # --- what peers reach -------------------------------------------------------------------------------------------

    def asked(
        self, connection: Connection, on_answer: Callable[..., None], rid: int, req: Request, wait: float
    ) -> None:
        """A request arrives."""
        self._askers[connection.identity] = (connection, on_answer)
        self._tokens += 1
        envelope = (b"%d" % self._tokens, b"%.9f" % self.world.seconds)
        self.feed(AskedFor(Peer(connection.identity, envelope), rid, req, wait))

    def worker_opened(self, connection: Connection, on_ticket: Callable[[Ticket], None]) -> None:
        """A worker connects for orders."""
        self._workers.append((connection, on_ticket))
        self._push()

    def listen(self, connection: Connection, on_broadcast: Callable[[object], None], worker_id: str | None) -> None:
        """A peer subscribes: a worker to what concerns it, anyone else (None) to events."""
        self._listeners.append((connection, on_broadcast, worker_id))

    def reported(self, report: Report) -> None:
        """A worker's report arrives."""
        self.feed(Reported(report))

    def rollout(self, arrived: RolloutArrived | Malformed) -> None:
        """A rollout arrives, or bytes that should be one."""
        self.feed(arrived)

    # --- one stimulus at a time -------------------------------------------------------------------------------------

    def feed(self, stimulus: Stimulus) -> None:
        """Tell the state, hold the outcome against the books, and do what follows."""
        self._stimuli.append(stimulus)
        if self._handling:
            return
        self._handling = True
        try:
            while self._stimuli and self.ended is None:
                self._handle(self._stimuli.popleft())
        finally:
            self._handling = False

    def _handle(self, stimulus: Stimulus) -> None:
        world, ledger = self.world, self.ledger
        ledger.told(stimulus)
        effects = self.state.handle(stimulus, world.instant())
        if world.tracing:
            if effects or not isinstance(stimulus, Tick):
                world.note(self.process.name, f"hears {stimulus}"[:300])
            for effect in effects:
                world.note(self.process.name, f"  → {effect}"[:300])
        ledger.handled(stimulus, effects)
        for effect in effects:
            self._carry_out(effect)

    def _tick(self) -> None:
        if self.ended is None:
            self.feed(Tick())
            self.world.after(self.scenario.tick, self.process, self._tick)

    # --- effects ----------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, AnswerRequest):
            if not self._send(effect.peer, effect.request_id, effect.answer):
                self.feed(AnswerLost(effect.peer, effect.request_id, effect.answer))
        elif isinstance(effect, RefuseRequest):
            self._send(effect.peer, effect.request_id, effect.error)
        elif isinstance(effect, Announce):
            self._announce(effect.what)
        elif isinstance(effect, MarkEdition):
            if self.segment is not None:
                self.segment.edition[0] = effect.edition
        elif isinstance(effect, PushTicket):
            self._tickets.append(effect.ticket)
            self._push()
        elif isinstance(effect, WriteRollout):
            self.world.after(self._while(), self.process, self._begin_write, effect)
        elif isinstance(effect, GatherFrame):
            self.world.after(self._while(), self.process, self._begin_gather, effect)
        elif isinstance(effect, CreateBuffer):
            self.world.after(self._while(), self.process, self._create, effect)
        else:
            self.ended = effect
            self.process.alive = False
            self.network.cut_all_of(self.process)

    def _while(self) -> float:
        return self.world.rng.expovariate(1 / 0.02) if self.world.chance(0.3) else 0.0002

    def _send(self, peer: Peer, request_id: int, answer: object, payload: object = None) -> bool:
        connection, on_answer = self._askers[peer.identity]
        if not connection.open:
            return False
        connection.down("answers", on_answer, request_id, answer, payload)
        return True

    def _announce(self, what: object) -> None:
        self._listeners = [listener for listener in self._listeners if listener[0].open]
        if isinstance(what, RevokeTickets):
            self._tickets = deque(ticket for ticket in self._tickets if ticket.ticket_id not in what.ticket_ids)
        for connection, on_broadcast, worker_id in self._listeners:
            if worker_id is None:
                wanted = isinstance(what, Event | ServiceBeat)
            else:
                wanted = not isinstance(what, Event) and (not isinstance(what, Verdict) or what.worker_id == worker_id)
            if wanted:
                connection.down("broadcast", on_broadcast, what)

    def _push(self) -> None:
        """Deal tickets out in turn, to busy and stopped workers too, as PUSH does."""
        while self._workers and not self._workers[0][0].open:
            self._workers.popleft()
        while self._tickets and self._workers:
            connection, on_ticket = self._workers[0]
            if not connection.open:
                self._workers.popleft()
                continue
            self._workers.rotate(-1)
            connection.down("tickets", on_ticket, self._tickets.popleft())

    def _create(self, effect: CreateBuffer) -> None:
        self.segment = Segment(effect.schema, effect.rows, effect.steps)
        path = f"/simulated/{self.run_id}"
        self._segments[path] = self.segment
        self.feed(BufferReady(self.segment.layout.describe(path, b"t" * 32)))

    # --- threads ----------------------------------------------------------------------------------------------------

    def _begin_write(self, effect: WriteRollout) -> None:
        assert self.segment is not None
        self.segment.scribble(effect)
        self.world.after(self._while(), self.process, self._end_write, effect)

    def _end_write(self, effect: WriteRollout) -> None:
        segment = self.segment
        assert segment is not None
        if not self.world.calm and self.world.chance(self.scenario.write_fails):
            self.feed(RolloutWritten(effect.job_id, "it could not be written: OSError: simulated"))
            return
        runs = write_rollout(segment.arrays, segment.stamps, effect)
        self.feed(RolloutWritten(effect.job_id, "", runs))
        for row in effect.rows:
            if row in self.ledger.episode_in_row:
                self.ledger.memory_holds(row, segment.arrays)

    def _begin_gather(self, effect: GatherFrame) -> None:
        assert self.segment is not None
        copy = Copy(self.segment, effect.plan)
        copy.first_half()
        self.world.after(self._while(), self.process, self._end_gather, effect, copy)

    def _end_gather(self, effect: GatherFrame, copy: Copy) -> None:
        plan = effect.plan
        self.ledger.frame_answered(effect.peer.envelope[0])
        if not copy.second_half():
            self.ledger.fail("lease", f"a row changed while the frame for lease {plan.lease_id} was gathered")
        if not self.world.calm and self.world.chance(self.scenario.write_fails):
            self._send(effect.peer, effect.request_id, OdsError("no room to send another batch"))
            self.feed(FrameGathered(plan.lease_id, "no room to send another batch"))
            return
        answer = Batch(plan.batch_size, plan.length, plan.history, 1, effect.language, plan.lease_id)
        sent = self._send(effect.peer, effect.request_id, answer, copy.views)
        self.feed(FrameGathered(plan.lease_id, "" if sent else "the asker is gone"))
