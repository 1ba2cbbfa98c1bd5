"""Both clients behind one blocking face, so that one test holds for both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ods_async.client.aio import AsyncClient
from ods_async.client.sync import Client
from ods_async.transport.sockets import open_channel_count


class Blocking:
    """An :class:`AsyncClient`, each call run to its end in a loop of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.runner = asyncio.Runner()
        self.client = AsyncClient(*args, **options)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *args, **options: self.runner.run(found(*args, **options))

    def take(self, stream: Any) -> Any:
        return self.runner.run(anext(stream))

    def end_stream(self, stream: Any) -> None:
        self.runner.run(stream.aclose())

    def __enter__(self) -> Blocking:
        self.connect()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Plain(Client):
    def take(self, stream: Any) -> Any:
        return next(stream)

    def end_stream(self, stream: Any) -> None:
        stream.close()


@pytest.fixture(params=[Plain, Blocking], ids=["blocking", "asyncio"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes a client of either kind; all are closed at the end, and no socket may be left."""
    before = open_channel_count()
    made: list[Any] = []

    def client(*args: Any, **options: Any) -> Any:
        made.append(request.param(*args, **options))
        return made[-1]

    yield client
    for each in made:
        each.close()
        if isinstance(each, Blocking):
            each.runner.close()
    assert open_channel_count() <= before
