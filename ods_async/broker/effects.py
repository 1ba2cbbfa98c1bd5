"""Carries out what the state decided: answers, orders, announcements, and the work that threads do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ods_async.broker.broadcasts import Broadcasts
from ods_async.broker.doors import Doors
from ods_async.broker.memory import BrokerMemory
from ods_async.broker.outgoing import OutgoingBook, Reservation
from ods_async.core.reports import RevokeTickets, Ticket
from ods_async.core.requests import Answer, Batch, Connect, Limits, Plan, Request, Welcome
from ods_async.core.stimuli import (
    Announce,
    AnswerLost,
    AnswerRequest,
    AskedFor,
    BufferFailed,
    BufferReady,
    CreateBuffer,
    Effect,
    EndService,
    FrameGathered,
    GatherFrame,
    MarkEdition,
    Peer,
    PushTicket,
    RefuseRequest,
    RolloutWritten,
    Stimulus,
    WriteRollout,
)
from ods_async.core.write import write_rollout
from ods_async.errors import LimitExceededError, OdsError, SharedMemoryError
from ods_async.transport.pool import BufferPool
from ods_async.transport.priority import thread_pool
from ods_async.transport.sockets import join_envelope
from ods_async.wire.codec import encode_answer, encode_ticket
from ods_async.wire.dialect import dialect_of
from ods_async.wire.messages import PROTOCOL

__all__ = ["EffectRunner"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

GATHERING_THREADS = 2
INGEST_THREADS = 2  # one writes a rollout, one reads the next
IDLE_POOL_BYTES = 512 * 1024 * 1024
SHARED_WORK_BYTES = 8 * 1024 * 1024  # from here on a batch is gathered by several threads
INLINE_BYTES = 1024 * 1024  # gathered on the loop: a hop to a thread costs more than the copy
ROOM_SECONDS = 2.0
ROOM_POLL_SECONDS = 0.001
# zmq gives every peer an identity of five bytes that begins with a zero, and lets no peer choose one that does.
_INSIDE = b"\x00inside"
_UNHEARD = 0


class EffectRunner:
    """The hands of the broker. All but what is given to :meth:`in_thread` and :meth:`in_the_back` runs in the loop.

    Args:
        doors: the open sockets.
        feed: tells the state what became of an effect.
        ended: called once with the state's last effect.
        limits: what peers may send and ask for.
        shared_memory: ``auto``, ``on`` or ``off``.
        run_id: of this run.

    Attributes:
        counts: ``answers_dropped`` (the asker is gone or does not read), ``batches_refused`` (its earlier ones are
            unread), ``faults`` (this program's own).
    """

    def __init__(
        self,
        doors: Doors,
        feed: Callable[[Stimulus], None],
        ended: Callable[[EndService], None],
        limits: Limits,
        *,
        shared_memory: str,
        run_id: int,
    ) -> None:
        self._doors = doors
        self._feed = feed
        self._ended = ended
        self._limits = limits
        self._shared_memory = shared_memory
        self._run_id = run_id
        self._threads = thread_pool(GATHERING_THREADS, "ods-broker")
        # Nobody in particular waits for a rollout, but whoever draws waits for an answer.
        self._back = thread_pool(INGEST_THREADS, "ods-ingest", stepping_back=True)
        self._working: set[asyncio.Task[None]] = set()
        self._memory: BrokerMemory | None = None
        self._pool = BufferPool(IDLE_POOL_BYTES)
        self._outgoing = OutgoingBook(limits.batch_bytes, limits.parked_per_session)
        self._tickets: deque[Ticket] = deque()
        self._dialled: dict[Peer, str] = {}
        self._inside: dict[int, asyncio.Future[Answer]] = {}
        self._inside_count = 0
        dialect_of(limits)  # making it takes 10 ms: now, before anybody waits for an answer
        self.counts: Counter[str] = Counter()
        self._broadcasts = Broadcasts(lambda: doors.events, limits, self.counts, self.fault)

    # --- what others may use ----------------------------------------------------------------------------------------

    def carry_out(self, effect: Effect) -> None:
        """Do it, or begin to; never waits."""
        match effect:
            case AnswerRequest():
                self._answer(effect)
            case RefuseRequest():
                self.refuse(effect.peer, effect.request_id, effect.error)
            case GatherFrame():
                self._gather(effect)
            case MarkEdition():
                if self._memory is not None:
                    self._memory.edition[0] = effect.edition
            case PushTicket():
                self._tickets.append(effect.ticket)
                self.push_tickets()
            case Announce():
                self._announce(effect)
            case CreateBuffer():
                self._work(self._create(effect))
            case WriteRollout():
                self._work(self._write(effect))
            case EndService():
                self._ended(effect)

    def refuse(self, peer: Peer, request_id: int, error: OdsError) -> None:
        """Send an error as the answer."""
        if peer.identity == _INSIDE:
            self._settle_inside(request_id, error)
        elif not self._send(peer, [encode_answer(request_id, error, self._limits)]):
            self.counts["answers_dropped"] += 1

    def push_tickets(self) -> None:
        """Deal out what waits for a worker to take it."""
        while self._tickets and self._doors.tickets.send([encode_ticket(self._tickets[0])]):
            self._tickets.popleft()

    @contextlib.contextmanager
    def dialled(self, peer: Peer, via: str) -> Iterator[None]:
        """While it lasts, a ``Welcome`` to ``peer`` holds the addresses for a client that dialled ``via``."""
        self._dialled[peer] = via
        try:
            yield
        finally:
            self._dialled.pop(peer, None)

    async def ask(self, request: Request, timeout: float) -> Answer:
        """Ask the state from inside, as a consumer would.

        Raises:
            OdsError: the answer, where it is an error.
        """
        self._inside_count += 1
        request_id = self._inside_count
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._inside[request_id] = future
        try:
            connect = Connect(via="", role="owner", name="inside", protocol=PROTOCOL)
            self._feed(AskedFor(Peer(_INSIDE), _UNHEARD, connect, timeout))
            self._feed(AskedFor(Peer(_INSIDE), request_id, request, timeout))
            return await future
        finally:
            self._inside.pop(request_id, None)

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Run ``work``, for which somebody waits, in one of the broker's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def in_the_back(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` on a rollout in a thread that lets others go first."""
        return await asyncio.get_running_loop().run_in_executor(self._back, work)

    def fault(self, doing: str, error: BaseException) -> None:
        """This program erred: count it, and report it with its traceback."""
        self.counts["faults"] += 1
        _log.error("the broker erred while %s: %s", doing, error, exc_info=error)

    async def close(self) -> None:
        """Send what is still to be told, wait for the threads' work (milliseconds), then give the memory back."""
        self._broadcasts.flush()
        await asyncio.gather(*self._working, return_exceptions=True)
        for pool in (self._threads, self._back):
            pool.shutdown(wait=True)
        for future in self._inside.values():
            future.cancel()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    # --- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, effect: AnswerRequest) -> None:
        peer, request_id, answer = effect.peer, effect.request_id, effect.answer
        if peer.identity == _INSIDE:
            self._settle_inside(request_id, answer)
            return
        if isinstance(answer, Welcome):
            beside = self._doors.siblings_for(self._dialled.get(peer, ""))
            answer = Welcome(
                **{name: getattr(answer, name) for name in Welcome.__dataclass_fields__}
                | {"tickets": beside.tickets, "rollouts": beside.rollouts, "events": beside.events}
            )
        try:
            encoded = encode_answer(request_id, answer, self._limits)
        except LimitExceededError as error:
            self.refuse(peer, request_id, error)
            self._feed(AnswerLost(peer, request_id, answer))
            return
        except Exception as error:
            self.fault(f"encoding a {type(answer).__name__}", error)
            self.refuse(peer, request_id, _own_fault(f"answer with a {type(answer).__name__}", error))
            self._feed(AnswerLost(peer, request_id, answer))
            return
        if not self._send(peer, [encoded]):
            self.counts["answers_dropped"] += 1
            self._feed(AnswerLost(peer, request_id, answer))

    def _settle_inside(self, request_id: int, answer: Answer | OdsError) -> None:
        future = self._inside.get(request_id)
        if future is None or future.done():
            return
        if isinstance(answer, OdsError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _send(self, peer: Peer, body: list[bytes | memoryview], *, copy: bool = True) -> bool:
        return self._doors.requests.send(join_envelope(peer, body), copy=copy)

    def _announce(self, effect: Announce) -> None:
        what = effect.what
        if isinstance(what, RevokeTickets) and self._tickets:
            revoked = frozenset(what.ticket_ids)
            self._tickets = deque(ticket for ticket in self._tickets if ticket.ticket_id not in revoked)
        self._broadcasts.say(what)

    # --- work in threads --------------------------------------------------------------------------------------------

    def _work(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._working.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fault("working", error)

    async def _create(self, effect: CreateBuffer) -> None:
        def create() -> BrokerMemory:
            return BrokerMemory.create(
                effect.schema, effect.rows, effect.steps, shared=self._shared_memory, run_id=self._run_id
            )

        try:
            self._memory = await self.in_thread(create)
        except OdsError as error:
            self._feed(BufferFailed(error))
        except Exception as error:
            self.fault("making the buffer", error)
            text = f"the buffer cannot be made: {type(error).__name__}: {error}"
            self._feed(BufferFailed(SharedMemoryError(text, path="", needed_bytes=None, free_bytes=None)))
        else:
            self._feed(BufferReady(self._memory.description))

    async def _write(self, effect: WriteRollout) -> None:
        memory = self._memory
        assert memory is not None, "a rollout is written after the buffer is ready"
        try:
            runs = await self.in_the_back(lambda: write_rollout(memory.arrays, memory.stamps, effect))
        except Exception as error:
            self.fault("writing a rollout", error)
            self._feed(RolloutWritten(effect.job_id, f"it could not be written: {type(error).__name__}: {error}"))
        else:
            self._feed(RolloutWritten(effect.job_id, "", runs))

    def _gather(self, effect: GatherFrame) -> None:
        memory, plan = self._memory, effect.plan
        assert memory is not None, "windows are planned after the buffer is ready"
        layout = memory.batch_layout(plan.batch_size, plan.length, context=plan.history > 0)
        room = self._outgoing.reserve(effect.peer.identity, layout.nbytes)
        if isinstance(room, str):
            self._work(self._gather_when_there_is_room(effect, memory, layout.nbytes))
        else:
            self._work(self._gather_and_send(effect, memory, room))

    async def _gather_when_there_is_room(self, effect: GatherFrame, memory: BrokerMemory, nbytes: int) -> None:
        # The memory of a batch that its asker has read already comes back from zmq's own thread a little later.
        room: Reservation | str = ""
        patience = asyncio.get_running_loop().time() + ROOM_SECONDS
        while isinstance(room, str):
            if asyncio.get_running_loop().time() >= patience:
                self.counts["batches_refused"] += 1
                error = LimitExceededError(
                    f"no room to send another batch: {room}; read the answers, or ask less often",
                    what="outgoing",
                    size=self._outgoing.nbytes + nbytes,
                    limit=None,
                )
                self._not_gathered(effect, error)
                return
            await asyncio.sleep(ROOM_POLL_SECONDS)
            room = self._outgoing.reserve(effect.peer.identity, nbytes)
        await self._gather_and_send(effect, memory, room)

    async def _gather_and_send(self, effect: GatherFrame, memory: BrokerMemory, room: Reservation) -> None:
        try:
            if room.nbytes <= INLINE_BYTES:
                payload = self._gathered(effect.plan, memory)
            else:
                payload = await self._gathered_in_threads(effect.plan, memory)
        except OdsError as error:
            room.free()
            self._not_gathered(effect, error)
            return
        except Exception as error:
            room.free()
            self.fault("gathering a batch", error)
            self._not_gathered(effect, _own_fault("gather the batch", error))
            return
        room.hold_until_gone(payload)
        plan = effect.plan
        batch = Batch(plan.batch_size, plan.length, plan.history, payload.nbytes, effect.language, plan.lease_id)
        header = encode_answer(effect.request_id, batch, self._limits)
        if self._send(effect.peer, [header, payload.data], copy=False):
            self._feed(FrameGathered(plan.lease_id))
        else:
            self.counts["answers_dropped"] += 1
            self._feed(FrameGathered(plan.lease_id, "the asker is gone or does not read"))

    def _gathered(self, plan: Plan, memory: BrokerMemory) -> NDArray[np.uint8]:
        layout = memory.batch_layout(plan.batch_size, plan.length, context=plan.history > 0)
        payload = self._pool.take(layout.nbytes)
        return _whole(payload, memory.copier.copy(plan, layout, payload.data))

    async def _gathered_in_threads(self, plan: Plan, memory: BrokerMemory) -> NDArray[np.uint8]:
        """As :meth:`_gathered`; a large batch by several threads: who asked for it waits, and so does a processor."""
        layout = memory.batch_layout(plan.batch_size, plan.length, context=plan.history > 0)
        payload = self._pool.take(layout.nbytes)

        def copy(part: tuple[int, int]) -> bool:
            return memory.copier.copy(plan, layout, payload.data, part)

        n = plan.batch_size
        count = min(GATHERING_THREADS, n) if layout.nbytes >= SHARED_WORK_BYTES else 1
        parts = [(n * turn // count, n * (turn + 1) // count) for turn in range(count)]
        done = await asyncio.gather(*(self.in_thread(functools.partial(copy, part)) for part in parts))
        return _whole(payload, all(done))

    def _not_gathered(self, effect: GatherFrame, error: OdsError) -> None:
        self.refuse(effect.peer, effect.request_id, error)
        self._feed(FrameGathered(effect.plan.lease_id, error.message))


def _whole(payload: NDArray[np.uint8], unchanged: bool) -> NDArray[np.uint8]:
    if not unchanged:
        raise OdsError("the batch took longer to gather than its lease lasted, and was dropped; ask again")
    return payload


def _own_fault(what: str, error: Exception) -> OdsError:
    return OdsError(f"the broker could not {what}, which is a defect of its own: {type(error).__name__}: {error}")
