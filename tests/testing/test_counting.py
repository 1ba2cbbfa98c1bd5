"""The counting environment shows every fault that a window could have."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ods_async.testing import COUNTING_ID, CountingEnv, window_faults
from ods_async.testing.counting import expected_length, register
from ods_async.worker.demonstration import execute_demo_episode


def _episode(seed: int = 1, **kwargs: Any) -> Any:
    (episode,) = execute_demo_episode(CountingEnv(**kwargs), seed=seed).episodes
    return episode


def test_it_is_registered_once_by_importing_the_package() -> None:
    register()
    env = gym.make(COUNTING_ID, max_length=9)
    assert isinstance(env.unwrapped, CountingEnv)
    env.close()


def test_an_episode_is_whole_and_its_length_follows_from_the_fingerprint() -> None:
    episode = _episode(image_shape=(3, 5), width=4)
    assert window_faults(episode.arrays) == ""
    assert episode.length == expected_length(int(episode.arrays["obs", "fingerprint"][0]), 5, 40)
    assert [s.start for s in episode.segments[1:]] == [s.end for s in episode.segments[:-1]]
    assert episode.segments[-1].end == episode.length


def test_observations_share_one_array_on_purpose() -> None:
    env = CountingEnv()
    first, _ = env.reset(seed=1)
    second = env.step(next(iter(next(env.create_demo_segments()).actions)))[0]  # type: ignore[arg-type]
    assert first["state"] is second["state"]


@pytest.mark.parametrize(
    "path", [("obs", "fingerprint"), ("obs", "state"), ("actions",), ("rewards",), ("obs", "image")]
)
def test_a_value_of_another_episode_is_seen_in_every_field(path: tuple[str, ...]) -> None:
    one, other = _episode(1, min_length=12, image_shape=(2, 3)), _episode(2, min_length=12, image_shape=(2, 3))
    arrays = {key: value[:12].copy() for key, value in one.arrays.items()}
    assert window_faults(arrays) == ""
    arrays[path][7:] = other.arrays[path][6:11]
    assert window_faults(arrays) != ""


def test_a_step_that_is_missing_is_seen() -> None:
    arrays = {key: np.delete(value, 3, axis=0) for key, value in _episode().arrays.items()}
    assert "not consecutive" in window_faults(arrays)


def test_once_over_it_goes_along_with_any_action_as_rows_of_a_vector_must() -> None:
    env = CountingEnv(min_length=2, max_length=2)
    env.reset(seed=1)
    with pytest.raises(ValueError, match="planned was"):
        env.step(np.full(2, 0.3, np.float32))
    for segment in env.create_demo_segments():
        for action in segment.actions:  # type: ignore[union-attr]
            env.step(action)
    env.step(np.full(2, 0.3, np.float32))


@pytest.mark.parametrize(
    ("end", "flags"),
    [("plan", (False, False)), ("terminated", (True, False)), ("truncated", (False, True)), ("both", (True, True))],
)
def test_it_ends_as_it_was_told(end: str, flags: tuple[bool, bool]) -> None:
    arrays = _episode(end=end).arrays
    assert (bool(arrays[("terminated",)][-1]), bool(arrays[("truncated",)][-1])) == flags


def test_it_fails_only_as_often_as_told() -> None:
    env = CountingEnv(fail_phase="reset", fail_episode=1, fail_times=1)
    env.reset(seed=1)
    with pytest.raises(RuntimeError, match="told to fail in reset"):
        env.reset(seed=2)
    env.reset(seed=3)


def test_with_a_marker_only_the_first_process_fails(tmp_path: Any) -> None:
    marker = str(tmp_path / "failed")
    with pytest.raises(RuntimeError, match="told to fail in make"):
        CountingEnv(fail_phase="make", fail_marker=marker)
    CountingEnv(fail_phase="make", fail_marker=marker).close()


@pytest.mark.parametrize("kwargs", [{"min_length": 0}, {"min_length": 9, "max_length": 8}, {"end": "later"}])
def test_arguments_that_make_no_sense_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|no such choice"):
        CountingEnv(**kwargs)
