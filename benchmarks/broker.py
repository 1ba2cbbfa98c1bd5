"""The broker under measurement, in a process of its own as the product runs it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.children import serve
from benchmarks.workloads import WORKLOADS
from ods_async.broker.process import settle_in
from ods_async.broker.service import Broker
from ods_async.config import OnlineDataEngineCfg

SEED = 20_240


class LoopWatch:
    """How long single callbacks held up an event loop: wall time, time on a processor, and time without one.

    A thread that could run and has no processor waits for the machine, not for the program: Linux counts that time for
    each thread (``schedstat``, see the kernel's documentation of schedstats).
    """

    def __init__(self) -> None:
        self.reset()
        run = asyncio.Handle._run
        own: list[int] = []  # opened in the loop's thread, as it tells of the thread that opened it

        def queued() -> int:
            if not own:
                own.append(os.open("/proc/thread-self/schedstat", os.O_RDONLY))
            return int(os.pread(own[0], 64, 0).split()[1])

        def timed(handle: asyncio.Handle) -> None:
            # Asked outside of what is timed: reading a file lets go of the interpreter, and getting it back takes time.
            waited = queued()
            processor, wall = time.thread_time_ns(), time.perf_counter_ns()
            run(handle)
            took = time.perf_counter_ns() - wall
            processor = time.thread_time_ns() - processor
            self.calls += 1
            if took > 1_000_000:
                self.slow.append((took, processor, min(took, queued() - waited)))

        asyncio.Handle._run = timed  # type: ignore[method-assign]

    def reset(self) -> None:
        self.calls = 0
        self.slow: list[tuple[int, int, int]] = []

    def report(self) -> dict[str, Any]:
        walls = sorted((wall for wall, _, _ in self.slow), reverse=True)
        worst = max(self.slow, default=(0, 0, 0))
        return {
            "calls": self.calls,
            "over_1_ms": len(walls),
            "over_5_ms": sum(wall > 5_000_000 for wall in walls),
            "worst_ms": worst[0] / 1e6,
            "worst_waited_for_a_processor_ms": worst[2] / 1e6,
            "worst_processor_ms": max((processor for _, processor, _ in self.slow), default=0) / 1e6,
            "worst_without_waiting_ms": max((wall - waited for wall, _, waited in self.slow), default=0) / 1e6,
        }


def main() -> None:
    settle_in()
    loop = asyncio.new_event_loop()
    running: list[Broker] = []
    watches: list[LoopWatch] = []

    def begin(workload: str, folder: str | None = None, watch: bool = False, **settings: Any) -> dict[str, Any]:
        work = WORKLOADS[workload]
        if watch:
            watches.append(LoopWatch())
        cfg = OnlineDataEngineCfg(
            buffer_size=work.slots,
            max_episode_steps=work.steps,
            gym_config={"num_envs": work.num_envs},
            seed=SEED,
            ticket_start_timeout=600.0,
            limits={"leases_per_session": 256},
            **{"refill_policy": "continuous", **work.settings, **settings},
        )
        endpoints = [f"ipc://{Path(folder or tempfile.gettempdir()) / 'b.sock'}", "tcp://127.0.0.1:0"]
        broker = Broker(cfg, endpoints=endpoints)
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(broker.start(), loop).result()
        running.append(broker)
        return {"endpoints": broker.endpoints}

    def watch() -> dict[str, Any]:
        """What was seen since the last call."""
        report = watches[0].report()
        watches[0].reset()
        return report

    def counts() -> dict[str, int]:
        return running[0].counts

    def profile(seconds: float) -> list[list[Any]]:
        """Where the loop's thread spends its time: cProfile's own times, the greatest first."""
        import cProfile
        import pstats

        profiler = cProfile.Profile()
        done = threading.Event()

        async def measure() -> None:
            profiler.enable()
            await asyncio.sleep(seconds)
            profiler.disable()
            done.set()

        asyncio.run_coroutine_threadsafe(measure(), loop).result()
        return top(pstats.Stats(profiler))

    serve({"begin": begin, "watch": watch, "counts": counts, "profile": profile})
    for broker in running:
        asyncio.run_coroutine_threadsafe(broker.stop(0.0), loop).result()


def top(stats: Any, most: int = 45) -> list[list[Any]]:
    """``[calls, own seconds, cumulated seconds, where]``."""
    rows = [
        [calls, round(own, 4), round(total, 4), f"{Path(where[0]).name}:{where[1]}:{where[2]}"]
        for where, (_, calls, own, total, _) in stats.stats.items()
    ]
    return sorted(rows, key=lambda row: -row[1])[:most]


if __name__ == "__main__":
    main()
