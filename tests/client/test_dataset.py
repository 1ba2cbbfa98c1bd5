"""The dataset in one process: modes, seeds, arguments. What needs DataLoader workers is in ``test_loader.py``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from ods_async.client import dataset as dataset_module
from ods_async.client.aio import AsyncClient
from ods_async.client.chunk_sizes import ChunkSizeSampler, UniformChunkSampler
from ods_async.client.dataset import OnlineDataset
from ods_async.client.streams import Place, stream_of
from ods_async.client.sync import Client
from ods_async.config import OnlineDataEngineCfg
from ods_async.errors import (
    ArgumentError,
    BrokerUnreachableError,
    DataUnavailableError,
    EndpointError,
    RequestTimeoutError,
    StateError,
)
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.peers import RawWorker
from ods_async.transport.sockets import open_channel_count

EPISODES = 40


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    cfg = OnlineDataEngineCfg(buffer_size=EPISODES, max_episode_steps=24, refill_policy="manual")
    with run_broker(cfg) as running:
        with RawWorker(running.endpoint) as worker:
            worker.work(EPISODES, length=9)
            with Client(running.endpoint) as client:
                client.wait_ready()
        yield running


def take(source: Any, count: int) -> list[Any]:
    iterator = iter(source)
    return [next(iterator) for _ in range(count)]


def marks(item: TensorDict) -> list[int]:
    """Which windows: ``1000 * episode + first step`` of each."""
    found: list[int] = item["obs", "mark"][..., 0].reshape(-1).tolist()
    return found


def equal(one: TensorDict, other: TensorDict) -> bool:
    names = set(one.keys(True, True))
    return names == set(other.keys(True, True)) and all(torch.equal(one[name], other[name]) for name in names)


def test_item_mode_yields_single_windows(broker: RunningBroker) -> None:
    """B20, B21: each is one window of one episode."""
    for item in take(OnlineDataset(broker.endpoint, 5), 6):
        assert item.batch_size == (5,)
        assert item["obs", "state"].shape == (5, 3)
        assert (item["obs", "mark"].diff() == 1).all()
        assert item["valid"].all()


def test_batch_mode_yields_whole_batches_that_belong_to_the_caller(broker: RunningBroker) -> None:
    """B20, C30."""
    dataset = OnlineDataset(broker.endpoint, chunk_size=5, batch_size=7, sampling_mode="boundary", seed=1)
    first = take(dataset, 1)[0]
    assert first.batch_size == (7, 5)
    assert (first["segment_id"].diff(dim=1) == 1).any(dim=1).all()
    kept = first.clone()
    first["obs", "state"].mul_(0)
    dataset.set_epoch(0)
    assert equal(take(dataset, 1)[0], kept)


@pytest.mark.parametrize("data_path", ["shared_memory", "frames"])
def test_dataset_equals_direct_sampling(broker: RunningBroker, data_path: str) -> None:
    """C36, for chunks."""
    dataset = OnlineDataset(broker.endpoint, 4, 3, seed=9, rank=1, world_size=2, data_path=data_path)
    rng = stream_of(9, rank=1, worker=0, epoch=0)
    with Client(broker.endpoint) as client:
        for batch in take(dataset, 3):
            assert equal(batch, client.sample_batch(3, 4, seed=int(rng.integers(2**63))))


@pytest.mark.parametrize("sampling_mode", ["episode", "segment"])
def test_contexts_pad_exactly_outside_the_episode_as_direct_sampling_does(
    broker: RunningBroker, sampling_mode: str
) -> None:
    """C36, B25-B27: offsets -2..+4 around anchors anywhere, and a look-ahead of more than the row."""
    for history, horizon, batch_size in [(3, 5, 60), (2, 120, 4)]:
        dataset = OnlineDataset(
            broker.endpoint,
            batch_size=batch_size,
            history_length=history,
            prediction_horizon=horizon,
            sampling_mode=sampling_mode,
            seed=4,
        )
        batch = take(dataset, 1)[0]
        assert batch.batch_size == (batch_size, history + horizon - 1)
        rng = stream_of(4, rank=0, worker=0, epoch=0)
        with Client(broker.endpoint) as client:
            direct = client.sample_batch_with_context(
                batch_size, history, horizon, sampling_mode=sampling_mode, seed=int(rng.integers(2**63))
            )
        assert equal(batch, direct)
        now = history - 1
        anchor = batch["obs", "mark"][:, now]
        episode, step = anchor // 1000, anchor % 1000
        length = 9 + episode % 4
        low, high = torch.zeros_like(step), length
        if sampling_mode == "segment":
            half = length // 2
            low, high = torch.where(step < half, 0, half), torch.where(step < half, half, length)
        steps = step[:, None] + torch.arange(-now, horizon)
        real = (steps >= low[:, None]) & (steps < high[:, None])
        assert torch.equal(batch["valid"], real)
        assert torch.equal(batch["loss_mask"], real & (torch.arange(history + horizon - 1) >= now))
        assert torch.equal(batch["obs", "mark"], torch.where(real, episode[:, None] * 1000 + steps, 0))
        assert torch.equal(batch["episode_step"], torch.where(real, steps, 0))
        assert torch.equal(batch["task_index"] == -1, ~real)
        assert not real.all()


def test_items_of_contexts_have_one_dimension(broker: RunningBroker) -> None:
    item = take(OnlineDataset(broker.endpoint, history_length=2, prediction_horizon=3), 1)[0]
    assert item.batch_size == (4,)
    assert "loss_mask" in item.keys()  # noqa: SIM118 - a TensorDict iterates over its batch


def test_length_is_chosen_once_a_batch_and_repeats_with_the_seed(broker: RunningBroker) -> None:
    def lengths() -> list[int]:
        dataset = OnlineDataset(broker.endpoint, UniformChunkSampler(2, 9), batch_size=3, seed=3)
        return [batch.batch_size[1] for batch in take(dataset, 25)]

    assert lengths() == lengths()
    assert set(lengths()) <= set(range(2, 10))
    assert len(set(lengths())) > 4


def test_a_sampler_that_draws_nonsense_is_refused(broker: RunningBroker) -> None:
    class Nonsense(ChunkSizeSampler):
        def draw(self, rng: np.random.Generator) -> int:
            return 0

    with pytest.raises(ArgumentError, match="chunk_size must be an integer of at least 1, got 0"):
        take(OnlineDataset(broker.endpoint, Nonsense()), 1)


def test_transform_gets_what_is_drawn_and_its_result_is_yielded(broker: RunningBroker) -> None:
    dataset = OnlineDataset(broker.endpoint, 4, 3, lambda batch: (tuple(batch.batch_size), batch["rewards"].sum()))
    shape, total = take(dataset, 1)[0]
    assert shape == (3, 4)
    assert total.shape == ()


def test_epochs_and_ranks_have_streams_of_their_own_which_repeat(broker: RunningBroker) -> None:
    """C15 without workers."""

    def epochs(**options: Any) -> list[tuple[int, ...]]:
        dataset = OnlineDataset(broker.endpoint, 3, 8, seed=5, **options)
        return [tuple(mark for batch in take(dataset, 4) for mark in marks(batch)) for _ in range(3)]

    zero, one = epochs(rank=0, world_size=2), epochs(rank=1, world_size=2)
    assert len({*zero, *one}) == 6
    assert epochs() == zero
    assert epochs(rank=1, world_size=2) == one


def test_set_epoch_chooses_the_stream(broker: RunningBroker) -> None:
    dataset = OnlineDataset(broker.endpoint, 3, 8, seed=5)
    first, second = (marks(take(dataset, 1)[0]) for _ in range(2))
    dataset.set_epoch(1)
    assert marks(take(dataset, 1)[0]) == second
    dataset.set_epoch(0)
    assert marks(take(dataset, 1)[0]) == first
    assert first != second


def test_without_a_seed_two_iterators_differ_and_no_global_chance_is_used(broker: RunningBroker) -> None:
    """B24."""
    state = torch.random.get_rng_state()
    dataset = OnlineDataset(broker.endpoint, 3, 16)
    assert marks(take(dataset, 1)[0]) != marks(take(dataset, 1)[0])
    dataset.set_epoch(3)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_rank_comes_from_torch_distributed_where_it_is_initialised(broker: RunningBroker) -> None:
    """C15: also for a copy that is unpickled where it is not, as in a spawned worker."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made_before = OnlineDataset(broker.endpoint, 3, 8, seed=5)
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        dataset = OnlineDataset(broker.endpoint, 3, 8, seed=5)
        assert (made_before.rank, dataset.rank, dataset.world_size) == (2, 2, 3)
        sent = pickle.dumps(dataset)
        given = OnlineDataset(broker.endpoint, 3, 8, seed=5, rank=0, world_size=3)
        assert (given.rank, given.world_size) == (0, 3)
    finally:
        dist.destroy_process_group()
    received = pickle.loads(sent)
    assert (received.rank, received.world_size) == (2, 3)
    explicit = OnlineDataset(broker.endpoint, 3, 8, seed=5, rank=2, world_size=3)
    assert marks(take(received, 1)[0]) == marks(take(explicit, 1)[0])
    assert (dataset.rank, dataset.world_size) == (0, 1)


def test_length_ends_an_epoch(broker: RunningBroker) -> None:
    dataset = OnlineDataset(broker.endpoint, 3, length=5)
    assert len(dataset) == 5
    assert [len(list(dataset)) for _ in range(2)] == [5, 5]
    iterator = iter(dataset)
    list(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_endless_dataset_has_no_length_and_is_true(broker: RunningBroker) -> None:
    dataset = OnlineDataset(broker.endpoint, 3)
    with pytest.raises(TypeError, match="no end"):
        len(dataset)
    assert dataset


def test_nothing_connects_before_the_first_item_and_nothing_stays_after_an_early_end(broker: RunningBroker) -> None:
    before = open_channel_count()
    iterator = iter(OnlineDataset(broker.endpoint, 3, 2))
    assert open_channel_count() == before
    for _ in iterator:
        break
    assert open_channel_count() == before + 1
    del iterator
    assert open_channel_count() == before
    for _ in OnlineDataset(broker.endpoint, 3, 2, length=1):
        pass
    assert open_channel_count() == before
    with Client(broker.endpoint) as client:
        assert client.get_status()["open_leases"] == 0


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_as_source_lends_its_connection_details_only(broker: RunningBroker, kind: Any) -> None:
    """C41: the dataset pickles with a client inside, and outlives it."""
    client = kind(broker.endpoint, data_path="frames", timeout=7.0, owner=b"secret" * 6)
    dataset = OnlineDataset(client, 3, 2, seed=1)
    assert dataset.timeout == 7.0
    data = pickle.dumps(dataset)
    assert b"secretsecret" not in data
    received = pickle.loads(data)
    if kind is Client:
        client.close()
    assert equal(take(dataset, 1)[0], take(received, 1)[0])
    made = received.make_client()
    made.connect()
    made.sample_batch(2, 3)
    assert made.data_path == "frames"
    made.close()
    assert equal(take(copy.deepcopy(dataset), 1)[0], take(received, 1)[0])


def test_an_engine_as_source_may_start_later(broker: RunningBroker) -> None:
    class Engine:
        started = False

        @property
        def endpoint(self) -> str:
            if not self.started:
                raise StateError("not started", operation="endpoint", required="READY", current="CREATED")
            return broker.endpoint

    engine = Engine()
    dataset = OnlineDataset(engine, 3, 2)
    iterator = iter(dataset)
    with pytest.raises(StateError):
        next(iterator)
    with pytest.raises(StateError):
        pickle.dumps(dataset)
    engine.started = True
    assert next(iterator).batch_size == (2, 3)
    assert take(pickle.loads(pickle.dumps(dataset)), 1)[0].batch_size == (2, 3)


def test_an_error_leaves_the_iterator_usable(broker: RunningBroker) -> None:
    """B23."""

    class Sizes(ChunkSizeSampler):
        sizes = [24, 3]  # noqa: RUF012 - one list for all on purpose

        def __call__(self) -> int:
            return self.sizes.pop(0)

    iterator = iter(OnlineDataset(broker.endpoint, Sizes(), 2))
    with pytest.raises(DataUnavailableError) as caught:
        next(iterator)
    assert (caught.value.mode, caught.value.length) == ("episode", 24)
    assert next(iterator).batch_size == (2, 3)


def test_no_broker_and_no_episodes_are_told_in_time() -> None:
    """C21, C35."""
    away = Client("tcp://127.0.0.1:9", connect_timeout=0.3)
    with pytest.raises(BrokerUnreachableError, match=r"127\.0\.0\.1:9"):
        take(OnlineDataset(away, 3, 2), 1)
    with (
        run_broker(OnlineDataEngineCfg(buffer_size=3, max_episode_steps=5)) as empty,
        RawWorker(empty.endpoint),
        pytest.raises(RequestTimeoutError, match="0 of 2 windows"),
    ):
        take(OnlineDataset(empty.endpoint, 3, 2, timeout=0.3), 1)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"source": 7}, "source"),
        ({"chunk_size": None}, "chunk_size"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": 2.5}, "chunk_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"transform": 3}, "transform"),
        ({"sampling_mode": "row"}, "sampling_mode"),
        ({"sampling_mode": "boundary", "chunk_size": 1}, "chunk_size"),
        ({"history_length": 2}, "chunk_size"),
        ({"history_length": 2, "chunk_size": None}, "prediction_horizon"),
        (
            {"history_length": 2, "prediction_horizon": 2, "chunk_size": None, "sampling_mode": "boundary"},
            "sampling_mode",
        ),
        ({"generations": (1,)}, "generations"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"rank": 1}, "world_size"),
        ({"world_size": 1}, "rank"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"length": 0}, "length"),
        ({"timeout": 0}, "timeout"),
        ({"data_path": "disk"}, "data_path"),
    ],
)
def test_bad_arguments_are_refused_by_name_before_anything_connects(options: dict[str, Any], argument: str) -> None:
    given = {"source": "tcp://127.0.0.1:9", "chunk_size": 4} | options
    with pytest.raises(ArgumentError) as caught:
        OnlineDataset(given.pop("source"), given.pop("chunk_size"), **given)
    assert caught.value.argument == argument


def test_bad_addresses_and_epochs_are_refused() -> None:
    with pytest.raises(EndpointError):
        OnlineDataset("sim-host:5555", 3)
    dataset = OnlineDataset("tcp://127.0.0.1:9", 3)
    with pytest.raises(ArgumentError, match="epoch"):
        dataset.set_epoch(-1)
    assert repr(dataset) == "OnlineDataset('tcp://127.0.0.1:9', chunk_size=3, batch_size=None)"


@pytest.mark.parametrize(("inside", "told"), [(True, 1), (False, 0)])
def test_big_blocks_are_kept_in_a_loader_s_own_process_and_never_in_the_user_s(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, inside: bool, told: int
) -> None:
    """Issue 4: it changes the allocator of a whole process, which only its owner may decide."""
    calls: list[bool] = []
    monkeypatch.setattr(dataset_module, "keep_big_blocks", lambda: calls.append(True))
    monkeypatch.setattr(dataset_module, "here", lambda: Place(0, 1, inside))
    with closing(iter(OnlineDataset(broker.endpoint, chunk_size=3, batch_size=2))) as batches:
        next(batches)
    assert len(calls) == told
