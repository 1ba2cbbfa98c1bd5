"""C36: what is marked as padding, and what stands there, at the ends of a short and a long episode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ods_async import Client, OnlineDataEngineCfg, OnlineDataset
from ods_async.client.dataset import stream_of
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.peers import RawWorker, marked_episode

LENGTHS = (5, 300)
HISTORY, HORIZON = 3, 5  # offsets -2 to +4


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    """Episode 0 has 5 steps, episode 1 has 300; mark = 1000 * (episode + 1) + step, never 0."""
    cfg = OnlineDataEngineCfg(
        buffer_size=2, max_episode_steps=300, refill_policy="manual", include_provenance=True, spare_rows=2
    )
    with run_broker(cfg) as running:
        with RawWorker(running.endpoint) as worker:
            for index, length in enumerate(LENGTHS):
                ticket = worker.next_ticket()
                assert ticket is not None
                worker.hand_in(ticket.ticket_id, marked_episode(index + 1, length))
            with Client(running.endpoint) as client:
                client.wait_ready()
        yield running


def check(batch: Any, history: int, mode: str = "episode") -> set[tuple[int, int]]:
    """Every step of every window against the rule; the anchors (episode, step) that there were."""
    n, length = batch.batch_size
    now = history - 1
    assert batch["valid"][:, now].all()
    anchor = batch["obs", "mark"][:, now]
    episode, step = anchor // 1000 - 1, anchor % 1000
    end = torch.tensor(LENGTHS)[episode]
    low, high = torch.zeros_like(end), end
    if mode == "segment":
        half = end // 2
        low, high = torch.where(step < half, 0, half), torch.where(step < half, half, end)
    steps = step[:, None] + torch.arange(-now, length - now)
    real = (steps >= low[:, None]) & (steps < high[:, None])
    assert torch.equal(batch["valid"], real)
    assert torch.equal(batch["loss_mask"], real & (torch.arange(length) >= now))
    assert torch.equal(batch["obs", "mark"], torch.where(real, 1000 * (episode[:, None] + 1) + steps, 0))
    assert torch.equal(batch["episode_step"], torch.where(real, steps, 0))
    assert torch.equal(
        batch["obs", "state"], torch.where(real, episode[:, None] + 1, 0)[..., None].expand(n, length, 3)
    )
    ids = batch["ods_episode_id"][:, now]
    assert torch.equal(batch["ods_episode_id"], torch.where(real, ids[:, None], -1))
    for name, values in batch.items(True, True):  # and no field that holds anything else there
        top = name[0] if isinstance(name, tuple) else name
        pad = -1 if top in ("task_index", "subtask_index") or top.startswith("ods_") else 0
        assert (values[~real] == pad).all(), name
    return set(zip(episode.tolist(), step.tolist(), strict=True))


@pytest.mark.parametrize("data_path", ["shared_memory", "frames"])
@pytest.mark.parametrize("mode", ["episode", "segment"])
def test_c36_masks_are_true_exactly_inside_around_the_first_a_middle_and_the_last_step(
    broker: RunningBroker, mode: str, data_path: str
) -> None:
    """C36: offsets -2 to +4, every field; what stands in padding is never a neighbour's."""
    with Client(broker.endpoint, data_path=data_path) as client:
        seen = set()
        for seed in range(3):
            batch = client.sample_batch_with_context(2000, HISTORY, HORIZON, sampling_mode=mode, seed=seed)
            seen |= check(batch, HISTORY, mode)
    assert {(0, step) for step in range(5)} <= seen
    assert {(1, step) for step in (0, 1, 149, 150, 298, 299)} <= seen


def test_c36_a_look_ahead_of_120_steps_beyond_an_episode_of_5(broker: RunningBroker) -> None:
    """C36: direct sampling and the dataset give the same, over both data paths."""
    shape: dict[str, Any] = {"history_length": 2, "prediction_horizon": 121}
    seed = int(stream_of(4, rank=0, worker=0, epoch=0).integers(2**63))
    found = []
    for data_path in ("shared_memory", "frames"):
        dataset = OnlineDataset(broker.endpoint, batch_size=64, seed=4, data_path=data_path, **shape)
        iterator = iter(dataset)
        found.append(next(iterator))
        iterator.close()
        with Client(broker.endpoint, data_path=data_path) as client:
            found.append(client.sample_batch_with_context(64, 2, 121, seed=seed))
    for batch in found:
        assert (batch == found[0]).all()
        assert {episode for episode, _ in check(batch, 2)} == {0, 1}


def test_c36_chunks_hold_no_padding_and_those_longer_than_the_short_episode_come_from_the_other(
    broker: RunningBroker,
) -> None:
    """C36: only one episode can be chosen then; its steps count from its own beginning."""
    with Client(broker.endpoint) as client:
        batch = client.sample_batch(500, 120)
        assert batch["valid"].all()
        assert torch.equal(batch["obs", "mark"], 2000 + batch["episode_step"])
        assert (batch["ods_episode_id"] == batch["ods_episode_id"][0, 0]).all()
        assert "loss_mask" not in batch.keys()  # noqa: SIM118 - a TensorDict iterates over its batch
