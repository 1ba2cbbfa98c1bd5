"""The other ends of a broker, as thin as can be: they speak the wire and nothing else. For tests of the broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from ods_async.core.episode import Episode, Rollout, Segment, recorded_schema
from ods_async.core.reports import Goodbye, Heartbeat, Hello, Report, Ticket, TicketStarted, Verdict
from ods_async.core.requests import Answer, Connect, FieldDescription, Request, Welcome
from ods_async.core.schema import EpisodeSchema, FieldSpec
from ods_async.errors import OdsError
from ods_async.transport.sockets import Channel, ChannelOptions, Frame, Hub, open_channel
from ods_async.wire.codec import (
    decode_answer,
    decode_broadcast,
    decode_ticket,
    encode_report,
    encode_request,
)
from ods_async.wire.messages import PROTOCOL
from ods_async.wire.rollout import pack_rollout, plan_rollout

__all__ = ["SMALL_FIELDS", "RawConsumer", "RawWorker", "marked_episode"]

SMALL_FIELDS: Final = (
    FieldSpec(("obs", "state"), "float32", (3,)),
    FieldSpec(("obs", "mark"), "int64"),
    FieldSpec(("actions",), "float32", (2,)),
)


def marked_episode(mark: int, length: int, fields: tuple[FieldSpec, ...] = SMALL_FIELDS) -> Episode:
    """An episode of which every element of every step tells ``mark`` (modulo what its dtype holds).

    ``("obs", "mark")``, where there is such a field, holds ``1000 * mark + step``.
    """
    arrays: dict[tuple[str, ...], Any] = {}
    for field in recorded_schema(fields):
        value = mark % 251 if np.dtype(field.dtype).itemsize == 1 else mark
        arrays[field.path] = np.full((length, *field.shape), value, field.dtype)
    arrays["terminated",][:] = False
    arrays["truncated",][:] = False
    arrays["continuity_id",][:] = 0
    if ("obs", "mark") in arrays:
        arrays["obs", "mark"][:] = 1000 * mark + np.arange(length)
    half = length // 2
    segments = (Segment("reach", 0, half, "reach it"), Segment("place", half, length, f"place {mark % 3}"))
    return Episode(length, arrays, segments, instruction=f"task {mark % 5}")


class RawConsumer:
    """Asks a broker and waits for the answer; connected (``Connect``) when made.

    Args:
        endpoint: where the broker answers.
        connect: say who one is; False to see what happens without.
        timeout: seconds to wait for any answer.
    """

    def __init__(self, endpoint: str, *, connect: bool = True, timeout: float = 10.0) -> None:
        self.timeout = timeout
        self._hub = Hub()
        self.channel: Channel = open_channel(self._hub, "req", connect=[endpoint])
        self._count = 0
        self.payload: Frame | None = None
        if connect:
            welcome = self.ask(Connect(endpoint, "consumer", "raw", PROTOCOL))
            assert isinstance(welcome, Welcome)
            self.welcome = welcome

    def send(self, request: Request, timeout: float | None = None) -> int:
        """Send a request, and return its number."""
        self._count += 1
        within = self.timeout if timeout is None else timeout
        if not self.channel.wait(self.timeout, write=True) or not self.channel.send(
            [encode_request(self._count, within, request)]
        ):
            raise TimeoutError("nobody takes the request")
        return self._count

    def receive(self) -> tuple[int, Answer | OdsError]:
        """The next answer and its number; what follows the header is in ``payload``."""
        if not self.channel.wait(self.timeout) or (frames := self.channel.receive()) is None:
            raise TimeoutError(f"no answer within {self.timeout} s")
        self.payload = frames[1] if len(frames) > 1 else None
        return decode_answer(frames[0])

    def ask(self, request: Request, timeout: float | None = None) -> Answer:
        """Send and receive.

        Raises:
            OdsError: the answer, where it is an error.
            TimeoutError: no answer at all.
        """
        number = self.send(request, timeout)
        answered, answer = self.receive()
        if answered != number:
            raise AssertionError(f"the answer to request {answered} came for request {number}")
        if isinstance(answer, OdsError):
            raise answer
        return answer

    def close(self) -> None:
        """Close the socket."""
        self._hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class RawWorker:
    """Takes tickets and hands in rollouts, one call at a time, or by itself after :meth:`work_in_background`.

    Args:
        endpoint: where the broker answers.
        worker_id: its name.
        fields: of the environment it pretends to have.
        num_envs: episodes of a rollout.
        hello: say hello when made.
    """

    def __init__(
        self,
        endpoint: str,
        worker_id: str = "w0",
        *,
        fields: tuple[FieldSpec, ...] = SMALL_FIELDS,
        num_envs: int = 1,
        hello: bool = True,
    ) -> None:
        self.worker_id = worker_id
        self.fields = fields
        self.num_envs = num_envs
        self.made = 0
        self._hub = Hub()
        with RawConsumer(endpoint) as consumer:
            self.welcome = consumer.welcome
        self.tickets = open_channel(self._hub, "pull", connect=[self.welcome.tickets])
        self.rollouts = open_channel(self._hub, "push", connect=[self.welcome.rollouts])
        topics = (b"verdict." + worker_id.encode(), b"tickets", b"stop")
        self.news = open_channel(self._hub, "sub", connect=[self.welcome.events], options=ChannelOptions(topics=topics))
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        if hello:
            self.hello()

    @property
    def schema(self) -> EpisodeSchema:
        """What it records."""
        return recorded_schema(self.fields)

    def hello(self) -> None:
        """Say who it is and what it records."""
        described = tuple(FieldDescription(f.path, f.dtype, f.shape, f.pad, 0) for f in self.schema)
        self.report(Hello(self.worker_id, 4711, "nowhere", self.num_envs, described, "raw"))

    def report(self, report: Report) -> None:
        """Send a report."""
        self.send([encode_report(report)])

    def send(self, frames: list[Frame], timeout: float = 10.0) -> None:
        """Send anything."""
        if not self.rollouts.wait(timeout, write=True) or not self.rollouts.send(frames, copy=False):
            raise TimeoutError("nobody takes the report")

    def next_ticket(self, timeout: float = 10.0) -> Ticket | None:
        """The next order, reported as started, or None when none comes in time."""
        if not self.tickets.wait(timeout) or (frames := self.tickets.receive()) is None:
            return None
        ticket = decode_ticket(frames[0])
        self.report(TicketStarted(self.worker_id, ticket.ticket_id))
        return ticket

    def hand_in(self, ticket_id: int, *episodes: Episode) -> None:
        """Send the rollout of these episodes."""
        rollout = Rollout(ticket_id, self.worker_id, episodes, 1, 0.25)
        report, nbytes = plan_rollout(rollout, self.schema.fields)
        payload = bytearray(nbytes)
        pack_rollout(rollout, report, memoryview(payload))
        self.send([encode_report(report), memoryview(payload)])

    def work(self, rollouts: int, length: int = 7) -> None:
        """Make so many rollouts, each when it is ordered. Marks count up from 0; lengths from ``length`` to +3."""
        for _ in range(rollouts):
            ticket = self.next_ticket()
            if ticket is None:
                raise TimeoutError("no ticket came")
            self._make(ticket, length)

    def verdict(self, timeout: float = 10.0) -> Verdict:
        """The next verdict; other news is skipped."""
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0 and self.news.wait(left):
            frames = self.news.receive()
            if frames is not None and isinstance(what := decode_broadcast(frames[0], frames[1]), Verdict):
                return what
        raise TimeoutError(f"no verdict within {timeout} s")

    def work_in_background(self, length: int = 7, each: Callable[[], None] | None = None) -> None:
        """Go on making rollouts in a thread until closed."""

        def run() -> None:
            beat = 0.0
            while not self._stop.is_set():
                if time.monotonic() > beat:
                    beat = time.monotonic() + 0.1
                    self.report(Heartbeat(self.worker_id, "wait", None, self.made))
                ticket = self.next_ticket(0.02)
                if ticket is not None:
                    self._make(ticket, length)
                    if each is not None:
                        each()

        self._thread = threading.Thread(target=run, name=f"raw-worker-{self.worker_id}", daemon=True)
        self._thread.start()

    def close(self, goodbye: bool = True) -> None:
        """End, with or without a word."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if goodbye and self.rollouts.writable:
            self.report(Goodbye(self.worker_id, "done"))
        self.rollouts.close(1.0)
        self._hub.close(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _make(self, ticket: Ticket, length: int) -> None:
        episodes = []
        for _ in range(self.num_envs):
            episodes.append(marked_episode(self.made, length + self.made % 4, self.fields))
            self.made += 1
        self.hand_in(ticket.ticket_id, *episodes)
