"""TransferQueue over its sockets: windows of 32 steps as samples, 64 of them drawn at random a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from benchmarks.peers.common import BATCH, CHUNK, SIZES, episode, rounds, run


def measure(workload: str, seconds: float, repeats: int) -> dict[str, Any]:
    episodes, steps = SIZES[workload]
    keys: list[str] = []
    for number in range(episodes):
        windows = {
            name: torch.from_numpy(value.reshape(steps // CHUNK, CHUNK, *value.shape[1:]))
            for name, value in episode(workload, number).items()
        }
        mine = [f"{workload}-{number}-{window}" for window in range(steps // CHUNK)]
        tq.kv_batch_put(keys=mine, partition_id=workload, fields=TensorDict(windows, batch_size=[steps // CHUNK]))
        keys += mine
    random = np.random.default_rng(1)

    def take() -> Any:
        chosen = [keys[place] for place in random.choice(len(keys), BATCH, replace=False)]
        return tq.kv_batch_get(keys=chosen, partition_id=workload)

    first = take()
    assert len(first["qpos"]) == BATCH  # a jagged tensor, and left so
    return rounds(take, seconds, repeats)


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)  # its three actors ask for a processor each
    tq.init()
    try:
        run("TransferQueue, over its sockets", ("transferqueue", "tensordict", "torch"), measure)
    finally:
        tq.close()
        ray.shutdown()
