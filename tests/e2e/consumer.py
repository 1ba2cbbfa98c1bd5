"""A consumer as a program: takes jobs as JSON lines on its standard input, tells results as JSON lines.

Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import torch

import ods_async as ods
from ods_async.client.batch import Mould
from ods_async.core.copying import SegmentCopier
from ods_async.core.memory import BatchLayout
from ods_async.core.requests import Plan
from tests.e2e.windows import Facts, faults, identities

Result = dict[str, Any]


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


async def now(outcome: Any) -> Any:
    """What a call of either client came to: the asyncio client's have to be awaited."""
    return await outcome if inspect.isawaitable(outcome) else outcome


@contextlib.asynccontextmanager
async def opened(kind: str, endpoint: str, data_path: str = "auto") -> AsyncIterator[Any]:
    """A client of that kind; the blocking one may block this loop, in which nothing else runs."""
    if kind == "blocking":
        with ods.Client(endpoint, data_path=data_path) as client:
            yield client
    else:
        async with ods.AsyncClient(endpoint, data_path=data_path) as awaiting:
            yield awaiting


@contextlib.asynccontextmanager
async def following(client: Any, batch: int, chunk: int, prefetch: int) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """A stream of either client, as a function that brings the next batch."""
    stream = client.stream(batch, chunk, prefetch=prefetch)
    if isinstance(client, ods.Client):
        with stream:

            async def take() -> Any:
                return next(stream)

            yield take
    else:
        async with stream:
            yield stream.__anext__


# --- drawing while everything is being replaced -------------------------------------------------------------------


class Book:
    """Checks batches and adds up."""

    def __init__(self, client: Any, facts: Facts) -> None:
        self.client, self.facts = client, facts
        self.windows: dict[str, int] = {}
        self.faults: list[str] = []
        self.print_of: dict[int, int] = {}
        self.oldest = 0
        self.turn = 0

    async def look(self) -> None:
        self.oldest = (await now(self.client.get_flow_status()))["completed_generation"]

    async def add(self, batch: Any, mode: str, history: int, since: int) -> None:
        self.turn += 1
        name = f"{mode} {'contexts' if history else 'chunks'}"
        self.windows[name] = self.windows.get(name, 0) + len(batch)
        self.faults += faults(batch, self.facts, mode=mode, history=history, since=since)
        if "ods_episode_id" not in batch.keys():  # noqa: SIM118 - a TensorDict is no dict
            return
        for episode, fingerprint in identities(batch, history):
            if self.print_of.setdefault(episode, fingerprint) != fingerprint:
                self.faults.append(f"episode {episode} has two fingerprints")
        if self.turn % 16 == 0 and not history:
            await self.check_words(batch)

    async def check_words(self, batch: Any) -> None:
        texts = await now(self.client.resolve_language(batch))
        for window, parts in zip(texts["subtask"], batch["segment_id"].tolist(), strict=True):
            if window != [f"count part {part}" for part in parts]:
                self.faults.append(f"texts {window} of parts {parts}")

    @property
    def total(self) -> int:
        return sum(self.windows.values())


async def draw(
    kind: str, endpoint: str, data_path: str, windows: int, generations: int, batch: int, chunk: int, facts: Result
) -> Result:
    """Draw in all modes, chunks and contexts, until so many windows were seen and so many generations complete."""
    async with opened(kind, endpoint, data_path) as client:
        book = Book(client, Facts(**facts))
        await book.look()
        ways: list[tuple[str, int]] = [("episode", 0), ("segment", 0), ("boundary", 0), ("episode", 4), ("segment", 3)]
        while book.total < windows * 0.7:
            for mode, history in ways:
                since = book.oldest
                if history:
                    asked = client.sample_batch_with_context(batch, history, chunk, sampling_mode=mode)
                else:
                    asked = client.sample_batch(batch, max(2, chunk // 3) if mode == "segment" else chunk, mode)
                await book.add(await now(asked), mode, history, since)
            await book.look()
        async with following(client, batch, chunk, prefetch=4) as take:
            while book.total < windows or book.oldest < generations:
                # What was drawn ahead may be older than what is complete when it is taken.
                await book.add(await take(), "episode", 0, 0)
                await book.look()
        return {
            "windows": book.windows,
            "total": book.total,
            "faults": book.faults[:5],
            "episodes": len(book.print_of),
            "generation": book.oldest,
            "redrawn": client.redrawn,
            "data_path": client.data_path,
        }


# --- stopped in the middle of a copy --------------------------------------------------------------------------------


async def stop_midway(kind: str, endpoint: str, batch: int, chunk: int, facts: Result, prefetch: int = 0) -> Result:
    """Draw, and stop this very process (SIGSTOP) when half of the bytes of a batch are copied."""
    copy, copy_each = SegmentCopier.copy, SegmentCopier.copy_each
    torn: list[list[str]] = []
    known = Facts(**facts)

    def copy_and_stop(self: SegmentCopier, plan: Plan, layout: BatchLayout, memory: Any, part: Any = None) -> bool:
        assert part in (None, (0, plan.batch_size)), "one thread copies all of it"
        SegmentCopier.copy, SegmentCopier.copy_each = copy, copy_each  # type: ignore[method-assign]
        assert copy(self, plan, layout, memory)
        say(stopping=True)
        # To this thread: sent to the process, another thread may take it while this one copies on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        rest = bytearray(layout.nbytes)
        unchanged = copy(self, plan, layout, rest)
        image, half = ("obs", "image"), plan.batch_size // 2  # the large one: half of its windows come now
        out = layout.views(memory)
        out[image][half:] = layout.views(rest)[image][half:]
        mould = Mould(tuple(out), plan.batch_size, plan.length)
        torn.append(faults(mould.over(out.values()), known))
        return unchanged

    def stop_in_the_first(
        self: SegmentCopier, plans: Sequence[Plan], layout: BatchLayout, memories: Sequence[Any]
    ) -> list[bool]:
        first = copy_and_stop(self, plans[0], layout, memories[0])
        return [
            first,
            *(copy(self, plan, layout, memory) for plan, memory in zip(plans[1:], memories[1:], strict=True)),
        ]

    torch.set_num_threads(1)
    async with opened(kind, endpoint, "shared_memory") as client:
        good = faults(await now(client.sample_batch(batch, chunk)), known)  # the connection stands, memory is mapped
        SegmentCopier.copy = copy_and_stop  # type: ignore[method-assign]
        SegmentCopier.copy_each = stop_in_the_first  # type: ignore[method-assign]
        try:
            if prefetch:
                async with following(client, batch, chunk, prefetch) as take:
                    good += faults(await take(), known)
            else:
                good += faults(await now(client.sample_batch(batch, chunk)), known)
        finally:
            SegmentCopier.copy = copy  # type: ignore[method-assign]
        redrawn = client.redrawn
        good += faults(await now(client.sample_batch(batch, chunk)), known)
        return {"faults": good, "torn": torn, "redrawn": redrawn}


# --- failures of others ---------------------------------------------------------------------------------------------


async def wait(kind: str, endpoint: str, data_path: str, generation: int) -> Result:
    """Wait for a generation that will not come."""
    async with opened(kind, endpoint, data_path) as client:
        await now(client.sample_batch(2, 2))
        say(waiting=True)
        return await failure_of(lambda: client.wait_for_generation(generation, timeout=60.0))


async def stream(kind: str, endpoint: str, data_path: str) -> Result:
    """Draw all the time, with batches drawn ahead."""
    async with opened(kind, endpoint, data_path) as client, following(client, 2, 2, prefetch=4) as take:
        await take()
        say(waiting=True)

        async def forever() -> None:
            while True:
                await take()

        return await failure_of(forever)


async def idle(kind: str, endpoint: str, data_path: str) -> Result:
    """Rest until told to go on, and ask then."""
    async with opened(kind, endpoint, data_path) as client:
        await now(client.sample_batch(2, 2))
        say(waiting=True)
        await asyncio.to_thread(sys.stdin.readline)
        return await failure_of(lambda: client.sample_batch(2, 2))


async def failure_of(work: Callable[[], object]) -> Result:
    try:
        await now(work())
    except Exception as error:
        return describe(error)
    return {"error": "", "text": "nothing was raised", "at": time.monotonic()}


def describe(error: Exception) -> Result:
    fields = getattr(error, "fields", {})
    return {"error": type(error).__name__, "text": str(error), "fields": fields, "at": time.monotonic()}


JOBS: dict[str, Callable[..., Awaitable[Result]]] = {
    "draw": draw,
    "stop_midway": stop_midway,
    "wait": wait,
    "stream": stream,
    "idle": idle,
}


async def _run(job: Awaitable[Result]) -> Result:
    return await job


def main() -> None:
    say(ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            result = asyncio.run(_run(JOBS[job.pop("do")](**job)))
        except Exception as error:
            result = describe(error) | {"trace": traceback.format_exc()}
        say(result=result)


if __name__ == "__main__":
    main()
