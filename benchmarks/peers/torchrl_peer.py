"""TorchRL in the trainer's own process: a replay buffer over a TensorDict, slices of trajectories drawn from it."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SliceSampler

from benchmarks.peers.common import BATCH, CHUNK, SIZES, episode, rounds, run


def measure(workload: str, seconds: float, repeats: int) -> dict[str, Any]:
    episodes, steps = SIZES[workload]
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(episodes * steps),
        sampler=SliceSampler(slice_len=CHUNK, traj_key="trajectory", cache_values=True),
        batch_size=BATCH * CHUNK,
    )
    for number in range(episodes):
        fields = {name: torch.from_numpy(value) for name, value in episode(workload, number).items()}
        fields["trajectory"] = torch.full((steps,), number)
        buffer.extend(TensorDict(fields, batch_size=[steps]))
    batch = buffer.sample().reshape(BATCH, CHUNK)
    assert bool((batch["trajectory"] == batch["trajectory"][:, :1]).all())
    return rounds(lambda: buffer.sample().reshape(BATCH, CHUNK), seconds, repeats)


if __name__ == "__main__":
    run("TorchRL SliceSampler, in process", ("torchrl", "tensordict", "torch"), measure)
