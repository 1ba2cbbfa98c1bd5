"""The settings and their rules: B1 to B5."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ods_async.config import DEFAULT_LIMITS, OnlineDataEngineCfg
from ods_async.core.requests import Limits
from ods_async.errors import ConfigError, EndpointError

COUNTS = ["buffer_size", "max_episode_steps", "refill_threshold", "max_generation_attempts", "language_buffer_bytes"]
COUNTS += ["event_history"]
OPTIONAL_COUNTS = ["state_dim", "action_dim", "spare_rows"]
SECONDS = ["initialization_timeout", "shutdown_timeout", "lease_seconds", "ticket_start_timeout"]
SECONDS += ["ticket_finish_timeout", "heartbeat_interval", "heartbeat_timeout"]


def refused(name: str, value: object, *words: str, **others: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        OnlineDataEngineCfg(**{name: value}, **others)
    error = caught.value
    assert isinstance(error, ValueError)
    assert name in str(error)
    for word in words:
        assert word in str(error)
    return error


def test_defaults_are_those_of_the_contract() -> None:
    """Section A of the contract."""
    cfg = OnlineDataEngineCfg()
    expected = {
        "buffer_size": 16,
        "max_episode_steps": 300,
        "state_dim": None,
        "action_dim": None,
        "buffer_device": "cpu",
        "gym_config": {},
        "action_config": {},
        "refill_threshold": 50,
        "refill_policy": "sample_threshold",
        "max_generation_attempts": 3,
        "initialization_timeout": 300.0,
        "shutdown_timeout": 5.0,
        "language_buffer_bytes": 1048576,
        "include_provenance": False,
        "episode_sample_budget": None,
        "episode_sample_hard_limit": None,
        "lifecycle_event_capacity": 0,
        "action_semantics": "expert_controller_command",
        "action_contracts": None,
        "num_workers": 1,
        "max_worker_restarts": 0,
        "worker_failure": None,
        "endpoint": None,
        "extra_endpoints": (),
        "shared_memory": "auto",
    }
    assert {name: getattr(cfg, name) for name in expected} == expected


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "7", None, math.nan, 2**63])
def test_b1_sizes_and_counts_are_real_positive_integers(name: str, value: object) -> None:
    """B1."""
    error = refused(name, value, repr(value), "positive integer" if "size" not in name else "integer")
    assert error.argument == name
    assert error.value == repr(value)


@pytest.mark.parametrize("name", OPTIONAL_COUNTS)
@pytest.mark.parametrize("value", [0, -3, False, 1.5, "1"])
def test_b1_optional_counts_take_none_and_positive_integers(name: str, value: object) -> None:
    """B1."""
    refused(name, value, "or None")
    assert getattr(OnlineDataEngineCfg(**{name: 5}), name) == 5


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "5", None, 1e10, 10**400])
def test_b1_time_outs_are_finite_and_positive(name: str, value: object) -> None:
    """B1: NaN and infinity are refused."""
    refused(name, value, "finite")


def test_time_outs_become_floats() -> None:
    kept = OnlineDataEngineCfg(initialization_timeout=7).initialization_timeout
    assert (kept, type(kept)) == (7.0, float)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("refill_policy", "sample_treshold", "did you mean 'sample_threshold'"),
        ("action_semantics", "policy", "'policy_request'"),
        ("worker_failure", "ignore", "'tolerate'"),
        ("shared_memory", True, "'auto'"),
        ("include_provenance", 1, "True or False"),
        ("num_workers", -1, "non-negative"),
        ("num_workers", True, "non-negative"),
        ("max_worker_restarts", None, "non-negative"),
        ("seed", -4, "non-negative"),
        ("lifecycle_event_capacity", True, "non-negative"),
        ("name", "../up", "letters"),
        ("name", "", "letters"),
        ("gym_config", [], "dict"),
        ("action_config", None, "dict"),
        ("extra_endpoints", "tcp://127.0.0.1:1", "list"),
    ],
)
def test_b1_choices_and_kinds(name: str, value: object, words: str) -> None:
    """B1."""
    refused(name, value, words)


@pytest.mark.parametrize("value", ["localhost:5555", "http://a:1", "", 5, "tcp:/host", "tcp://"])
def test_an_address_must_look_like_one(value: object) -> None:
    """C44: the message has the bad value and a valid example."""
    error = refused("endpoint", value, "tcp://127.0.0.1:5555", repr(value))
    assert isinstance(error, EndpointError)
    refused("extra_endpoints", [value], "extra_endpoints[0]")


def test_b1_num_envs_must_fit_the_buffer() -> None:
    """B1: ``num_envs <= buffer_size``."""
    refused("gym_config", {"num_envs": 9}, "num_envs", "9", "buffer_size=8", buffer_size=8)
    assert OnlineDataEngineCfg(buffer_size=8, gym_config={"num_envs": 8}).num_envs == 8


@pytest.mark.parametrize("value", [0, True, 2.0, "2"])
def test_b1_num_envs_is_a_positive_integer(value: object) -> None:
    """B1."""
    refused("gym_config", {"num_envs": value}, 'gym_config["num_envs"]', repr(value))


def test_b2_the_environments_own_step_limit_is_the_capacity_of_a_row() -> None:
    """B2."""
    assert OnlineDataEngineCfg(max_episode_steps=70).steps == 70
    assert OnlineDataEngineCfg(max_episode_steps=70, gym_config={"max_episode_steps": 40}).steps == 40
    assert OnlineDataEngineCfg(max_episode_steps=70, gym_config={"max_episode_steps": None}).steps == 70
    refused("gym_config", {"max_episode_steps": 0}, 'gym_config["max_episode_steps"]')


def test_b3_replace_and_copy_check_again_and_share_nothing() -> None:
    """B3."""
    cfg = OnlineDataEngineCfg(gym_config={"kwargs": {"sizes": [1, 2]}})
    other = cfg.replace(buffer_size=3)
    assert (other.buffer_size, cfg.buffer_size, other.gym_config) == (3, 16, cfg.gym_config)
    twin = cfg.copy()
    assert twin == cfg
    twin.gym_config["kwargs"]["sizes"].append(3)
    assert cfg.gym_config["kwargs"]["sizes"] == [1, 2]
    with pytest.raises(ConfigError, match="buffer_size=0"):
        cfg.replace(buffer_size=0)
    with pytest.raises(ConfigError, match="did you mean 'buffer_size'"):
        cfg.replace(bufer_size=4)
    with pytest.raises(ConfigError, match="did you mean 'num_workers'"):
        cfg.copy(num_worker=4)


def test_b3_validate_sees_what_was_edited_inside() -> None:
    """B3."""
    cfg = OnlineDataEngineCfg(gym_config={"num_envs": 2})
    cfg.validate()
    cfg.gym_config["num_envs"] = 99
    with pytest.raises(ConfigError, match="num_envs"):
        cfg.validate()


def test_b3_to_dict_round_trips_through_json() -> None:
    """B3."""
    cfg = OnlineDataEngineCfg(
        buffer_size=5,
        action_dim=4,
        action_semantics="policy_request",
        action_contracts=("arm", "hand"),
        gym_config={"id": "X-v0", "kwargs": {"shape": (3, 4), "deep": {"a": [None, True, 0.5]}}},
        extra_endpoints=("tcp://127.0.0.1:0",),
        limits={"sessions": 7},
        episode_sample_budget=3,
        episode_sample_hard_limit=9,
    )
    again = OnlineDataEngineCfg.from_dict(json.loads(json.dumps(cfg.to_dict())))
    assert again == cfg
    assert again.action_contracts == ("arm", "hand")
    assert again.extra_endpoints == ("tcp://127.0.0.1:0",)
    assert pickle.loads(pickle.dumps(cfg)) == cfg


def test_a_configuration_is_frozen_and_keeps_no_dict_of_the_caller() -> None:
    given: dict[str, Any] = {"kwargs": {"x": 1}}
    cfg = OnlineDataEngineCfg(gym_config=given)
    given["kwargs"]["x"] = 2
    assert cfg.gym_config["kwargs"]["x"] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.buffer_size = 3  # type: ignore[misc]


def test_b5_another_device_is_refused_with_a_pointer_to_the_consumer() -> None:
    """B5."""
    refused("buffer_device", "cuda:0", "device=")
    refused("buffer_device", None, "device=")


def test_unknown_keys_are_refused_with_a_suggestion() -> None:
    """B1."""
    with pytest.raises(ConfigError, match="bufer_size=4: is not a setting; did you mean 'buffer_size'"):
        OnlineDataEngineCfg.from_dict({"bufer_size": 4})
    with pytest.raises(ConfigError, match="known are"):
        OnlineDataEngineCfg.from_dict({"zzz": 4})
    refused("gym_config", {"num_env": 2}, "did you mean 'num_envs'", "kwargs")
    refused("limits", {"session": 2}, "did you mean 'sessions'")
    with pytest.raises(ConfigError, match="mapping"):
        OnlineDataEngineCfg.from_dict([("buffer_size", 4)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"kwargs": {"a": [1, {"b": np.float64(2)}]}}, "gym_config['kwargs']['a'][1]['b']"),
        ({"kwargs": {"f": len}}, "gym_config['kwargs']['f']"),
        ({"kwargs": {1: 2}}, "gym_config['kwargs'][1]"),
        ({"kwargs": {"s": {1}}}, "gym_config['kwargs']['s']"),
        ({"kwargs": {"d": Path("x")}}, "gym_config['kwargs']['d']"),
        ({"kwargs": {"d": b"x"}}, "gym_config['kwargs']['d']"),
        ({"policy": len}, "gym_config['policy']"),
    ],
)
def test_what_is_not_plain_data_is_refused_by_key_path(value: object, path: str) -> None:
    """C26: settings travel as JSON, never pickled."""
    assert path in str(refused("gym_config", value))


def test_a_dict_that_holds_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["kwargs"] = {"again": loop}
    refused("gym_config", loop, "nested")


@pytest.mark.parametrize("policy", ["experts", "a:b c", "", 3])
def test_a_policy_is_named_by_module_and_attribute(policy: object) -> None:
    refused("gym_config", {"policy": policy}, "module:attribute")


@pytest.mark.parametrize(
    ("key", "value"),
    [("tasks", "reach-v3"), ("imports", [3]), ("accept", "all"), ("vectorization", "threads"), ("next_obs", 1)],
)
def test_b1_what_an_environment_is_made_of_is_checked_by_key(key: str, value: object) -> None:
    """B1."""
    refused("gym_config", {key: value}, f'gym_config["{key}"]', "must be")


def test_budget_and_ceiling_come_together_and_in_order() -> None:
    """B35."""
    refused("episode_sample_hard_limit", None, "together", episode_sample_budget=4)
    refused("episode_sample_budget", None, "together", episode_sample_hard_limit=4)
    refused("episode_sample_budget", 5, "4", episode_sample_hard_limit=4)
    refused("episode_sample_budget", 2**63, "2**63", episode_sample_hard_limit=2**63)
    cfg = OnlineDataEngineCfg(episode_sample_budget=4, episode_sample_hard_limit=2**63 - 1)
    assert cfg.episode_sample_budget == 4


@pytest.mark.parametrize(("size", "envs", "least"), [(4, 1, 8), (5, 4, 11), (8, 8, 16), (3, 2, 6)])
def test_b40_the_log_must_hold_the_first_fill(size: int, envs: int, least: int) -> None:
    """B40."""
    others: dict[str, Any] = {"buffer_size": size, "gym_config": {"num_envs": envs}}
    refused("lifecycle_event_capacity", least - 1, str(least), **others)
    assert OnlineDataEngineCfg(lifecycle_event_capacity=least, **others).lifecycle_event_capacity == least


def test_b46_contracts_belong_to_policy_requests_only() -> None:
    """B46."""
    refused("action_contracts", ("a",), "policy_request")
    with pytest.raises(ConfigError, match="action_contracts=None"):
        OnlineDataEngineCfg(action_semantics="policy_request", action_dim=3)
    with pytest.raises(ConfigError, match="action_dim=None"):
        OnlineDataEngineCfg(action_semantics="policy_request", action_contracts=("a",))
    for value in ((), ("a", " "), "a", ("a", 3)):
        refused("action_contracts", value, "blank", action_semantics="policy_request", action_dim=3)


def test_samples_per_insert_belongs_to_continuous_refill() -> None:
    """B33."""
    refused("samples_per_insert", 2.0, "continuous")
    assert OnlineDataEngineCfg(samples_per_insert=2, refill_policy="continuous").samples_per_insert == 2.0


def test_spare_rows_hold_at_least_one_rollout() -> None:
    refused("spare_rows", 2, "num_envs=3", gym_config={"num_envs": 3})
    cfg = OnlineDataEngineCfg(buffer_size=10, gym_config={"num_envs": 3})
    assert (cfg.spare, cfg.rows, cfg.rollouts_per_generation) == (6, 16, 4)


def test_a_heartbeat_time_out_leaves_room_for_two_beats() -> None:
    refused("heartbeat_timeout", 0.9, "heartbeat_interval=0.5")


def test_limits_are_those_of_the_wire_and_silly_ones_are_refused() -> None:
    """C43."""
    assert dataclasses.asdict(Limits()) == DEFAULT_LIMITS
    assert Limits(**OnlineDataEngineCfg(limits={"sessions": 5}).limits) == Limits(sessions=5)
    refused("limits", {"header_bytes": 100}, "65536")
    refused("limits", {"sessions": 0}, "positive")


def test_an_environment_is_demanded_only_where_workers_start() -> None:
    with pytest.raises(ConfigError, match="gym_config"):
        OnlineDataEngineCfg().require_environment()
    OnlineDataEngineCfg(gym_config={"id": "X-v0"}).require_environment()


def test_settings_need_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, ods_async.config; print([m for m in ('numpy', 'torch', 'zmq', 'gymnasium') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_paths_of_keys_are_text_and_an_allow_list_needs_keys(tmp_path: Path) -> None:
    """C19: a list without keys would guard nothing."""
    cfg = OnlineDataEngineCfg(server_keys=tmp_path, client_keys="keys")  # type: ignore[arg-type]
    assert (cfg.server_keys, cfg.client_keys) == (str(tmp_path), "keys")
    assert OnlineDataEngineCfg.from_dict(cfg.to_dict()) == cfg
    refused("server_keys", "", "path of a file or folder")
    refused("client_keys", 7, "path of a file or folder")
    refused("allowed_clients", "clients", "together with server_keys")
