"""What one window of a batch shows, held against the episode it should come from (B20–B28, B34)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ods_async.core.episode import Episode
from ods_async.core.requests import Sample
from ods_async.core.schema import Path
from ods_async.testing.simulation.clockwork import Violation

__all__ = ["MARK", "Shown"]

MARK: Path = ("obs", "mark")
"""The field whose every step holds its episode's fingerprint and its own number."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Steps ``first … last-1`` of episode ``mark``, from place ``offset`` of the window on; padding around them."""

    views: Mapping[Path, Any]
    number: int
    wanted: Sample
    label: str
    valid: NDArray[np.bool_]
    mark: int
    first: int
    last: int
    offset: int

    @classmethod
    def of(cls, views: Mapping[Path, Any], number: int, wanted: Sample, label: str) -> Shown:
        """Look at window ``number`` of a batch.

        Raises:
            Violation: the real steps have a gap, "now" is padding, or a chunk has padding.
        """
        valid = views["valid",][number]
        real = np.flatnonzero(valid)
        now = wanted.history - 1 if wanted.history else 0
        whole = len(real) == wanted.length or wanted.history > 0
        if not len(real) or not valid[now] or real[-1] - real[0] + 1 != len(real) or not whole:
            raise Violation("window", f"{label}: valid is {valid.tolist()}")
        mark, first = views[MARK][number, real[0]].tolist()
        return cls(views, number, wanted, label, valid, mark, first, first + len(real), int(real[0]))

    def check(self, episode: Episode) -> None:
        """Everything but the provenance.

        Raises:
            Violation: the window is not what was asked for.
        """
        marks = self.views[MARK][self.number]
        first, last = self.first, self.last
        if (
            first < 0
            or last > episode.length
            or not np.array_equal(marks[self.valid], episode.arrays[MARK][first:last])
        ):
            self._fail(f"not steps {first} to {last - 1} of episode {self.mark}: {marks.tolist()}")
        if marks[~self.valid].any():
            self._fail(f"padding is not zero: {marks.tolist()}")
        continuity = episode.arrays["continuity_id",].tolist()
        if len(set(continuity[first:last])) != 1 or continuity[first] < 0:
            self._fail(f"continuity {continuity[first:last]}")
        segments = _segments(episode)
        self._check_mode(episode, segments)
        if self.wanted.history:
            self._check_padding(continuity, segments)

    def check_provenance(self, episode_id: int) -> None:
        """B34: the episode's number on real steps, -1 on padding.

        Raises:
            Violation: it is not so.
        """
        stamped = self.views["ods_episode_id",][self.number]
        if (stamped[self.valid] != episode_id).any() or (stamped[~self.valid] != -1).any():
            self._fail(f"provenance {stamped.tolist()} for episode {episode_id}")

    def _fail(self, text: str) -> NoReturn:
        raise Violation("window", f"{self.label}: {text}")

    def _check_mode(self, episode: Episode, segments: list[int]) -> None:
        mode = self.wanted.mode
        if mode == "episode":
            return
        inside = set(segments[self.first : self.last])
        accepted = all(part >= 0 and episode.segments[part].accepted for part in inside)
        if not accepted or (len(inside) == 1) != (mode == "segment"):
            self._fail(f"mode {mode} in segments {inside} of {episode.segments}")

    def _check_padding(self, continuity: list[int], segments: list[int]) -> None:
        """Padding is never there for a step that could be shown (B26), and the masks say what is real (B27)."""
        first, last, wanted = self.first, self.last, self.wanted

        def goes_on(step: int) -> bool:
            if not 0 <= step < len(continuity) or continuity[step] != continuity[first]:
                return False
            return wanted.mode == "episode" or segments[step] == segments[first]

        if self.offset > 0 and goes_on(first - 1):
            self._fail(f"step {first - 1} is missing before {first}")
        if self.offset + (last - first) < wanted.length and goes_on(last):
            self._fail(f"step {last} is missing after {last - 1}")
        mask = self.views["loss_mask",][self.number]
        if mask[: wanted.history - 1].any() or (mask != self.valid)[wanted.history - 1 :].any():
            self._fail(f"loss_mask {mask.tolist()} with valid {self.valid.tolist()}")


def _segments(episode: Episode) -> list[int]:
    """The segment of each step, -1 outside."""
    found = [-1] * episode.length
    for number, part in enumerate(episode.segments):
        found[part.start : part.end] = [number] * (part.end - part.start)
    return found
