"""The clients and the subscriber against the real broker, while a worker publishes as fast as it can."""

from __future__ import annotations

import asyncio
import collections
import random
import threading
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from ods_async.client import link
from ods_async.client.aio import AsyncClient
from ods_async.client.sync import Client
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.states import OnlineDataEngineState
from ods_async.errors import ClosedError, OnlineDataBudgetExhaustedError
from ods_async.observe.fold import fold_all
from ods_async.observe.subscriber import EventsLost
from ods_async.testing.broker import run_broker
from ods_async.testing.peers import RawWorker


def config(**changes: Any) -> OnlineDataEngineCfg:
    settings: dict[str, Any] = {"buffer_size": 6, "max_episode_steps": 12, "refill_policy": "manual"}
    return OnlineDataEngineCfg(**(settings | changes))


def check(batch: TensorDict) -> None:
    """Every window is of one episode, in order, by the mark in every step (``1000 * episode + step``)."""
    mark = batch["obs", "mark"]
    assert (mark[:, 1:] - mark[:, :-1] == 1).all()
    assert (mark // 1000 == batch["obs", "state"][..., 0]).all()
    assert (batch["actions"][..., 1] == batch["obs", "state"][..., 0]).all()
    assert (mark % 1000 == batch["episode_step"]).all()


@pytest.mark.parametrize("context", [False, True])
def test_b20_a_batch_that_several_threads_copied_is_the_same_batch(
    context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they end with the client, whatever else draws at the same time."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with run_broker(config(), ipc=True) as broker, RawWorker(broker.endpoint) as worker:
        worker.work(6)
        ipc = next(endpoint for endpoint in broker.endpoints if endpoint.startswith("ipc"))
        with Client(ipc, data_path="shared_memory") as client:

            def draw() -> TensorDict:
                return (
                    client.sample_batch_with_context(31, 3, 4, seed=5)
                    if context
                    else client.sample_batch(31, 5, seed=5)
                )

            alone = draw()
            monkeypatch.setattr(link, "SHARED_WORK_BYTES", 0)
            together = draw()
            assert (alone == together).all()
            assert "ods-copy" in {thread.name.rpartition("_")[0] for thread in threading.enumerate()}
            many = [
                threading.Thread(target=lambda: [check(client.sample_batch(31, 5)) for _ in range(50)]) for _ in "abc"
            ]
            for thread in many:
                thread.start()
            for thread in many:
                thread.join()


def test_consumers_of_every_kind_draw_whole_windows_while_episodes_stream_in() -> None:
    """B18, B21: over shared memory and frames, one at a time and drawn ahead, blocking and awaiting."""
    cfg = config(refill_policy="continuous", buffer_size=5)
    errors: list[BaseException] = []
    marks: set[int] = set()

    def guarded(work: Any) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with run_broker(cfg, ipc=True) as broker, RawWorker(broker.endpoint) as worker:
        worker.work_in_background()
        tcp, ipc = sorted(broker.endpoints, key=lambda endpoint: endpoint.startswith("ipc"))
        end = time.monotonic() + 3.0

        def one_at_a_time() -> None:
            with Client(ipc, data_path="shared_memory") as client:
                while time.monotonic() < end:
                    batch = client.sample_batch(33, 4)
                    check(batch)
                    marks.update((batch["obs", "mark"][:, 0] // 1000).tolist())

        def ahead() -> None:
            with Client(tcp, data_path="frames") as client, client.stream(33, 4, prefetch=4) as stream:
                while time.monotonic() < end:
                    check(next(stream))

        def awaiting() -> None:
            async def draw() -> None:
                async with AsyncClient(ipc) as client:
                    assert client.state is OnlineDataEngineState.READY
                    while time.monotonic() < end:
                        contexts = await client.sample_batch_with_context(17, 3, 5)
                        assert (contexts["loss_mask"].sum(1) >= 1).all()
                        async with client.stream(33, 4, prefetch=2) as stream:
                            for _ in range(5):
                                check(await anext(stream))

            asyncio.run(draw())

        with Client(tcp) as first:
            first.wait_ready(timeout=20)
        threads = [guarded(work) for work in (one_at_a_time, ahead, awaiting)]
        for thread in threads:
            thread.join()
        with Client(tcp) as last:
            stats = last.get_stats()
    assert not errors, errors
    assert stats["completed_generation"] > 3
    assert len(marks) > 15


def test_what_events_add_up_to_is_what_the_broker_counts_b41_b47() -> None:
    with (
        run_broker(config()) as broker,
        RawWorker(broker.endpoint) as worker,
        Client(broker.endpoint, owner=broker.owner_token) as owner,
    ):
        worker.work(6)
        owner.wait_ready(timeout=20)
        generation = owner.request_refill()
        worker.work(6)
        owner.wait_for_generation(generation, timeout=20)
        stats = owner.get_stats()
        with owner.events(since=0, follow=False) as events:
            snapshot = fold_all(events)
    assert snapshot.published_episodes == stats["successful_episodes"] == 12
    assert snapshot.published_steps == stats["generated_frames"]
    assert snapshot.evicted_episodes == 6
    assert (snapshot.completed_generation, snapshot.state) == (2, "READY")
    assert set(snapshot.slots) == set(range(6))
    assert snapshot.lost_events == 0
    assert snapshot.living_workers == 1


def test_a_subscriber_that_waits_sees_the_end_b41() -> None:
    with run_broker(config()) as broker, RawWorker(broker.endpoint) as worker:
        worker.work(6)
        client = Client(broker.endpoint)
        events = client.events(since=0)
        seen = [next(events)]
        broker.stop()
        seen += list(events)
        client.close()
        events.close()
    assert not any(isinstance(item, EventsLost) for item in seen)
    assert [item.sequence for item in seen] == list(range(len(seen)))
    assert fold_all(seen).state == "STOPPED"


def test_language_survives_the_broker_b43() -> None:
    with run_broker(config()) as broker, RawWorker(broker.endpoint) as worker:
        worker.work(6)
        client = Client(broker.endpoint, data_path="frames")
        batch = client.sample_batch(40, 5)
    texts = client.resolve_language(batch)
    client.close()
    episodes = batch["obs", "mark"][:, 0] // 1000
    assert [row[0] for row in texts["task"]] == [f"task {int(mark) % 5}" for mark in episodes]
    assert {text for row in texts["subtask"] for text in row} <= {"reach it", "place 0", "place 1", "place 2"}


async def test_budgets_hold_under_cancellation_and_streams_and_the_sum_closes_b37() -> None:
    budget = 60
    cfg = config(include_provenance=True, episode_sample_budget=budget, episode_sample_hard_limit=budget)
    received: collections.Counter[int] = collections.Counter()
    delivered = 0
    rng = random.Random(3)

    def count(batch: TensorDict) -> None:
        nonlocal delivered
        delivered += batch.batch_size[0]
        episodes, times = torch.unique(batch["ods_episode_id"][:, 0], return_counts=True)
        received.update(dict(zip(episodes.tolist(), times.tolist(), strict=True)))

    async def draw(client: AsyncClient) -> None:
        while True:
            call = asyncio.ensure_future(client.sample_batch(7, 4))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.002)
                call.cancel()
            try:
                count(await call)
            except asyncio.CancelledError:
                pass
            except OnlineDataBudgetExhaustedError:
                return

    async def stream(client: AsyncClient) -> None:
        while True:
            async with client.stream(5, 4, prefetch=4) as batches:
                for _ in range(rng.randrange(4)):
                    try:
                        count(await anext(batches))
                    except OnlineDataBudgetExhaustedError:
                        return

    with run_broker(cfg) as broker, RawWorker(broker.endpoint) as worker:
        worker.work(6)
        async with AsyncClient(broker.endpoint) as one, AsyncClient(broker.endpoint, data_path="frames") as other:
            for client in (one, other):  # from here on all words are known, and a draw is one question
                count(await client.sample_batch(7, 4))
            await asyncio.gather(draw(one), draw(other), stream(one))
            snapshot = await one.get_sampling_budget_snapshot()
            end = time.monotonic() + 5
            while snapshot["total_delivered_chunks"] != delivered and time.monotonic() < end:  # notices under way
                snapshot = await one.get_sampling_budget_snapshot()
    assert max(received.values()) <= budget
    assert sum(row["delivered"] for row in snapshot["rows"]) == snapshot["total_delivered_chunks"]
    assert snapshot["unlocked_remaining_chunks"] + snapshot["total_delivered_chunks"] == 6 * budget
    # Every window that was charged for was received: what was given up, the broker heard of.
    assert snapshot["total_delivered_chunks"] == delivered


def test_stopping_is_the_owners_and_ends_the_waiting_b13() -> None:
    with run_broker(config()) as broker:
        owner = Client(broker.endpoint, owner=broker.owner_token)
        waiter = Client(broker.endpoint)
        outcome: list[BaseException] = []

        def wait() -> None:
            try:
                waiter.wait_ready(timeout=30)
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        owner.connect()
        owner.stop(grace=0.1, timeout=10)
        thread.join()
        assert isinstance(outcome[0], ClosedError)
        owner.close()
        waiter.close()
