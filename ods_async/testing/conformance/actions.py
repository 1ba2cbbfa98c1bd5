"""What recorded actions mean, checked against the live environment before the first step (B4, B45, B46)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ods_async as ods
from ods_async.testing.conformance.checks import fields_of, varied
from ods_async.testing.conformance.environments import CONTRACTS, CONTRACTS_ID, MODULE
from ods_async.testing.conformance.ways import LoopThread, Way, make_engine
from ods_async.worker.actions import check_recording
from ods_async.worker.environments import make_environment


def _requests(flaw: str | None = None, **changes: Any) -> ods.OnlineDataEngineCfg:
    gym = {"id": CONTRACTS_ID, "imports": [MODULE], "kwargs": {"flaw": flaw}}
    values = {"action_semantics": "policy_request", "action_dim": 5, "action_contracts": CONTRACTS} | changes
    return varied(buffer_size=2, max_episode_steps=9, gym_config=gym, **values)


def test_b45_what_the_controller_was_told_is_recorded(plain: Way) -> None:
    """B45, B4: the width is the environment's where ``action_dim`` does not say it."""
    assert fields_of(plain.sample_batch(2, 2))["actions",].shape == (2, 2, 3)


def test_b46_policy_requests_are_recorded_raw(engine_way: str, loop: LoopThread) -> None:
    """B46: once semantics, contracts, slices, widths and joints agree."""
    engine = make_engine(engine_way, _requests(), loop)
    engine.start()
    try:
        fields = fields_of(engine.sample_batch(8, 3))
        first = fields["actions",][..., [0, 1, 3, 4]]
        assert (first == np.array([8.5, -8.25, 3.0, -3.0], np.float32)).all()
        assert np.array_equal(fields["actions",][..., 2], (fields["episode_step",] / 8).astype(np.float32))
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"flaw": "order"}, r"action_contracts\[0\]"),
        ({"flaw": "gap"}, "slice that begins at 3"),
        ({"flaw": "joints"}, "joints of action term"),
        ({"action_dim": 4}, "action_dim: expected 4"),
        ({"action_semantics": "expert_controller_command", "action_contracts": None}, "action_semantics"),
        ({"state_dim": 9}, "state_dim: expected 9"),
    ],
)
def test_b46_the_first_disagreement_is_named(changes: dict[str, Any], said: str) -> None:
    """B46, B4, B45: before anything is simulated."""
    cfg = _requests(**changes)
    environment = make_environment(cfg.gym_config, cfg.steps, cfg.action_config)
    with pytest.raises(ods.SchemaMismatchError, match=said):
        check_recording(
            environment,
            action_semantics=cfg.action_semantics,
            action_contracts=cfg.action_contracts,
            action_dim=cfg.action_dim,
            state_dim=cfg.state_dim,
        )


def test_b46_a_disagreement_fails_the_start(engine_way: str, loop: LoopThread) -> None:
    """B46, B7: with the same error."""
    engine = make_engine(engine_way, _requests("order"), loop)
    with pytest.raises(ods.SchemaMismatchError, match=r"action_contracts\[0\]"):
        engine.start()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"action_dim": None}, "action_dim"),
        ({"action_contracts": None}, "action_contracts"),
        ({"action_contracts": ()}, "action_contracts"),
        ({"action_contracts": ("arm.v1", " ")}, "action_contracts"),
        ({"action_semantics": "expert_controller_command"}, "action_contracts"),
        ({"action_semantics": "anything"}, "action_semantics"),
    ],
)
def test_b46_contracts_go_with_policy_requests_only(changes: dict[str, Any], named: str) -> None:
    """B46, B1."""
    with pytest.raises(ods.ConfigError, match=named):
        _requests(**changes)
