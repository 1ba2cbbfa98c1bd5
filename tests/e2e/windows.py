"""What must hold of every batch from counting environments, all windows at once: nothing torn, stale or crossed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ods_async.testing.counting import expected_action, expected_image, expected_state

IDS = ("task_index", "subtask_index")


@dataclass(frozen=True)
class Facts:
    """The settings of the environment behind the batches; three segments an episode."""

    min_length: int
    max_length: int
    segments: int = 3


def faults(batch: Any, facts: Facts, *, mode: str = "episode", history: int = 0, since: int = 0) -> list[str]:
    """What is wrong with a batch; an empty list when all of its windows are whole.

    Args:
        batch: the TensorDict ``[n, length]``.
        facts: how long its episodes can be.
        mode: the sampling mode it was drawn in.
        history: of a context; 0 for chunks.
        since: the newest generation that was complete before the batch was asked for (needs provenance).
    """
    found = []

    def require(what: str, good: Any) -> None:
        good = np.asarray(good)
        if not good.all():
            found.append(f"{mode} (history {history}): {what} in {int((~good).sum())} places")

    n, length = batch.batch_size
    get = {path if isinstance(path, tuple) else (path,): t.numpy() for path, t in batch.items(True, True)}
    real = get["valid",]
    now = history - 1 if history else 0
    prints, steps = get["obs", "fingerprint"], get["obs", "step"]
    own = np.broadcast_to(prints[:, now : now + 1], (n, length))
    count = steps[:, now : now + 1] - now + np.arange(length)
    require("'now' is a real step", real[:, now])
    if not history:
        require("every step of a chunk is real", real)
    require("one fingerprint", (prints == own) | ~real)
    require("consecutive steps", (steps == count) | ~real)
    episode = facts.min_length + own[:, :1] % (facts.max_length - facts.min_length + 1)
    bounds = np.linspace(0, episode[:, 0], facts.segments + 1).astype(int)
    part = (count[..., None] >= bounds[1:-1].T[:, None, :]).sum(-1)
    inside = (count >= 0) & (count < episode)
    if mode == "segment":
        inside &= part == part[:, now : now + 1]
    require("real steps are exactly those of the episode, no stale tail", real == inside)
    expected: dict[tuple[str, ...], NDArray[Any]] = {
        ("obs", "state"): expected_state(own, count, get["obs", "state"].shape[-1]),
        ("actions",): expected_action(own, count, get["actions",].shape[-1]),
        ("rewards",): count.astype(np.float32),
        ("episode_step",): count,
        ("segment_id",): part,
        ("segment_accepted",): np.ones_like(real),
    }
    if ("obs", "image") in get:
        image = get["obs", "image"]
        expected["obs", "image"] = expected_image(own, count).reshape(n, length, *[1] * (image.ndim - 2))
    for path, values in expected.items():
        shown = get[path]
        where = real.reshape(n, length, *[1] * (shown.ndim - 2))
        require(f"{'/'.join(path)} of the step itself", (shown == values) | ~where)
    if history:
        require("loss_mask from 'now' on", get["loss_mask",] == (real & (np.arange(length) >= now)))
        for path, shown in get.items():
            pad = -1 if path[0] in IDS or path[0].startswith("ods_") else 0
            where = real.reshape(n, length, *[1] * (shown.ndim - 2))
            require(f"padding of {'/'.join(path)} is {pad}", (shown == pad) | where)
    if mode == "segment":
        require("one segment", (get["segment_id",] == get["segment_id",][:, now : now + 1]) | ~real)
    if mode == "boundary":
        require("a boundary between segments", get["segment_id",].min(1) < get["segment_id",].max(1))
    if ("ods_episode_id",) in get:
        ids, made = get["ods_episode_id",], get["ods_generation",]
        require("one episode id", (ids == ids[:, now : now + 1]) | ~real)
        require("one generation", (made == made[:, now : now + 1]) | ~real)
        require(f"nothing older than generation {since}, which was complete", (made >= since) | ~real)
        require("ods_frame_index counts", (get["ods_frame_index",] == count) | ~real)
    return found


def identities(batch: Any, history: int = 0) -> list[tuple[int, int]]:
    """Per window ``(episode id, fingerprint)``: each id must keep its fingerprint for ever, and the other way round."""
    now = history - 1 if history else 0
    ids, prints = batch["ods_episode_id"][:, now], batch["obs", "fingerprint"][:, now]
    return list(zip(ids.tolist(), prints.tolist(), strict=True))
