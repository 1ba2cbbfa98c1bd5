"""The asking end of a simulated connection: drives the client's own conversations, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ods_async.client.exchange import Ask, Do, Talk
from ods_async.client.session import Session
from ods_async.core.requests import Batch, BufferDescription, Cancel, Plan, Release, Request, Welcome
from ods_async.core.schema import Path
from ods_async.errors import BrokerUnreachableError, OdsError, RequestTimeoutError
from ods_async.testing.simulation.broker_peer import Copy, Segment, SimBroker
from ods_async.testing.simulation.clockwork import Connection, Process
from ods_async.wire.asking import Answered

if TYPE_CHECKING:
    from ods_async.testing.simulation.service import Service

__all__ = ["FAILURES", "Cancelled", "Driver", "SimMemory", "Views"]

Views = dict[Path, Any]
FAILURES = (RuntimeError, ValueError)
"""What simulated workers fail of; a run's failure arrives as its own type (B11)."""
_PENDING = object()


class Cancelled(BaseException):
    """The caller gave up, as with ``asyncio.CancelledError``."""


class SimMemory:
    """Batches as plain arrays, out of a mapped segment or over a received frame."""

    def __init__(self, segment: Segment, *, shared: bool) -> None:
        self._segment = segment
        self._copies: dict[int, Copy] = {}
        self.shared = shared

    def nbytes(self, batch_size: int, length: int, history: int) -> int:
        """So much that copying takes a while."""
        return 1

    @property
    def edition(self) -> int | None:
        """What the segment shows."""
        return int(self._segment.edition[0]) if self.shared else None

    def prepare(self, batch_size: int, length: int, history: int, landing: object) -> None:
        """Nothing is made ahead."""

    def gather(self, plans: Sequence[Plan], landing: object, prepared: Sequence[object] = ()) -> list[Views | None]:
        """Called twice for the same plans: half of the windows are copied, then, later, the others."""
        copies = [self._copies.pop(plan.lease_id, None) for plan in plans]
        if None in copies:
            for plan in plans:
                copy = self._copies[plan.lease_id] = Copy(self._segment, plan)
                copy.first_half()
            return _PENDING  # type: ignore[return-value]
        return [copy.views if copy is not None and copy.second_half() else None for copy in copies]

    def wrap(self, answer: Batch, payload: Any, landing: object) -> Views:
        """The frame's arrays."""
        views: Views = payload
        return views

    def close(self) -> None:
        """Let go of the segment."""
        self._copies.clear()


class Lane:
    """One connection's requests; good until the connection is lost."""

    def __init__(self, link: Connection, broker: SimBroker) -> None:
        self.link = link
        self.broker = broker
        self.session = Session()
        self.lost = False
        self.waiting: int | None = None
        self._next = 1

    def number(self) -> int:
        """A new request's number."""
        self._next += 1
        return self._next

    def tell(self, notice: Release | Cancel, on_answer: Callable[..., None]) -> None:
        """Send a notice."""
        self.waiting = None
        self.link.up("requests", self.broker.asked, self.link, on_answer, self.number(), notice, 0.0)


class Driver:
    """Carries out one conversation at a time for a process, over a lane that it makes and remakes.

    Args:
        service: the simulated service.
        process: whose.
    """

    def __init__(self, service: Service, process: Process) -> None:
        self._service = service
        self._world = service.world
        self._process = process
        self._lane: Lane | None = None
        self._talk: Talk[Any] | None = None
        self._done: Callable[[object, BaseException | None], None] | None = None
        self._turn = 0
        self._deadline = 0.0

    @property
    def busy(self) -> bool:
        """Whether a conversation is under way."""
        return self._done is not None

    @property
    def session(self) -> Session:
        """What the connection in use remembers."""
        return self._lane.session if self._lane is not None else Session()

    @property
    def link(self) -> Connection | None:
        """The connection in use."""
        return self._lane.link if self._lane is not None else None

    @property
    def broker(self) -> SimBroker | None:
        """The broker at the other end."""
        return self._lane.broker if self._lane is not None else None

    def make_memory(self, _welcome: Welcome, description: BufferDescription, *, shared: bool) -> SimMemory:
        """The buffer that the broker describes."""
        assert description.segment is not None
        return SimMemory(self._service.segments[description.segment], shared=shared)

    def start(
        self,
        talk: Callable[[Session], Talk[Any]],
        timeout: float,
        done: Callable[[object, BaseException | None], None],
    ) -> None:
        """Begin a conversation; ``done(outcome, error)`` is called at its end."""
        assert self._done is None
        self._deadline = self._world.seconds + timeout
        self._done = done
        self._reach(talk)

    def cancel(self) -> None:
        """Give up what is under way."""
        if self._talk is not None:
            self._world.note(self._process.name, "gives up")
            self._give_up()
            self._resume(None, Cancelled())

    # --- inside -----------------------------------------------------------------------------------------------------

    def _reach(self, talk: Callable[[Session], Talk[Any]]) -> None:
        lane = self._lane
        if lane is None or lane.lost:
            broker = self._service.broker
            if broker is None or not broker.process.alive:
                self._world.after(0.1, self._process, self._nobody)
                return
            link = self._service.network.connect(self._process, broker.process, self._lost)
            lane = self._lane = Lane(link, broker)
        self._talk = talk(lane.session)
        self._resume(None, None)

    def _nobody(self) -> None:
        self._report(None, BrokerUnreachableError("nobody", endpoint="sim://", timeout=0.1))

    def _report(self, value: object, error: BaseException | None) -> None:
        done, self._done = self._done, None
        assert done is not None
        done(value, error)

    def _resume(self, value: object, error: BaseException | None) -> None:
        talk, lane = self._talk, self._lane
        assert talk is not None
        assert lane is not None
        self._turn += 1
        turn = self._turn
        try:
            step = talk.throw(error) if error is not None else talk.send(value)
        except StopIteration as stop:
            self._finish(stop.value, None)
            return
        except (OdsError, TimeoutError, Cancelled, *FAILURES) as raised:
            self._finish(None, raised)
            return
        if isinstance(step, Ask):
            self._ask(step, turn)
        else:
            self._world.after(self._pause(), self._process, self._do, step, turn)

    def _pause(self) -> float:
        rng = self._world.rng
        if not self._world.calm and rng.random() < 0.03:
            return 1.5 * self._service.scenario.settings.lease_seconds  # it sleeps past its lease
        return rng.expovariate(1 / 0.05) if rng.random() < 0.2 else 0.0002

    def _do(self, step: Do, turn: int) -> None:
        if turn != self._turn:
            return
        try:
            outcome = step.work()
        except OdsError as error:
            self._resume(None, error)
            return
        if outcome is _PENDING:
            self._world.after(self._pause(), self._process, self._do, step, turn)
        else:
            self._resume(outcome, None)

    def _ask(self, step: Ask, turn: int) -> None:
        lane = self._lane
        assert lane is not None
        now = self._world.seconds
        until = self._deadline if step.limit is None else min(self._deadline, now + step.limit)
        if lane.lost or until <= now:
            error: OdsError = (
                BrokerUnreachableError("the broker went away", endpoint="sim://", timeout=0.0)
                if lane.lost
                else RequestTimeoutError("no time left", operation="", timeout=0.0, missing="time")
            )
            self._world.after(0.0, self._process, self._throw, turn, error)
            return
        request: Request = step.request
        number = lane.waiting = lane.number()
        wait = until - now
        lane.link.up("requests", lane.broker.asked, lane.link, self._on_answer, number, request, wait)
        self._world.after(wait + min(1.0, 0.25 + 0.05 * wait), self._process, self._overdue, lane, number)

    def _throw(self, turn: int, error: OdsError) -> None:
        if turn == self._turn:
            self._resume(None, error)

    def _on_answer(self, request_id: int, answer: object, payload: Any) -> None:
        lane = self._lane
        if lane is None or lane.lost or lane.waiting != request_id or self._talk is None:
            return
        lane.waiting = None
        if isinstance(answer, Exception):
            self._resume(None, answer)
        else:
            self._resume(Answered(answer, payload), None)  # type: ignore[arg-type]

    def _overdue(self, lane: Lane, number: int) -> None:
        if lane is self._lane and lane.waiting == number:
            self._give_up()
            self._resume(None, RequestTimeoutError("no answer", operation="", timeout=0.0, missing="an answer"))

    def _give_up(self) -> None:
        lane = self._lane
        if lane is not None and lane.waiting is not None and not lane.lost:
            lane.tell(Cancel(lane.waiting), self._on_answer)

    def _lost(self, link: Connection) -> None:
        lane = self._lane
        if lane is None or lane.link is not link or lane.lost:
            return
        lane.lost = True
        if lane.waiting is not None:
            lane.waiting = None
            self._resume(None, BrokerUnreachableError("the broker went away", endpoint="sim://", timeout=0.0))

    def _finish(self, value: object, error: BaseException | None) -> None:
        self._talk = None
        lane = self._lane
        assert lane is not None
        if not lane.lost:
            notice = lane.session.notice()
            if notice is not None:
                lane.tell(notice, self._on_answer)
        self._report(value, error)
