"""The demo: scripted Meta-World experts stream into two trainers, one through shared memory and one over tcp.

Two workers run the experts of three MuJoCo tasks and hand in whole episodes. A broker keeps the newest 24. The engine
in this process draws windows out of shared memory, a second client draws the same windows as frames over tcp, and
behind both of them fresh generations replace the old episodes. Nothing here is special: these are the public names.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import ods_async as ods

TASKS = ["reach-v3", "push-v3", "pick-place-v3"]
BATCH, CHUNK = 64, 16
GENERATIONS = 3  # the first fill and two refills behind the trainers' backs


def settings(workers: int) -> ods.OnlineDataEngineCfg:
    return ods.OnlineDataEngineCfg(
        buffer_size=24,
        max_episode_steps=200,
        gym_config={
            "id": "Meta-World/MT1",
            "tasks": TASKS,
            "policy": "ods_async.worker.metaworld:expert",
        },
        num_workers=workers,
        extra_endpoints=("tcp://127.0.0.1:0",),
        refill_threshold=400,  # a refill is asked for after 400 windows a slot, and drawing goes on meanwhile
    )


def show(line: str) -> None:
    """Progress: rewrites the line on a terminal, prints a new one elsewhere."""
    print(f"\r\033[K{line}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def run(batches: int, workers: int, limit: float) -> str:
    started = time.monotonic()
    cfg = settings(workers)
    print(f"starting a broker and {workers} workers for {', '.join(TASKS)} ...", flush=True)
    with ods.OnlineDataEngine(cfg) as engine:
        tcp_endpoint = next(endpoint for endpoint in engine.endpoints if endpoint.startswith("tcp://"))
        print(f"first generation after {time.monotonic() - started:.1f} s; drawing from {engine.endpoint}", flush=True)
        drawn = Counter({"shared memory": 0, "tcp": 0})
        seconds = Counter({"shared memory": 0.0, "tcp": 0.0})
        tasks_seen: set[str] = set()
        with ods.Client(tcp_endpoint, data_path="frames") as remote:
            next_report = time.monotonic()
            while True:
                for name, source in (("shared memory", engine), ("tcp", remote)):
                    begin = time.perf_counter()
                    batch = source.sample_batch(BATCH, CHUNK, timeout=60.0)
                    seconds[name] += time.perf_counter() - begin
                    drawn[name] += 1
                    assert batch.batch_size == (BATCH, CHUNK)
                    assert bool(batch["valid"].all())
                stats = engine.get_stats()
                if time.monotonic() >= next_report:
                    next_report = time.monotonic() + 1.0
                    tasks_seen |= {text for row in engine.resolve_language(batch)["task"] for text in row}
                    show(
                        f"{sum(drawn.values()):6d} batches | {stats['successful_episodes']:4d} episodes | generation "
                        f"{stats['completed_generation']} of {GENERATIONS} | tasks: {', '.join(sorted(tasks_seen))}"
                    )
                enough = sum(drawn.values()) >= batches and len(tasks_seen) == len(TASKS)
                if enough and stats["completed_generation"] >= GENERATIONS:
                    break
                if time.monotonic() - started > limit:
                    raise TimeoutError(f"only {dict(drawn)} batches and {stats} after {limit:g} s")
        print(flush=True)
        rates = {name: drawn[name] / seconds[name] for name in drawn}
    return (
        f"demo ok: {stats['successful_episodes']} episodes, {stats['completed_generation']} generations, "
        f"{sum(drawn.values())} batches, {rates['shared memory']:.0f} batches/s shared memory, "
        f"{rates['tcp']:.0f} batches/s tcp"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=500, help="draw at least so many batches")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=110.0, help="give up after so many seconds")
    arguments = parser.parse_args()
    print(run(arguments.batches, arguments.workers, arguments.limit), flush=True)


if __name__ == "__main__":
    main()
