"""A lane: one socket that asks a broker and waits for the answer, blocking or awaiting.

A lane is good for one connection. When that is lost the lane is spent (``lost``), whatever was waited for fails at
once, and its user makes a new one: what a broker knew about the old connection, the next broker does not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Final

from ods_async.core.requests import Cancel, Release, Request
from ods_async.errors import BrokerUnreachableError, ClosedError, PeerError
from ods_async.transport.curve import CurveKeys
from ods_async.transport.probe import PROBE_SECONDS, mechanism_of
from ods_async.transport.pump import AsyncPump
from ods_async.transport.sockets import Channel, ChannelOptions, Frame, Hub, Waitable, open_channel, wait_any
from ods_async.transport.watch import ConnectionWatch, handshake_error, watch_connection
from ods_async.wire.asking import Answered, Asker

__all__ = ["AsyncLane", "Lane"]


_RECHECK_SECONDS: Final = 0.001


class _Line:
    """What both lanes have: the channel, its watch, the asker, and the words for what goes wrong."""

    def __init__(self, hub: Hub, endpoint: str, options: ChannelOptions) -> None:
        self.endpoint = endpoint
        self.lost = False
        self._checked = 0.0
        self._keys = options.curve if isinstance(options.curve, CurveKeys) else None
        self._asker = Asker()
        self._channel: Channel = open_channel(
            hub, "req", connect=(endpoint,), options=dataclasses.replace(options, watched=True)
        )
        self._watch: ConnectionWatch = watch_connection(self._channel)

    def check(self) -> PeerError | None:
        """What has become of the connection: None while nothing is wrong with it. Never waits."""
        if self._channel.closed:
            self.lost = True
            return self._unreachable("this connection is closed", 0.0)
        self._watch.poll()
        if self._watch.disconnects:
            self.lost = True
            return self._unreachable(f"the broker at {self.endpoint} went away, or cut this connection off", 0.0)
        if self._watch.hopeless:
            self.lost = True
            return handshake_error(self.endpoint, self._keys, self._watch)
        return None

    def recheck(self, now: float) -> PeerError | None:
        """As :meth:`check`, at most once a millisecond: looking costs more than a small batch's plan."""
        if now - self._checked < _RECHECK_SECONDS and not self.lost:
            return None
        self._checked = now
        return self.check()

    def _nobody(self, timeout: float) -> BrokerUnreachableError:
        why = f" ({self._watch.last_failure})" if self._watch.last_failure else ""
        return self._unreachable(
            f"no broker answers at {self.endpoint} within {timeout:.3g} s{why}; is it running, and is the address "
            "right?",
            timeout,
        )

    def _unreachable(self, text: str, timeout: float) -> BrokerUnreachableError:
        return BrokerUnreachableError(text, endpoint=self.endpoint, timeout=timeout)


class Lane(_Line):
    """A lane that blocks its thread; used by one thread at a time.

    Args:
        hub: whose sockets.
        endpoint: the broker's asking endpoint.
        options: keys, heartbeats, limits.
        wake: a descriptor that ends every wait when it becomes readable, or None.
    """

    def __init__(self, hub: Hub, endpoint: str, options: ChannelOptions, wake: int | None = None) -> None:
        super().__init__(hub, endpoint, options)
        self._wake = wake
        self._readers: list[Waitable | int] = [self._channel, self._watch]
        if wake is not None:
            self._readers.append(wake)

    def ask(
        self,
        request: Request,
        deadline: float,
        limit: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Answered:
        """Ask, and wait for the answer until ``deadline`` (monotonic seconds) or for ``limit`` seconds if that is less.

        ``meanwhile`` is done while the answer is on its way; what it raises is raised here, and calls the request off.
        However it ends, the lane can ask again at once, unless it is ``lost``.

        Raises:
            RequestTimeoutError: no answer in time.
            BrokerUnreachableError: nobody is there, or the broker went away meanwhile.
            ClosedError: the wake descriptor said to stop.
            Exception: what the broker answered.
        """
        self.post(request, deadline, limit)
        if meanwhile is not None:
            try:
                meanwhile()
            except BaseException:
                self.give_up()
                raise
        return self.collect()

    def post(self, request: Request, deadline: float, limit: float | None = None) -> None:
        """The first half of :meth:`ask`. Nothing else may be asked or told before :meth:`collect`."""
        now = time.monotonic()
        until = deadline if limit is None else min(deadline, now + limit)
        self._reach(now, until)
        try:
            if not self._channel.send([self._asker.ask(request, now=time.monotonic(), deadline=until)]):
                raise self.check() or self._nobody(until - now)
        except BaseException:
            self.give_up()
            raise

    def collect(self) -> Answered:
        """The second half of :meth:`ask`: wait for the answer to what was posted."""
        try:
            return self._answer()
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Call off what was posted: its answer is no longer wanted."""
        notice = self._asker.give_up()
        if notice is not None and not self.lost and not self._channel.closed:
            self._channel.send([notice])

    def tell(self, notice: Release | Cancel) -> bool:
        """Send a notice; False if it cannot leave now (then the broker's deadlines do its work)."""
        return self._channel.send([self._asker.tell(notice)])

    def close(self, linger: float = 0.0) -> None:
        """Close the socket; what was just told may go on leaving for ``linger`` seconds. Again: no effect."""
        self.lost = True
        self._channel.close(linger)

    def _reach(self, now: float, until: float) -> None:
        while not self._channel.writable:
            error = self.check()
            if error is not None:
                raise error
            left = until - time.monotonic()
            if left <= 0:
                raise self._nobody(until - now)
            self._stop_if_woken()
            if self._watch.doubtful:
                self._watch.probed(mechanism_of(self.endpoint, min(left, PROBE_SECONDS)))
                continue
            # Room to send cannot be waited for together with the others, hence the slices.
            self._channel.wait(min(left, 0.05), write=True)

    def _answer(self) -> Answered:
        while True:
            left = self._asker.patience - time.monotonic()
            if left <= 0:
                raise self._asker.overdue()
            ready = wait_any(self._readers, left)
            if self._channel in ready:  # an answer that is there counts, whatever became of the connection since
                frames = self._channel.receive()
                answered = None if frames is None else self._asker.receive(frames)
                if answered is not None:
                    return answered
            elif self._watch in ready and (error := self.check()) is not None:
                raise error
            self._stop_if_woken(ready)

    def _stop_if_woken(self, ready: list[Waitable | int] | None = None) -> None:
        if self._wake is not None and self._wake in (wait_any([self._wake], 0.0) if ready is None else ready):
            raise ClosedError("closed while an answer was waited for", what="stream")


class AsyncLane(_Line):
    """A lane of the running asyncio loop; one request at a time.

    Raises:
        RuntimeError: no loop is running.
    """

    def __init__(self, hub: Hub, endpoint: str, options: ChannelOptions) -> None:
        super().__init__(hub, endpoint, options)
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[Answered] | None = None
        self._trouble: asyncio.Future[PeerError] = self._loop.create_future()
        self._probe: asyncio.Future[str | None] | None = None
        self._pump = AsyncPump(self._channel, self._on_message)
        self._watch_fileno = self._watch.fileno
        self._loop.add_reader(self._watch_fileno, self._on_watch)
        self._loop.call_soon(self._on_watch)

    async def ask(
        self,
        request: Request,
        deadline: float,
        limit: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Answered:
        """As :meth:`Lane.ask`; may be cancelled at any time."""
        now = time.monotonic()
        until = deadline if limit is None else min(deadline, now + limit)
        if not self._channel.writable:
            await self._reach(now, until)
        waiter: asyncio.Future[Answered] = self._loop.create_future()
        timer: asyncio.TimerHandle | None = None
        try:
            data = self._asker.ask(request, now=time.monotonic(), deadline=until)
            self._waiter = waiter
            if not self._pump.send([data]):
                raise self.check() or self._nobody(until - now)
            if self.lost and self._trouble.done():
                raise self._trouble.result()
            timer = self._loop.call_later(self._asker.patience - time.monotonic(), self._on_overdue)
            if meanwhile is not None:
                meanwhile()
            return await waiter
        except BaseException:
            notice = self._asker.give_up()
            if notice is None and _has_result(waiter):  # cancelled after the answer came, before anybody saw it
                notice = self._asker.unseen()
            if notice is not None and not self.lost and not self._channel.closed:
                self._pump.send([notice])
            raise
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def tell(self, notice: Release | Cancel) -> bool:
        """As :meth:`Lane.tell`."""
        return self._pump.send([self._asker.tell(notice)])

    def close(self, linger: float = 0.0) -> None:
        """As :meth:`Lane.close`; who waits for an answer gets a :class:`ClosedError`."""
        self.lost = True
        if self._pump.stopped:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._watch_fileno)
            self._fail(ClosedError("the client was closed while an answer was waited for", what="client"))
        self._pump.close(linger)

    async def _reach(self, now: float, until: float) -> None:
        room = asyncio.ensure_future(self._pump.writable())
        try:
            waits: set[asyncio.Future[Any]] = {room, self._trouble}
            await asyncio.wait(
                waits,
                timeout=max(0.0, until - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._trouble.done():
                raise self._trouble.result()
            if self._pump.stopped:
                raise ClosedError("the client was closed while a broker was looked for", what="client")
            if not room.done():
                raise self._nobody(until - now)
        finally:
            room.cancel()

    def _on_message(self, frames: list[Frame]) -> None:
        self._on_watch()
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            answered = self._asker.receive(frames)
        except Exception as error:
            waiter.set_exception(error)
        else:
            if answered is not None:
                waiter.set_result(answered)

    def _on_watch(self) -> None:
        if self._pump.stopped or self._trouble.done():
            return
        error = self.check()
        if error is not None:
            self._trouble.set_result(error)
            self._fail(error)
        elif self._watch.doubtful and self._probe is None:
            self._probe = self._loop.run_in_executor(None, mechanism_of, self.endpoint)
            self._probe.add_done_callback(self._on_probe)

    def _on_probe(self, probe: asyncio.Future[str | None]) -> None:
        if not probe.cancelled():
            self._watch.probed(probe.result())
            self._on_watch()

    def _on_overdue(self) -> None:
        self._fail(self._asker.overdue())

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)


def _has_result(future: asyncio.Future[Answered]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
