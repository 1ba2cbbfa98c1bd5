"""``python -m ods_async.testing.trial.consumer``: one consumer that asks all day long and checks what it gets.

It draws batches and contexts, streams, asks for figures and texts, in an order drawn from a seed. Every window is
checked step by step, every answer's time against its deadline. Counts go into a file, which is replaced every second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ods_async.client.aio import AsyncClient
from ods_async.client.sync import Client
from ods_async.errors import (
    BrokerUnreachableError,
    ClosedError,
    DataUnavailableError,
    RequestTimeoutError,
    RunChangedError,
    SessionLostError,
    SharedMemoryError,
)
from ods_async.testing.counting import window_faults
from ods_async.testing.trial.running import RunningTime

__all__ = ["Consumer", "main"]

# What may rightly come while brokers and workers come and go. Anything else is a fault.
_EXPECTED: Final = (
    BrokerUnreachableError,
    ClosedError,
    DataUnavailableError,
    RequestTimeoutError,
    RunChangedError,
    SessionLostError,
    SharedMemoryError,
)
_MODES: Final = ("episode", "segment", "boundary")
_EPISODES_KEPT: Final = 4096
_FAULTS_KEPT: Final = 10


class Consumer:
    """Asks, checks, counts.

    Args:
        client: blocking or awaiting.
        rng: what it asks for.
        timeout: seconds of most requests.
        slack: how much later than its deadline a call may return.
    """

    def __init__(self, client: Client | AsyncClient, rng: random.Random, timeout: float, slack: float) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.faults: list[str] = []
        self.slowest = 0.0
        self.clock = RunningTime()
        self._client = client
        self._rng = rng
        self._timeout = timeout
        self._slack = slack
        self._prints: dict[tuple[int, int], int] = {}
        self._episodes: dict[int, tuple[int, int]] = {}

    async def ask(self) -> None:
        """One request of some kind (or a few batches of a stream)."""
        kind = self._rng.choices(("chunks", "context", "stream", "stats", "status", "language"), (50, 20, 5, 5, 5, 10))[
            0
        ]
        batch_size, length = self._rng.randint(1, 24), self._rng.randint(2, 9)
        client = self._client
        if kind == "chunks":
            mode = self._rng.choice(_MODES)
            await self._call(lambda wait: client.sample_batch(batch_size, length, mode, timeout=wait), self._check)
        elif kind == "context":
            horizon = self._rng.randint(1, 6)
            await self._call(
                lambda wait: client.sample_batch_with_context(batch_size, length, horizon, timeout=wait), self._check
            )
        elif kind == "stream":
            await self._stream(batch_size, length)
        elif kind == "stats":
            await self._call(lambda wait: client.get_stats(timeout=wait), None)
        elif kind == "status":
            await self._call(lambda wait: client.get_status(timeout=wait), None)
        else:
            await self._language(batch_size, length)

    async def _language(self, batch_size: int, length: int) -> None:
        batch = await self._call(lambda wait: self._client.sample_batch(batch_size, length, timeout=wait), self._check)
        if batch is None:
            return

        def check(texts: Any) -> None:
            if {text for row in texts["task"] for text in row} != {"count to the end"}:
                self.fault(f"texts of another task: {texts['task'][0]}")

        await self._call(lambda wait: self._client.resolve_language(batch, timeout=wait), check)

    async def _stream(self, batch_size: int, length: int) -> None:
        wait = self._timeout
        stream: Any = self._client.stream(batch_size, length, prefetch=self._rng.randint(0, 4), timeout=wait)
        blocking = hasattr(stream, "__next__")
        try:
            for _ in range(self._rng.randint(1, 6)):
                if await self._call(lambda _: next(stream) if blocking else anext(stream), self._check) is None:
                    break
        finally:
            closed = stream.close() if blocking else stream.aclose()
            if inspect.isawaitable(closed):
                await closed

    async def _call(self, ask: Callable[[float], Any], check: Callable[[Any], None] | None) -> Any:
        """Ask once. Returns the answer, or None after an error that may be."""
        timeout = self._timeout
        self.counts["requests"] += 1
        begun = self.clock.now()
        answer: Any = None
        try:
            answer = ask(timeout)
            if isinstance(answer, Awaitable):
                answer = await answer
            self.counts["answers"] += 1
        except _EXPECTED as error:
            self.counts["refusals"] += 1
            self.errors[type(error).__name__] += 1
            answer = None
        except Exception:
            answer = None
            self.counts["surprises"] += 1
            self.fault(traceback.format_exc(limit=-6))
        taken = self.clock.now() - begun
        self.slowest = max(self.slowest, taken)
        if taken > timeout + self._slack:
            self.counts["late"] += 1
            self.fault(f"a call with {timeout:g} s took {taken:.2f} s")
        if answer is not None and check is not None:
            check(answer)
        return answer

    def _check(self, batch: Any) -> None:
        """Look at every window of a batch, step by step."""
        names = [("obs", "fingerprint"), ("obs", "step"), ("obs", "state"), ("actions",), ("rewards",)]
        if "image" in batch["obs"]:
            names.append(("obs", "image"))
        arrays = {name: batch[name].numpy() for name in names}
        valid = batch["valid"].numpy()
        stamped = "ods_episode_id" in batch
        self.counts["batches"] += 1
        for row in range(batch.batch_size[0]):
            real = valid[row]
            self.counts["windows"] += 1
            if not real.any():
                self.counts["torn"] += 1
                self.fault("a window without a single real step")
                continue
            found = window_faults({name: array[row][real] for name, array in arrays.items()})
            if not found and stamped:
                found = self._identity(batch, row, real)
            if found:
                self.counts["torn"] += 1
                self.fault(found)

    def _identity(self, batch: Any, row: int, real: Any) -> str:
        """One episode id has one content in a run, and one content was published once."""
        runs = batch["ods_run_id"][row].numpy()[real]
        ids = batch["ods_episode_id"][row].numpy()[real]
        mark = int(batch["obs", "fingerprint"][row].numpy()[real][0])
        if (runs != runs[0]).any() or (ids != ids[0]).any():
            return f"one window of several episodes: {ids.tolist()}"
        episode = (int(runs[0]), int(ids[0]))
        if self._prints.setdefault(episode, mark) != mark:
            return f"episode {episode} has changed its content"
        if self._episodes.setdefault(mark, episode) != episode:
            return f"episode {episode} was published before, as {self._episodes[mark]}"
        if len(self._prints) > _EPISODES_KEPT:
            oldest = next(iter(self._prints))
            self._episodes.pop(self._prints.pop(oldest), None)
        return ""

    def fault(self, words: str) -> None:
        """Remember what went wrong (the first few)."""
        self.counts["faults"] += 1
        if len(self.faults) < _FAULTS_KEPT:
            self.faults.append(words)

    def report(self) -> dict[str, Any]:
        """All counts as plain data."""
        return {
            "pid": os.getpid(),
            "counts": dict(self.counts),
            "errors": dict(self.errors),
            "faults": self.faults,
            "slowest": round(self.slowest, 3),
            "paused": round(self.clock.paused, 3),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask until SIGTERM.

    Returns:
        0 when nothing was wrong, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m ods_async.testing.trial.consumer", description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("--name", default="consumer")
    parser.add_argument("--folder", type=Path, required=True, help="where the report goes")
    parser.add_argument("--style", choices=("asyncio", "blocking"), default="blocking")
    parser.add_argument("--data-path", default="auto")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--slack", type=float, default=2.0)
    parser.add_argument("--pause-after", type=float, default=0.2, help="seconds of rest after an error")
    given = parser.parse_args(arguments)
    return asyncio.run(_run(given))


async def _run(given: argparse.Namespace) -> int:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    kind: Any = AsyncClient if given.style == "asyncio" else Client
    client = kind(given.endpoint, data_path=given.data_path, timeout=given.timeout, name=given.name)
    consumer = Consumer(client, random.Random(given.seed), given.timeout, given.slack)
    path = given.folder / f"{given.name}-{os.getpid()}.report"
    parent = os.getppid()
    _write(path, consumer.report())  # so that others see it is at work
    try:
        written = consumer.clock.now()
        while not asked and os.getppid() == parent:
            begun, refusals = consumer.clock.now(), consumer.counts["refusals"]
            await consumer.ask()
            now = consumer.clock.now()
            if now - written > 1.0:
                written = now
                _write(path, consumer.report())
            rest = 1.0 / given.rate - (now - begun)
            if consumer.counts["refusals"] > refusals:
                rest = max(rest, given.pause_after)
            await asyncio.sleep(max(0.0, rest))
    finally:
        closed = client.close()
        if inspect.isawaitable(closed):
            await closed
        consumer.clock.close()
        _write(path, consumer.report())
    return 1 if consumer.faults else 0


def _write(path: Path, report: dict[str, Any]) -> None:
    fresh = path.with_suffix(".fresh")
    with contextlib.suppress(OSError):
        fresh.write_text(json.dumps(report))
        fresh.replace(path)


if __name__ == "__main__":
    sys.exit(main())
