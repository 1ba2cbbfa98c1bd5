"""Hub: one zmq context a process, and what a fork does to it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import zmq

from ods_async.errors import ClosedError
from ods_async.transport.priority import own_threads, step_back

if TYPE_CHECKING:
    from ods_async.transport.sockets import Channel

__all__ = ["Hub", "abandon", "open_channel_count", "process_id"]

_process_id = os.getpid()


def process_id() -> int:
    """As ``os.getpid``, without a call into the system: it is asked several times for every message."""
    return _process_id


class _Socket(zmq.Socket[bytes]):
    """Known to its context before it exists: Ctrl-C in the middle of making one must not leave it open for ever."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *args: Any, **kwargs: Any) -> None:
        if isinstance(context, _Context):
            context._add_socket(self)
        super().__init__(context, *args, **kwargs)


class _Context(zmq.Context[zmq.Socket[bytes]]):
    _socket_class = _Socket


class Hub:
    """The sockets' engine: one zmq context, made at first use, in the process that uses it.

    ``io_threads`` are zmq's own; those numbered in ``stepping_back`` let others go first where processors are short. A
    forked child that uses an inherited hub gets a context of its own and leaves the parent's alone. :meth:`close` ends
    the channels that are still open (their threads must no longer use them).
    """

    def __init__(self, io_threads: int = 1, stepping_back: tuple[int, ...] = ()) -> None:
        self._io_threads = io_threads
        self._stepping_back = stepping_back
        self._lock = threading.Lock()
        self._pid = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._channels: set[Channel] = set()  # strong: a channel that nobody holds any more must still be closed
        self._closed = False
        _HUBS.add(self)

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """This process's context.

        Raises:
            ClosedError: the hub was closed.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the hub is closed; make a new one", what="hub")
            if self._context is None or self._pid != process_id():
                self._pid = process_id()
                self._context = _Context(io_threads=self._io_threads)
                self._context.set(zmq.BLOCKY, 0)
                if self._stepping_back:
                    self._step_back(self._context)
            return self._context

    def _step_back(self, context: _Context) -> None:
        # The first socket starts zmq's threads: one that tidies up, then those that move bytes, in order.
        before = own_threads()
        context.socket(zmq.PAIR).close(0)
        started = sorted(own_threads() - before)
        if len(started) == 1 + self._io_threads:  # else somebody else started one meanwhile, and nobody steps back
            for number in self._stepping_back:
                step_back(started[1 + number])

    @property
    def open_channels(self) -> int:
        """How many of its channels are open in this process."""
        with self._lock:
            channels = list(self._channels)
        return sum(not channel.closed for channel in channels)

    def add(self, channel: Channel) -> None:
        """Have :meth:`close` close this channel too."""
        with self._lock:
            self._channels.add(channel)

    def discard(self, channel: Channel) -> None:
        """This channel is closed."""
        with self._lock:
            self._channels.discard(channel)

    def close(self, linger: float = 0.0) -> None:
        """Close all channels, each sending for at most ``linger`` seconds more, and end the context. Again: no effect.

        In a forked child the parent's sockets are only forgotten.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            context, self._context = self._context, None
            channels = list(self._channels)
        for channel in channels:
            channel.close(linger)
        if context is not None and self._pid == process_id():
            for socket in list(context._sockets):  # of a channel whose making was interrupted
                with contextlib.suppress(zmq.ZMQError):
                    socket.close(0)
            with _undisturbed(linger > 0):
                context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _forget(self) -> None:
        # In a forked child. Python must neither end nor complain about objects whose threads live in the parent.
        self._lock = threading.Lock()
        for channel in list(self._channels):
            channel._abandon()
        self._channels = set()
        if self._context is not None:
            abandon(self._context)
            self._context = None


_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


@contextlib.contextmanager
def _undisturbed(may_take_long: bool) -> Iterator[None]:
    # A signal ends the wait for a context's threads, and pyzmq then takes the context for ended: a thread and its files
    # would stay. Others may handle it meanwhile. What is to end the program may also end a wait that takes long.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - (_ENDING if may_take_long else set()))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_HUBS: weakref.WeakSet[Hub] = weakref.WeakSet()
_ABANDONED: list[object] = []


def _after_fork_in_child() -> None:
    global _process_id
    _process_id = os.getpid()
    for hub in list(_HUBS):
        hub._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def abandon(thing: zmq.Context[zmq.Socket[bytes]] | zmq.Socket[bytes]) -> None:
    """Let a forked child forget a parent's context or socket: never closed, never complained about."""
    thing._shadow = True
    _ABANDONED.append(thing)


def open_channel_count() -> int:
    """How many channels are open in this process, over all hubs: what a leak check wants to know."""
    return sum(hub.open_channels for hub in list(_HUBS))
