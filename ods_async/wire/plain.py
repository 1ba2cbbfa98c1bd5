"""Plain values: what may stand in an episode's metadata and in other free-form fields.

They come back equal and of the same type, or the sender refuses them and names the way to the culprit. Allowed:
None, bool, int (up to 1,023 bits), float, str, bytes, numpy scalars, and lists, tuples and dicts with text keys of
these.

On the wire every container begins with a number that says what it is, so that a tuple stays a tuple and no msgpack
maps are needed: ``[0, …]`` list, ``[1, …]`` tuple, ``[2, key, value, …]`` dict, ``[3, bytes]`` large int (little-endian
two's complement), ``[4, dtype, bytes]`` numpy scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ods_async.core.requests import Limits
from ods_async.errors import ArgumentError, LimitExceededError
from ods_async.wire.coders import INT64_MAX, INT64_MIN, Coder, Refused, short_repr
from ods_async.wire.text import check_text

__all__ = ["SCALARS", "check_plain", "plain_coder"]

_LIST: Final = 0
_TUPLE: Final = 1
_DICT: Final = 2
_LARGE: Final = 3
_SCALAR: Final = 4

_LARGE_BYTES: Final = 128

SCALARS: Final = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""The dtypes there are on this wire, by numpy's name, as little-endian dtypes."""

_EASY_LEAVES: Final = frozenset((str, bytes, float, bool, type(None)))
_LEAVES: Final = _EASY_LEAVES | {int}
_SCALAR_TYPES: Final = {dtype.type: name for name, dtype in SCALARS.items()}

_REMEDY: Final = (
    "allowed are None, bool, int, float, str, bytes, numpy scalars, and lists, tuples and dicts with text keys; "
    "convert it first, for example with str(...), list(...) or .tolist()"
)


def plain_coder(limits: Limits) -> Coder:
    """The coder of ``dict[str, object]`` under ``limits`` (``nesting``, ``text_bytes``)."""
    text_bytes, nesting = limits.text_bytes, limits.nesting

    def pack(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Refused(f"expected a dict, found {type(value).__name__}", value)
        return _pack(dict(value), nesting, text_bytes)

    def unpack(tree: Any) -> dict[str, object]:
        if type(tree) is not tuple or not tree or tree[0] != _DICT:
            raise Refused(f"expected a dict, found {short_repr(tree)}", tree)
        value = _unpack(tree, nesting)
        assert isinstance(value, dict)
        return value

    return Coder(pack, unpack)


def check_plain(value: Mapping[str, object], where: str, limits: Limits | None = None) -> None:
    """Refuse, at the sender, a mapping that would not come back as it is.

    Args:
        value: what someone wants to send, such as an episode's metadata.
        where: the name of the whole thing, for the message.
        limits: the broker's, where known.

    Raises:
        ArgumentError: a value or key that cannot be sent; ``argument`` is the way to it (``metadata/seed``).
        LimitExceededError: a text that is too long.
    """
    try:
        plain_coder(limits or Limits()).pack(value)
    except Refused as refused:
        raise sender_error(refused.under(where)) from None


def sender_error(refused: Refused) -> ArgumentError | LimitExceededError:
    """What the sender is told about a value it cannot send."""
    if refused.size is not None:
        return LimitExceededError(str(refused), what=refused.where, size=refused.size, limit=refused.limit)
    return ArgumentError(
        str(refused),
        argument=refused.where,
        value=short_repr(refused.value),
        rule=refused.reason.partition(", found")[0],
    )


def _pack(value: Any, depth: int, text_bytes: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is bytes:
        return value
    if kind is int:
        return value if INT64_MIN <= value <= INT64_MAX else _pack_large(value)
    if kind is str:
        return check_text(value, text_bytes)
    if kind in _SCALAR_TYPES:
        name = _SCALAR_TYPES[kind]
        return (_SCALAR, name, np.asarray(value, SCALARS[name]).tobytes())
    if kind is dict or kind is list or kind is tuple:
        if depth <= 0:
            raise Refused("nested too deeply; flatten it", value)
        if kind is dict:
            return _pack_dict(value, depth - 1, text_bytes)
        tree: list[Any] = [_LIST if kind is list else _TUPLE]
        if set(map(type, value)) == {int} and min(value) >= INT64_MIN and max(value) <= INT64_MAX:
            tree += value
            return tree
        for index, item in enumerate(value):
            try:
                tree.append(_pack(item, depth - 1, text_bytes))
            except Refused as refused:
                raise refused.under(str(index)) from None
        return tree
    raise Refused(f"a {kind.__module__}.{kind.__qualname__} cannot be sent; {_REMEDY}", value)


def _pack_dict(value: dict[Any, Any], depth: int, text_bytes: int) -> list[Any]:
    tree: list[Any] = [_DICT]
    for key, item in value.items():
        if type(key) is not str:
            raise Refused(
                f"a key of type {type(key).__name__} cannot be sent; use text, for example str(key)", key
            ).under(short_repr(key))
        try:
            tree.append(check_text(key, text_bytes))
            tree.append(_pack(item, depth, text_bytes))
        except Refused as refused:
            raise refused.under(key if key.isprintable() else ascii(key)) from None
    return tree


def _pack_large(value: int) -> tuple[int, bytes]:
    size = value.bit_length() // 8 + 1
    if size > _LARGE_BYTES:
        raise Refused(f"an int of {value.bit_length()} bits is too large to send; send it as text", value)
    return (_LARGE, value.to_bytes(size, "little", signed=True))


def _unpack(tree: Any, depth: int) -> Any:
    if type(tree) is not tuple:
        if type(tree) not in _LEAVES or (type(tree) is int and not INT64_MIN <= tree <= INT64_MAX):
            raise Refused(f"not a plain value: {short_repr(tree)}", tree)
        return tree
    kind = tree[0] if tree and type(tree[0]) is int else None
    if kind == _LARGE:
        return _unpack_large(tree)
    if kind == _SCALAR:
        return _unpack_scalar(tree)
    if kind not in (_LIST, _TUPLE, _DICT):
        raise Refused("an array that does not say what it is", tree)
    if depth <= 0:
        raise Refused("nested too deeply", tree)
    if kind == _DICT:
        return _unpack_dict(tree, depth - 1)
    items = tree[1:]
    if not set(map(type, items)) <= _EASY_LEAVES:
        items = tuple([_unpack(item, depth - 1) for item in items])
    return list(items) if kind == _LIST else items


def _unpack_dict(tree: tuple[Any, ...], depth: int) -> dict[str, Any]:
    keys, items = tree[1::2], tree[2::2]
    if len(keys) != len(items):
        raise Refused("a dict with a key that has no value", tree)
    made: dict[str, Any] = {}
    for key, item in zip(keys, items, strict=True):
        if type(key) is not str:
            raise Refused(f"a dict with a key that is no text: {short_repr(key)}", key)
        made[key] = _unpack(item, depth)
    if len(made) != len(keys):
        raise Refused("a dict with the same key twice", tree)
    return made


def _unpack_large(tree: tuple[Any, ...]) -> int:
    if len(tree) != 2 or type(tree[1]) is not bytes or not 8 <= len(tree[1]) <= _LARGE_BYTES:
        raise Refused("a large int that is none", tree)
    value = int.from_bytes(tree[1], "little", signed=True)
    if INT64_MIN <= value <= INT64_MAX:
        raise Refused("a large int that is none", tree)
    return value


def _unpack_scalar(tree: tuple[Any, ...]) -> Any:
    if len(tree) == 3 and type(tree[1]) is str and type(tree[2]) is bytes:
        name, data = tree[1], tree[2]
        dtype = SCALARS.get(name)
        if dtype is not None and len(data) == dtype.itemsize and (name != "bool" or data in (b"\0", b"\1")):
            return np.frombuffer(data, dtype)[0]
    raise Refused("a numpy scalar that is none", tree)
