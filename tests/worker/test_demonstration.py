"""The demonstration protocol (B48, B42, C13, C25, C37)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ods_async.core.episode import recorded_schema
from ods_async.errors import ConfigError, SchemaMismatchError
from ods_async.testing.counting import CountingEnv, window_faults
from ods_async.worker.demonstration import Trace, execute_demo_episode
from ods_async.worker.environments import EnvironmentSettings, LoopEnvironment, VectorEnvironment
from ods_async.worker.plans import DemoSegment, DemoView


class Line(gym.Env[Any, Any]):
    """A point on a line. The observation is one array that is reused; the script says how a step ends."""

    def __init__(self, script: dict[int, dict[str, Any]] | None = None, fresh: bool = False) -> None:
        self.fresh = fresh
        self.observation_space = spaces.Box(-100, 100, (3,), np.float32)
        self.action_space = spaces.Box(-9, 9, (2,), np.float32)
        self.script = script or {}
        self.shown = np.zeros(3, np.float32)
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.shown[:] = 0
        self.count = 0
        return self.shown, {}

    def step(self, action: Any) -> Any:
        self.shown[:2] += action
        self.shown[2] += 1
        said = self.script.get(self.count, {})
        self.count += 1
        info = said.get("info", {})
        shown = self.shown.copy() if self.fresh else self.shown
        return shown, said.get("reward", 0.5), said.get("term", False), said.get("trunc", False), info


def steps(count: int, value: float = 1.0) -> list[Any]:
    return [np.full(2, value, np.float32)] * count


def run(script: dict[int, dict[str, Any]] | None = None, actions: int = 5, **kwargs: Any) -> Any:
    settings = EnvironmentSettings("line", **kwargs.pop("settings", {}))
    env = LoopEnvironment([Line(script)], kwargs.pop("capacity", 11), "line", settings)
    return execute_demo_episode(env, policy=lambda view: steps(actions), **kwargs)


def flags(result: Any) -> tuple[bool, bool]:
    arrays = result.episodes[0].arrays
    assert not arrays[("terminated",)][:-1].any()
    assert not arrays[("truncated",)][:-1].any()
    return bool(arrays[("terminated",)][-1]), bool(arrays[("truncated",)][-1])


def test_observations_are_copied_although_the_environment_reuses_its_array() -> None:
    (episode,) = run().episodes
    np.testing.assert_array_equal(episode.arrays[("obs",)][:, 2], [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(episode.arrays[("actions",)], np.ones((5, 2)))
    assert episode.arrays[("rewards",)].dtype == np.float32


def test_a_later_episode_does_not_touch_an_earlier_one() -> None:
    env = LoopEnvironment([Line()], 11)
    first = execute_demo_episode(env, policy=lambda view: steps(5))
    kept = first.episodes[0].arrays[("obs",)].copy()
    execute_demo_episode(env, policy=lambda view: steps(7, 2.0))
    np.testing.assert_array_equal(first.episodes[0].arrays[("obs",)], kept)


def test_what_is_recorded_is_what_was_told_even_if_the_environment_writes_into_it() -> None:
    result = execute_demo_episode(CountingEnv(min_length=4, max_length=4), seed=2)
    assert window_faults(result.episodes[0].arrays) == ""


def test_the_episode_fits_the_schema_of_its_environment() -> None:
    env = LoopEnvironment([Line()], 11)
    (episode,) = execute_demo_episode(env, policy=lambda view: steps(3)).episodes
    episode.check(recorded_schema(env.fields), 11)
    np.testing.assert_array_equal(episode.arrays[("continuity_id",)], 0)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"term": True}, (True, False)),
        ({"trunc": True}, (False, True)),
        ({"term": True, "trunc": True}, (True, True)),
        ({}, (False, True)),
    ],
    ids=["goal", "time limit", "both", "own capacity"],
)
def test_c13_terminated_and_truncated_are_kept_apart(said: dict[str, Any], expected: tuple[bool, bool]) -> None:
    result = run({3: said}, actions=9, capacity=4, settings={"next_obs": True})
    assert result.lengths == (4,)
    assert flags(result) == expected
    # C13: the observation after the last action is kept as well.
    np.testing.assert_array_equal(result.episodes[0].arrays[("next_obs",)][-1], [4, 4, 4])


def test_c25_an_episode_of_exactly_the_capacity_is_whole_and_a_longer_one_is_truncated() -> None:
    assert flags(run({9: {"term": True}}, actions=99, capacity=10)) == (True, False)
    longer = run({10: {"term": True}}, actions=99, capacity=10)
    assert (longer.lengths, flags(longer)) == ((10,), (False, True))


def test_c25_a_plan_without_actions_is_no_episode() -> None:
    result = run(actions=0)
    assert (result.completed, result.all_success, result.reasons, result.episodes) == (True, False, ("empty",), ())


def test_b48_success_is_the_last_that_was_reported() -> None:
    said = {1: {"info": {"success": True}}}
    assert run({**said, 4: {"info": {"success": False}}}).all_success is False
    assert run(said).all_success is True
    assert run({0: {"info": {"success": False}}}).all_success is False
    assert run().all_success is True


def test_b48_truncation_without_the_reported_success_is_a_failed_try() -> None:
    script = {2: {"trunc": True, "info": {"success": False}}}
    result = run(script)
    assert (result.completed, result.all_success, result.terminal_reason) == (True, False, "truncated")
    assert run(script, settings={"accept": "any"}).all_success is True
    assert run(settings={"accept": "success"}).all_success is False


def test_b48_a_reported_failure_ends_the_episode_at_once() -> None:
    result = run({2: {"info": {"failure": True}}})
    assert (result.lengths, result.terminal_reason, result.all_success) == ((3,), "failure", False)


def test_b48_should_stop_is_asked_before_every_step_and_interrupts_between_two() -> None:
    asked = []
    env = Line()

    def stop() -> bool:
        asked.append(env.count)
        return len(asked) == 4

    result = execute_demo_episode(env, policy=lambda view: steps(9), should_stop=stop)
    assert asked == [0, 1, 2, 3]
    assert (result.completed, result.terminal_reason, result.lengths, result.episodes) == (
        False,
        "interrupted",
        (3,),
        (),
    )


def test_b48_each_segment_is_planned_from_the_state_the_one_before_reached() -> None:
    seen = []

    def policy(view: DemoView) -> Iterator[DemoSegment]:
        for index, length in enumerate((2, 3)):
            seen.append(("segment", index, view.step, float(view.observation[2])))

            def plan(index: int = index, length: int = length) -> list[Any]:
                seen.append(("actions", index, view.step, float(view.observation[2])))
                return steps(length)

            yield DemoSegment(plan, f"part {index}", instruction=f"do {index}", target="cup")

    result = execute_demo_episode(Line(), policy=policy)
    assert seen == [("segment", 0, 0, 0.0), ("actions", 0, 0, 0.0), ("segment", 1, 2, 2.0), ("actions", 1, 2, 2.0)]
    assert [(s.name, s.start, s.end, s.instruction, s.target) for s in result.segments[0]] == [
        ("part 0", 0, 2, "do 0", "cup"),
        ("part 1", 2, 5, "do 1", "cup"),
    ]


def test_b48_actions_of_a_segment_are_asked_for_one_by_one() -> None:
    def act(view: DemoView) -> Iterator[Any]:
        while view.observation[2] < 4:
            yield np.full(2, view.observation[2], np.float32)

    (episode,) = execute_demo_episode(Line(), policy=lambda view: [DemoSegment(act, "go")]).episodes
    np.testing.assert_array_equal(episode.arrays[("actions",)][:, 0], [0, 1, 2, 3])


def test_b48_a_validator_that_rejects_marks_its_segment_only() -> None:
    states = []

    def check(view: DemoView) -> bool:
        states.append(float(view.observation[2]))
        return view.observation[2] != 3

    plan = [
        DemoSegment(steps(1), "one", validator=check),
        DemoSegment(steps(2), "two", validator=check),
        DemoSegment(steps(1), "three", validator=lambda: True),
    ]
    result = execute_demo_episode(Line(), policy=lambda view: plan)
    assert states == [1.0, 3.0]
    assert [s.accepted for s in result.segments[0]] == [True, False, True]
    assert result.all_success is True


def test_a_segment_cut_short_by_the_end_of_the_episode_ends_there() -> None:
    plan = [DemoSegment(steps(2), "one"), DemoSegment([], "empty"), DemoSegment(steps(9), "two")]
    env = Line({3: {"term": True, "info": {"success": True}}})
    result = execute_demo_episode(env, policy=lambda view: plan)
    assert [(s.name, s.start, s.end, s.accepted) for s in result.segments[0]] == [
        ("one", 0, 2, True),
        ("empty", 2, 2, True),
        ("two", 2, 4, True),
    ]


def test_b48_environments_may_offer_segments_or_a_list_of_actions() -> None:
    class Listed(Line):
        instruction = "walk"

        def create_demo_action_list(self) -> list[Any]:
            return steps(3)

    result = execute_demo_episode(gym.wrappers.TimeLimit(Listed(), 9))
    assert [(s.name, s.start, s.end) for s in result.segments[0]] == [("demonstration", 0, 3)]
    assert result.instruction == "walk"


def test_b48_an_environment_nobody_can_plan_for_is_refused_before_it_is_reset() -> None:
    env = Line()
    env.count = 77
    with pytest.raises(ConfigError, match=r"neither create_demo_segments\(\) nor create_demo_action_list\(\)"):
        execute_demo_episode(env)
    assert env.count == 77


def test_b48_progress_is_shown_per_segment() -> None:
    shown = []

    def progress(actions: Any, description: str) -> Any:
        for action in actions:
            shown.append(description)
            yield action

    plan = [DemoSegment(steps(2), "reach"), DemoSegment(steps(1), "grasp")]
    execute_demo_episode(Line(), policy=lambda view: plan, progress=progress)
    assert shown == ["reach", "reach", "grasp"]


def test_b48_rows_finish_independently_and_the_rollout_needs_all_of_them() -> None:
    lines = [Line({1: {"term": True}}), Line(), Line({3: {"trunc": True}})]
    result = execute_demo_episode(LoopEnvironment(lines, 11), policy=lambda view: steps(6))
    assert result.lengths == (2, 6, 4)
    assert [line.count for line in lines] == [2, 6, 4]
    assert result.all_success is True
    bad = LoopEnvironment([Line(), Line({1: {"info": {"failure": True}}})], 11)
    failed = execute_demo_episode(bad, policy=lambda view: steps(6))
    assert (failed.all_success, failed.terminal_reason) == (False, "failure")


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_phantom_steps_of_automatic_resets_are_never_stored(mode: AutoresetMode) -> None:
    """B48: whatever the vector environment does with a finished row, its episode ends where it ended."""
    ends = (2, 6, 4)
    # Fresh arrays: with SAME_STEP gymnasium itself keeps the last observation by reference.
    made = [lambda end=end: Line({end - 1: {"term": True}}, fresh=True) for end in ends]
    vector = SyncVectorEnv(made, autoreset_mode=mode)
    env = VectorEnvironment(vector, 11, settings=EnvironmentSettings("line", next_obs=True))
    result = execute_demo_episode(env, policy=lambda view: steps(9))
    assert result.lengths == ends
    for episode, end in zip(result.episodes, ends, strict=True):
        np.testing.assert_array_equal(episode.arrays[("obs",)][:, 2], np.arange(end))
        assert episode.arrays[("next_obs",)][-1, 2] == end
        assert episode.arrays[("terminated",)].tolist() == [False] * (end - 1) + [True]
    env.close()


def test_b42_one_plan_for_all_rows_gives_spans_per_row() -> None:
    class Batch(SyncVectorEnv):
        def create_demo_segments(self) -> Iterator[DemoSegment]:
            yield DemoSegment([np.full((2, 2), k, np.float32) for k in range(2)], "one", "first")
            yield DemoSegment(
                [np.stack([np.full(2, k, np.float32), np.full(2, -k, np.float32)]) for k in range(3)],
                "two",
                validator=lambda: np.array([True, False]),
            )

    vector = Batch([lambda: Line({2: {"term": True}}), Line], autoreset_mode=AutoresetMode.DISABLED)
    result = execute_demo_episode(vector)
    assert result.lengths == (3, 5)
    assert [[(s.start, s.end, s.accepted) for s in row] for row in result.segments] == [
        [(0, 2, True), (2, 3, True)],
        [(0, 2, True), (2, 5, False)],
    ]
    np.testing.assert_array_equal(result.episodes[1].arrays[("actions",)][:, 0], [0, 1, 0, -1, -2])


def test_c37_an_episode_with_nan_or_infinity_is_a_failed_try_that_says_where() -> None:
    result = run({2: {"reward": float("inf")}})
    assert (result.all_success, result.terminal_reason) == (False, "nonfinite: rewards at step 2")
    assert run({2: {"reward": 1e300}}).all_success is False
    assert run({2: {"reward": float("nan")}}, settings={"allow_nonfinite": True}).all_success is True
    spoiled = execute_demo_episode(CountingEnv(min_length=9, fail_phase="step", fail_kind="nan", fail_step=4), seed=1)
    assert spoiled.terminal_reason == "nonfinite: obs/state at step 5"


def test_c11_an_observation_of_another_shape_is_refused_naming_the_field() -> None:
    env = CountingEnv(min_length=9, fail_phase="step", fail_kind="shape", fail_step=4)
    with pytest.raises(SchemaMismatchError, match=r"obs/state: expected float32 \[6\].*found float32 \[7\]"):
        execute_demo_episode(env, seed=1)


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="rewards: expected one number a step"):
        run({0: {"reward": np.zeros(1)}})


def test_seeds_make_episodes_repeatable_and_rows_different() -> None:
    def prints(seed: int) -> list[int]:
        env = LoopEnvironment([CountingEnv(), CountingEnv()], 50)
        result = execute_demo_episode(env, seed=seed)
        return [int(e.arrays["obs", "fingerprint"][0]) for e in result.episodes]

    assert prints(5) == prints(5)
    assert len({*prints(5), *prints(6)}) == 4


def test_the_trace_tells_phase_and_step_of_an_error() -> None:
    for phase, step in (("reset", None), ("plan", 0), ("step", 7)):
        trace = Trace()
        with pytest.raises(RuntimeError, match=f"told to fail in {phase}"):
            execute_demo_episode(CountingEnv(min_length=9, fail_phase=phase, fail_step=7), trace=trace, seed=1)
        assert (trace.phase, trace.step) == (phase, step)


def test_continuity_follows_the_environments_word() -> None:
    result = run({1: {"info": {"continuity_id": 4}}})
    np.testing.assert_array_equal(result.episodes[0].arrays[("continuity_id",)], [0, 0, 4, 0, 0])


def test_plans_that_mix_segments_and_actions_are_refused() -> None:
    with pytest.raises(TypeError, match="segments or actions, not both"):
        execute_demo_episode(Line(), policy=lambda view: [DemoSegment(steps(1), "one"), *steps(1)])


def test_a_plan_that_is_nothing_is_refused_in_words_that_say_what_is_wanted() -> None:
    env = Line()
    env.create_demo_action_list = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="segments or of actions; it gave None"):
        execute_demo_episode(env, seed=3)
