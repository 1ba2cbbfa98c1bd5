"""A network that can go wrong: relays tcp on loopback, and can stop forwarding without closing, or delay.

It listens on another loopback address (``127.0.0.2``) with the same port numbers as the broker on ``127.0.0.1``.
Since a broker names its other sockets by the host that a peer dialled, everything of that peer goes through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

__all__ = ["Relay"]

_CHUNK: Final = 65_536


class Relay:
    """Relays in a thread of its own; the methods may be called from any thread.

    Args:
        host: where to listen.
        target: where the broker listens.

    Attributes:
        connections: connections relayed so far.
    """

    def __init__(self, host: str = "127.0.0.2", target: str = "127.0.0.1") -> None:
        self.connections = 0
        self._host, self._target = host, target
        self._loop = asyncio.new_event_loop()
        self._delay = 0.0
        self._open = asyncio.Event()
        self._servers: dict[int, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._loop.call_soon_threadsafe(self._open.set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def follow(self, ports: Iterable[int]) -> None:
        """Relay these ports, and no others from now on; connections that stand stay."""
        asyncio.run_coroutine_threadsafe(self._follow(frozenset(ports)), self._loop).result()

    def cut(self) -> None:
        """Forward nothing more, without closing anything; new connections are taken and left silent."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """Forward again, beginning with what was held back."""
        self._loop.call_soon_threadsafe(self._open.set)

    def drop(self) -> None:
        """Close all connections that stand."""
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])

    def delay(self, seconds: float) -> None:
        """Hold every piece back for so long, in both directions."""
        self._delay = seconds

    def close(self) -> None:
        """End everything."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _follow(self, ports: frozenset[int]) -> None:
        for port in self._servers.keys() - ports:
            self._servers.pop(port).close()
        for port in ports - self._servers.keys():
            self._servers[port] = await asyncio.start_server(functools.partial(self._serve, port), self._host, port)

    async def _close(self) -> None:
        await self._follow(frozenset())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        other: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            answers, other = await asyncio.open_connection(self._target, port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, other))
                group.create_task(self._pass_on(answers, writer))
        except* OSError:
            pass
        except* asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            for end in (writer, other):
                if end is not None:
                    end.close()
                    with contextlib.suppress(OSError, asyncio.CancelledError):
                        await end.wait_closed()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            if self._delay:
                await asyncio.sleep(self._delay)
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("one end has closed")
