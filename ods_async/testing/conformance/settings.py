"""Settings: refused with field, value and rule before anything exists (B1 to B5)."""

from __future__ import annotations

from typing import Any

import pytest

import ods_async as ods
from ods_async.testing.conformance.checks import varied


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("buffer_size", 0),
        ("buffer_size", True),
        ("buffer_size", 4.0),
        ("max_episode_steps", -1),
        ("refill_threshold", 0),
        ("max_generation_attempts", 0),
        ("initialization_timeout", float("nan")),
        ("initialization_timeout", float("inf")),
        ("shutdown_timeout", 0),
        ("shutdown_timeout", True),
        ("language_buffer_bytes", 0),
        ("refill_policy", "sometimes"),
        ("action_semantics", "whatever"),
        ("include_provenance", 1),
        ("lifecycle_event_capacity", -1),
        ("num_workers", -1),
        ("worker_failure", "ignore"),
        ("samples_per_insert", 0.0),
        ("endpoint", "localhost:5555"),
    ],
)
def test_b1_a_bad_value_is_refused_with_field_value_and_rule(name: str, value: Any) -> None:
    """B1: a bool is no number, NaN and infinity are no time-outs."""
    with pytest.raises(ods.ConfigError, match=name) as caught:
        ods.OnlineDataEngineCfg(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert caught.value.argument == name
    assert repr(value) in caught.value.value
    assert caught.value.rule in str(caught.value)


def test_b1_settings_must_agree_with_each_other_and_be_known() -> None:
    """B1, B35: ``num_envs``, budgets, unknown keys."""
    for changes, said in (
        ({"gym_config": {"num_envs": 17}}, "num_envs"),
        ({"episode_sample_budget": 3}, "episode_sample_hard_limit"),
        ({"episode_sample_hard_limit": 3}, "episode_sample_budget"),
        ({"episode_sample_budget": 4, "episode_sample_hard_limit": 3}, "hard_limit=3"),
        ({"episode_sample_budget": 2**63, "episode_sample_hard_limit": 2**63}, r"2\*\*63"),
        ({"gym_config": {"num_env": 1}}, "num_envs"),
    ):
        with pytest.raises(ods.ConfigError, match=said):
            ods.OnlineDataEngineCfg(**changes)
    with pytest.raises(ods.ConfigError, match="buffer_size"):
        ods.OnlineDataEngineCfg.from_dict({"bufer_size": 3})


def test_b2_the_capacity_is_gym_configs_where_it_says_so() -> None:
    """B2."""
    assert ods.OnlineDataEngineCfg(max_episode_steps=7).steps == 7
    assert ods.OnlineDataEngineCfg(max_episode_steps=7, gym_config={"max_episode_steps": 9}).steps == 9


def test_b3_settings_are_copied_changed_and_told_as_data() -> None:
    """B3: ``replace`` validates again, ``to_dict`` round-trips, a copy shares nothing."""
    cfg = varied()
    twin = cfg.copy()
    assert twin == cfg
    twin.gym_config["kwargs"]["min_length"] = 1
    assert twin != cfg
    assert cfg.replace(buffer_size=9).buffer_size == 9
    with pytest.raises(ods.ConfigError):
        cfg.replace(buffer_size=0)
    assert ods.OnlineDataEngineCfg.from_dict(cfg.to_dict()) == cfg
    cfg.validate()
    cfg.gym_config["num_envs"] = 99
    with pytest.raises(ods.ConfigError, match="num_envs"):
        cfg.validate()


def test_b5_the_buffer_is_on_the_cpu() -> None:
    """B5: anything else is refused with a pointer to the consumer's ``device=``."""
    with pytest.raises(ods.ConfigError, match="device="):
        ods.OnlineDataEngineCfg(buffer_device="cuda:0")
