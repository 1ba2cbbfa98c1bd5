"""What every simulated peer that asks has: a process, a connection, and the client's conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ods_async.client.exchange import Exchange, Talk
from ods_async.client.session import Session
from ods_async.core.requests import Request
from ods_async.testing.simulation.clockwork import Process
from ods_async.testing.simulation.lane import Driver, SimMemory, Views

if TYPE_CHECKING:
    from ods_async.testing.simulation.service import Service

__all__ = ["Asker"]


class Asker:
    """What all of them share: a process, a driver, an exchange."""

    def __init__(self, service: Service, name: str, *, shared: bool, owner: bytes | None = None) -> None:
        self.service = service
        self.world = service.world
        self.name = name
        self.process = Process(name)
        self.driver = Driver(service, self.process)
        self.exchange: Exchange[Views] = Exchange(
            endpoint="sim://",
            role="consumer" if owner is None else "owner",
            name=name,
            owner=owner,
            connect_timeout=1.0,
            make_memory=lambda welcome, description: self._memory(welcome, description, shared),
        )

    def _memory(self, welcome: Any, description: Any, shared: bool) -> SimMemory:
        return self.driver.make_memory(welcome, description, shared=shared)

    def ask(
        self,
        request: Request,
        expected: type[Any],
        timeout: float,
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Ask one question."""
        self.start(lambda session: self.exchange.plain(session, request, expected), timeout, done)

    def start(
        self, talk: Callable[[Session], Talk[Any]], timeout: float, done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Begin a conversation."""
        self.driver.start(talk, timeout, done)

    def maybe_cancel(self, probability: float) -> None:
        """While faults last, now and then give up soon what has just begun."""
        if not self.world.calm and self.world.chance(probability):
            self.world.after(self.world.rng.uniform(0.0, 0.2), self.process, self._cancel)

    def _cancel(self) -> None:
        if not self.world.calm:
            self.driver.cancel()
