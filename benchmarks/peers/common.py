"""The same data for every peer: sixteen small fields, and an image in workload I."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH, CHUNK = 64, 32
INTS = ("continuity_id", "episode_step", "segment_id", "segment_step", "task_index", "subtask_index")
FLAGS = ("terminated", "truncated", "valid", "segment_start", "segment_end", "segment_accepted")
SIZES = {"S": (64, 256), "I": (32, 128)}  # episodes, steps of each


def episode(workload: str, number: int) -> dict[str, Any]:
    """One episode, ``[steps, ...]`` of every field."""
    steps = SIZES[workload][1]
    random = np.random.default_rng(number)
    fields: dict[str, Any] = {
        name: random.standard_normal((steps, 14)).astype(np.float32) for name in ("qpos", "qvel", "actions")
    }
    fields["rewards"] = np.zeros(steps, np.float32)
    fields |= {name: np.full(steps, number, np.int64) for name in INTS}
    fields |= {name: np.ones(steps, np.bool_) for name in FLAGS}
    if workload == "I":
        fields["image"] = random.integers(0, 256, (steps, 96, 96, 3), np.uint8)
    return fields


def rounds(take: Callable[[], Any], seconds: float, repeats: int) -> dict[str, Any]:
    """Rates of each round, and how long a take took; the batch before is kept meanwhile."""
    batch = take()
    rates, took = [], []
    for _ in range(repeats):
        count, begin = 0, time.perf_counter()
        now = begin
        while now - begin < seconds:
            batch = take()
            before, now = now, time.perf_counter()
            took.append(now - before)
            count += 1
        rates.append(count / (now - begin))
    del batch
    took.sort()
    return {
        "rate": statistics.median(rates),
        "rates": rates,
        "p50_us": took[len(took) // 2] * 1e6,
        "p99_us": took[min(len(took) - 1, int(0.99 * len(took)))] * 1e6,
    }


def run(name: str, packages: tuple[str, ...], measure: Callable[[str, float, int], dict[str, Any]]) -> None:
    """Measure S and I and print one line of JSON. Arguments: seconds of a round, rounds."""
    seconds, repeats = float(sys.argv[1]), int(sys.argv[2])
    result: dict[str, Any] = {"peer": name, "versions": {each: importlib.metadata.version(each) for each in packages}}
    for workload in ("S", "I"):
        try:
            result[workload] = measure(workload, seconds, repeats)
        except Exception as error:
            result[workload] = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(result), flush=True)
