"""Plans: named segments of actions, asked for one at a time, so that each may be planned from the state reached (B48).

Where a plan comes from, first that applies: the configured policy; the environment's ``create_demo_segments()``; its
``create_demo_action_list()``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from ods_async.core.episode import Segment
from ods_async.errors import ConfigError
from ods_async.worker.environments import DemoEnvironment

__all__ = ["END", "DemoSegment", "DemoView", "Plan", "Policy", "Progress", "check_plan_source", "plans_for"]

Policy = Callable[["DemoView"], Iterable[Any]]
Progress = Callable[[Iterable[Any], str], Iterable[Any]]

END: Final = object()  # instead of an action: the plan is used up


@dataclass(frozen=True, slots=True)
class DemoSegment:
    """A named part of a plan.

    Attributes:
        actions: the actions in order, or a callable that returns them; it is called when the segment begins, with the
            :class:`DemoView` if it takes an argument.
        name: what people call this part.
        instruction: what is done in it, in words for a policy that reads; None or empty: the episode's instruction.
        target: which object or place it is about, free text.
        validator: asked when the segment has ended (with the view if it takes an argument); a false answer marks its
            steps as not accepted, which keeps them out of ``segment`` and ``boundary`` samples.
    """

    actions: Iterable[Any] | Callable[..., Iterable[Any]]
    name: str
    instruction: str | None = None
    target: str | None = None
    validator: Callable[..., Any] | None = None


@dataclass(slots=True, eq=False)
class DemoView:
    """What a plan can see of its row, always the latest.

    Attributes:
        observation: as the environment returned it; it may be reused by the environment at the next step.
        info: the info that came with it.
        step: steps carried out so far.
        row: index of the row.
        env: the row's gymnasium environment, the vector environment for a plan over all rows, or None when the
            environment lives in another process.
        episode_index: number of this rollout.
        attempt_id: tries before this one.
        capacity: the longest episode, in steps.
        rng: random numbers of this row and attempt.
        instruction: what the episode does; a plan may set it. None or empty: nothing is known (``unknown_task``).
        metadata: small facts to keep with the episode; a plan may add to it.
    """

    observation: Any
    info: Mapping[str, Any]
    row: int
    env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | None
    episode_index: int
    attempt_id: int
    capacity: int
    rng: np.random.Generator
    instruction: str | None = None
    step: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)


def check_plan_source(environment: DemoEnvironment, policy: Policy | None) -> None:
    """Refuse an environment nobody can plan for, before anything is simulated.

    Raises:
        ConfigError: neither a policy nor one of the methods of the protocol.
    """
    if policy is None and _offered(environment) is None:
        raise ConfigError(
            f"{environment.name} offers neither create_demo_segments() nor create_demo_action_list(), and gym_config "
            'names no "policy"; name one as "module:attribute"',
            argument='gym_config["policy"]',
            value="None",
            rule="a policy for environments that make no plans of their own",
        )


class Plan:
    """Walks through the segments of a plan and remembers where each began and ended.

    With ``rows``, the plan is for all rows at once: actions and verdicts have a leading axis of rows, and every row is
    given its part of the same action.
    """

    def __init__(
        self, source: Callable[[], Iterable[Any]], view: Any, rows: int | None, progress: Progress | None
    ) -> None:
        self._segments = _as_segments(source)
        self._view = view
        self._rows = rows
        self._progress = progress
        self._current: tuple[DemoSegment, int] | None = None
        self._actions: Iterator[Any] = iter(())
        self._done: list[tuple[DemoSegment, int, int, Any]] = []
        self._step = -1
        self._action: Any = None

    def next_action(self, row: int, step: int) -> Any:
        """The row's action for ``step``, or ``END``. Steps are asked for in order, each after the one before it."""
        if self._rows is None:
            return self._advance(step)
        if step != self._step:
            self._step, self._action = step, self._advance(step)
        return self._action if self._action is END else _part(self._action, row)

    def _advance(self, step: int) -> Any:
        while True:
            if self._current is None:
                segment = next(self._segments, None)
                if segment is None:
                    return END
                self._current = segment, step
                actions: Any = _ask(segment.actions, self._view) if callable(segment.actions) else segment.actions
                if self._progress is not None:
                    actions = self._progress(actions, segment.name)
                self._actions = iter(actions)
            action = next(self._actions, END)
            if action is not END:
                return action
            segment, start = self._current
            self._current = None
            verdict = True if segment.validator is None else _ask(segment.validator, self._view)
            self._done.append((segment, start, step, verdict))

    def finish(self, row: int, length: int, success: bool) -> tuple[Segment, ...]:
        """The row's segments; one that was cut short without a validator counts as the episode does."""
        found = list(self._done)
        if self._current is not None and self._current[1] < length:
            segment, start = self._current
            verdict = success if segment.validator is None else _ask(segment.validator, self._view)
            found.append((segment, start, length, verdict))
        return tuple(
            Segment(
                name=segment.name,
                start=min(start, length),
                end=min(end, length),
                instruction=segment.instruction,
                accepted=_verdict(verdict, row if self._rows is not None else None),
                target=segment.target,
            )
            for segment, start, end, verdict in found
        )


def _as_segments(source: Callable[[], Iterable[Any]]) -> Iterator[DemoSegment]:
    """The plan's segments, one at a time; a plan of bare actions is one segment."""
    made = source()
    try:
        items = iter([made] if isinstance(made, DemoSegment) else made)
    except TypeError as error:
        raise TypeError(
            f"an expert must give a DemoSegment, or an iterable of segments or of actions; it gave {made!r:.80}"
        ) from error
    for first in items:
        if not isinstance(first, DemoSegment):
            yield DemoSegment(itertools.chain([first], items), "demonstration")
            return
        yield first
        for segment in items:
            if not isinstance(segment, DemoSegment):
                raise TypeError(f"a plan holds segments or actions, not both; found {type(segment).__name__}")
            yield segment


def plans_for(
    environment: DemoEnvironment, policy: Policy | None, views: list[DemoView], progress: Progress | None
) -> list[Plan]:
    """A plan for every row (one and the same where the vector environment plans for all of them)."""
    shown = [progress] + [None] * (len(views) - 1)
    if policy is not None:
        return [
            Plan(lambda view=view: policy(view), view, None, wrap)  # type: ignore[misc]
            for view, wrap in zip(views, shown, strict=True)
        ]
    offered = _offered(environment)
    assert offered is not None
    if offered == "rows":
        return [Plan(_method(view.env), view, None, wrap) for view, wrap in zip(views, shown, strict=True)]
    # One plan for all rows: it sees the first row's view, with the vector environment in it.
    views[0].env = environment.whole
    plan = Plan(_method(environment.whole), views[0], len(views), progress)
    return [plan] * len(views)


def _offered(environment: DemoEnvironment) -> str | None:
    if all(_find(environment.row(index)) is not None for index in range(environment.num_envs)):
        return "rows"
    return "whole" if _find(environment.whole) is not None else None


def _find(env: Any) -> Callable[[], Any] | None:
    if env is None:
        return None
    for name in ("create_demo_segments", "create_demo_action_list"):
        if isinstance(env, gym.Env):
            if env.has_wrapper_attr(name):
                return env.get_wrapper_attr(name)  # type: ignore[no-any-return]
        elif callable(getattr(env.unwrapped, name, None)):
            return getattr(env.unwrapped, name)  # type: ignore[no-any-return]
    return None


def _method(env: Any) -> Callable[[], Any]:
    method = _find(env)
    assert method is not None
    return method


def _ask(function: Callable[..., Any], view: DemoView) -> Any:
    """Call with the view if the function takes an argument, else without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return function()
    wants = any(
        (p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty) or p.kind is p.VAR_POSITIONAL
        for p in parameters
    )
    return function(view) if wants else function()


def _part(action: Any, row: int) -> Any:
    if isinstance(action, Mapping):
        return {key: _part(value, row) for key, value in action.items()}
    if isinstance(action, tuple):
        return tuple(_part(value, row) for value in action)
    return action[row]


def _verdict(verdict: Any, row: int | None) -> bool:
    values = np.asarray(verdict)
    if row is not None and values.ndim:
        return bool(values[row])
    return bool(values.all())
