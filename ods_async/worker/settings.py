"""``gym_config`` as a value: what kind of environment a worker makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ods_async.config.rules import RULES, bad

__all__ = ["EnvironmentSettings"]


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """``gym_config``, read and checked.

    Attributes:
        id: gymnasium id, ``"module:Name-v0"`` included.
        num_envs: rows of a rollout.
        kwargs: passed to the environment.
        max_episode_steps: rows' capacity, or None for the caller's.
        policy: ``"module:attribute"`` of a policy, or None where the environment makes its own plans.
        policy_kwargs: passed to the policy.
        tasks: several Meta-World tasks, taken in turn, one an episode.
        instruction: what every episode does, where neither policy nor environment says so.
        accept: ``"success"``: only episodes that report success; ``"any"``: every finished one; None: success where the
            environment reports it, every finished one elsewhere.
        vectorization: ``"loop"``, ``"sync"``, ``"async"`` or ``"vector_entry_point"``.
        imports: modules to import first (they register environments).
        next_obs: also record the observation after each action, below ``next_obs``; so the last one is kept too.
        allow_nonfinite: keep episodes that hold NaN or infinity.
    """

    id: str
    num_envs: int = 1
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    policy: str | None = None
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    instruction: str | None = None
    accept: str | None = None
    vectorization: str = "loop"
    imports: tuple[str, ...] = ()
    next_obs: bool = False
    allow_nonfinite: bool = False

    @classmethod
    def from_config(cls, gym_config: Mapping[str, Any]) -> EnvironmentSettings:
        """The settings in ``gym_config``.

        Raises:
            ConfigError: an unknown key, a missing id, or a value of the wrong kind, with the rule.
        """
        made = RULES["gym_config"]("gym_config", dict(gym_config))
        if "id" not in made:
            raise bad('gym_config["id"]', None, "must name a gymnasium environment")
        for key in ("tasks", "imports"):
            if key in made:
                made[key] = tuple(made[key])
        return cls(**made)
