"""Scripted Meta-World experts, for real."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ods_async.errors import ConfigError
from ods_async.worker.demonstration import execute_demo_episode
from ods_async.worker.environments import make_environment
from ods_async.worker.policies import resolve_policy

pytest.importorskip("metaworld")
pytestmark = pytest.mark.metaworld

NAMES = {
    "reach-v3": ["reach"],
    "push-v3": ["approach", "descend", "push"],
    "pick-place-v3": ["reach", "descend", "grasp", "place"],
}


@pytest.fixture(scope="module")
def env() -> Any:
    made = make_environment({"id": "Meta-World/MT1", "tasks": list(NAMES)}, 150)
    yield made
    made.close()


def test_each_task_succeeds_in_named_segments_with_instructions(env: Any) -> None:
    policy = resolve_policy("ods_async.worker.metaworld:expert")
    seen = set()
    several = False
    for index in range(6):
        result = execute_demo_episode(env, policy=policy, episode_index=index, seed=index)
        assert result.all_success, result.reasons
        (episode,) = result.episodes
        task = str(episode.metadata["task"])
        assert task == list(NAMES)[index % 3]
        # A phase that is over before it began (the hand starts above the puck, say) makes no segment.
        names = [s.name for s in episode.segments]
        assert names == [name for name in NAMES[task] if name in names]
        assert names[-1] == NAMES[task][-1]
        several |= len(names) > 1
        assert all(s.instruction and s.accepted and s.end > s.start for s in episode.segments)
        assert (episode.segments[0].start, episode.segments[-1].end) == (0, episode.length)
        assert episode.instruction
        observations = episode.arrays[("obs",)]
        assert (observations.dtype, observations.shape[1:]) == (np.float64, (39,))
        assert len(np.unique(observations[:, :3], axis=0)) > episode.length // 2
        assert np.abs(episode.arrays[("actions",)]).max() <= 1.0
        assert episode.length < 150
        seen.add(observations[0].tobytes())
    assert len(seen) == 6
    assert several


def test_the_same_seed_gives_the_same_episode_and_another_one_another(env: Any) -> None:
    policy = resolve_policy("ods_async.worker.metaworld:expert")

    def goal(seed: int) -> Any:
        return execute_demo_episode(env, policy=policy, seed=seed).episodes[0].arrays[("obs",)][0, -3:].tolist()

    assert goal(3) == goal(3)
    assert goal(3) != goal(4)


def test_one_task_is_made_by_metaworlds_own_id() -> None:
    made = make_environment({"id": "Meta-World/MT1", "kwargs": {"env_name": "reach-v3"}}, 150)
    policy = resolve_policy("ods_async.worker.metaworld:expert", {"settle": 1, "noise": 0.05})
    result = execute_demo_episode(made, policy=policy, seed=1)
    assert result.all_success
    assert result.instruction == "reach the goal"
    made.close()


def test_a_task_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="pick-place-v3"):
        make_environment({"id": "Meta-World/MT1", "tasks": ["fly-v3"]}, 150)
