"""What a schedule is about: settings, peers and how unkind the world is, all drawn from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ods_async.core.requests import Limits
from ods_async.core.settings import BrokerSettings

__all__ = ["Scenario"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One schedule's settings. Times in simulated seconds, the rest are probabilities or counts."""

    settings: BrokerSettings
    workers: int
    consumers: int
    subscribers: int
    tick: float
    delay: float
    loss: float
    repeat: float
    faults: int
    fault_seconds: float
    step_seconds: float
    attempt_fails: float
    bad_rollout: float
    crash: float
    write_fails: float
    new_instruction: float
    long_instruction: int
    broker_may_die: bool
    max_length_share: float
    wire: bool

    @property
    def tolerant(self) -> bool:
        """Whether the service has to survive its workers."""
        return self.settings.worker_failure == "tolerate"

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """The scenario of ``seed``."""
        rng = random.Random(f"scenario {seed}")
        num_envs = rng.choice((1, 1, 1, 2))
        buffer_size = rng.randint(max(2, num_envs), 4)
        workers = rng.choice((1, 2, 2, 3))
        tolerant = rng.random() < 0.85
        budget = rng.choice((None, rng.randint(2, 30)))
        rollouts = -(-buffer_size // num_envs)
        least_log = max(2 * buffer_size, 2 * rollouts * num_envs - buffer_size)
        policy = rng.choice(("sample_threshold", "sample_threshold", "manual", "continuous"))
        supervised = tuple(f"w{n}" for n in range(workers)) if rng.random() < 0.5 else ()
        settings = BrokerSettings(
            buffer_size=buffer_size,
            max_episode_steps=rng.randint(4, 8),
            num_envs=num_envs,
            spare_rows=num_envs + rng.randint(0, 2),
            refill_policy=policy,
            refill_threshold=rng.randint(2, 10),
            samples_per_insert=rng.choice((None, 2.0, 8.0)) if policy == "continuous" else None,
            max_generation_attempts=rng.randint(1, 3),
            language_buffer_bytes=rng.choice((1 << 20, 1 << 20, 1 << 20, 60)),
            include_provenance=rng.random() < 0.7,
            episode_sample_budget=budget,
            episode_sample_hard_limit=budget,
            lifecycle_event_capacity=rng.choice((0, least_log, 3 * least_log)),
            worker_failure="tolerate" if tolerant else "fail",
            max_worker_restarts=rng.choice((0, 2)),
            supervised=supervised,
            lease_seconds=rng.choice((0.3, 1.0)),
            ticket_start_timeout=0.5,
            ticket_finish_timeout=rng.choice((2.0, 6.0)),
            heartbeat_interval=0.4,
            heartbeat_timeout=1.2,
            event_history=rng.choice((6, 40, 8192)),
            limits=Limits(
                parked_per_session=2,
                sessions=rng.choice((4, 1024, 1024)),
                leases_per_session=rng.choice((3, 16)),
                plans_per_request=4,
                batch_windows=64,
            ),
        )
        harsh = rng.choice((0.0, 0.3, 1.0))
        return cls(
            settings=settings,
            workers=workers,
            consumers=rng.choice((1, 1, 2)),
            subscribers=rng.choice((0, 1)),
            tick=rng.choice((0.05, 0.1, 0.2, 0.2)),
            delay=rng.choice((0.0003, 0.005, 0.05)),
            loss=harsh * 0.08,
            repeat=harsh * 0.05,
            faults=rng.randint(0, 4),
            fault_seconds=rng.uniform(0.5, 2.5),
            step_seconds=rng.choice((0.02, 0.1)),
            attempt_fails=harsh * 0.15,
            bad_rollout=harsh * 0.06,
            crash=harsh * 0.05,
            write_fails=harsh * 0.03,
            new_instruction=rng.choice((0.0, 0.2)),
            long_instruction=rng.choice((4, 12)),
            broker_may_die=rng.random() < 0.35,
            max_length_share=rng.random(),
            wire=rng.random() < 0.1,
        )
