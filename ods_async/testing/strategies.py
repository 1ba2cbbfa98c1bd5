"""Hypothesis strategies for buffers: annotations as they can and as they hardly can occur. Needs ``hypothesis``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ods_async.core.episode import Episode, Segment
from ods_async.testing.oracle import Oracle

__all__ = ["Annotations", "annotated_buffers", "episodes"]


@dataclass(frozen=True)
class Annotations:
    """Annotations of a buffer as arrays ``[rows, steps]``; ``generation`` is ``[rows]``, -1 where nothing is valid."""

    valid: NDArray[np.bool_]
    continuity_id: NDArray[np.int64]
    segment_id: NDArray[np.int64]
    segment_accepted: NDArray[np.bool_]
    generation: NDArray[np.int64]

    def oracle(self) -> Oracle:
        """The same as plain lists, for the slow answers."""
        steps = self.valid.shape[1]
        return Oracle(
            self.valid.tolist(),
            self.continuity_id.tolist(),
            self.segment_id.tolist(),
            self.segment_accepted.tolist(),
            [[generation] * steps for generation in self.generation.tolist()],
        )


@st.composite
def annotated_buffers(draw: st.DrawFn, max_rows: int = 5, max_steps: int = 17) -> Annotations:
    """Rows put together from stretches of equal annotations, so that runs of all kinds meet in all ways."""
    rows = draw(st.integers(1, max_rows))
    steps = draw(st.integers(1, max_steps))
    valid = np.zeros((rows, steps), np.bool_)
    continuity = np.full((rows, steps), -1, np.int64)
    segment = np.full((rows, steps), -1, np.int64)
    accepted = np.zeros((rows, steps), np.bool_)
    for row in range(rows):
        at = 0
        while at < steps:
            end = min(steps, at + draw(st.integers(1, 6)))
            # mostly ordinary values: real, continuous, accepted
            valid[row, at:end] = draw(st.integers(0, 7)) > 0
            continuity[row, at:end] = draw(st.sampled_from((0, 0, 0, 1, 7, -1)))
            segment[row, at:end] = draw(st.sampled_from((0, 1, 2, 2, -1)))
            accepted[row, at:end] = draw(st.integers(0, 4)) > 0
            at = end
    generation = np.array(draw(st.lists(st.integers(1, 3), min_size=rows, max_size=rows)), np.int64)
    return Annotations(valid, continuity, segment, accepted, generation)


@st.composite
def episodes(draw: st.DrawFn, max_length: int = 13) -> Episode:
    """Episodes with the recorded fields, ``obs/pose`` float32 ``[3]`` and ``actions`` float32 ``[2]``."""
    length = draw(st.integers(1, max_length))
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    segments = tuple(
        Segment(f"part {number}", start, end, draw(st.sampled_from((None, "lift", ""))), draw(st.booleans()))
        for number, (start, end) in enumerate(spans)
    )
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    jumps = np.array(draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)), np.int64)
    arrays: dict[tuple[str, ...], NDArray[Any]] = {
        ("obs", "pose"): rng.standard_normal((length, 3)).astype(np.float32),
        ("actions",): rng.standard_normal((length, 2)).astype(np.float32),
        ("rewards",): rng.standard_normal(length).astype(np.float32),
        ("terminated",): np.arange(length) == length - 1,
        ("truncated",): np.zeros(length, np.bool_),
        ("continuity_id",): np.cumsum(jumps == 9),
    }
    return Episode(length, arrays, segments, draw(st.sampled_from((None, "stack the cups"))))
