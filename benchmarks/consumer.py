"""A trainer that does nothing but take batches, and looks at the clock."""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.broker import top
from benchmarks.children import memory, serve
from benchmarks.workloads import WORKLOADS
from ods_async.transport.allocator import keep_big_blocks


def plain(client: Any, work: Any, case: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Arguments of the call that a case makes; True where it draws contexts."""
    mode = case.get("mode", "episode")
    if mode == "context":
        return (work.batch, work.chunk // 4, work.chunk - work.chunk // 4 + 1), {}, True
    return (work.batch, work.chunk), {"sampling_mode": mode}, False


def ahead_of(case: dict[str, Any]) -> int:
    """How many batches a case draws ahead."""
    return int(case.get("ahead", 8)) if "prefetch" in case["client"] else 0


def rounds(
    take: Callable[[], Any], seconds: float, repeats: int, warm: int, ahead: int = 0
) -> list[tuple[float, list[int]]]:
    """Per round, how long it took altogether and how long each take took (ns). The batch before is kept meanwhile.

    What is drawn ``ahead`` lies in memory that a stream comes to need whenever it gets that far, perhaps late: as many
    batches are held at once before the clock runs, so that all of it has been touched.
    """
    batch = None
    held = [take() for _ in range(ahead)]
    del held
    for _ in range(warm):
        batch = take()
    found = []
    clock = time.perf_counter_ns
    for _ in range(repeats):
        took: list[int] = []
        begin = clock()
        end = begin + int(seconds * 1e9)
        now = begin
        while now < end:
            batch = take()
            before, now = now, clock()
            took.append(now - before)
        found.append(((now - begin) / 1e9, took))
    del batch
    return found


class Consumer:
    def __init__(self) -> None:
        self.base = 0

    def begin(self, keep: bool = False) -> dict[str, Any]:
        import ods_async.client.aio
        import ods_async.client.sync  # noqa: F401

        kept = keep_big_blocks() if keep else False
        self.base = memory()["private"]
        return {"kept": kept, "base": self.base}

    def measure(self, **case: Any) -> dict[str, Any]:
        """Draw as the case says, and return what each round took."""
        kind = case["client"]
        profiler = cProfile.Profile() if case.get("profile") else None
        work = WORKLOADS[case["workload"]]
        with_profile = (lambda call: profiler.runcall(call)) if profiler else (lambda call: call())
        found, owned = with_profile(lambda: getattr(self, f"_{kind}")(work, case))
        took = sorted(value for _, values in found for value in values)
        result: dict[str, Any] = {
            "rates": [len(values) / seconds for seconds, values in found],
            "count": len(took),
            "p50_us": took[len(took) // 2] / 1e3,
            "p99_us": took[min(len(took) - 1, int(len(took) * 0.99))] / 1e3,
            "worst_us": took[-1] / 1e3,
            "private": owned,
            "base": self.base,
        }
        if profiler is not None:
            result["profile"] = top(pstats.Stats(profiler))
        return result

    def _rounds(self, take: Callable[[], Any], case: dict[str, Any]) -> tuple[list[tuple[float, list[int]]], int]:
        return rounds(take, case["seconds"], case["repeats"], case.get("warm", 5), ahead_of(case)), memory()["private"]

    def _blocking(self, work: Any, case: dict[str, Any]) -> Any:
        from ods_async.client.sync import Client

        with Client(case["endpoint"], data_path=case.get("path", "auto")) as client:
            args, options, context = plain(client, work, case)
            call = client.sample_batch_with_context if context else client.sample_batch
            return self._rounds(lambda: call(*args, **options), case)

    def _prefetch(self, work: Any, case: dict[str, Any]) -> Any:
        from ods_async.client.sync import Client

        with (
            Client(case["endpoint"], data_path=case.get("path", "auto")) as client,
            client.stream(work.batch, work.chunk, prefetch=case.get("ahead", 8)) as stream,
        ):
            return self._rounds(lambda: next(stream), case)

    def _asyncio(self, work: Any, case: dict[str, Any]) -> Any:
        return asyncio.run(self._awaiting(work, case, ahead=None))

    def _asyncio_prefetch(self, work: Any, case: dict[str, Any]) -> Any:
        return asyncio.run(self._awaiting(work, case, ahead=case.get("ahead", 8)))

    async def _awaiting(self, work: Any, case: dict[str, Any], ahead: int | None) -> Any:
        from ods_async.client.aio import AsyncClient

        clock = time.perf_counter_ns
        async with AsyncClient(case["endpoint"], data_path=case.get("path", "auto")) as client:
            args, options, _ = plain(client, work, case)
            stream = None if ahead is None else client.stream(work.batch, work.chunk, prefetch=ahead)
            found = []
            held = [] if stream is None else [await anext(stream) for _ in range(ahead_of(case))]
            held.clear()
            for turn in range(case["repeats"] + 1):
                took: list[int] = []
                begin = now = clock()
                end = begin + int((case["seconds"] if turn else 0.05) * 1e9)
                while now < end or not took:
                    batch = await (client.sample_batch(*args, **options) if stream is None else anext(stream))
                    before, now = now, clock()
                    took.append(now - before)
                if turn:
                    found.append(((now - begin) / 1e9, took))
            owned = memory()["private"]
            del batch
            if stream is not None:
                await stream.aclose()
            return found, owned

    def _dataloader(self, work: Any, case: dict[str, Any]) -> Any:
        from torch.utils.data import DataLoader

        from ods_async.client.dataset import OnlineDataset

        dataset = OnlineDataset(case["endpoint"], chunk_size=work.chunk, batch_size=work.batch)
        loader = DataLoader(dataset, batch_size=None, num_workers=case.get("workers", 0))
        batches: Iterator[Any] = iter(loader)
        return self._rounds(lambda: next(batches), case)


def main() -> None:
    consumer = Consumer()
    serve({"begin": consumer.begin, "measure": consumer.measure})


if __name__ == "__main__":
    main()
