"""Recorded actions mean what the configuration says (B4, B45, B46)."""

from __future__ import annotations

from types import SimpleNamespace as Bag
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from ods_async.errors import SchemaMismatchError
from ods_async.worker.actions import check_recording
from ods_async.worker.environments import LoopEnvironment

CONTRACTS = ("arm.delta.v1", "grip.v2")


class Robot(gym.Env[Any, Any]):
    """Five values of action in two terms."""

    def __init__(self, semantics: str | None = "policy_request") -> None:
        self.observation_space = spaces.Dict(
            {
                "qpos": spaces.Box(-1, 1, (7,), np.float32),
                "mode": spaces.Discrete(3),
                "image": spaces.Box(0, 255, (4, 6, 3), np.uint8),
            }
        )
        self.action_space = spaces.Box(-1, 1, (5,), np.float32)
        if semantics:
            self.rollout_action_semantics = semantics
        self.robot = Bag(joint_names=["base", "elbow", "wrist", "palm", "tip"])
        arm = Bag(contract=CONTRACTS[0], action_dim=3, joint_names=("elbow", "base", "wrist"))
        grip = Bag(contract=CONTRACTS[1], action_dim=2, joint_names=())
        self.terms = {
            "arm": Bag(command_type="qpos", controlled_joint_ids=[1, 0, 2]),
            "grip": Bag(command_type="binary"),
        }
        self.action_manager: Any = Bag(
            descriptors=[Bag(name="arm", start=0, stop=3, term=arm), Bag(name="grip", start=3, stop=5, term=grip)],
            total_action_dim=5,
            get_term=self.terms.__getitem__,
        )


def check(*robots: Robot, **kwargs: Any) -> None:
    check_recording(LoopEnvironment(list(robots), 9, "robot"), **kwargs)


def request(robot: Robot, contracts: tuple[str, ...] = CONTRACTS, action_dim: int = 5) -> None:
    check(robot, action_semantics="policy_request", action_contracts=contracts, action_dim=action_dim)


def test_b4_widths_left_open_are_taken_from_the_environment() -> None:
    check(Robot(None))


def test_b4_widths_given_must_agree() -> None:
    check(Robot(None), state_dim=8, action_dim=5)
    with pytest.raises(
        SchemaMismatchError, match=r"state_dim: expected 9, as configured, found 8 .*obs/mode, obs/qpos"
    ):
        check(Robot(None), state_dim=9)
    with pytest.raises(SchemaMismatchError, match=r"action_dim: expected 4, as configured, found 5"):
        check(Robot(None), action_dim=4)


def test_b45_an_expert_spec_must_have_the_width_that_is_stepped() -> None:
    robot = Robot(None)
    robot.expert_action_spec = Bag(width=6)  # type: ignore[attr-defined]
    with pytest.raises(SchemaMismatchError, match="expert_action_spec: expected width 6"):
        check(robot)


def test_b46_an_environment_that_agrees_in_everything_is_taken() -> None:
    request(Robot())


def test_b46_semantics_must_agree_in_every_row() -> None:
    with pytest.raises(SchemaMismatchError, match="action_semantics: expected 'policy_request'"):
        request(Robot(None))
    with pytest.raises(SchemaMismatchError, match="action_semantics: expected 'expert_controller_command'"):
        check(Robot(None), Robot())


@pytest.mark.parametrize(
    ("contracts", "said"),
    [
        (CONTRACTS[::-1], r"action_contracts\[0\]: expected 'grip.v2', found 'arm.delta.v1'"),
        (CONTRACTS[:1], r"action_contracts\[1\]: expected no further contract, found 'grip.v2'"),
        ((*CONTRACTS, "x"), r"action_contracts\[2\]: expected 'x', found no further term"),
    ],
)
def test_b46_contract_ids_and_their_order_must_agree(contracts: tuple[str, ...], said: str) -> None:
    with pytest.raises(SchemaMismatchError, match=said):
        request(Robot(), contracts)


def _gap(robot: Robot) -> None:
    robot.action_manager.descriptors[1].start = 4


def _wide(robot: Robot) -> None:
    robot.action_manager.descriptors[0].term.action_dim = 2


def _joints(robot: Robot) -> None:
    robot.terms["arm"].controlled_joint_ids = [0, 1, 2]


def _total(robot: Robot) -> None:
    robot.action_manager.total_action_dim = 6


def _none(robot: Robot) -> None:
    robot.action_manager = None


def _space(robot: Robot) -> None:
    robot.action_space = spaces.Box(-1, 1, (4,), np.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_gap, r"action term 'grip': expected a slice that begins at 3, found \[4, 5\)"),
        (_wide, r"action term 'arm': expected a slice of width 2, found \[0, 3\)"),
        (_joints, r"joints of action term 'arm': expected \('elbow', 'base', 'wrist'\), found \('base', 'elbow'"),
        (_total, r"total_action_dim: expected 5, the sum of the terms, found 6"),
        (_none, r"action_manager: expected an action manager, for policy_request, found none"),
        (_space, r"action space: expected width 5, that of the action manager, found width 4"),
    ],
)
def test_b46_the_first_disagreement_is_named(change: Any, said: str) -> None:
    robot = Robot()
    change(robot)
    with pytest.raises(SchemaMismatchError, match=said):
        request(robot)
