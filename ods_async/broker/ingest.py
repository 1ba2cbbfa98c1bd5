"""What workers send: from the frames of the rollouts socket to what the state is told."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from ods_async.core.reports import Report, RolloutReport
from ods_async.core.requests import Limits
from ods_async.core.stimuli import Malformed, Reported, RolloutArrived, Stimulus
from ods_async.errors import OdsError, ProtocolError
from ods_async.transport.sockets import Frame
from ods_async.wire.codec import decode_report
from ods_async.wire.rollout import unpack_rollout

__all__ = ["Reports"]

BIG_HEADER_BYTES = 64 * 1024
BIG_PAYLOAD_BYTES = 32 * 1024 * 1024


class Reports:
    """Turns what workers send into stimuli, in the order in which it arrived.

    Big rollouts (of many episodes, or many bytes to check) are taken apart in a thread; whatever comes after waits, so
    that a worker's goodbye never overtakes its last rollout. The socket is not read meanwhile, so little can wait.

    Args:
        feed: tells the state.
        in_thread: runs a function in the broker's threads.
        pause: stops (True) and resumes (False) reading the socket.
        limits: what a worker may send.
    """

    def __init__(
        self,
        feed: Callable[[Stimulus], None],
        in_thread: Callable[[Callable[[], Stimulus]], Awaitable[Stimulus]],
        pause: Callable[[bool], None],
        limits: Limits,
    ) -> None:
        self._feed = feed
        self._in_thread = in_thread
        self._pause = pause
        self._limits = limits
        self._waiting: deque[list[Frame]] = deque()
        self._task: asyncio.Task[None] | None = None

    def on_message(self, frames: list[Frame]) -> None:
        """One message, whatever it is."""
        if self._task is None and not _is_big(frames):
            self._feed(self.read(frames))
            return
        self._waiting.append(frames)
        if self._task is None:
            self._pause(True)
            self._task = asyncio.get_running_loop().create_task(self._read_waiting())

    def read(self, frames: Sequence[Frame]) -> Stimulus:
        """What the state is told about a message; never raises for bad bytes. Safe in a thread."""
        report: Report | None = None
        try:
            if not 1 <= len(frames) <= 2:
                raise _malformed(f"{len(frames)} frames instead of 1 or 2")
            report = decode_report(frames[0], self._limits)
            if not isinstance(report, RolloutReport):
                if len(frames) != 1:
                    raise _malformed(f"a {type(report).__name__} with a payload")
                return Reported(report)
            if len(frames) != 2:
                raise _malformed("a rollout without its payload")
            return RolloutArrived(unpack_rollout(report, memoryview(frames[1]), self._limits))
        except OdsError as error:
            ticket_id = getattr(report, "ticket_id", None)
            reason = str(error.fields.get("reason", error.message))
            return Malformed("rollouts", reason, getattr(report, "worker_id", ""), ticket_id)

    async def close(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read_waiting(self) -> None:
        try:
            while self._waiting:
                frames = self._waiting.popleft()
                if _is_big(frames):
                    self._feed(await self._in_thread(functools.partial(self.read, frames)))
                else:
                    self._feed(self.read(frames))
        finally:
            self._task = None
            self._pause(False)


def _is_big(frames: Sequence[Frame]) -> bool:
    return len(frames) > 0 and (len(frames[0]) > BIG_HEADER_BYTES or len(frames[-1]) > BIG_PAYLOAD_BYTES)


def _malformed(reason: str) -> ProtocolError:
    return ProtocolError(f"this is no report: {reason}", reason=reason)
