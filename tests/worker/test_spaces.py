"""Spaces become fields; values are written strictly (C11, C29)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from ods_async.core.schema import FieldSpec
from ods_async.errors import SchemaMismatchError
from ods_async.worker.spaces import SpaceCodec, fields_of

BOX3 = spaces.Box(-1.0, 1.0, (3,), np.float32)


def _arrays(codec: SpaceCodec, steps: int = 2) -> dict[Any, Any]:
    return {f.path: np.zeros((steps, *f.shape), f.dtype) for f in codec.fields}


def test_a_flat_box_is_one_field_at_the_root() -> None:
    assert fields_of(spaces.Box(0, 255, (5, 7, 3), np.uint8), ("obs",)) == (FieldSpec(("obs",), "uint8", (5, 7, 3)),)


def test_c29_nested_spaces_have_documented_paths_dtypes_and_shapes() -> None:
    space = spaces.Dict(
        {
            "qpos": BOX3,
            "mode": spaces.Discrete(4),
            "flags": spaces.MultiBinary((2, 5)),
            "pair": spaces.Tuple(
                (spaces.Box(0.0, 1.0, (), np.float64), spaces.Dict({"n": spaces.MultiDiscrete([3, 4])}))
            ),
        }
    )
    assert {f.path: (f.dtype, f.shape) for f in fields_of(space, ("obs",))} == {
        ("obs", "qpos"): ("float32", (3,)),
        ("obs", "mode"): ("int64", ()),
        ("obs", "flags"): ("int8", (2, 5)),
        ("obs", "pair", "0"): ("float64", ()),
        ("obs", "pair", "1", "n"): ("int64", (2,)),
    }
    codec = SpaceCodec(space, ("obs",))
    arrays = _arrays(codec)
    space.seed(3)
    value = space.sample()
    codec.write(value, arrays, 1)
    np.testing.assert_array_equal(arrays["obs", "pair", "1", "n"][1], value["pair"][1]["n"])
    assert arrays["obs", "mode"][1] == value["mode"]
    assert arrays["obs", "mode"].dtype == np.int64


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(8),
        spaces.Sequence(BOX3),
        spaces.Graph(BOX3, None),
        spaces.OneOf((BOX3, spaces.Discrete(2))),
    ],
    ids=lambda s: type(s).__name__,
)
def test_c29_spaces_without_a_fixed_shape_are_refused_with_name_and_path(space: spaces.Space[Any]) -> None:
    with pytest.raises(SchemaMismatchError, match=rf"obs/goal/0: the space {type(space).__name__} cannot be recorded"):
        fields_of(spaces.Dict({"goal": spaces.Tuple((space,))}), ("obs",))


def test_a_space_without_any_field_is_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="obs: the space"):
        SpaceCodec(spaces.Dict({}), ("obs",))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.full(3, 1 / 3), r"float64 \[3\]"),
        (np.zeros((3, 1), np.float32), r"float32 \[3, 1\]"),
        (np.zeros(2, np.float32), r"float32 \[2\]"),
        (np.zeros(3, np.int64), r"int64 \[3\]"),
        (np.float32(0), r"float32 \[\]"),
    ],
)
def test_c11_a_value_is_never_cast_or_broadcast(value: Any, found: str) -> None:
    codec = SpaceCodec(BOX3, ("obs",))
    with pytest.raises(SchemaMismatchError, match=rf"obs: expected float32 \[3\].*found {found}"):
        codec.write(value, _arrays(codec), 0)


@pytest.mark.parametrize("value", [{"a": np.zeros(3, np.float32)}, {"a": 0, "b": 0, "c": 0}, np.zeros(3)])
def test_c11_missing_and_extra_keys_are_refused(value: Any) -> None:
    codec = SpaceCodec(spaces.Dict({"a": BOX3, "b": spaces.Discrete(2)}), ("obs",))
    with pytest.raises(SchemaMismatchError, match="obs: expected"):
        codec.write(value, _arrays(codec), 0)


def test_c11_a_short_tuple_is_refused() -> None:
    codec = SpaceCodec(spaces.Tuple((BOX3, spaces.Discrete(2))), ("obs",))
    with pytest.raises(SchemaMismatchError, match=r"a tuple of 2 entries.*found 1 entries"):
        codec.write((np.zeros(3, np.float32),), _arrays(codec), 0)


def test_a_big_endian_array_keeps_its_values() -> None:
    codec = SpaceCodec(BOX3, ("obs",))
    arrays = _arrays(codec)
    codec.write(np.array([0.25, -0.5, 1.0], ">f4"), arrays, 0)
    np.testing.assert_array_equal(arrays[("obs",)][0], [0.25, -0.5, 1.0])


def test_commands_take_the_spaces_dtype_before_the_environment_sees_them() -> None:
    codec = SpaceCodec(BOX3, ("actions",))
    given = [1 / 3, 0, 1]
    told = codec.command(given)
    assert told.dtype == np.float32
    arrays = _arrays(codec)
    codec.write(told, arrays, 0)
    np.testing.assert_array_equal(arrays[("actions",)][0], told)


def test_a_command_is_a_copy_of_the_plans_array() -> None:
    plan = np.zeros(3, np.float32)
    told = SpaceCodec(BOX3, ("actions",)).command(plan)
    plan += 1
    np.testing.assert_array_equal(told, 0)


def test_nested_commands_keep_their_structure() -> None:
    space = spaces.Dict({"arm": BOX3, "grip": spaces.Discrete(2), "pair": spaces.Tuple((spaces.Discrete(5),))})
    told = SpaceCodec(space, ("actions",)).command({"arm": [0, 0, 0], "grip": 1, "pair": [np.int32(4)]})
    assert told["arm"].dtype == np.float32
    assert told["grip"] == 1
    assert told["pair"] == (4,)
    assert space.contains(told)


@pytest.mark.parametrize("action", [0.5, 2**70, "left", [0]])
def test_a_command_that_the_space_cannot_hold_is_refused(action: Any) -> None:
    with pytest.raises(SchemaMismatchError, match="actions: expected"):
        SpaceCodec(spaces.Discrete(3), ("actions",)).command(action)


def test_a_command_beyond_the_floats_range_is_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="within the range of float32"):
        SpaceCodec(BOX3, ("actions",)).command(np.array([1e300, 0, 0]))


def test_width_counts_the_values_of_a_step() -> None:
    assert SpaceCodec(spaces.Dict({"a": BOX3, "b": spaces.MultiBinary((2, 5))}), ("obs",)).width == 13
