"""Row uniform, then start uniform (B22, B29): through the real client, with episodes of very different lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ods_async import Client, OnlineDataEngine, OnlineDataEngineCfg
from ods_async.testing.counting import expected_length

LOW, HIGH = 3, 240
Draws = list[tuple[int, int]]


@pytest.fixture(scope="module")
def engine(_nothing_left_by_the_run: None) -> Iterator[OnlineDataEngine]:
    """Sixteen episodes of 3 to 240 steps; seeded, as the draws are: the counts below are the same in every run."""
    cfg = OnlineDataEngineCfg(
        buffer_size=16,
        max_episode_steps=HIGH,
        gym_config={"id": "ods_async/Counting-v0", "kwargs": {"min_length": LOW, "max_length": HIGH}},
        refill_policy="manual",
        seed=20,
        initialization_timeout=90.0,
        extra_endpoints=("tcp://127.0.0.1:0",),
    )
    with OnlineDataEngine(cfg) as running:
        yield running


def lengths(engine: OnlineDataEngine) -> dict[int, int]:
    """Fingerprint -> length, of all episodes there are (drawn by a client that is closed when the test ends)."""
    with Client(engine.endpoint) as client:
        prints = np.unique(client.sample_batch(4000, 1, seed=1)["obs", "fingerprint"].numpy())
    return {int(found): expected_length(int(found), LOW, HIGH) for found in prints}


def is_uniform(counts: Counter[int], choices: int) -> bool:
    """Whether the counts fit equal chances for ``choices`` outcomes: chi square within five standard deviations."""
    assert len(counts) <= choices
    assert set(counts) <= set(range(choices))
    expected = counts.total() / choices
    square = sum((counts[choice] - expected) ** 2 for choice in range(choices)) / expected
    freedom = choices - 1
    # Wilson and Hilferty: the cube root of chi square is nearly normal.
    cube, spread = 1 - 2 / (9 * freedom), (2 / (9 * freedom)) ** 0.5
    return bool(((square / freedom) ** (1 / 3) - cube) / spread < 5)


def test_the_measure_tells_uniform_from_nearly_uniform() -> None:
    rng = np.random.default_rng(1)
    assert is_uniform(Counter(rng.integers(0, 8, 20_000).tolist()), 8)
    assert not is_uniform(Counter(rng.choice(8, 20_000, p=[0.145, *[0.1225] * 5, 0.1225, 0.12]).tolist()), 8)


def check(draws: Draws, starts: dict[int, int]) -> None:
    """``draws``: (fingerprint, start) each; ``starts``: fingerprint -> how many starts there are."""
    rows = sorted(starts)
    assert is_uniform(Counter(rows.index(fingerprint) for fingerprint, _ in draws), len(rows)), "rows are favoured"
    for fingerprint, choices in starts.items():
        counts = Counter(start for found, start in draws if found == fingerprint)
        if choices == 1:
            assert set(counts) == {0}
            continue
        assert {0, choices - 1} <= set(counts) or choices > 150, "the first or last start is never drawn"
        assert is_uniform(counts, choices), f"starts of an episode of {choices} starts are favoured"


@pytest.mark.parametrize("data_path", ["shared_memory", "frames"])
def test_windows_are_uniform_over_episodes_then_over_starts(engine: OnlineDataEngine, data_path: str) -> None:
    """B22: the long do not crowd out the short; rows too short for the window are left out; all ends are reached."""
    known = lengths(engine)
    assert len(known) == 16
    assert max(known.values()) > 6 * min(known.values()), "these lengths are not very different"
    endpoint = engine.endpoints[0 if data_path == "shared_memory" else 1]
    with Client(endpoint, data_path=data_path) as client:
        for chunk in (3, 1 + sorted(known.values())[2]):
            draws: Draws = []
            for seed in range(16):
                batch = client.sample_batch(2000, chunk, seed=seed)
                prints, steps = batch["obs", "fingerprint"][:, 0], batch["obs", "step"][:, 0]
                draws += zip(prints.tolist(), steps.tolist(), strict=True)
            check(draws, {found: length - chunk + 1 for found, length in known.items() if length >= chunk})
            assert max(start + chunk for _, start in draws) == max(known.values())


def test_unseeded_draws_are_uniform_too(engine: OnlineDataEngine) -> None:
    """B22: the broker's own chance (seeded by the configuration)."""
    known = lengths(engine)
    with Client(engine.endpoint) as client, client.stream(500, 4, prefetch=4) as stream:
        draws: Draws = []
        for _, batch in zip(range(40), stream, strict=False):
            prints, steps = batch["obs", "fingerprint"][:, 0], batch["obs", "step"][:, 0]
            draws += zip(prints.tolist(), steps.tolist(), strict=True)
    check(draws, {found: length - 3 for found, length in known.items() if length >= 4})


@pytest.mark.parametrize("mode", ["segment", "boundary"])
def test_windows_of_segments_and_boundaries_are_uniform_as_well(engine: OnlineDataEngine, mode: str) -> None:
    """B21, B22: every eligible start of a row alike, whatever segment or boundary it belongs to."""
    known, chunk = lengths(engine), 5
    starts: dict[int, list[int]] = {}
    for found, length in known.items():
        bounds = np.linspace(0, length, 4).astype(int)
        part = np.searchsorted(bounds[1:-1], np.arange(length), side="right")
        crossing = [part[s] != part[s + chunk - 1] for s in range(length - chunk + 1)]
        eligible = [s for s, crosses in enumerate(crossing) if crosses == (mode == "boundary")]
        if eligible:
            starts[found] = eligible
    draws: Draws = []
    with Client(engine.endpoint) as client:
        for seed in range(10):
            batch = client.sample_batch(2000, chunk, mode, seed=seed)
            prints, steps = batch["obs", "fingerprint"][:, 0].tolist(), batch["obs", "step"][:, 0].tolist()
            draws += [(found, starts[found].index(step)) for found, step in zip(prints, steps, strict=True)]
    check(draws, {found: len(eligible) for found, eligible in starts.items()})


def test_contexts_are_uniform_over_episodes_then_over_anchors(engine: OnlineDataEngine) -> None:
    """B25, B29: every step is an anchor, the first and the last of the shortest episode included."""
    known = lengths(engine)
    draws: Draws = []
    with Client(engine.endpoints[1]) as client:
        for seed in range(16):
            batch: Any = client.sample_batch_with_context(2000, 3, 2, seed=seed)
            prints, steps = batch["obs", "fingerprint"][:, 2], batch["obs", "step"][:, 2]
            draws += zip(prints.tolist(), steps.tolist(), strict=True)
    check(draws, known)
