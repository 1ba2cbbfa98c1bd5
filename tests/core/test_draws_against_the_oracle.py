"""Draws through the whole broker state, on plain memory, against the oracle: thousands of random buffers.

A model keeps the episodes that should be retained and what is left of their budgets; the oracle says what may be drawn
from them; the broker must agree in what it draws, in what it refuses, and in every value of every step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ods_async.core.episode import Episode, Segment
from ods_async.core.requests import GetBudget, Refill, Release, Sample
from ods_async.errors import DataUnavailableError, OnlineDataBudgetExhaustedError
from ods_async.testing.in_memory import OWNER, InMemoryBroker, episode_of
from ods_async.testing.oracle import Oracle

IDS = ("ods_run_id", "ods_episode_id", "ods_generation", "ods_frame_index", "task_index", "subtask_index")


def random_episode(rng: np.random.Generator, steps: int, fingerprint: int) -> Episode:
    """Any length; gaps between segments, empty and unaccepted ones; jumps in time, and steps outside of all time."""
    length = int(rng.integers(1, steps + 1))
    cuts = np.sort(rng.integers(0, length + 1, 2 * int(rng.integers(0, 4)))).tolist()
    if rng.random() < 0.4 and len(cuts) >= 4:
        cuts[2] = cuts[1]  # two segments that touch, so that there is a boundary
    segments = tuple(
        Segment(f"s{number}", start, end, (None, "lift", "place")[int(rng.integers(3))], bool(rng.random() < 0.75))
        for number, (start, end) in enumerate(zip(cuts[::2], cuts[1::2], strict=True))
    )
    continuity = np.cumsum(rng.random(length) < 0.12)
    continuity[rng.random(length) < 0.06] = -1
    task = (None, "stack", "sort")[int(rng.integers(3))]
    return episode_of(length, float(fingerprint), segments=segments, instruction=task, continuity=continuity)


class Model:
    """What the buffer should hold, oldest first, and what is left of each episode's budget."""

    def __init__(self, broker: InMemoryBroker) -> None:
        self.settings = broker.settings
        self.episodes: list[tuple[int, int, Episode]] = []  # fingerprint, generation, episode
        self.left: dict[int, int] = {}
        self.delivered = 0

    def publish(self, fingerprint: int, generation: int, episode: Episode) -> None:
        self.episodes = [*self.episodes, (fingerprint, generation, episode)][-self.settings.buffer_size :]
        if self.settings.episode_sample_budget is not None:
            self.left[fingerprint] = self.settings.episode_sample_budget

    def oracle(self) -> Oracle:
        notes: list[list[list[int]]] = [[], [], [], [], []]
        for _, generation, episode in self.episodes:
            rest = self.settings.max_episode_steps - episode.length
            segment, accepted = [-1] * episode.length, [0] * episode.length
            for number, part in enumerate(episode.segments):
                for step in range(part.start, part.end):
                    segment[step], accepted[step] = number, int(part.accepted)
            continuity: Any = episode.arrays["continuity_id",]
            notes[0].append([1] * episode.length + [0] * rest)
            notes[1].append([*continuity.tolist(), *[-1] * rest])
            notes[2].append([*segment, *[-1] * rest])
            notes[3].append([*accepted, *[0] * rest])
            notes[4].append([generation] * (episode.length + rest))
        return Oracle(*notes)

    def row_of(self, fingerprint: float) -> int:
        return [f for f, _, _ in self.episodes].index(int(fingerprint))

    def can_supply(self, rows: set[int]) -> int | None:
        """Windows that these rows may still be delivered; None: no bound."""
        if self.settings.episode_sample_budget is None:
            return None
        return sum(self.left[self.episodes[row][0]] for row in rows)

    def check_step(self, fields: dict[Any, Any], at: tuple[int, int], row: int, step: int, oracle: Oracle) -> None:
        fingerprint, generation, episode = self.episodes[row]
        values = {path: array[at] for path, array in fields.items()}
        assert (values["obs", "qpos"] == fingerprint).all()
        assert (values["actions",] == step).all()
        assert values["terminated",] == (step == episode.length - 1)
        assert values["valid",]
        assert values["episode_step",] == step
        assert values["continuity_id",] == oracle.continuity_id[row][step]
        assert values["segment_id",] == oracle.segment_id[row][step]
        assert values["segment_accepted",] == oracle.segment_accepted[row][step]
        assert (values["ods_generation",], values["ods_frame_index",]) == (generation, step)
        assert values["ods_episode_id",] == fingerprint - 1

    def check_padding(self, fields: dict[Any, Any], at: tuple[int, int]) -> None:
        for path, array in fields.items():
            expected = -1 if path[-1] in IDS or path[-1].endswith("_ns") else 0
            assert (array[at] == expected).all(), path


class Trial:
    """One random buffer, drawn from in random ways."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        envs = int(rng.integers(1, 3))
        slots = int(rng.integers(envs, 5))
        budget = int(rng.integers(1, 7)) if rng.random() < 0.5 else None
        self.broker = InMemoryBroker(
            seed=seed,
            buffer_size=slots,
            num_envs=envs,
            spare_rows=2 * envs,
            max_episode_steps=int(rng.integers(1, 12)),
            refill_policy="manual",
            include_provenance=True,
            episode_sample_budget=budget,
            episode_sample_hard_limit=budget,
        )
        self.broker.connect()
        self.broker.join()
        self.model = Model(self.broker)
        self.made = 0
        self.work(1000)

    def work(self, rollouts: int) -> None:
        """Work off so many tickets."""
        while self.broker.tickets and rollouts:
            ticket = self.broker.start_ticket()
            episodes = []
            for _ in range(self.broker.settings.num_envs):
                self.made += 1
                episodes.append(random_episode(self.rng, self.broker.settings.max_episode_steps, self.made))
                self.model.publish(self.made, ticket.generation, episodes[-1])
            self.broker.hand_in(ticket, *episodes)
            rollouts -= 1

    def draw(self) -> None:
        """One request of any kind, held against the oracle."""
        rng, steps = self.rng, self.broker.settings.max_episode_steps
        size = int(rng.integers(1, 7))
        oracle = self.model.oracle()
        if rng.random() < 0.5:
            mode = ("episode", "segment", "boundary")[int(rng.integers(3))]
            length = int(rng.integers(1, steps + 1))
            if mode == "boundary" and length < 2:
                return
            self.held_against(Sample(size, length, mode), {row for row, _ in oracle.windows(length, mode)}, oracle)
            return
        mode = ("episode", "segment")[int(rng.integers(2))]
        history, horizon = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        newest = self.broker.state.production.requested
        chosen = tuple({int(g) for g in rng.integers(1, newest + 1, 2)}) if rng.random() < 0.4 else ()
        rows = {row for row, _ in oracle.anchors(mode, chosen)}
        sample = Sample(size, history + horizon - 1, mode, history, horizon, chosen)
        self.held_against(sample, rows, oracle)

    def held_against(self, sample: Sample, rows: set[int], oracle: Oracle) -> None:
        supply = self.model.can_supply(rows)
        if not rows:
            with pytest.raises(DataUnavailableError) as refused:
                self.broker.get(sample)
            assert type(refused.value) is DataUnavailableError
            return
        if supply is not None and supply < sample.batch_size:
            with pytest.raises(OnlineDataBudgetExhaustedError) as spent:
                self.broker.get(sample)
            assert (spent.value.requested, spent.value.remaining) == (sample.batch_size, supply)
            return
        (plan,) = self.broker.get(sample).plans
        fields = self.broker.gather(plan)
        now = max(0, sample.history - 1)
        drawn: Counter[int] = Counter()
        for window in range(sample.batch_size):
            row = self.model.row_of(fields["obs", "qpos"][window, now, 0])
            step = int(fields["actions",][window, now, 0])
            drawn[self.model.episodes[row][0]] += 1
            if not sample.history:
                assert oracle.is_eligible(row, step, sample.length, sample.mode)
                shown: list[int | None] = list(range(step, step + sample.length))
            else:
                assert (row, step) in oracle.anchors(sample.mode, sample.generations)
                shown = oracle.context(row, step, sample.history, sample.horizon, sample.mode, sample.generations)
                mask = [place is not None and index >= now for index, place in enumerate(shown)]
                assert fields["loss_mask",][window].tolist() == mask
            for index, place in enumerate(shown):
                if place is None:
                    self.model.check_padding(fields, (window, index))
                else:
                    self.model.check_step(fields, (window, index), row, place, oracle)
        lost = self.rng.random() < 0.25
        self.broker.ask(Release((), (plan.lease_id,)) if lost else Release((plan.lease_id,)))
        if not lost:
            self.model.delivered += sample.batch_size
            for fingerprint, count in drawn.items() if self.model.left else ():
                self.model.left[fingerprint] -= count

    def check_books(self) -> None:
        snapshot = self.broker.get(GetBudget())
        if not snapshot.enabled:
            return
        assert snapshot.total_delivered_chunks == self.model.delivered
        remaining = {row.episode_id + 1: row.remaining for row in snapshot.rows}
        assert remaining == {fingerprint: self.model.left[fingerprint] for fingerprint, _, _ in self.model.episodes}
        anchored = {row for row, _ in self.model.oracle().anchors("episode")}
        assert snapshot.unlocked_remaining_chunks == self.model.can_supply(anchored)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**63 - 1))
def test_draws_agree_with_the_oracle_on_any_buffer(seed: int) -> None:
    """B16, B18, B20 to B23, B25 to B30, B34 to B38: eligibility, values, padding, generations, refusals, budgets."""
    trial = Trial(seed)
    for _ in range(2):
        for _ in range(5):
            trial.draw()
        trial.check_books()
        trial.broker.get(Refill(OWNER))
        trial.work(int(trial.rng.integers(0, 4)))
    trial.draw()
    trial.check_books()
