"""Messages of every kind from a random generator, and what a mischievous or broken peer may make of them."""

from __future__ import annotations

import dataclasses
import random
import types
import typing
from collections.abc import Callable
from typing import Any, Final

import msgpack

from ods_async.core.requests import Batch, BufferDescription, FieldDescription, Plan
from ods_async.wire.plain import SCALARS

__all__ = ["mutate_bytes", "mutate_tree", "random_message"]

_EDGES: Final = (0, 1, -1, 2, 127, 128, 255, 256, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, -(2**63))
_TEXTS: Final = ("", "a", "episode", "segment", "READY", "é☕", "x" * 300, "\x00", "worker-0")
_HUGE: Final = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc9",
)


def random_message(cls: type[Any], rng: random.Random) -> Any:
    """An object of a message class whose fields have the right types; plans, fields and buffers also fit together."""
    if cls is Plan:
        return _plan(rng)
    if cls is FieldDescription:
        shape = tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 3)))
        path = tuple(rng.choice(("obs", "state", "a", "rewards")) for _ in range(rng.randint(1, 3)))
        return FieldDescription(path, rng.choice(sorted(SCALARS)), shape, rng.choice((0, -1)), rng.randrange(2**30))
    hints = typing.get_type_hints(cls)
    values = {f.name: _value(hints[f.name], rng) for f in dataclasses.fields(cls)}
    if cls is Batch or cls is BufferDescription:
        values = {key: abs(value) % 10**6 + 1 if type(value) is int else value for key, value in values.items()}
    return cls(**values)


def _plan(rng: random.Random) -> Plan:
    count, history = rng.randint(1, 5), rng.choice((0, 0, 1, 3))
    ends = rng.randbytes(4 * count) if history else b""
    rows = b"".join(rng.randrange(8).to_bytes(4, "little") for _ in range(count))
    return Plan(
        rng.choice(_EDGES), count, rng.randint(1, 9), history, rows, rows, ends, ends[::-1], rng.randbytes(8 * count)
    )


def _value(hint: Any, rng: random.Random) -> Any:
    leaves: dict[Any, Callable[[], Any]] = {
        int: lambda: rng.choice((*_EDGES, rng.randrange(1000))),
        float: lambda: rng.choice((0.0, 1.5, -1.0, 1e300, float("nan"), float("inf"))),
        bool: lambda: rng.random() < 0.5,
        str: lambda: rng.choice(_TEXTS),
        bytes: lambda: rng.randbytes(rng.randrange(40)),
    }
    if hint in leaves:
        return leaves[hint]()
    if dataclasses.is_dataclass(hint):
        return random_message(typing.cast("type[Any]", hint), rng)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        chosen = rng.choice(arguments)
        return None if chosen is types.NoneType else _value(chosen, rng)
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(_value(arguments[0], rng) for _ in range(rng.randrange(4)))
    if origin is tuple:
        return tuple(_value(argument, rng) for argument in arguments)
    return {rng.choice(_TEXTS): _plain(rng, 3) for _ in range(rng.randrange(3))}


def _plain(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [_plain(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 6:
        return {rng.choice(_TEXTS): _plain(rng, depth - 1) for _ in range(rng.randrange(3))}
    return (None, True, rng.choice(_EDGES), rng.choice(_TEXTS), rng.randbytes(4))[kind]


# --- mutation -------------------------------------------------------------------------------------------------------


def mutate_tree(data: bytes, rng: random.Random) -> bytes:
    """The message with one to three of its values replaced, dropped, doubled, nested or exchanged; always msgpack."""
    try:
        tree = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException):
        return data
    for _ in range(rng.randint(1, 3)):
        tree = _mutated(tree, rng, rng.randint(0, 6))
    try:
        packed: bytes = msgpack.packb(tree)
    except (ValueError, OverflowError, RecursionError):
        return data
    return packed


def _mutated(node: Any, rng: random.Random, depth: int) -> Any:
    if depth and isinstance(node, list) and node:
        at = rng.randrange(len(node))
        return [*node[:at], _mutated(node[at], rng, depth - 1), *node[at + 1 :]]
    if depth and isinstance(node, dict) and node:
        key = rng.choice(list(node))
        return node | {key: _mutated(node[key], rng, depth - 1)}
    if isinstance(node, list) and rng.random() < 0.5:
        changed = list(node)
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            changed.insert(at, _odd(rng))
        elif kind == 1:
            del changed[at : at + 1]
        elif kind == 2:
            changed = changed * rng.randint(2, 20)
        else:
            rng.shuffle(changed)
        return changed
    if type(node) is int and rng.random() < 0.5:
        return node + rng.choice((-1, 1, 64, -64)) if -(2**62) < node < 2**62 else 0
    if isinstance(node, bytes) and rng.random() < 0.5:
        return node[: rng.randrange(len(node) + 1)] + rng.randbytes(rng.randrange(9))
    return _odd(rng)


def _odd(rng: random.Random) -> Any:
    kind = rng.randrange(12)
    if kind == 0:
        nested: Any = rng.choice(_EDGES)
        for _ in range(rng.choice((3, 17, 60, 300))):
            nested = [nested] if rng.random() < 0.5 else {"x": nested}
        return nested
    if kind == 1:
        return {rng.choice((1, b"k", "k", None, 1.5)): 1}
    if kind == 2:
        return msgpack.ExtType(rng.randint(0, 127), rng.randbytes(rng.randrange(20)))
    if kind == 3:
        return "y" * rng.choice((1, 1000, 70_000))
    if kind == 4:
        return [rng.choice(_EDGES)] * rng.choice((10, 5000))
    return (True, None, rng.choice(_EDGES), 2**64 - 1, float("nan"), rng.choice(_TEXTS), rng.randbytes(8))[kind - 5]


def mutate_bytes(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """The message with bytes flipped, cut, put in, doubled, or spliced with another; or no message at all."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        kind, at = rng.randrange(9), rng.randrange(len(changed) + 1)
        if kind <= 2 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8) if kind else rng.randint(1, 255)
        elif kind == 3:
            del changed[at:]
        elif kind == 4:
            changed[at:at] = rng.choice(_HUGE)
        elif kind == 5:
            changed[at : at + 1] = rng.choice(_HUGE)
        elif kind == 6:
            changed[at:] = other[rng.randrange(len(other) + 1) :]
        elif kind == 7:
            changed[at:at] = rng.randbytes(rng.randrange(9))
        else:
            changed = bytearray(rng.randbytes(rng.choice((0, 1, 3, 40, 400))))
    return bytes(changed)
