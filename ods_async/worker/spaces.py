"""Gymnasium spaces as named fields, and values of those spaces written into arrays of one episode.

Supported: ``Box``, ``Discrete``, ``MultiBinary``, ``MultiDiscrete``, and ``Dict`` and ``Tuple`` of these (entries of a
``Tuple`` are named "0", "1", …). A ``Box`` keeps its dtype and shape, a ``Discrete`` is one int64 per step, a
``MultiBinary`` is int8, a ``MultiDiscrete`` int64. ``Text``, ``Sequence``, ``Graph``, ``OneOf`` and unknown spaces have
no fixed shape per step and are refused with their path, before anything is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ods_async.core.episode import Array
from ods_async.core.schema import FieldSpec, Path, path_text
from ods_async.errors import SchemaMismatchError
from ods_async.wire.plain import SCALARS

__all__ = ["SpaceCodec", "fields_of"]

_Leaf = tuple[FieldSpec, spaces.Space[Any], tuple[str | int, ...]]


def fields_of(space: gym.Space[Any], root: Path) -> tuple[FieldSpec, ...]:
    """The fields of ``space`` below ``root``, in the space's own order.

    Raises:
        SchemaMismatchError: a space without a fixed shape per step, with its path.
    """
    return tuple(spec for spec, _, _ in _leaves(space, root, ()))


class SpaceCodec:
    """Writes values of one space into arrays of an episode, strictly: no cast, no broadcast.

    Args:
        space: the space of one environment (not batched).
        root: path of the group or field, ``("obs",)`` say.

    Raises:
        SchemaMismatchError: a space that is not supported, or one without a single field.
    """

    def __init__(self, space: gym.Space[Any], root: Path) -> None:
        self.space = space
        self._leaves = _leaves(space, root, ())
        self.fields = tuple(spec for spec, _, _ in self._leaves)
        if not self.fields:
            raise SchemaMismatchError(
                f"{path_text(root)}: the space {space} has no field; there is nothing to record",
                field=path_text(root),
                expected="at least one field",
                found=str(space),
            )
        self._shapes = _shape_checks(space, root, ())

    @property
    def width(self) -> int:
        """Number of values per step, over all fields."""
        return sum(math.prod(spec.shape) for spec in self.fields)

    def write(self, value: Any, arrays: Mapping[Path, Array], step: int) -> None:
        """Copy ``value`` into ``arrays[path][step]`` for every field.

        Raises:
            SchemaMismatchError: a missing or extra key, another dtype or another shape than the space promises.
        """
        for check in self._shapes:
            check(value)
        for spec, space, keys in self._leaves:
            part = value
            for key in keys:
                part = part[key]
            array = _strict(part, spec, space)
            arrays[spec.path][step] = array

    def command(self, action: Any) -> Any:
        """``action`` as the environment is told it: the space's own dtypes and shapes, in memory of its own.

        A plan may yield lists, Python numbers or floats of another width; they are turned into the space's dtype
        *before* the environment sees them, so that what is recorded is exactly what was told.

        Raises:
            SchemaMismatchError: another shape, a missing or extra key, or a number that the dtype cannot hold.
        """
        for check in self._shapes:
            check(action)
        return self._command(self.space, action, iter(self._leaves))

    def _command(self, space: gym.Space[Any], action: Any, leaves: Any) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._command(sub, action[key], leaves) for key, sub in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self._command(sub, part, leaves) for sub, part in zip(space.spaces, action, strict=True))
        spec, _, _ = next(leaves)
        array = _exact(action, spec)
        return array[()] if isinstance(space, spaces.Discrete) else array


def _leaves(space: gym.Space[Any], path: Path, keys: tuple[str | int, ...]) -> list[_Leaf]:
    if isinstance(space, spaces.Dict):
        found: list[_Leaf] = []
        for key, sub in space.spaces.items():
            if not isinstance(key, str):
                raise _unsupported(space, path, f"its key {key!r} is no text")
            found += _leaves(sub, (*path, key), (*keys, key))
        return found
    if isinstance(space, spaces.Tuple):
        return [
            leaf for index, sub in enumerate(space.spaces) for leaf in _leaves(sub, (*path, str(index)), (*keys, index))
        ]
    if isinstance(space, spaces.Discrete | spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        dtype = np.dtype(space.dtype)
        if dtype.kind not in "biuf" or dtype.name not in SCALARS:
            raise _unsupported(space, path, f"its dtype {dtype} cannot be sent")
        shape = tuple(int(size) for size in space.shape or ())
        return [(FieldSpec(path, dtype.name, shape), space, keys)]
    raise _unsupported(space, path, "it has no fixed shape per step")


def _unsupported(space: gym.Space[Any], path: Path, why: str) -> SchemaMismatchError:
    name = path_text(path)
    return SchemaMismatchError(
        f"{name}: the space {type(space).__name__} cannot be recorded, {why}; supported are Box, Discrete, "
        "MultiBinary, MultiDiscrete, and Dict and Tuple of these. Wrap the environment so that this entry is left out "
        "or encoded",
        field=name,
        expected="Box, Discrete, MultiBinary, MultiDiscrete, Dict or Tuple",
        found=type(space).__name__,
    )


def _shape_checks(space: gym.Space[Any], path: Path, keys: tuple[str | int, ...]) -> list[Callable[[Any], None]]:
    """Checks that the groups of a value have exactly the space's keys, outermost first."""
    checks: list[Callable[[Any], None]] = []
    if isinstance(space, spaces.Dict):
        names = frozenset(space.spaces)
        checks.append(lambda value: _check_keys(_at(value, keys), names, path))
        for key, sub in space.spaces.items():
            checks += _shape_checks(sub, (*path, key), (*keys, key))
    elif isinstance(space, spaces.Tuple):
        count = len(space.spaces)
        checks.append(lambda value: _check_count(_at(value, keys), count, path))
        for index, sub in enumerate(space.spaces):
            checks += _shape_checks(sub, (*path, str(index)), (*keys, index))
    return checks


def _at(value: Any, keys: tuple[str | int, ...]) -> Any:
    for key in keys:
        value = value[key]
    return value


def _check_keys(value: Any, names: frozenset[str], path: Path) -> None:
    if not isinstance(value, Mapping):
        raise _mismatch(path, f"a dict with the keys {sorted(names)}", type(value).__name__)
    if value.keys() != names:
        raise _mismatch(path, f"the keys {sorted(names)}", f"{sorted(map(str, value))}")


def _check_count(value: Any, count: int, path: Path) -> None:
    if not isinstance(value, tuple | list) or len(value) != count:
        found = f"{len(value)} entries" if isinstance(value, tuple | list) else type(value).__name__
        raise _mismatch(path, f"a tuple of {count} entries", found)


def _strict(value: Any, spec: FieldSpec, space: gym.Space[Any]) -> Array:
    """``value`` as an array of exactly the field's dtype and shape; a bare integer may be a ``Discrete``."""
    if isinstance(space, spaces.Discrete) and isinstance(value, int | np.integer) and not isinstance(value, bool):
        return _exact(value, spec)
    array = value if isinstance(value, np.ndarray) else _as_array(value, spec)
    # Byte order is a matter of storage, not of type: assignment into native memory keeps every value.
    if array.dtype.newbyteorder("=") != np.dtype(spec.dtype) or array.shape != spec.shape:
        raise _mismatch(spec.path, f"{spec.dtype} {list(spec.shape)}", f"{array.dtype} {list(array.shape)}")
    return array


def _exact(value: Any, spec: FieldSpec) -> Array:
    """``value`` in the field's dtype; floats may be rounded to a narrower float, everything else must be exact."""
    array = _as_array(value, spec)
    dtype = np.dtype(spec.dtype)
    if array.shape != spec.shape:
        raise _mismatch(spec.path, f"{spec.dtype} {list(spec.shape)}", f"{array.dtype} {list(array.shape)}")
    if array.dtype.kind not in "biuf":
        raise _mismatch(spec.path, f"{spec.dtype} {list(spec.shape)}", f"{array.dtype} {list(array.shape)}")
    if array.dtype == dtype:
        return np.array(array)
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(cast, array):
        raise _mismatch(spec.path, f"values that {spec.dtype} holds exactly", f"{array.dtype} {array!r:.80}")
    if dtype.kind == "f" and not np.array_equal(np.isfinite(cast), np.isfinite(array)):
        raise _mismatch(spec.path, f"values within the range of {spec.dtype}", f"{array.dtype} {array!r:.80}")
    return cast


def _as_array(value: Any, spec: FieldSpec) -> Array:
    try:
        return np.asarray(value)
    except Exception as error:  # bfloat16, gradients, another device, ragged lists: everyone has errors of their own
        found = f"{type(value).__name__} {getattr(value, 'dtype', '')}".rstrip()
        raise _mismatch(
            spec.path, f"{spec.dtype} {list(spec.shape)}", f"a {found}, which is no array: {error}"
        ) from error


def _mismatch(path: Path, expected: str, found: str) -> SchemaMismatchError:
    name = path_text(path)
    return SchemaMismatchError(
        f"{name}: expected {expected}, as the space says, and found {found}; nothing is cast or broadcast, so let the "
        "environment return what its space promises",
        field=name,
        expected=expected,
        found=found,
    )
