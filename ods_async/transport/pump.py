"""AsyncPump: a channel served by an asyncio loop, without a thread and without a wakeup lost.

zmq's descriptor is edge-triggered: it tells that *something* changed since the channel was last looked at, and any
look, a send included, uses the news up. So after every send, and whenever a burst was cut short, the pump looks again
by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ods_async.errors import ClosedError
from ods_async.transport.sockets import Channel, Frame

__all__ = ["AsyncPump"]


class AsyncPump:
    """Calls ``on_message`` for every message of a channel, in the running loop.

    Args:
        channel: an open channel; from now on only the loop's thread may touch it.
        on_message: gets the frames. What it raises goes to the loop's exception handler and ends nothing.
        on_writable: called once when there is room again after a send was refused.
        burst: so many messages a turn of the loop at most; then others get their turn.

    Raises:
        RuntimeError: no loop is running.
    """

    def __init__(
        self,
        channel: Channel,
        on_message: Callable[[list[Frame]], None] | None = None,
        *,
        on_writable: Callable[[], None] | None = None,
        burst: int = 32,
    ) -> None:
        self.channel = channel
        self._on_message = on_message
        self._on_writable = on_writable
        self._burst = burst
        self._refused = False
        self._waiting: list[asyncio.Future[None]] = []
        self._scheduled = False
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel.fileno, self._look)
        self._look_soon()  # what came before the reader was there gives no edge any more

    @property
    def stopped(self) -> bool:
        """True after :meth:`stop` or :meth:`close`."""
        return self._stopped

    def send(self, frames: Sequence[Frame], *, copy: bool = True) -> bool:
        """As :meth:`Channel.send <ods_async.transport.sockets.Channel.send>`; from the loop's thread only."""
        sent = self.channel.send(frames, copy=copy)
        if not sent:
            self._refused = self.channel.last_refusal == "full"
        if not self._scheduled and (self._refused or self._waiting or self.channel.readable):
            self._look_soon()
        return sent

    async def writable(self) -> None:
        """Return when a send would be taken. Bound it with ``asyncio.timeout``.

        Raises:
            ClosedError: the channel is closed, or the pump stopped meanwhile.
        """
        if self.channel.writable:
            self._look_soon()
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(future)
        self._look_soon()
        try:
            await future
        finally:
            if future in self._waiting:
                self._waiting.remove(future)

    def stop(self) -> None:
        """Look no more; the channel stays open. Again: no effect."""
        if self._stopped:
            return
        self._stopped = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self.channel.fileno)
        for future in self._waiting:
            if not future.done():
                future.set_exception(ClosedError("the pump was stopped while waiting for room", what="pump"))
        self._waiting.clear()

    def close(self, linger: float | None = None) -> None:
        """Stop, and close the channel as :meth:`Channel.close <ods_async.transport.sockets.Channel.close>` does."""
        self.stop()
        self.channel.close(linger)

    def _look_soon(self) -> None:
        if not self._scheduled and not self._stopped:
            self._scheduled = True
            self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        self._scheduled = False
        self._look()

    def _look(self) -> None:
        if self._over():
            return
        if self._on_message is not None:
            for _ in range(self._burst):
                frames = self.channel.receive()
                if frames is None:
                    break
                self._call(self._on_message, frames)
                if self._over():
                    return
            else:
                self._look_soon()
        if (self._refused or self._waiting) and self.channel.writable:
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)
            self._waiting.clear()
            if self._refused:
                self._refused = False
                if self._on_writable is not None:
                    self._call(self._on_writable)
        # Asked in any case: it is what takes the news off the descriptor, which a channel that only sends never reads
        # from. And asked for both at once: every look uses up the news of both, those of the steps above included.
        if not self._over():
            readable, writable = self.channel.ready
            if (readable and self._on_message is not None) or (writable and (self._refused or self._waiting)):
                self._look_soon()

    def _over(self) -> bool:
        return self._stopped or self.channel.closed

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": f"a handler of the {self.channel.kind} channel raised", "exception": error}
            )
