"""What is stamped on every valid step of a published episode, where provenance is on (B34)."""

from __future__ import annotations

from typing import NamedTuple

from ods_async.core.stimuli import Instant

__all__ = ["EpisodeProvenance", "provenance_of"]


class EpisodeProvenance(NamedTuple):
    """One episode's stamps; the step's own number makes the sixth, ``ods_frame_index``.

    ``accepted_at_ns`` is Unix time, ``published_monotonic_ns`` the broker's monotonic clock; both in nanoseconds.
    """

    run_id: int
    episode_id: int
    generation: int
    accepted_at_ns: int
    published_monotonic_ns: int


def provenance_of(
    run_id: int, generation: int, first_episode_id: int, episodes: int, now: Instant
) -> tuple[EpisodeProvenance, ...]:
    """The stamps of a rollout's episodes, with ids from ``first_episode_id`` up; ``now`` is when it was accepted.

    A rollout is stamped while it is written, so its publication time is that instant, too, moments before readers
    see it.
    """
    return tuple(
        EpisodeProvenance(run_id, first_episode_id + i, generation, now.unix_ns, now.monotonic_ns)
        for i in range(episodes)
    )
