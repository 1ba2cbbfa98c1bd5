"""The whole broker without a socket, a thread or a clock: the pure state, and its effects carried out on plain memory.

For tests and simulations. Time stands still until :meth:`InMemoryBroker.pass_time`; every effect is kept in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ods_async.core.broker_state import BrokerState
from ods_async.core.episode import Episode, Rollout, Segment
from ods_async.core.events import Event
from ods_async.core.gather import gather_into
from ods_async.core.memory import BatchLayout, SegmentLayout
from ods_async.core.reports import Goodbye, Heartbeat, Hello, Report, Ticket, TicketStarted, Verdict
from ods_async.core.requests import Answer, Connect, FieldDescription, Plan, Plans, Request
from ods_async.core.schema import RECORDED, FieldSpec, Path
from ods_async.core.settings import BrokerSettings
from ods_async.core.stimuli import (
    Announce,
    AnswerRequest,
    AskedFor,
    BufferReady,
    CreateBuffer,
    Effect,
    EndService,
    FrameGathered,
    GatherFrame,
    Instant,
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

__all__ = ["ENV_FIELDS", "InMemoryBroker", "episode_of"]

_E = TypeVar("_E", bound=Event)

OWNER = b"owner-token"
ENV_FIELDS = (FieldSpec(("obs", "qpos"), "float64", (3,)), FieldSpec(("actions",), "float32", (2,)))


def episode_of(
    length: int,
    fingerprint: float = 0.0,
    *,
    segments: tuple[Segment, ...] = (),
    instruction: str | None = None,
    continuity: Any = 0,
) -> Episode:
    """An episode of :data:`ENV_FIELDS` whose every step holds ``fingerprint``, and its step number in ``actions``."""
    steps = np.arange(length, dtype=np.float32)
    arrays: dict[Path, Any] = {
        ("obs", "qpos"): np.full((length, 3), fingerprint, np.float64),
        ("actions",): np.stack([steps, steps], axis=1),
        ("rewards",): np.ones(length, np.float32),
        ("terminated",): np.arange(length) == length - 1,
        ("truncated",): np.zeros(length, np.bool_),
        ("continuity_id",): np.broadcast_to(np.asarray(continuity, np.int64), (length,)).copy(),
    }
    return Episode(length, arrays, segments, instruction)


class InMemoryBroker:
    """A broker state, its memory, and everything it ever did.

    Args:
        settings: by default a buffer of 4 slots of 10 steps.
        auto_write: carry out ``WriteRollout`` at once; otherwise call :meth:`write` when the test wants it.
        **changes: settings to change.
    """

    def __init__(
        self, settings: BrokerSettings | None = None, *, auto_write: bool = True, seed: int = 0, **changes: Any
    ):
        base = settings or BrokerSettings(buffer_size=4, max_episode_steps=10, spare_rows=2)
        self.settings = replace(base, **changes)
        self.now = Instant(1_000_000_000, 1_700_000_000_000_000_000)
        self.state = BrokerState(
            self.settings, run_id=7, owner_token=OWNER, rng=np.random.default_rng(seed), now=self.now
        )
        self.auto_write = auto_write
        self.tickets: deque[Ticket] = deque()
        self.events: list[Event] = []
        self.announced: list[object] = []
        self.answers: dict[tuple[bytes, int], Answer | OdsError] = {}
        self.answer_counts: dict[tuple[bytes, int], int] = {}
        self.writes: deque[WriteRollout] = deque()
        self.frames: list[dict[Path, Any]] = []
        self.frame_leases: list[int] = []
        self.ended: EndService | None = None
        self.layout: SegmentLayout | None = None
        self.memory = bytearray()
        self._request_id = 0
        self._fingerprint = 0
        self._do(self.state.run.take_effects())

    # --- stimuli ----------------------------------------------------------------------------------------------------

    def tell(self, stimulus: Stimulus) -> None:
        """Let something happen now."""
        self._do(self.state.handle(stimulus, self.now))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with ticks as a running broker has them and one at its end."""
        left, most = int(seconds * 1e9), int(self.settings.heartbeat_timeout * 1e9 / 8)
        while left > most:
            self._sleep(most)
            left -= most
        self._sleep(left)

    def sleep(self, seconds: float) -> None:
        """Let time pass in which the broker's process does not run, with a tick at its end."""
        self._sleep(int(seconds * 1e9))

    def _sleep(self, nanoseconds: int) -> None:
        self.now = Instant(self.now.monotonic_ns + nanoseconds, self.now.unix_ns + nanoseconds)
        self.tell(Tick())

    def report(self, report: Report) -> None:
        """A worker reports."""
        self.tell(Reported(report))

    def join(self, worker_id: str = "w0", fields: tuple[FieldSpec, ...] = ENV_FIELDS, pid: int = 1) -> None:
        """A worker says hello."""
        described = tuple(FieldDescription(f.path, f.dtype, f.shape, f.pad, 0) for f in fields + RECORDED)
        self.report(Hello(worker_id, pid, "host", self.settings.num_envs, described, "env"))

    def leave(self, worker_id: str = "w0") -> None:
        """A worker says goodbye."""
        self.report(Goodbye(worker_id, "done"))

    def beat(self, worker_id: str = "w0", ticket_id: int | None = None) -> None:
        """A worker's heartbeat."""
        self.report(Heartbeat(worker_id, "step", ticket_id, 0))

    def start_ticket(self, worker_id: str = "w0") -> Ticket:
        """The worker takes the oldest ticket that lies about."""
        ticket = self.tickets.popleft()
        self.report(TicketStarted(worker_id, ticket.ticket_id))
        return ticket

    def hand_in(self, ticket: Ticket, *episodes: Episode, worker_id: str = "w0") -> None:
        """The worker hands in a rollout."""
        self.tell(RolloutArrived(Rollout(ticket.ticket_id, worker_id, episodes, 1, 0.5)))

    def fill(self, length: int = 8, worker_id: str = "w0", limit: int = 1000) -> int:
        """Work off every ticket with episodes of ``length`` steps; how many rollouts that were."""
        done = 0
        while self.tickets and done < limit:
            ticket = self.start_ticket(worker_id)
            episodes = [episode_of(length, float(self._next_fingerprint())) for _ in range(self.settings.num_envs)]
            self.hand_in(ticket, *episodes, worker_id=worker_id)
            done += 1
        return done

    def _next_fingerprint(self) -> int:
        self._fingerprint += 1
        return self._fingerprint

    def write(self) -> None:
        """Carry out the oldest write that was asked for."""
        effect = self.writes.popleft()
        assert self.layout is not None
        runs = write_rollout(self.layout.arrays(self.memory), self.layout.stamps(self.memory), effect)
        self.tell(RolloutWritten(effect.job_id, "", runs))

    # --- requests ---------------------------------------------------------------------------------------------------

    def connect(self, who: bytes = b"c0", role: str = "consumer") -> None:
        """A consumer introduces itself."""
        self.ask(Connect("ipc://x", role, who.decode(), 1), who)

    def ask(self, request: Request, who: bytes = b"c0", timeout: float = 5.0) -> int:
        """A consumer asks; the id its answer will have in :attr:`answers`."""
        self._request_id += 1
        self.tell(AskedFor(Peer(who), self._request_id, request, timeout))
        return self._request_id

    def answer(self, request_id: int, who: bytes = b"c0") -> Any:
        """The answer (which is taken away), or None while there is none."""
        return self.answers.pop((who, request_id), None)

    def get(self, request: Request, who: bytes = b"c0", timeout: float = 5.0) -> Any:
        """Ask and take the answer that comes at once; errors are raised."""
        answer = self.answer(self.ask(request, who, timeout), who)
        if isinstance(answer, OdsError):
            raise answer
        return answer

    def gather(self, plan: Plan) -> dict[Path, Any]:
        """Copy a plan's windows out of the memory, as a consumer does; no stamp may have changed."""
        assert self.layout is not None
        windows, stamps = WindowPlan.from_message(plan, self.layout.rows, self.layout.steps)
        batch = BatchLayout.of(self.layout.schema, len(windows), windows.length, context=windows.history > 0)
        out = batch.views(bytearray(batch.nbytes))
        gather_into(self.layout.arrays(self.memory), windows, out)
        now = self.layout.stamps(self.memory)[windows.rows]
        assert (now == stamps).all(), "a row changed under a reader"
        return out

    def draw(self, request: Request, who: bytes = b"c0") -> dict[Path, Any]:
        """Ask for one batch and copy it; the lease stays open."""
        answer = self.get(request, who)
        assert isinstance(answer, Plans)
        return self.gather(answer.plans[0])

    # --- what was done ----------------------------------------------------------------------------------------------

    def events_of(self, cls: type[_E]) -> list[_E]:
        """Every event of one kind so far."""
        return [event for event in self.events if isinstance(event, cls)]

    def verdicts(self) -> list[Verdict]:
        """Every verdict so far."""
        return [what for what in self.announced if isinstance(what, Verdict)]

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, AnswerRequest):
            self._note_answer(effect.peer, effect.request_id, effect.answer)
        elif isinstance(effect, RefuseRequest):
            self._note_answer(effect.peer, effect.request_id, effect.error)
        elif isinstance(effect, MarkEdition):
            if self.layout is not None:
                self.layout.edition(self.memory)[0] = effect.edition
        elif isinstance(effect, PushTicket):
            self.tickets.append(effect.ticket)
        elif isinstance(effect, Announce):
            self.announced.append(effect.what)
            if isinstance(effect.what, Event):
                self.events.append(effect.what)
        elif isinstance(effect, CreateBuffer):
            self.layout = SegmentLayout.of(effect.schema, effect.rows, effect.steps)
            self.memory = bytearray(self.layout.nbytes)
            self.tell(BufferReady(self.layout.describe(None, b"t" * 32)))
        elif isinstance(effect, WriteRollout):
            self.writes.append(effect)
            if self.auto_write:
                self.write()
        elif isinstance(effect, GatherFrame):
            self.frames.append(self.gather(effect.plan))
            self.frame_leases.append(effect.plan.lease_id)
            self.tell(FrameGathered(effect.plan.lease_id))
        else:
            self.ended = effect

    def _note_answer(self, peer: Peer, request_id: int, answer: Answer | OdsError) -> None:
        key = (peer.identity, request_id)
        self.answers[key] = answer
        self.answer_counts[key] = self.answer_counts.get(key, 0) + 1
        assert self.answer_counts[key] == 1, "a request was answered twice"
