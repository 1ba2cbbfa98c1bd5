"""One asker's side of request and answer: numbers, deadlines, which bytes are the answer. No clock, no socket.

Every request has a number of its own; an answer repeats it. What carries another number is the late answer to a
question nobody waits for any more, and is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ods_async.core.requests import Answer, Batch, Cancel, Limits, Release, Request, Welcome
from ods_async.errors import ArgumentError, OdsError, ProtocolError, RequestTimeoutError
from ods_async.wire.codec import decode_answer, encode_request
from ods_async.wire.errors import own_type
from ods_async.wire.messages import LIMITS

__all__ = ["Answered", "Asker", "checked_timeout"]

# How much longer than the broker an asker waits: the broker's own answer at the deadline says what is missing.
PATIENCE_SECONDS: Final = 0.25
PATIENCE_SHARE: Final = 0.05
PATIENCE_MOST: Final = 1.0


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, with the payload frame when it has one."""

    answer: Answer
    payload: bytes | memoryview | None = None


@dataclass(frozen=True, slots=True)
class _Pending:
    request_id: int
    operation: str
    timeout: float
    deadline: float


def checked_timeout(timeout: float | None, default: float) -> float:
    """The time-out in seconds, ``default`` for None.

    Raises:
        ArgumentError: not a finite number above 0.
    """
    if timeout is None:
        return default
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, (int, float))
        or not math.isfinite(timeout)
        or not timeout > 0
    ):
        raise ArgumentError(
            f"timeout is {timeout!r}; it must be a finite number of seconds above 0",
            argument="timeout",
            value=repr(timeout),
            rule="finite, above 0",
        )
    return float(timeout)


class Asker:
    """Numbers requests, knows the one that is waited for, and tells its answer from anything else.

    One request at a time, as on a REQ socket. Times are monotonic seconds, given by the caller.
    """

    def __init__(self, first_id: int = 1) -> None:
        self._next_id = first_id
        self._limits: Limits = LIMITS  # until the broker has told its own
        self._pending: _Pending | None = None
        self._last_id = 0

    @property
    def waiting(self) -> bool:
        """Whether an answer is waited for."""
        return self._pending is not None

    @property
    def patience(self) -> float:
        """When to give up waiting (monotonic seconds); infinity when nothing is waited for."""
        if self._pending is None:
            return math.inf
        slack = min(PATIENCE_MOST, PATIENCE_SECONDS + PATIENCE_SHARE * self._pending.timeout)
        return self._pending.deadline + slack

    def ask(self, request: Request, *, now: float, deadline: float) -> bytes:
        """The bytes that ask ``request``, to be answered by ``deadline``.

        Raises:
            RequestTimeoutError: the deadline is already over; nothing was asked.
        """
        timeout = deadline - now
        if timeout <= 0:
            raise RequestTimeoutError(
                f"no time left to ask for {_name(request)}",
                operation=_name(request),
                timeout=0.0,
                missing="time",
            )
        request_id = self._number()
        data = encode_request(request_id, timeout, request, self._limits)
        self._last_id = request_id
        self._pending = _Pending(request_id, _name(request), timeout, deadline)
        return data

    def tell(self, notice: Release | Cancel) -> bytes:
        """The bytes of a notice, which gets no answer. What was waited for is waited for no longer."""
        self._pending = None
        return encode_request(self._number(), 0.0, notice, self._limits)

    def receive(self, frames: Sequence[bytes | memoryview]) -> Answered | None:
        """The answer that is waited for, or None when these frames are the answer to something older.

        Raises:
            ProtocolError: the frames are no answer.
            Exception: the error that the broker answered, with its own class where that class is known.
        """
        pending = self._pending
        if pending is None:
            return None
        if not 1 <= len(frames) <= 2:
            raise ProtocolError(
                f"an answer has one frame or two, this one has {len(frames)}; is {pending.operation} "
                "being answered by another program?",
                reason="frames",
            )
        request_id, answer = decode_answer(frames[0], self._limits)
        if request_id != pending.request_id:
            return None
        self._pending = None
        if isinstance(answer, OdsError):
            try:
                raise own_type(answer)
            finally:
                del answer  # else this frame and the error would keep each other, and the caller's frames, alive
        if isinstance(answer, Welcome):
            self._limits = answer.limits
        payload = frames[1] if len(frames) == 2 else None
        announced = answer.payload_bytes if isinstance(answer, Batch) else None
        found = None if payload is None else len(payload)
        if announced != found:
            raise ProtocolError(
                f"the answer to {pending.operation} announces {_bytes(announced)} of payload and carries "
                f"{_bytes(found)}; the broker and this client do not speak the same protocol",
                reason="payload size",
            )
        return Answered(answer, payload)

    def give_up(self) -> bytes | None:
        """The notice that the request is no longer wanted, or None when none is waited for."""
        return None if self._pending is None else self.unseen()

    def unseen(self) -> bytes:
        """The notice that nobody has seen the answer to the last request, whether it came or not."""
        return self.tell(Cancel(self._last_id))

    def overdue(self) -> RequestTimeoutError:
        """The error for an asker whose patience is over."""
        operation, timeout = ("a request", 0.0)
        if self._pending is not None:
            operation, timeout = self._pending.operation, self._pending.timeout
        return RequestTimeoutError(
            f"{operation}: no answer from the broker within {timeout:.3g} s; it is busy, stopped, or out of reach",
            operation=operation,
            timeout=timeout,
            missing="an answer from the broker",
        )

    def _number(self) -> int:
        number = self._next_id
        self._next_id += 1
        return number


def _name(request: Request) -> str:
    return type(request).__name__


def _bytes(count: int | None) -> str:
    return "none" if count is None else f"{count} bytes"
