"""Carries out plans, step by step in all rows, records them, and judges the outcome after every step (B48)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from ods_async.core.episode import Episode, Segment
from ods_async.worker.environments import DemoEnvironment, as_demo_environment
from ods_async.worker.plans import (
    END,
    DemoSegment,
    DemoView,
    Plan,
    Policy,
    Progress,
    check_plan_source,
    plans_for,
)
from ods_async.worker.recorder import Moment
from ods_async.worker.trace import Trace

__all__ = ["DemoEpisodeResult", "DemoSegment", "DemoView", "Trace", "check_plan_source", "execute_demo_episode"]

_SUCCESS: Final = ("success", "is_success")
_FAILURE: Final = ("failure", "is_failure")


@dataclass(frozen=True, slots=True)
class DemoEpisodeResult:
    """What became of one execution.

    Attributes:
        completed: every row came to an end (False: interrupted).
        all_success: every row's episode is accepted.
        terminal_reason: ``success``, ``interrupted``, or the first reason why a row was not accepted.
        reasons: per row: success, ended (plan used up), terminated, truncated, failure, empty, or nonfinite: which.
        lengths: steps per row.
        episodes: the recorded episodes, one a row; empty unless all rows completed with at least one step.
        instruction: of the first row.
    """

    completed: bool
    all_success: bool
    terminal_reason: str
    reasons: tuple[str, ...]
    lengths: tuple[int, ...]
    episodes: tuple[Episode, ...] = ()
    instruction: str | None = None

    @property
    def length(self) -> int:
        """Steps of the longest row."""
        return max(self.lengths, default=0)

    @property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """Segments per row."""
        return tuple(episode.segments for episode in self.episodes)


def execute_demo_episode(
    env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | DemoEnvironment,
    *,
    policy: Policy | None = None,
    episode_index: int = 0,
    attempt_id: int = 0,
    seed: int | Sequence[int] | None = None,
    capacity: int = 300,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    trace: Trace | None = None,
) -> DemoEpisodeResult:
    """Reset ``env``, carry out its plan, record every step, and judge the outcome after every step.

    A row ends when its plan is used up, when the environment terminates or truncates, when ``info["failure"]`` is
    true, or at ``capacity`` (then its last step is marked truncated). Its episode is accepted when the last
    ``info["success"]`` was true; where success is never reported, when it ended without a failure. A row that fails
    ends the execution, since the rollout cannot be accepted any more.

    Args:
        env: a gymnasium environment, a vector environment, or one from ``make_environment``.
        policy: called with a :class:`DemoView` per row; returns segments or bare actions. None: the environment plans.
        episode_index: number of this rollout.
        attempt_id: tries before this one.
        seed: one seed, from which each row gets its own. None: fresh randomness.
        capacity: the longest episode, unless ``env`` knows its own.
        should_stop: asked before every step; True ends the execution between two steps.
        progress: wraps the actions of each segment of the first row, as ``tqdm(actions, desc=...)`` does.
        trace: kept up to date.

    Raises:
        Exception: whatever the environment or the plan raises.
        SchemaMismatchError: an observation or action that does not fit its space.
    """
    environment = as_demo_environment(env, capacity)
    check_plan_source(environment, policy)
    run = _Execution(environment, policy, (episode_index, attempt_id), seed, progress, trace or Trace())
    return run.carry_out(should_stop)


@dataclass(slots=True)
class _Row:
    """One row while it runs."""

    view: DemoView
    plan: Plan
    success: bool | None = None
    reason: str = ""
    segments: tuple[Segment, ...] = ()
    length: int = 0


class _Execution:
    def __init__(
        self,
        environment: DemoEnvironment,
        policy: Policy | None,
        identity: tuple[int, int],
        seed: int | Sequence[int] | None,
        progress: Progress | None,
        trace: Trace,
    ) -> None:
        self._environment = environment
        self._trace = trace
        self._accept = environment.settings.accept
        self._recorder = environment.recorder
        count = environment.num_envs
        seeds = np.random.SeedSequence(seed).generate_state(2 * count, np.uint32) >> 1
        trace.phase, trace.step = "reset", None
        moments = environment.reset([int(s) for s in seeds[:count]], identity[0])
        trace.phase, trace.step = "plan", 0
        views = [
            DemoView(
                observation=moment.observation,
                info=moment.info,
                row=index,
                env=environment.row(index),
                episode_index=identity[0],
                attempt_id=identity[1],
                capacity=environment.capacity,
                rng=np.random.default_rng(int(seeds[count + index])),
                instruction=environment.settings.instruction or _instruction_of(environment.row(index)),
            )
            for index, moment in enumerate(moments)
        ]
        plans = plans_for(environment, policy, views, progress)
        self._rows = [_Row(view, plan) for view, plan in zip(views, plans, strict=True)]

    def carry_out(self, should_stop: Callable[[], bool]) -> DemoEpisodeResult:
        trace, rows = self._trace, self._rows
        for step in itertools.count():
            if should_stop():
                return self._result(interrupted=True)
            trace.step = step
            actions = [self._choose(index, row, step) for index, row in enumerate(rows)]
            if all(action is None for action in actions) or self._hopeless():
                break
            trace.phase = "step"
            # The environment may write into what it is given; what is recorded was copied before.
            moments = self._environment.step(actions)
            trace.steps += sum(moment is not None for moment in moments)
            for index, (row, moment) in enumerate(zip(rows, moments, strict=True)):
                if moment is not None:
                    self._judge(index, row, moment, step)
            if self._hopeless():
                break
        trace.phase, trace.step = "idle", None
        return self._result(interrupted=False)

    def _choose(self, index: int, row: _Row, step: int) -> Any:
        """The row's next action, recorded together with what was seen before it; None when the row has ended."""
        if row.reason:
            return None
        self._trace.phase = "plan"
        action = row.plan.next_action(row.view.row, step)
        if action is END:
            self._finish(row, step, "ended" if step else "empty")
            return None
        told = self._environment.actions.command(action)
        self._trace.phase = "step" if step else "reset"  # whose observation may be refused now
        self._recorder.before(index, step, row.view.observation, told, row.view.info)
        return told

    def _judge(self, index: int, row: _Row, moment: Moment, step: int) -> None:
        length = step + 1
        at_capacity = length >= self._environment.capacity and not moment.terminated
        truncated = moment.truncated or at_capacity
        self._recorder.after(index, step, moment, truncated)
        view = row.view
        view.observation, view.info, view.step = moment.observation, moment.info, length
        success = _flag(moment.info, _SUCCESS)
        row.success = row.success if success is None else success
        if _flag(moment.info, _FAILURE):
            row.success = False
            self._finish(row, length, "failure")
        elif moment.terminated or truncated:
            self._finish(row, length, "terminated" if moment.terminated else "truncated")

    def _finish(self, row: _Row, length: int, reason: str) -> None:
        row.length = length
        settings = self._environment.settings
        if reason == "empty":
            row.success = False
        elif not settings.allow_nonfinite and (spoiled := self._recorder.nonfinite(row.view.row, length)):
            reason, row.success = f"nonfinite: {spoiled}", False
        elif self._accept == "any":
            row.success = True
        elif row.success is None:
            row.success = self._accept is None
        row.segments = row.plan.finish(row.view.row, length, bool(row.success))
        row.reason = "success" if row.success and reason in ("ended", "terminated") else reason

    def _hopeless(self) -> bool:
        return any(row.reason and not row.success for row in self._rows)

    def _result(self, *, interrupted: bool) -> DemoEpisodeResult:
        rows = self._rows
        reasons = tuple(row.reason or "interrupted" for row in rows)
        lengths = tuple(row.length if row.reason else row.view.step for row in rows)
        completed = not interrupted and all(row.reason for row in rows)
        accepted = completed and all(row.success for row in rows)
        failed = [row.reason for row in rows if row.reason and not row.success]
        reason = "interrupted" if interrupted else (failed[0] if failed else "success")
        episodes: tuple[Episode, ...] = ()
        if completed and all(lengths):
            episodes = tuple(
                Episode(
                    length=row.length,
                    arrays=self._recorder.taken(index, row.length),
                    segments=row.segments,
                    instruction=row.view.instruction,
                    metadata={"outcome": row.reason, **row.view.metadata},
                )
                for index, row in enumerate(rows)
            )
        return DemoEpisodeResult(completed, accepted, reason, reasons, lengths, episodes, rows[0].view.instruction)


def _instruction_of(env: gym.Env[Any, Any] | None) -> str | None:
    if env is None or not env.has_wrapper_attr("instruction"):
        return None
    found = env.get_wrapper_attr("instruction")
    return found if isinstance(found, str) else None


def _flag(info: Mapping[str, Any], names: Iterable[str]) -> bool | None:
    """What the environment says, or None when it says nothing."""
    for name in names:
        if name in info and info[name] is not None:
            return bool(np.all(info[name]))
    return None
