"""Spaces: what is stored comes back as it was; what cannot be stored is refused by name (B14, B17)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ods_async as ods
from ods_async.testing.conformance.checks import fields_of, varied
from ods_async.testing.conformance.environments import MODULE, SPACES_ID, samples_of
from ods_async.testing.conformance.ways import LoopThread, Way, make_engine
from ods_async.worker.environments import make_environment

_NAMES = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
]
DTYPES: dict[tuple[str, ...], str] = {
    **{("obs", f"box_{name}"): name for name in _NAMES},
    ("obs", "depth"): "uint16",
    ("obs", "scalar"): "float64",
    ("obs", "nothing"): "float32",
    ("obs", "choice"): "int64",
    ("obs", "switches"): "int8",
    ("obs", "choices"): "int64",
    ("obs", "a.b"): "int64",
    ("obs", "a", "b"): "int32",
    ("obs", "pair", "0"): "int64",
    ("obs", "pair", "1", "in"): "float32",
    ("obs", "seed"): "int64",
    ("actions", "arm"): "float32",
    ("actions", "grip"): "int64",
}


def _part(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value[int(key)] if isinstance(value, tuple) else value[key]
    return value


def test_b14_every_storable_space_comes_back_as_it_was(spaced: Way) -> None:
    """B14: Box of every dtype, Discrete, MultiBinary, MultiDiscrete, Dict, Tuple, scalars, empty, dotted names."""
    fields = fields_of(spaced.sample_batch(30, 3))
    assert {path: str(a.dtype) for path, a in fields.items() if path[0] in ("obs", "actions")} == DTYPES
    assert fields["obs", "nothing"].shape == (30, 3, 0, 3)
    assert fields["obs", "scalar"].shape == (30, 3)
    assert fields["obs", "depth"].shape == (30, 3, 4, 6)
    for index in range(30):
        first = int(fields["episode_step",][index, 0])
        samples = samples_of(int(fields["obs", "seed"][index, 0]), first + 3)[first:]
        for step, sample in enumerate(samples):
            for path in DTYPES:
                if path[0] == "obs" and path != ("obs", "seed"):
                    assert np.array_equal(fields[path][index, step], _part(sample, path[1:])), path


def test_b14_actions_of_several_parts_are_recorded_as_they_were_told(spaced: Way) -> None:
    """B14, B45: in the dtypes of the action space."""
    fields = fields_of(spaced.sample_batch(20, 2))
    steps = fields["episode_step",]
    assert np.array_equal(fields["actions", "arm"][..., 0], (steps / 8).astype(np.float32))
    assert (fields["actions", "arm"][..., 1:] == np.array([0.25, -0.5], np.float32)).all()
    assert np.array_equal(fields["actions", "grip"], steps % 2)


@pytest.mark.parametrize("kind", ["text", "sequence", "graph", "oneof"])
def test_b17_a_space_without_a_fixed_shape_is_refused_by_its_path(kind: str) -> None:
    """B17: when the environment is made, before anything is simulated."""
    gym = {"id": SPACES_ID, "imports": [MODULE], "kwargs": {"refuse": kind}}
    with pytest.raises(ods.SchemaMismatchError, match=r"obs/outer/deep/1"):
        make_environment(gym, 9)


def test_b17_a_space_that_cannot_be_stored_fails_the_start(engine_way: str, loop: LoopThread) -> None:
    """B17, B7: with the same error."""
    gym = {"id": SPACES_ID, "imports": [MODULE], "kwargs": {"refuse": "graph"}}
    engine = make_engine(engine_way, varied(buffer_size=2, max_episode_steps=9, gym_config=gym), loop)
    with pytest.raises(ods.SchemaMismatchError, match=r"obs/outer/deep/1"):
        engine.start()
    assert engine.state is ods.OnlineDataEngineState.FAILED


def test_b17_an_observation_of_another_shape_is_refused(loop: LoopThread) -> None:
    """B17: naming the field, what was expected and what was found."""
    gym = {"id": "ods_async/Counting-v0", "kwargs": {"fail_phase": "step", "fail_step": 1, "fail_kind": "shape"}}
    engine = make_engine("engine", varied(gym_config=gym, max_episode_steps=50), loop)
    with pytest.raises(ods.SchemaMismatchError, match=r"obs/state.*\[6\].*\[7\]"):
        engine.start()
