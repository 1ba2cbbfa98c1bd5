"""The dataset over an engine with real processes."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

import ods_async as ods
from ods_async.testing import window_faults


def test_a_loader_over_an_engine_draws_whole_windows_until_the_engine_stops() -> None:
    """C31, C41: made before the start, forked after it; the engine samples on beside its workers."""
    cfg = ods.OnlineDataEngineCfg(
        buffer_size=5,
        max_episode_steps=13,
        gym_config={"id": "ods_async/Counting-v0", "kwargs": {"min_length": 6, "max_length": 11}},
    )
    engine = ods.OnlineDataEngine(cfg)
    dataset = ods.OnlineDataset(engine, chunk_size=ods.UniformChunkSampler(2, 4), batch_size=3)
    contexts = ods.OnlineDataset(engine, batch_size=3, history_length=2, prediction_horizon=3, timeout=20.0)
    with engine:
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=2, timeout=60)
        for count, batch in enumerate(loader):
            assert batch.batch_size[0] == 3
            assert [window_faults(window) for window in batch] == [""] * 3
            texts = engine.resolve_language(batch)["task"]
            assert (len(texts), len(texts[0])) == tuple(batch.batch_size)
            if count == 12:
                break
        assert engine.sample_batch(2, 3).batch_size == (2, 3)
        under_way = iter(contexts)
        assert next(under_way).batch_size == (3, 4)
    with pytest.raises((ods.PeerError, ods.ClosedError)):
        next(under_way)
