"""What every window, context and count is held against."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import ods_async as ods
from ods_async.testing.conformance.environments import MODULE, VARIED_ID, Story, story_of
from ods_async.testing.conformance.ways import Way
from ods_async.testing.counting import expected_action, expected_state
from ods_async.testing.oracle import Oracle

__all__ = [
    "CAPACITY",
    "PROVENANCE",
    "SHORTEST",
    "check_contexts",
    "check_windows",
    "fields_of",
    "fingerprints_in",
    "is_about_uniform",
    "oracle_of",
    "story",
    "until",
    "varied",
]

SHORTEST, CAPACITY = 3, 13
PROVENANCE = (
    "ods_run_id",
    "ods_episode_id",
    "ods_generation",
    "ods_frame_index",
    "ods_accepted_at_ns",
    "ods_published_at_monotonic_ns",
)


def varied(**changes: Any) -> ods.OnlineDataEngineCfg:
    """Settings around the varied environment; ``env`` and ``num_envs`` go where they belong."""
    env = {"min_length": SHORTEST, "max_length": CAPACITY, **changes.pop("env", {})}
    gym = {"id": VARIED_ID, "imports": [MODULE], "kwargs": env, "num_envs": changes.pop("num_envs", 1)}
    values: dict[str, Any] = {
        "buffer_size": 4,
        "max_episode_steps": CAPACITY,
        "gym_config": gym,
        "refill_policy": "manual",
        "initialization_timeout": 90.0,
        "include_provenance": True,
        "seed": 11,
    }
    return ods.OnlineDataEngineCfg(**(values | changes))


def story(fingerprint: int) -> Story:
    """What the episode with that fingerprint tells."""
    return story_of(int(fingerprint), SHORTEST, CAPACITY)


def oracle_of(stories: Sequence[Story]) -> Oracle:
    """The buffer that holds these episodes, one a row."""
    valid, continuity, segment, accepted = [], [], [], []
    for tale in stories:
        rest = CAPACITY - tale.length
        valid.append([1] * tale.length + [0] * rest)
        continuity.append([*tale.continuity, *[-1] * rest])
        parts = [tale.part_of(step) for step in range(tale.length)]
        segment.append([*parts, *[-1] * rest])
        accepted.append([*(int(tale.parts[part].accepted) for part in parts), *[0] * rest])
    return Oracle(valid, continuity, segment, accepted)


def fields_of(batch: Any) -> dict[tuple[str, ...], Any]:
    """The batch's fields as arrays, by path."""
    found: dict[tuple[str, ...], Any] = {}
    for key in batch.keys(include_nested=True, leaves_only=True):
        path = key if isinstance(key, tuple) else (key,)
        found[path] = batch.get(key).numpy()
    return found


def check_windows(batch: Any, mode: str) -> None:
    """Every window is one eligible piece of one episode, and every field of every step is right."""
    fields = fields_of(batch)
    assert fields["valid",].all()
    for index, fingerprint in enumerate(fields["obs", "fingerprint"][:, 0].tolist()):
        tale = story(fingerprint)
        steps = fields["obs", "step"][index]
        start, length = int(steps[0]), len(steps)
        assert oracle_of([tale]).is_eligible(0, start, length, mode), (mode, start, length, tale)
        assert steps.tolist() == list(range(start, start + length))
        _check_steps({path: array[index] for path, array in fields.items()}, fingerprint, steps, tale)


def check_contexts(batch: Any, history: int, mode: str) -> None:
    """Every context shows what the oracle says, and nothing else: zeros, and -1 for ids, where nothing is (B26)."""
    fields = fields_of(batch)
    length = fields["valid",].shape[1]
    horizon = length - history + 1
    now = history - 1
    assert fields["valid",][:, now].all()
    for index in range(len(fields["valid",])):
        row = {path: array[index] for path, array in fields.items()}
        fingerprint, anchor = int(row["obs", "fingerprint"][now]), int(row["obs", "step"][now])
        tale = story(fingerprint)
        oracle = oracle_of([tale])
        assert (0, anchor) in oracle.anchors(mode)
        expected = oracle.context(0, anchor, history, horizon, mode)
        real = np.array([step is not None for step in expected])
        assert row["valid",].tolist() == real.tolist()
        assert row["loss_mask",].tolist() == (real & (np.arange(length) >= now)).tolist()
        steps = np.array([step for step in expected if step is not None])
        _check_steps({path: array[real] for path, array in row.items()}, fingerprint, steps, tale)
        for path, array in row.items():
            padding = array[~real]
            ids = path[-1] in (*PROVENANCE, "task_index", "subtask_index")
            assert (padding == (-1 if ids else 0)).all(), path


def _check_steps(row: Mapping[tuple[str, ...], Any], fingerprint: int, steps: Any, tale: Story) -> None:
    prints = np.full(len(steps), fingerprint)
    assert (row["obs", "fingerprint"] == prints).all()
    assert (row["obs", "step"] == steps).all()
    assert np.array_equal(row["obs", "state"], expected_state(prints, steps, row["obs", "state"].shape[-1]))
    assert np.array_equal(row["actions",], expected_action(prints, steps, row["actions",].shape[-1]))
    assert np.array_equal(row["rewards",], steps.astype(np.float32))
    told = [tale.annotations(int(step)) for step in steps]
    for name in told[0]:
        assert row[name,].tolist() == [annotation[name] for annotation in told], name


def fingerprints_in(way: Way) -> list[int]:
    """The episodes that the buffer holds, found by drawing until each was seen many times over."""
    batch = way.sample_batch(600, 1, seed=5)
    prints: list[int] = np.unique(batch["obs", "fingerprint"].numpy()).tolist()
    return prints


def is_about_uniform(counts: Sequence[int]) -> bool:
    """Whether these counts can be of equally likely things (a chance of about one in a million to err)."""
    expected = sum(counts) / len(counts)
    chi2 = sum((count - expected) ** 2 / expected for count in counts)
    k = max(1, len(counts) - 1)
    # Wilson and Hilferty: the cube root of chi2/k is about normal.
    limit: float = k * (1 - 2 / (9 * k) + 4.9 * math.sqrt(2 / (9 * k))) ** 3
    return chi2 <= limit


def until(condition: Callable[[], bool], within: float = 20.0) -> float:
    """Seconds until the condition held; fails when it does not in time."""
    before = time.monotonic()
    while not condition():
        assert time.monotonic() - before < within, "it did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - before
