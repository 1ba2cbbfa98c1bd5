"""Reverb over its socket: a server process, uniform draws of 32-step items, 64 of them a batch."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import reverb
import tensorflow as tf

from benchmarks.peers.common import BATCH, CHUNK, SIZES, episode, rounds, run

SERVER = """
import reverb, sys
server = reverb.Server([reverb.Table("t", reverb.selectors.Uniform(), reverb.selectors.Fifo(), max_size=10**6,
                                     rate_limiter=reverb.rate_limiters.MinSize(1))])
print(server.port, flush=True)
sys.stdin.read()
"""


def measure(workload: str, seconds: float, repeats: int) -> dict[str, Any]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        address = f"localhost:{int(server.stdout.readline())}"
        episodes, steps = SIZES[workload]
        for number in range(episodes):
            fields = episode(workload, number)
            with reverb.Client(address).trajectory_writer(num_keep_alive_refs=CHUNK) as writer:
                for step in range(steps):
                    writer.append({name: value[step] for name, value in fields.items()})
                    if step >= CHUNK - 1 and (step + 1) % 8 == 0:
                        writer.create_item("t", 1.0, {name: column[-CHUNK:] for name, column in writer.history.items()})
                writer.flush()
        first_fields = episode(workload, 0)
        dataset = reverb.TrajectoryDataset(
            address,
            "t",
            dtypes={name: tf.as_dtype(value.dtype) for name, value in first_fields.items()},
            shapes={name: tf.TensorShape([CHUNK, *value.shape[1:]]) for name, value in first_fields.items()},
            max_in_flight_samples_per_worker=2 * BATCH,
            num_workers_per_iterator=1,
        )
        batches = iter(dataset.batch(BATCH).prefetch(2))
        first = next(batches).data
        assert first["qpos"].shape == (BATCH, CHUNK, 14), first["qpos"].shape
        tasks = first["task_index"].numpy()
        assert bool(np.all(tasks == tasks[:, :1]))
        return rounds(
            lambda: tf.nest.map_structure(lambda tensor: tensor.numpy(), next(batches).data), seconds, repeats
        )
    finally:
        server.stdin.close()
        server.wait(20)


if __name__ == "__main__":
    run("Reverb, over its socket", ("dm-reverb", "tensorflow-cpu", "numpy"), measure)
