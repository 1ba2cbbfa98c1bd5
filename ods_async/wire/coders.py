"""How one value of a message looks as a tree of msgpack values, compiled from the dataclass's own annotations.

A tree is made of None, bool, int, float, str, bytes and arrays; no maps and no extension types exist on this wire, so
the decoder refuses both before it looks at them. A dataclass is the array of its fields in order.

Sending is generous where nothing is lost (a numpy integer for an ``int``, an int for a ``float``, a list for a tuple);
receiving is strict: a bool is no int, an int is no float, and the number of fields is exact.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from ods_async.core.schema import path_text

__all__ = ["INT64_MAX", "INT64_MIN", "UINT64_MAX", "Coder", "Refused", "refuse", "short_repr"]

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
UINT64_MAX: Final = 2**64 - 1


class Refused(Exception):
    """A value that does not fit, with the way to it. Never leaves ``wire``: it becomes an error of the package.

    ``size`` and ``limit`` are given when the value is merely too large.
    """

    def __init__(self, reason: str, value: object = None, *, size: int | None = None, limit: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value
        self.size = size
        self.limit = limit
        self.path: tuple[str, ...] = ()

    def under(self, key: str) -> Self:
        """The same, seen from one level further out."""
        self.path = (key, *self.path)
        return self

    @property
    def where(self) -> str:
        """The way to the value, as people read it."""
        return path_text(self.path)

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" if self.path else self.reason


@dataclass(frozen=True, slots=True)
class Coder:
    """``pack`` turns a value into a tree, ``unpack`` a tree into a value; both raise :class:`Refused`."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def short_repr(value: object) -> str:
    """For messages: at most some 80 characters, whatever the value."""
    if isinstance(value, (str, bytes, tuple, list, dict)) and len(value) > 40:
        return f"{type(value).__name__} of length {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"int of {value.bit_length()} bits"
    if isinstance(value, (tuple, list, dict)):
        return f"{type(value).__name__} of {len(value)} items"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse(expected: str, value: object) -> Refused:
    """The refusal of a value of the wrong type or range."""
    return Refused(f"expected {expected}, found {type(value).__name__} {short_repr(value)}", value)


def _int_coder(lowest: int, highest: int) -> Coder:
    expected = f"an int from {lowest} to {highest}"

    def unpack(tree: Any) -> int:
        if type(tree) is int and lowest <= tree <= highest:
            return tree
        raise refuse(expected, tree)

    def pack(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, (bool, np.bool_)):
                raise refuse(expected, value)
            try:
                value = operator.index(value)
            except TypeError:
                raise refuse(expected, value) from None
        if lowest <= value <= highest:
            return int(value)
        raise refuse(expected, value)

    return Coder(pack, unpack)


INT: Final = _int_coder(INT64_MIN, INT64_MAX)
UINT64_TOO: Final = _int_coder(INT64_MIN, UINT64_MAX)


def _unpack_float(tree: Any) -> float:
    if type(tree) is float:
        return tree
    raise refuse("a float", tree)


def _pack_float(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise refuse("a float", value)


def _bool(value: Any) -> bool:
    if value is True or value is False:
        return bool(value)
    raise refuse("a bool", value)


def _pack_bool(value: Any) -> bool:
    return bool(value) if isinstance(value, np.bool_) else _bool(value)


def _unpack_bytes(tree: Any) -> bytes:
    if type(tree) is bytes:
        return tree
    raise refuse("bytes", tree)


def _pack_bytes(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise refuse("bytes", value)


FLOAT: Final = Coder(_pack_float, _unpack_float)
BOOL: Final = Coder(_pack_bool, _bool)
BYTES: Final = Coder(_pack_bytes, _unpack_bytes)


def optional(inner: Coder) -> Coder:
    """None, or what ``inner`` takes."""
    inner_pack, inner_unpack = inner.pack, inner.unpack
    return Coder(
        lambda value: None if value is None else inner_pack(value),
        lambda tree: None if tree is None else inner_unpack(tree),
    )


def _locate(convert: Callable[[Any], Any], values: Sequence[Any]) -> Refused:
    """The first refusal among ``values``, with its index; called when one is known to be refused."""
    for index, value in enumerate(values):
        try:
            convert(value)
        except Refused as refused:
            return refused.under(str(index))
    return Refused("a value changed while it was being read")


def many(inner: Coder) -> Coder:
    """A tuple of any length; a run of ints is checked at the speed of C."""
    only_ints = inner is INT

    def convert(values: Any, one: Callable[[Any], Any]) -> tuple[Any, ...]:
        if not values:
            return ()
        if only_ints and set(map(type, values)) == {int} and min(values) >= INT64_MIN and max(values) <= INT64_MAX:
            return tuple(values)
        try:
            return tuple(map(one, values))
        except Refused:
            raise _locate(one, values) from None

    def unpack(tree: Any) -> tuple[Any, ...]:
        if type(tree) is not tuple:
            raise refuse("an array", tree)
        return convert(tree, inner.unpack)

    def pack(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (tuple, list)):
            raise refuse("a tuple", value)
        return convert(value, inner.pack)

    return Coder(pack, unpack)


def fixed(inners: tuple[Coder, ...]) -> Coder:
    """A tuple of exactly these."""
    packs, unpacks = tuple(c.pack for c in inners), tuple(c.unpack for c in inners)
    only_ints = len(inners) > 0 and all(inner is INT for inner in inners)

    def convert(values: Any, ones: tuple[Callable[[Any], Any], ...]) -> tuple[Any, ...]:
        if not isinstance(values, (tuple, list)) or len(values) != len(ones):
            raise refuse(f"an array of {len(ones)}", values)
        if only_ints and set(map(type, values)) == {int} and min(values) >= INT64_MIN and max(values) <= INT64_MAX:
            return tuple(values)
        return tuple(one(value) for one, value in zip(ones, values, strict=True))

    return Coder(lambda value: convert(value, packs), lambda tree: convert(tree, unpacks))


def _plain(coders: tuple[Coder, ...]) -> Callable[[Sequence[Any]], bool] | None:
    """Tells at the speed of C that values are ints and bytes that mean themselves; None where there are others."""
    types = tuple({INT: int, BYTES: bytes}.get(coder) for coder in coders)
    ints = [place for place, kind in enumerate(types) if kind is int]
    if None in types or len(ints) < 2:
        return None
    numbers = operator.itemgetter(*ints)

    def plain(values: Sequence[Any]) -> bool:
        if tuple(map(type, values)) != types:
            return False
        found: tuple[int, ...] = numbers(values)
        return min(found) >= INT64_MIN and max(found) <= INT64_MAX

    return plain


def record(cls: type[Any], coders: dict[str, Coder], check: Callable[[Any], None] | None) -> Coder:
    """A dataclass as the array of its fields; ``check`` sees a received one and raises :class:`Refused`."""
    names = tuple(coders)
    packs, unpacks = tuple(c.pack for c in coders.values()), tuple(c.unpack for c in coders.values())
    count, title = len(names), cls.__name__
    keywords = any(f.kw_only for f in dataclasses.fields(cls))
    look = operator.attrgetter(*names) if count > 1 else None
    plain = _plain(tuple(coders.values()))

    def locate(converts: tuple[Callable[[Any], Any], ...], values: Sequence[Any]) -> Refused:
        for name, convert, value in zip(names, converts, values, strict=True):
            try:
                convert(value)
            except Refused as refused:
                return refused.under(name)
        return Refused("a value changed while it was being read")

    def pack(value: Any) -> tuple[Any, ...]:
        if type(value) is not cls:
            raise refuse(title, value)
        values: Sequence[Any] = [getattr(value, name) for name in names] if look is None else look(value)
        if plain is not None and plain(values):
            return tuple(values)
        try:
            return tuple([one(item) for one, item in zip(packs, values, strict=True)])
        except Refused:
            raise locate(packs, values) from None

    def unpack(tree: Any) -> Any:
        if type(tree) is not tuple or len(tree) != count:
            raise refuse(f"{title} as an array of {count} fields", tree)
        values: Sequence[Any] = tree
        if plain is None or not plain(tree):
            try:
                values = [one(item) for one, item in zip(unpacks, tree, strict=True)]
            except Refused:
                raise locate(unpacks, tree) from None
        made = cls(**dict(zip(names, values, strict=True))) if keywords else cls(*values)
        if check is not None:
            check(made)
        return made

    return Coder(pack, unpack)
