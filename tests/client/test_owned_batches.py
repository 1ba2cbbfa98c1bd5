"""Batches of a real broker belong to whoever drew them, on every way they can come (C30, C31)."""

from __future__ import annotations

import itertools
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from ods_async import Client, OnlineDataEngineCfg, OnlineDataset
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.peers import RawWorker

EPISODES = 6


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    cfg = OnlineDataEngineCfg(buffer_size=EPISODES, max_episode_steps=12, refill_policy="manual")
    with run_broker(cfg, ipc=True) as running:
        with RawWorker(running.endpoint) as worker:
            worker.work(EPISODES, length=9)
            with Client(running.endpoint) as client:
                client.wait_ready()
        yield running


def spoil(batch: TensorDict) -> None:
    """Write into every tensor: as trainers normalise, and to its last byte."""
    for tensor in batch.values(include_nested=True, leaves_only=True):
        if tensor.is_floating_point():
            tensor.mul_(0).sub_(7)
        else:
            tensor.fill_(1)


def alike(one: TensorDict, other: TensorDict) -> bool:
    return bool((one == other).all()) and set(one.keys(True, True)) == set(other.keys(True, True))


WAYS = [("ipc", "shared_memory"), ("tcp", "shared_memory"), ("ipc", "frames"), ("tcp", "frames")]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("scheme", "path"), WAYS)
def test_c30_spoiled_batches_change_neither_the_buffer_nor_another_trainers_nor_kept_ones(
    broker: RunningBroker, scheme: str, path: str
) -> None:
    """C30: ``mul_(0)`` on everything, the same windows again, 50 batches kept, two trainers at once, texts as well."""
    endpoint = next(end for end in broker.endpoints if end.startswith(scheme))
    with Client(endpoint, data_path=path) as one, Client(broker.endpoint) as two:
        kept: list[tuple[TensorDict, TensorDict, Any]] = []
        for seed in range(50):
            batch, others = one.sample_batch(16, 5, seed=seed), two.sample_batch(16, 5, seed=seed)
            assert alike(batch, others)
            kept.append((others, others.clone(), two.resolve_language(others)))
            if seed % 2:
                kept.append((batch, batch.clone(), one.resolve_language(batch)))
            else:
                spoil(batch)
        for seed in range(0, 50, 7):
            again = one.sample_batch(16, 5, seed=seed)
            assert alike(again, two.sample_batch(16, 5, seed=seed))
            assert any(alike(again, copy) for _, copy, _ in kept)
            texts = one.resolve_language(again)
            texts["task"][0][0] = "spoiled"
            assert one.resolve_language(again)["task"][0][0] != "spoiled"
        for batch, copy, texts in kept:
            assert alike(batch, copy)
            assert one.resolve_language(batch) == texts
        stream = one.stream(16, 5, seed=3, prefetch=3)
        streamed = list(itertools.islice(stream, 12))
        copies = [batch.clone() for batch in streamed]
        spoil(streamed[0])
        assert all(alike(batch, copy) for batch, copy in zip(streamed[1:], copies[1:], strict=True))
        stream.close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("path", ["shared_memory", "frames"])
def test_c30_contexts_and_batches_of_a_dataset_are_the_callers_own_too(broker: RunningBroker, path: str) -> None:
    with Client(broker.endpoint, data_path=path) as client:
        context = client.sample_batch_with_context(16, 3, 4, seed=1)
        copy = context.clone()
        spoil(context)
        assert alike(client.sample_batch_with_context(16, 3, 4, seed=1), copy)
    for batch_size in (None, 4):
        dataset = OnlineDataset(broker.endpoint, 5, batch_size, length=8, seed=1, data_path=path)
        before = [item.clone() for item in dataset]
        dataset.set_epoch(0)
        for item, expected in zip(dataset, before, strict=True):
            assert alike(item, expected)
            spoil(item)
        dataset.set_epoch(0)
        assert all(alike(item, expected) for item, expected in zip(dataset, before, strict=True))


LOADERS = [
    (in_dataset, in_loader, workers, pinned, persistent)
    for in_dataset, in_loader in ((4, None), (4, 4), (None, 4), (None, None))
    for workers in (0, 2)
    for pinned in (False, True)
    for persistent in ((False, True) if workers else (False,))
]


@pytest.mark.parametrize(("in_dataset", "in_loader", "workers", "pinned", "persistent"), LOADERS)
def test_c31_every_combination_of_a_loader_gives_tensordicts_of_the_right_size_and_may_be_left_early(
    broker: RunningBroker, in_dataset: int | None, in_loader: int | None, workers: int, pinned: bool, persistent: bool
) -> None:
    """C31: batch_size None or 4 on either side, 0 or 2 workers, pinned or not, persistent or not."""
    expected = tuple(size for size in (in_loader, in_dataset) if size is not None)
    loader = DataLoader(
        OnlineDataset(broker.endpoint, 5, in_dataset),
        batch_size=in_loader,
        num_workers=workers,
        pin_memory=pinned,
        persistent_workers=persistent,
        multiprocessing_context="fork" if workers else None,
        timeout=60.0 * bool(workers),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if pinned and not torch.accelerator.is_available():
            warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator", UserWarning)
        for _ in range(2):  # each loop is left early; the second one begins anew
            for batch in itertools.islice(loader, 3):
                assert type(batch) is TensorDict
                assert batch.batch_size == (*expected, 5)
                assert (batch["obs", "mark"].diff(dim=-1) == 1).all()
                batch["actions"].mul_(0)
    began = time.monotonic()
    del loader
    assert time.monotonic() - began < 10.0
    assert not multiprocessing.active_children()
