"""A broker in a thread of this process: for tests and notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ods_async.broker.service import Broker
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.states import OnlineDataEngineState
from ods_async.core.stimuli import EndService

__all__ = ["RunningBroker", "run_broker"]

_T = TypeVar("_T")

JOIN_SECONDS = 30.0


class RunningBroker:
    """The broker of :func:`run_broker`, as seen from other threads.

    Attributes:
        endpoints: all addresses that answer.
        endpoint: the first of them: tcp, or ipc when no port was asked for.
        run_id: number of the run.
        owner_token: what the owner's requests must carry.
    """

    def __init__(self, broker: Broker, loop: asyncio.AbstractEventLoop) -> None:
        self._broker = broker
        self._loop = loop
        self.endpoints = broker.endpoints
        self.endpoint = broker.endpoint
        self.run_id = broker.run_id
        self.owner_token = broker.owner_token

    @property
    def state(self) -> OnlineDataEngineState:
        """The service's state."""
        return self._broker.state

    @property
    def counts(self) -> dict[str, int]:
        """Dropped answers and faults, see :class:`~ods_async.broker.service.Broker`."""
        return self._broker.counts

    def stop(self, grace: float = 0.0) -> EndService:
        """End the run, giving workers ``grace`` seconds; returns how it ended. Again: returns the same."""
        return self._call(self._broker.stop(grace))

    def wait_closed(self) -> EndService:
        """Wait until the run is over, for whatever reason."""
        return self._call(self._broker.wait_closed())

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@contextlib.contextmanager
def run_broker(
    cfg: OnlineDataEngineCfg, port: int | None = 0, *, ipc: bool = False, grace: float = 0.0, **kwargs: Any
) -> Iterator[RunningBroker]:
    """Run a broker in a thread while the context lasts; leaving it stops the broker and gives everything back.

    Args:
        cfg: the settings; its endpoints are not used.
        port: of ``tcp://127.0.0.1``; 0 takes a free one, None listens on ipc only.
        ipc: listen on an ipc socket in a private folder as well.
        grace: seconds that workers have to end at the end.
        **kwargs: passed on to :class:`~ods_async.broker.service.Broker` (``run_id``, ``owner_token``, …).

    Raises:
        EndpointError: the port is taken.
    """
    with tempfile.TemporaryDirectory(prefix="ods-", dir="/tmp") as folder, contextlib.ExitStack() as stack:
        endpoints = [] if port is None else [f"tcp://127.0.0.1:{port}"]
        if ipc or port is None:
            endpoints.append(f"ipc://{Path(folder) / 'b.sock'}")
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        thread = threading.Thread(target=loop.run_forever, name="ods-run-broker", daemon=True)
        thread.start()
        stack.callback(_end_thread, loop, thread)
        broker = Broker(cfg, endpoints=endpoints, **kwargs)
        asyncio.run_coroutine_threadsafe(broker.start(), loop).result()
        running = RunningBroker(broker, loop)
        stack.callback(running.stop, grace)
        yield running


def _end_thread(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(JOIN_SECONDS)
