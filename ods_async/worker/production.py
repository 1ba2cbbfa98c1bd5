"""What a worker does: make the environment, carry out a demonstration per ticket, hand in whole rollouts (B15, B19)."""

from __future__ import annotations

import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.episode import Rollout, recorded_schema
from ods_async.core.reports import AttemptFailed, Ticket, TicketStarted
from ods_async.core.requests import Welcome
from ods_async.worker.actions import check_recording
from ods_async.worker.demonstration import DemoEpisodeResult, execute_demo_episode
from ods_async.worker.desk import LinkSettings
from ods_async.worker.environments import DemoEnvironment, make_environment
from ods_async.worker.link import Link
from ods_async.worker.plans import Policy, check_plan_source
from ods_async.worker.policies import resolve_policy
from ods_async.worker.trace import Trace

__all__ = ["Production"]


class Production:
    """One worker's simulation, driven by tickets until it is told to end.

    Args:
        cfg: the settings; only what concerns environment, policy and attempts is used.
        identity: the worker's id and restarts: for reports, and so that no two workers make the same episodes.
        link: where tickets come from and rollouts go.
        trace: kept up to date.
        policy: instead of the configured one.
        max_rollouts: end after so many, or None.

    Attributes:
        made: rollouts handed in.
        capacity: the longest episode, in steps: the configuration's or the broker's, whichever is shorter.
    """

    def __init__(
        self,
        cfg: OnlineDataEngineCfg,
        identity: LinkSettings,
        link: Link,
        trace: Trace,
        policy: Policy | None = None,
        max_rollouts: int | None = None,
    ) -> None:
        self._cfg = cfg
        self._worker_id = identity.worker_id
        self._restarts = identity.restarts
        self._given: Counter[tuple[int, int]] = Counter()
        self._link = link
        self._trace = trace
        self._policy = policy
        self._max_rollouts = max_rollouts
        self.capacity = cfg.steps
        self._entropy = secrets.randbits(64) if cfg.seed is None else cfg.seed
        self.made = 0

    def make(self, welcome: Welcome) -> DemoEnvironment:
        """The environment, checked in every way that does not need a step; the broker is told what it records.

        Raises:
            ConfigError, SchemaMismatchError: settings and environment disagree.
            Exception: whatever the environment's constructor raises.
        """
        cfg = self._cfg
        self._trace.phase = "make"
        cfg.require_environment()
        if self._policy is None and cfg.gym_config.get("policy") is not None:
            self._policy = resolve_policy(cfg.gym_config["policy"], cfg.gym_config.get("policy_kwargs"))
        told = welcome.settings.get("max_episode_steps")
        if isinstance(told, int) and told >= 1:
            self.capacity = min(cfg.steps, told)
        config = dict(cfg.gym_config)
        if config.get("max_episode_steps") is not None:
            config["max_episode_steps"] = self.capacity
        environment = make_environment(config, self.capacity, cfg.action_config)
        try:
            check_plan_source(environment, self._policy)
            check_recording(
                environment,
                action_semantics=cfg.action_semantics,
                action_contracts=cfg.action_contracts,
                action_dim=cfg.action_dim,
                state_dim=cfg.state_dim,
            )
        except BaseException:
            environment.close()
            raise
        schema = recorded_schema(environment.fields)
        self._link.ready(schema, environment.num_envs, environment.name)
        self._trace.phase = "idle"
        return environment

    def run(self, environment: DemoEnvironment) -> None:
        """Make rollouts until the link says that it is enough.

        Raises:
            RuntimeError: a rollout was not made in ``max_generation_attempts``, with the last reason.
            Exception: whatever environment or plan raise.
        """
        while self._max_rollouts is None or self.made < self._max_rollouts:
            ticket = self._link.take_ticket()
            if ticket is None:
                return
            self._link.desk.ticket_id = ticket.ticket_id
            self._link.report(TicketStarted(self._worker_id, ticket.ticket_id))
            rollout = self._rollout(environment, ticket)
            if rollout is None:
                return
            self._link.hand_in(rollout)
            self._link.desk.ticket_id = None
            self.made += 1

    def _rollout(self, environment: DemoEnvironment, ticket: Ticket) -> Rollout | None:
        """The ticket's rollout; None when interrupted."""
        if self._given and next(iter(self._given))[0] != ticket.generation:
            self._given.clear()
        self._given[ticket.generation, ticket.rollout] += 1
        began, attempts = time.monotonic(), self._cfg.max_generation_attempts
        reason = ""
        for attempt in range(1, attempts + 1):
            result = self._attempt(environment, ticket, attempt)
            if not result.completed and result.terminal_reason == "interrupted":
                return None
            if result.all_success:
                return Rollout(
                    ticket_id=ticket.ticket_id,
                    worker_id=self._worker_id,
                    episodes=result.episodes,
                    attempts=attempt,
                    production_seconds=time.monotonic() - began,
                )
            reason = result.terminal_reason
            self._link.report(
                AttemptFailed(self._worker_id, ticket.ticket_id, attempt, environment.num_envs, reason[:1000])
            )
        self._trace.phase = "step"
        raise RuntimeError(
            f"rollout {ticket.rollout} of generation {ticket.generation} was not made in {attempts} "
            f"attempt{'s' if attempts > 1 else ''}; the last one ended with: {reason}"
        )

    def _attempt(self, environment: DemoEnvironment, ticket: Ticket, attempt: int) -> DemoEpisodeResult:
        should_stop: Callable[[], bool] = lambda: self._link.stop_reason is not None  # noqa: E731
        # The same in every run of the same seed, and different in every other respect: a unit that comes back (its
        # rollout was refused, its worker restarted) is made anew, and so is that of a broker that was started anew.
        unit = (ticket.generation, ticket.rollout)
        seed = [self._entropy, zlib.crc32(self._worker_id.encode()), self._restarts, *unit, self._given[unit], attempt]
        if self._cfg.seed is None:
            seed.append(ticket.run_id)
        return execute_demo_episode(
            environment,
            policy=self._policy,
            episode_index=ticket.rollout,
            attempt_id=attempt - 1,
            seed=seed,
            should_stop=should_stop,
            trace=self._trace,
        )
