"""A real peer for client tests: a thread with a real ROUTER and PUB, answering from the broker's own state and memory.

``hold`` keeps answers back until ``let_go``; ``before_answer`` sees every answer before it leaves. What the broker does
on its own (time, deadlines) goes by the real clock.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ods_async.core.memory import BatchLayout, SegmentLayout
from ods_async.core.reports import ServiceBeat
from ods_async.core.requests import Answer, Batch, Request, Welcome
from ods_async.core.stimuli import (
    Announce,
    AnswerRequest,
    AskedFor,
    BufferReady,
    CreateBuffer,
    Effect,
    FrameGathered,
    GatherFrame,
    Instant,
    Peer,
    RefuseRequest,
    Tick,
)
from ods_async.errors import OdsError
from ods_async.testing.in_memory import InMemoryBroker
from ods_async.transport.shm import Segment, anonymous, create_segment
from ods_async.transport.sockets import Channel, Hub, join_envelope, open_channel, split_envelope, wait_any
from ods_async.wire.codec import decode_request, encode_answer, encode_broadcast

T = TypeVar("T")


class Memory(InMemoryBroker):
    """The broker of ``ods_async.testing``, its memory in a segment, its answers sent by :class:`Service`."""

    def __init__(self, service: Service, shared: bool, **settings: Any) -> None:
        self.service = service
        self.shared = shared
        self.segment: Segment | None = None
        self.token = secrets.token_bytes(32)
        super().__init__(**settings)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, CreateBuffer):
            layout = self.layout = SegmentLayout.of(effect.schema, effect.rows, effect.steps)
            make = create_segment(layout.nbytes, 7, self.token) if self.shared else anonymous(layout.nbytes, self.token)
            self.segment = make
            self.memory = make.buffer  # type: ignore[assignment]
            self.tell(BufferReady(layout.describe(make.path, self.token)))
        elif isinstance(effect, AnswerRequest):
            self.service.send(effect.peer, effect.request_id, effect.answer)
        elif isinstance(effect, RefuseRequest):
            self.service.send(effect.peer, effect.request_id, effect.error)
        elif isinstance(effect, GatherFrame):
            plan = effect.plan
            views = self.gather(plan)
            assert self.layout is not None
            layout = BatchLayout.of(self.layout.schema, plan.batch_size, plan.length, context=plan.history > 0)
            payload = bytearray(layout.nbytes)
            for path, view in layout.views(payload).items():
                view[...] = views[path]
            nbytes = layout.nbytes
            answer = Batch(plan.batch_size, plan.length, plan.history, nbytes, effect.language, plan.lease_id)
            self.service.send(effect.peer, effect.request_id, answer, bytes(payload))
            self.tell(FrameGathered(plan.lease_id))
        else:
            if isinstance(effect, Announce):
                self.service.broadcast(effect.what)
            super()._carry_out(effect)


class Service:
    """The thread. Use as a context manager.

    Args:
        endpoint: where to listen; by default a free port of this machine.
        shared: whether the buffer is a shared segment.
        fill: episodes of that length in every slot from the start, by a worker that has joined; 0: nobody joined.
        **settings: the broker's settings.
    """

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0", *, shared: bool = True, fill: int = 8, **settings: Any):
        self.hub = Hub()
        self.router: Channel = open_channel(self.hub, "router", bind=(endpoint,))
        self.events: Channel = open_channel(self.hub, "pub", bind=("tcp://127.0.0.1:0",))
        self.endpoint = self.router.endpoints[0]
        self.requests: list[Request] = []
        self.sessions: set[bytes] = set()
        self.mute = False  # swallow broadcasts
        self.hold: Callable[[Answer | OdsError], bool] = lambda answer: False
        self.held: list[tuple[Peer, int, Answer | OdsError, bytes | None]] = []
        self.before_answer: Callable[[Answer | OdsError], None] = lambda answer: None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._wake = os.eventfd(0)
        self._going = True
        self.broker = Memory(self, shared, **settings)
        self._clock()
        if fill:
            self.broker.join()
            self.broker.fill(fill)
        self._thread = threading.Thread(target=self._serve, name="test-peer")

    def __enter__(self) -> Service:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self, linger: float = 0.0) -> None:
        """Go away as a killed broker does, only tidily; with ``linger`` what was broadcast still leaves."""
        if self._thread.is_alive():
            self._going = False
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)
            self.events.close(linger)
            self.hub.close()
            if self.broker.segment is not None:
                self.broker.segment.close()

    def do(self, job: Callable[[], T]) -> T:
        """Run ``job`` in the service's thread and return what it returns."""
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs.put((job, outcome))
        os.eventfd_write(self._wake, 1)
        result: T = outcome.get(timeout=10)
        return result

    def wait_for(self, condition: Callable[[], bool], timeout: float = 10.0) -> None:
        """Wait until ``condition``, looked at in the service's thread, holds."""
        end = time.monotonic() + timeout
        while not self.do(condition):
            assert time.monotonic() < end, "waited in vain"

    def let_go(self) -> None:
        """Send what was held."""

        def send() -> None:
            self.hold = lambda answer: False
            held, self.held = self.held, []
            for peer, request_id, answer, payload in held:
                self.send(peer, request_id, answer, payload)

        self.do(send)

    def refill(self, length: int = 8) -> None:
        """A whole new generation, at once."""

        def job() -> None:
            self.broker.state.production.request("manual")
            self.broker.tell(Tick())
            self.broker.fill(length)

        self.do(job)

    @property
    def open_leases(self) -> int:
        """Leases that are open now."""
        return self.do(lambda: sum(len(self.broker.state.run.store.leases_of(who)) for who in self.sessions))

    def asked(self, cls: type[T]) -> list[T]:
        """The requests of one class so far."""
        return [request for request in self.requests if isinstance(request, cls)]

    # --- in the thread ----------------------------------------------------------------------------------------------

    def send(self, peer: Peer, request_id: int, answer: Answer | OdsError, payload: bytes | None = None) -> None:
        if self.hold(answer):
            self.held.append((peer, request_id, answer, payload))
            return
        self.before_answer(answer)
        if isinstance(answer, Welcome):
            answer = replace(answer, events=self.events.endpoints[0])
        body = [encode_answer(request_id, answer)] + ([] if payload is None else [payload])
        self.router.send(join_envelope(peer, body), copy=False)

    def broadcast(self, what: Any) -> None:
        if not self.mute:
            self.events.send(encode_broadcast(what))

    def beat(self) -> None:
        """Tell subscribers how far the numbers are."""
        run = self.broker.state.run
        self.broadcast(ServiceBeat(run.run_id, len(self.broker.events), run.state.value))

    def _clock(self) -> None:
        self.broker.now = Instant(time.monotonic_ns(), time.time_ns())

    def _serve(self) -> None:
        while self._going:
            ready = wait_any([self.router, self._wake], 0.02)
            self._clock()
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while not self._jobs.empty():
                job, outcome = self._jobs.get()
                outcome.put(job())
            while (frames := self.router.receive()) is not None:
                peer, body = split_envelope(frames)
                self.sessions.add(peer.identity)
                request_id, timeout, request = decode_request(body[0])
                self.requests.append(request)
                self.broker.tell(AskedFor(peer, request_id, request, timeout))
            self.broker.tell(Tick())
