"""The dataset in DataLoaders, with real workers: batches, streams, start methods, early ends, errors."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from ods_async.client.chunk_sizes import ChunkSizeSampler, UniformChunkSampler
from ods_async.client.dataset import OnlineDataset
from ods_async.client.sync import Client
from ods_async.config import OnlineDataEngineCfg
from ods_async.errors import ArgumentError, BrokerUnreachableError, DataUnavailableError, RequestTimeoutError
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.peers import RawWorker

EPISODES = 1000

# Four workers on any machine: the point is that they are several.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes:UserWarning")


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    cfg = OnlineDataEngineCfg(buffer_size=EPISODES, max_episode_steps=24, refill_policy="manual")
    with run_broker(cfg, ipc=True) as running:
        with RawWorker(running.endpoint) as worker:
            worker.work(EPISODES, length=9)
            with Client(running.endpoint) as client:
                client.wait_ready()
        yield running


def loader(dataset: OnlineDataset, workers: int, start: str = "fork", **options: Any) -> DataLoader[Any]:
    options = {"batch_size": None} | options
    return DataLoader(
        dataset,
        num_workers=workers,
        multiprocessing_context=start if workers else None,
        timeout=60 * bool(workers),
        **options,
    )


def first(source: Any, count: int) -> list[Any]:
    found = []
    for item in source:
        found.append(item)
        if len(found) == count:
            break
    return found


def error_of(source: Any) -> Any:
    """What asking for an item raises, without its traceback: that would keep the loader's workers alive."""
    try:
        first(source, 1)
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError("no error")


def marks(item: TensorDict) -> tuple[int, ...]:
    """Which windows: ``1000 * episode + first step`` of each."""
    return tuple(item["obs", "mark"][..., 0].reshape(-1).tolist())


# --- C31: how batches are put together ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("batch_size", "options", "expected"),
    [
        (4, {}, (4, 5)),
        (4, {"collate_fn": OnlineDataset.passthrough_collate_fn}, (4, 5)),
        (4, {"batch_size": 1, "collate_fn": OnlineDataset.passthrough_collate_fn}, (4, 5)),
        (4, {"batch_size": 3}, (3, 4, 5)),
        (None, {"batch_size": 3}, (3, 5)),
        (None, {"batch_size": 3, "collate_fn": OnlineDataset.collate_fn}, (3, 5)),
        (None, {}, (5,)),
    ],
    ids=["batch", "batch-passed", "batch-list-of-1", "batches-stacked", "items", "items-collated", "single-items"],
)
def test_every_way_of_loading_gives_tensordicts_of_the_right_batch_size(
    broker: RunningBroker, workers: int, batch_size: int | None, options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    """C31; values are whole as well."""
    for batch in first(loader(OnlineDataset(broker.endpoint, 5, batch_size), workers, **options), 3):
        assert type(batch) is TensorDict
        assert batch.batch_size == expected
        assert batch["obs", "state"].shape == (*expected, 3)
        mark = batch["obs", "mark"]
        assert (mark.diff(dim=-1) == 1).all()
        assert torch.equal(batch["obs", "state"][..., 0].long(), mark // 1000)


@pytest.mark.parametrize("workers", [0, 1])
def test_pinning_without_an_accelerator_is_skipped(broker: RunningBroker, workers: int) -> None:
    """C31."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    dataset = OnlineDataset(broker.endpoint, 5, 4)
    with pytest.warns(UserWarning, match="no accelerator"):
        batch = first(loader(dataset, workers, pin_memory=True), 1)[0]
    assert batch.batch_size == (4, 5)
    assert not batch["actions"].is_pinned()


@pytest.mark.parametrize("workers", [0, 1])
def test_transformed_items_that_are_no_tensordicts_are_converted_as_usual(broker: RunningBroker, workers: int) -> None:
    dataset = OnlineDataset(
        broker.endpoint, 5, transform=lambda item: {"actions": item["actions"], "one": np.float32(1)}
    )
    batch = first(loader(dataset, workers, batch_size=3), 1)[0]
    assert batch["actions"].shape == (3, 5, 2)
    assert torch.equal(batch["one"], torch.ones(3))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [None, OnlineDataset.collate_fn])
def test_items_of_different_lengths_are_refused_in_plain_words(
    broker: RunningBroker, workers: int, collate_fn: Any
) -> None:
    """C31: and one length a batch is what batch mode is for."""
    sizes = UniformChunkSampler(2, 9)
    items = loader(OnlineDataset(broker.endpoint, sizes, seed=2), workers, batch_size=8, collate_fn=collate_fn)
    error = error_of(items)
    assert type(error) is ArgumentError
    assert "draw whole batches" in str(error)
    assert error.argument == "chunk_size"
    batches = first(loader(OnlineDataset(broker.endpoint, sizes, 8), workers), 4)
    assert [batch.batch_size[0] for batch in batches] == [8] * 4


def test_passing_through_several_batches_is_refused_in_plain_words(broker: RunningBroker) -> None:
    dataset = OnlineDataset(broker.endpoint, 5, 4)
    error = error_of(loader(dataset, 0, batch_size=2, collate_fn=OnlineDataset.passthrough_collate_fn))
    assert type(error) is ArgumentError
    assert "batch_size=None" in str(error)


# --- C15: streams ---------------------------------------------------------------------------------------------------


def two_epochs(broker: RunningBroker, workers: int, **options: Any) -> list[tuple[int, ...]]:
    """The windows of 2 epochs of 20 batches of 8, in the order in which they came."""
    persistent = options.pop("persistent_workers", False)
    source = options.pop("endpoint", broker.endpoint)
    batches = loader(OnlineDataset(source, 3, 8, **options), workers, persistent_workers=persistent)
    iterator = iter(batches)
    found = [marks(next(iterator)) for _ in range(20)]
    if not persistent:
        del iterator
    found += [marks(batch) for batch in first(batches, 20)]
    return found


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_ranks_and_epochs_differ_and_all_repeat_with_the_seed(broker: RunningBroker, persistent: bool) -> None:
    """C15 and C41: 1000 episodes, 4 workers, 2 epochs, 2 ranks; overlap as chance gives."""
    options = {"seed": 11, "world_size": 2, "persistent_workers": persistent}
    zero = two_epochs(broker, 4, rank=0, **options)
    one = two_epochs(broker, 4, rank=1, endpoint=broker.endpoints[1], **options)
    assert len({*zero, *one}) == 80
    windows = [mark for batch in zero for mark in batch]
    # Some 8,500 windows to choose 320 from: about 6 twice.
    assert len(set(windows)) > 290
    assert two_epochs(broker, 4, rank=0, endpoint=broker.endpoints[1], **options) == zero


def test_no_worker_and_one_worker_repeat_with_the_seed(broker: RunningBroker) -> None:
    """C15."""
    found = [two_epochs(broker, workers, seed=3) for workers in (0, 1, 0, 1)]
    assert found[0] == found[1] == found[2] == found[3]
    assert len(set(found[0])) == 40


def test_without_a_seed_workers_still_differ(broker: RunningBroker) -> None:
    """C15: also in the lengths that a sampler draws."""
    assert len(set(two_epochs(broker, 2))) == 40
    batches = first(loader(OnlineDataset(broker.endpoint, UniformChunkSampler(1, 9), 2), 2), 40)
    lengths = [batch.batch_size[1] for batch in batches]
    assert lengths[::2] != lengths[1::2]


def test_stated_length_is_shared_among_the_workers_and_not_multiplied(broker: RunningBroker) -> None:
    """C15."""
    dataset = OnlineDataset(broker.endpoint, 3, 2, length=7, seed=1)
    for workers in (0, 4):
        batches = loader(dataset, workers)
        assert len(batches) == 7
        assert len(list(batches)) == 7
    assert len(list(loader(OnlineDataset(broker.endpoint, 3, 2, length=1), 2))) == 1


def test_set_epoch_reaches_workers_that_live_on(broker: RunningBroker) -> None:
    dataset = OnlineDataset(broker.endpoint, 3, 8, length=4, seed=5)
    batches = loader(dataset, 2, persistent_workers=True)
    zero, one = ([marks(batch) for batch in batches] for _ in range(2))
    dataset.set_epoch(0)
    assert [marks(batch) for batch in batches] == zero
    assert [marks(batch) for batch in batches] == one != zero


# --- C41: start methods ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_forked_workers_and_the_parents_client_keep_out_of_each_others_way(broker: RunningBroker, workers: int) -> None:
    """C41: the parent has a client that sampled, and an iterator of the same dataset that is under way."""
    with Client(broker.endpoint) as client:
        before = client.sample_batch(4, 3, seed=1)
        stream = client.stream(4, 3, prefetch=2)
        next(stream)
        dataset = OnlineDataset(client, 3, 4)
        mine = iter(dataset)
        next(mine)
        assert len(first(loader(dataset, workers), 12)) == 12
        assert next(mine).batch_size == (4, 3)
        assert next(stream).batch_size == (4, 3)
        assert marks(client.sample_batch(4, 3, seed=1)) == marks(before)
        assert client.get_status()["open_leases"] <= 2  # the stream's own
        mine.close()


def test_fork_by_hand_in_the_middle_of_an_iteration(broker: RunningBroker) -> None:
    """C41: the child goes on with connections of its own, and so does the parent."""
    iterator = iter(OnlineDataset(broker.endpoint, 3, 4))
    next(iterator)
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sender, b"%d" % len(next(iterator)))
            iterator.close()
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as answer:
        assert answer.read() == b"4"
    os.waitpid(child, 0)
    assert next(iterator).batch_size == (4, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("start", "workers"), [("spawn", 1), ("forkserver", 4), ("spawn", 4)])
def test_started_workers_connect_by_themselves_and_draw_as_forked_ones(
    broker: RunningBroker, start: str, workers: int
) -> None:
    """C15, C41: the same streams, in both epochs, whatever starts the workers; the dataset holds a used client."""
    with Client(broker.endpoint) as client:
        client.sample_batch(4, 3)

        def epochs(start: str) -> list[list[tuple[int, ...]]]:
            dataset = OnlineDataset(client, 3, 4, length=6, seed=8)
            batches = loader(dataset, workers, start, persistent_workers=True)
            found = [[marks(batch) for batch in batches] for _ in range(2)]
            assert pickle.loads(pickle.dumps(dataset)).length == 6
            return found

        started = epochs(start)
        assert started == epochs("fork")
        assert len({batch for epoch in started for batch in epoch}) == 12
        assert client.sample_batch(4, 3).batch_size == (4, 3)


# --- C21, C31: ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_leaving_a_loop_early_ends_the_workers_at_once(broker: RunningBroker, workers: int) -> None:
    """C21, C31."""
    batches = loader(OnlineDataset(broker.endpoint, 5, 4), workers)
    iterator = iter(batches)
    next(iterator)
    begun = time.monotonic()
    del iterator
    assert time.monotonic() - begun < 4
    assert not multiprocessing.active_children()
    with Client(broker.endpoint) as client:
        assert client.get_status()["open_leases"] == 0


SCRIPT = """
    import sys
    from torch.utils.data import DataLoader
    from ods_async.client.dataset import OnlineDataset

    dataset = OnlineDataset(sys.argv[1], chunk_size=5, batch_size=4, seed=1)
    batches = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for batch in batches:
        print(tuple(batch.batch_size), flush=True)
        break
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("raise KeyError(1)", 1)])
def test_a_script_that_leaves_its_loop_ends_within_seconds(broker: RunningBroker, end: str, code: int) -> None:
    """C21, C31: persistent workers, no close anywhere."""
    script = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT.format(end=end)), broker.endpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    assert script.stderr is not None
    with script:
        assert script.stdout.readline() == "(4, 5)\n"
        processes = psutil.Process(script.pid).children(recursive=True)
        assert script.wait(10) == code
        noise = script.stderr.read()
        assert ("KeyError" in noise) == (code == 1)
        assert "ods_async" not in noise
    assert not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.slow
def test_workers_that_wait_for_data_end_when_the_training_process_is_killed() -> None:
    """C21: however long their time-out."""
    script = """
        import sys
        from torch.utils.data import DataLoader
        from ods_async.client.dataset import OnlineDataset

        batches = DataLoader(OnlineDataset(sys.argv[1], 5, 4, timeout=3600.0), batch_size=None, num_workers=2)
        iterator = iter(batches)
        print("begun", flush=True)
        next(iterator)
    """
    with run_broker(OnlineDataEngineCfg(buffer_size=3, max_episode_steps=5)) as empty, RawWorker(empty.endpoint):
        trainer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), empty.endpoint], stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout is not None
        with trainer:
            assert trainer.stdout.readline() == "begun\n"
            processes = psutil.Process(trainer.pid).children(recursive=True)
            assert processes
            trainer.kill()
        assert not psutil.wait_procs(processes, timeout=20)[1]


# --- errors ---------------------------------------------------------------------------------------------------------


class Sizes(ChunkSizeSampler):
    """Too long a window first, then a short one, over and over."""

    def __init__(self) -> None:
        self.turn = 0

    def draw(self, rng: np.random.Generator) -> int:
        self.turn += 1
        return 24 if self.turn % 2 else 3


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_errors_come_home_with_class_text_and_fields_and_loading_goes_on(broker: RunningBroker, workers: int) -> None:
    """B23."""
    iterator = iter(loader(OnlineDataset(broker.endpoint, Sizes(), 2), workers))
    for _ in range(max(workers, 1)):
        error = error_of(iterator)
        assert type(error) is DataUnavailableError
        assert (error.mode, error.length) == ("episode", 24)
        here = error_of(OnlineDataset(broker.endpoint, 24, 2))
        assert str(error) == str(here)
        assert pickle.loads(pickle.dumps(error)).fields == here.fields
        if workers:
            assert "in DataLoader worker process" in error.__notes__[0]
            assert "Traceback" in error.__notes__[0]
    assert next(iterator).batch_size == (2, 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_broker_is_told_in_time(workers: int) -> None:
    """C21."""
    away = Client("tcp://127.0.0.1:9", connect_timeout=0.3)
    begun = time.monotonic()
    error = error_of(loader(OnlineDataset(away, 3, 2), workers))
    assert type(error) is BrokerUnreachableError
    assert error.endpoint == "tcp://127.0.0.1:9"
    assert time.monotonic() - begun < 4


def test_a_worker_that_waits_in_vain_says_what_is_missing() -> None:
    """C35: after the whole time-out, not after one of the pieces it waits in."""
    with run_broker(OnlineDataEngineCfg(buffer_size=3, max_episode_steps=5)) as empty, RawWorker(empty.endpoint):
        begun = time.monotonic()
        error = error_of(loader(OnlineDataset(empty.endpoint, 3, 2, timeout=2.5), 1))
        assert 2.5 <= time.monotonic() - begun < 6
        assert type(error) is RequestTimeoutError
        assert str(error).startswith("no batch within 2.5 s: 0 of 2 windows")
        assert error.timeout == 2.5
