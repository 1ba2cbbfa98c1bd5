"""Ways into a service, all with one blocking face, so that each test is written once."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Self

import ods_async as ods

__all__ = ["CLIENT_WAYS", "ENGINE_WAYS", "WAYS", "LoopThread", "Service", "Way", "make_engine", "open_client"]

ENGINE_WAYS: Final = ("engine", "async-engine")
CLIENT_WAYS: Final = (
    "client-ipc-shared_memory",
    "async-client-ipc-shared_memory",
    "client-tcp-frames",
    "async-client-tcp-frames",
)
WAYS: Final = ENGINE_WAYS + CLIENT_WAYS


class LoopThread:
    """An asyncio loop in a thread, for what is awaited."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="conformance-loop", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Any]) -> Any:
        """Call ``work`` in the loop, and await what it returns if that can be awaited."""

        async def carry_out() -> Any:
            found = work()
            return await found if inspect.isawaitable(found) else found

        return asyncio.run_coroutine_threadsafe(carry_out(), self._loop).result()

    def begin(self, work: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
        """Begin awaiting what ``work`` returns, in the loop; the task, to be cancelled with :meth:`cancel`."""

        async def carry_out() -> asyncio.Task[Any]:
            return asyncio.ensure_future(work())

        task: asyncio.Task[Any] = asyncio.run_coroutine_threadsafe(carry_out(), self._loop).result()
        return task

    def cancel(self, task: asyncio.Task[Any]) -> Any | None:
        """Cancel a task of :meth:`begin`; what it returned if it was faster than that, else None."""

        async def carry_out() -> Any | None:
            task.cancel()
            try:
                return await task
            except asyncio.CancelledError:
                return None

        return asyncio.run_coroutine_threadsafe(carry_out(), self._loop).result()

    def close(self) -> None:
        """End the loop."""
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Way:
    """An engine or a client, blocking or not, with the verbs of the blocking one.

    Attributes:
        name: one of :data:`WAYS`.
        face: the engine or client itself.
        loop: where its coroutines run; None for a blocking one.
    """

    def __init__(self, name: str, face: Any, loop: LoopThread | None) -> None:
        self.name = name
        self.face = face
        self.loop = loop

    @property
    def owns(self) -> bool:
        """Whether it is the owner's way."""
        return isinstance(self.face, ods.OnlineDataEngine | ods.AsyncOnlineDataEngine)

    def __getattr__(self, name: str) -> Any:
        if self.loop is None or name.startswith("__"):
            return getattr(self.face, name)
        loop, face = self.loop, self.face
        found = loop.run(lambda: getattr(face, name))
        if not callable(found):
            return found
        return lambda *args, **kwargs: loop.run(lambda: found(*args, **kwargs))

    @contextlib.contextmanager
    def streaming(self, *args: Any, **kwargs: Any) -> Iterator[Iterator[Any]]:
        """The batches of ``stream(...)``; closed at the end."""
        stream = self.stream(*args, **kwargs)
        if self.loop is None:
            with stream:
                yield stream
            return
        loop = self.loop

        def batches() -> Iterator[Any]:
            while True:
                yield loop.run(stream.__anext__)

        try:
            yield batches()
        finally:
            loop.run(stream.aclose)


def make_engine(way: str, cfg: ods.OnlineDataEngineCfg, loop: LoopThread) -> Way:
    """An engine that was not started, blocking or not as ``way`` says."""
    if way.startswith("async"):
        return Way(way, loop.run(lambda: ods.AsyncOnlineDataEngine(cfg)), loop)
    return Way(way, ods.OnlineDataEngine(cfg), None)


def open_client(way: str, endpoints: tuple[str, ...], loop: LoopThread, **options: Any) -> Way:
    """A connected client of the endpoint and data path that ``way`` says."""
    scheme, path = way.removeprefix("async-").removeprefix("client-").split("-", 1)
    endpoint = next(endpoint for endpoint in endpoints if endpoint.startswith(scheme))
    kind = ods.AsyncClient if way.startswith("async") else ods.Client

    def make() -> Any:
        return kind(endpoint, data_path=path, **options)

    client = Way(way, loop.run(make), loop) if way.startswith("async") else Way(way, make(), None)
    client.connect()
    return client


class Service:
    """A running configuration: one blocking and one asyncio engine, each with its processes, and clients on demand.

    Args:
        cfg: the settings; ``endpoint`` is set to a free tcp port (an ipc address comes with it).
        loop: for what is awaited.
        ways: for which ways it is needed.
    """

    def __init__(self, cfg: ods.OnlineDataEngineCfg, loop: LoopThread, ways: tuple[str, ...] = WAYS) -> None:
        self.cfg = cfg.replace(endpoint="tcp://127.0.0.1:0")
        self._loop = loop
        wanted = ["engine"] if any(way != "async-engine" for way in ways) else []
        wanted += ["async-engine"] if "async-engine" in ways else []
        self._engines = {name: make_engine(name, self.cfg, loop) for name in wanted}
        try:
            with ThreadPoolExecutor() as threads:
                list(threads.map(lambda engine: engine.start(), self._engines.values()))
        except BaseException:
            self.stop()
            raise

    def owner_of(self, way: str) -> Way:
        """The engine behind a way: that way itself for an owner's."""
        return self._engines[way] if way in self._engines else self._engines["engine"]

    @contextlib.contextmanager
    def open(self, way: str, **options: Any) -> Iterator[Way]:
        """The way in of that name; a client is closed at the end."""
        if way in ENGINE_WAYS:
            yield self._engines[way]
            return
        client = open_client(way, self._engines["engine"].endpoints, self._loop, **options)
        try:
            yield client
        finally:
            client.close()

    def stop(self) -> None:
        """End the engines; the first error is raised after all were ended."""
        errors = []
        for engine in self._engines.values():
            try:
                engine.stop()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
