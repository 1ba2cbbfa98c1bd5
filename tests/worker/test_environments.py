"""gym_config becomes an environment, or a refusal before anything is simulated (B2, C29, C34)."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from ods_async.errors import ConfigError, SchemaMismatchError
from ods_async.testing import COUNTING_ID, window_faults
from ods_async.worker.demonstration import execute_demo_episode
from ods_async.worker.environments import LoopEnvironment, VectorEnvironment, make_environment
from ods_async.worker.policies import resolve_policy


class Odd(gym.Env[Any, Any]):
    """A text in its observation."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict({"mission": spaces.Text(9)})
        self.action_space = spaces.Discrete(3)
        self.closed = 0

    def reset(self, **_: Any) -> Any:
        raise AssertionError("nothing may be simulated")


class Bare(gym.Env[Any, Any]):
    """Discrete both ways: observations and actions are bare ints."""

    def __init__(self) -> None:
        self.observation_space = spaces.Discrete(5)
        self.action_space = spaces.Discrete(3)
        self.at = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return self.at, {}

    def step(self, action: Any) -> Any:
        self.at = (self.at + int(action)) % 5
        # C29: the keys of info change from step to step
        return self.at, 1, False, False, {f"key {self.at}": np.float32(self.at)}


@pytest.fixture(autouse=True)
def _registered() -> Any:
    gym.register("ods_tests/Odd-v0", entry_point=Odd)
    gym.register("ods_tests/Bare-v0", entry_point=Bare)
    yield
    del gym.registry["ods_tests/Odd-v0"]
    del gym.registry["ods_tests/Bare-v0"]


def test_the_counting_environment_is_found_by_its_id_alone() -> None:
    env = make_environment({"id": COUNTING_ID, "num_envs": 3, "kwargs": {"width": 7}}, 50)
    assert isinstance(env, LoopEnvironment)
    assert (env.num_envs, env.capacity, env.name) == (3, 50, COUNTING_ID)
    assert {f.path: f.shape for f in env.fields} == {
        ("obs", "fingerprint"): (),
        ("obs", "step"): (),
        ("obs", "state"): (7,),
        ("actions",): (2,),
    }
    env.close()


def test_b2_the_capacity_is_the_environments_own_limit() -> None:
    env = make_environment({"id": COUNTING_ID, "max_episode_steps": 8, "kwargs": {"endless": True}}, 50)
    result = execute_demo_episode(env, seed=1)
    assert (env.capacity, result.lengths) == (8, (8,))
    assert bool(result.episodes[0].arrays[("truncated",)][-1])
    env.close()


@pytest.mark.parametrize("vectorization", ["loop", "sync"])
def test_c29_bare_integers_round_trip_single_and_as_a_vector_of_two(vectorization: str) -> None:
    env = make_environment({"id": "ods_tests/Bare-v0", "num_envs": 2, "vectorization": vectorization}, 9)
    result = execute_demo_episode(env, policy=lambda view: [1, 2, 0, 1])
    for episode in result.episodes:
        assert episode.arrays[("obs",)].dtype == np.int64
        np.testing.assert_array_equal(episode.arrays[("obs",)], [0, 1, 3, 3])
        np.testing.assert_array_equal(episode.arrays[("actions",)], [1, 2, 0, 1])
    env.close()


@pytest.mark.parametrize("vectorization", ["loop", "sync", "async"])
def test_c29_a_space_that_cannot_be_recorded_is_refused_when_the_environment_is_made(vectorization: str) -> None:
    with pytest.raises(SchemaMismatchError, match="obs/mission: the space Text"):
        make_environment({"id": "ods_tests/Odd-v0", "num_envs": 2, "vectorization": vectorization}, 9)


ASYNC = {"id": COUNTING_ID, "num_envs": 2, "vectorization": "async"}


def test_an_async_vector_environment_runs_a_policy() -> None:
    env = make_environment(ASYNC, 30)
    assert isinstance(env, VectorEnvironment)
    with pytest.raises(ConfigError, match="neither create_demo_segments"):
        execute_demo_episode(env)
    result = execute_demo_episode(env, policy=_count, seed=3)
    assert result.lengths == (4, 4)
    assert [window_faults(episode.arrays) for episode in result.episodes] == ["", ""]
    env.close()


@pytest.mark.parametrize(
    ("kind", "phase", "said"),
    [
        ("error", "step", r"ods_async.testing.counting.CountingError: told to fail in step \(step 2 of episode 0\)"),
        ("error", "reset", r"ods_async.testing.counting.CountingError: told to fail in reset"),
        ("exit", "step", r"a row's process ended during a step or reset; exit codes by row: .*3"),
    ],
)
def test_c34_the_cause_is_kept_in_an_async_vector_environment(kind: str, phase: str, said: str) -> None:
    kwargs = {"fail_phase": phase, "fail_kind": kind, "fail_step": 2}
    env = make_environment({**ASYNC, "kwargs": kwargs}, 30)
    with pytest.raises(RuntimeError, match=said) as caught:
        execute_demo_episode(env, policy=_count, seed=3)
    if kind == "error":
        assert any("counting.py" in note for note in caught.value.__notes__)
    env.close()
    env.close()


def test_c34_an_async_row_that_cannot_be_made_is_an_error_here() -> None:
    with pytest.raises(RuntimeError, match="told to fail in make"):
        make_environment({**ASYNC, "kwargs": {"fail_phase": "make"}}, 30)


def _count(view: Any) -> Any:
    from ods_async.testing.counting import expected_action

    for step in range(4):
        yield expected_action(int(view.observation["fingerprint"]), step, 2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"id": COUNTING_ID, "num_env": 2}, "num_env"),
        ({"num_envs": 2}, "id"),
        ({"id": COUNTING_ID, "num_envs": True}, "num_envs"),
        ({"id": COUNTING_ID, "imports": ["no_such_module_here"]}, "no_such_module_here"),
    ],
)
def test_bad_settings_are_refused_with_the_key(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_environment(config, 9)


def test_a_keyword_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="action_config"):
        make_environment({"id": COUNTING_ID, "kwargs": {"width": 3}}, 9, {"width": 4})


def test_c34_what_the_constructor_raises_comes_out_and_the_rows_made_before_are_closed() -> None:
    with pytest.raises(RuntimeError, match="told to fail in make"):
        make_environment({"id": COUNTING_ID, "kwargs": {"fail_phase": "make"}}, 9)


def test_close_tries_every_row_and_raises_the_first_error() -> None:
    closed: list[int] = []

    class Row(Bare):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def close(self) -> None:
            closed.append(self.index)
            if self.index < 2:
                raise OSError(f"row {self.index}")

    with pytest.raises(OSError, match="row 0"):
        LoopEnvironment([Row(0), Row(1), Row(2)], 9).close()
    assert closed == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("os", "module:attribute"),
        (":path", "module:attribute"),
        ("no_such_module_here:x", "no_such_module_here"),
        ("os:nothing", "nothing"),
        ("os:name", "cannot be called"),
    ],
)
def test_policies_that_cannot_be_found_are_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_policy(name)


def test_policies_get_their_arguments() -> None:
    assert resolve_policy("os.path:join", {})("a", "b") == "a/b"
    assert resolve_policy("builtins:dict", {"settle": 3})() == {"settle": 3}
