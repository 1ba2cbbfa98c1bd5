"""An asyncio program that owns the service: it trains, watches the stream and asks for fresh data, all in one loop.

Runs with the counting environment, which needs no simulator.

    python examples/02_asyncio_trainer.py
"""

from __future__ import annotations

import asyncio

import ods_async as ods


async def train(engine: ods.AsyncOnlineDataEngine, batches: int) -> None:
    number = 0
    async for batch in engine.stream(batch_size=64, chunk_size=16, prefetch=4):
        number += 1
        assert batch.batch_size == (64, 16)
        if number % 100 == 0:
            print(f"{number} batches trained on", flush=True)
        if number == batches:
            return


async def refresh(engine: ods.AsyncOnlineDataEngine, times: int) -> None:
    for _ in range(times):
        generation = await engine.request_refill()
        await engine.wait_for_generation(generation, timeout=60.0)
        print(f"generation {generation} is complete", flush=True)


async def main() -> None:
    cfg = ods.OnlineDataEngineCfg(
        buffer_size=16,
        max_episode_steps=60,
        gym_config={"id": "ods_async/Counting-v0", "kwargs": {"min_length": 20, "max_length": 50}},
        refill_policy="manual",
        num_workers=2,
    )
    async with ods.AsyncOnlineDataEngine(cfg) as engine:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train(engine, batches=300))
            tasks.create_task(refresh(engine, times=2))
        stats = await engine.get_stats()
    print(f"example ok: {stats['successful_episodes']} episodes, {stats['completed_generation']} generations")


if __name__ == "__main__":
    asyncio.run(main())
