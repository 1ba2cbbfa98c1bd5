"""How one value of a message looks as a tree of msgpack values, compiled from the dataclass's own annotations.

A tree is made of None, bool, int, float, str, bytes and arrays; no maps and no extension types exist on this wire, so
the decoder refuses both before it looks at them. A dataclass is the array of its fields in order.

Sending is generous where nothing is lost (a numpy integer for an ``int``, an int for a ``float``, a list for a tuple);
receiving is strict: a bool is no int, an int is no float, and the number of fields is exact.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from ods_async.core.schema import path_text

__all__ = ["INT64_MAX", "INT64_MIN", "UINT64_MAX", "Coder", "CoderMaker", "Refused", "short_repr"]

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


def _refuse(expected: str, value: object) -> Refused:
    return Refused(f"expected {expected}, found {type(value).__name__} {short_repr(value)}", value)


def check_text(value: str, limit: int) -> str:
    """``value`` if it is valid Unicode of at most ``limit`` UTF-8 bytes."""
    size = len(value)
    if size * 4 > limit or not value.isascii():
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise Refused(
                f"expected valid Unicode, found a lone surrogate at position {error.start}; "
                "decode the text properly, or send bytes",
                value,
            ) from None
        if size > limit:
            raise Refused(f"expected at most {limit} bytes of text, found {size}", value, size=size, limit=limit)
    return value


def _int_coder(lowest: int, highest: int) -> Coder:
    expected = f"an int from {lowest} to {highest}"

    def unpack(tree: Any) -> int:
        if type(tree) is int and lowest <= tree <= highest:
            return tree
        raise _refuse(expected, tree)

    def pack(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, (bool, np.bool_)):
                raise _refuse(expected, value)
            try:
                value = operator.index(value)
            except TypeError:
                raise _refuse(expected, value) from None
        if lowest <= value <= highest:
            return int(value)
        raise _refuse(expected, value)

    return Coder(pack, unpack)


INT: Final = _int_coder(INT64_MIN, INT64_MAX)
UINT64_TOO: Final = _int_coder(INT64_MIN, UINT64_MAX)


def _unpack_float(tree: Any) -> float:
    if type(tree) is float:
        return tree
    raise _refuse("a float", tree)


def _pack_float(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise _refuse("a float", value)


def _bool(value: Any) -> bool:
    if value is True or value is False:
        return bool(value)
    raise _refuse("a bool", value)


def _pack_bool(value: Any) -> bool:
    return bool(value) if isinstance(value, np.bool_) else _bool(value)


def _unpack_text(tree: Any) -> str:
    if type(tree) is str:
        return tree
    raise _refuse("text", tree)


def _unpack_bytes(tree: Any) -> bytes:
    if type(tree) is bytes:
        return tree
    raise _refuse("bytes", tree)


def _pack_bytes(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise _refuse("bytes", value)


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
            raise _refuse("an array", tree)
        return convert(tree, inner.unpack)

    def pack(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (tuple, list)):
            raise _refuse("a tuple", value)
        return convert(value, inner.pack)

    return Coder(pack, unpack)


def fixed(inners: tuple[Coder, ...]) -> Coder:
    """A tuple of exactly these."""
    packs, unpacks = tuple(c.pack for c in inners), tuple(c.unpack for c in inners)

    def convert(values: Any, ones: tuple[Callable[[Any], Any], ...]) -> tuple[Any, ...]:
        if not isinstance(values, (tuple, list)) or len(values) != len(ones):
            raise _refuse(f"an array of {len(ones)}", values)
        return tuple(one(value) for one, value in zip(ones, values, strict=True))

    return Coder(lambda value: convert(value, packs), lambda tree: convert(tree, unpacks))


def record(cls: type[Any], coders: dict[str, Coder], check: Callable[[Any], None] | None) -> Coder:
    """A dataclass as the array of its fields; ``check`` sees a received one and raises :class:`Refused`."""
    names = tuple(coders)
    packs, unpacks = tuple(c.pack for c in coders.values()), tuple(c.unpack for c in coders.values())
    count, title = len(names), cls.__name__
    keywords = any(f.kw_only for f in dataclasses.fields(cls))

    def locate(converts: tuple[Callable[[Any], Any], ...], values: Sequence[Any]) -> Refused:
        for name, convert, value in zip(names, converts, values, strict=True):
            try:
                convert(value)
            except Refused as refused:
                return refused.under(name)
        return Refused("a value changed while it was being read")

    def pack(value: Any) -> tuple[Any, ...]:
        if type(value) is not cls:
            raise _refuse(title, value)
        values = [getattr(value, name) for name in names]
        try:
            return tuple([one(item) for one, item in zip(packs, values, strict=True)])
        except Refused:
            raise locate(packs, values) from None

    def unpack(tree: Any) -> Any:
        if type(tree) is not tuple or len(tree) != count:
            raise _refuse(f"{title} as an array of {count} fields", tree)
        try:
            values = [one(item) for one, item in zip(unpacks, tree, strict=True)]
        except Refused:
            raise locate(unpacks, tree) from None
        made = cls(**dict(zip(names, values, strict=True))) if keywords else cls(*values)
        if check is not None:
            check(made)
        return made

    return Coder(pack, unpack)


class CoderMaker:
    """Compiles coders from annotations, each class once.

    Args:
        text_bytes: longest text, in UTF-8 bytes.
        plain: the coder of ``dict[str, object]`` fields.
        overrides: coders for single fields, by class and field name.
        checks: what a received instance of a class must also hold.
    """

    def __init__(
        self,
        text_bytes: int,
        plain: Coder,
        overrides: dict[tuple[type[Any], str], Coder],
        checks: dict[type[Any], Callable[[Any], None]],
    ) -> None:
        self._plain = plain
        self._overrides = overrides
        self._checks = checks
        self._made: dict[type[Any], Coder] = {}

        def pack_text(value: Any) -> str:
            if not isinstance(value, str):
                raise _refuse("text", value)
            return str(check_text(value, text_bytes))

        self._leaves = {
            int: INT,
            float: FLOAT,
            bool: BOOL,
            bytes: BYTES,
            str: Coder(pack_text, _unpack_text),
        }

    def of_class(self, cls: type[Any]) -> Coder:
        """The coder of a dataclass."""
        coder = self._made.get(cls)
        if coder is None:
            hints = typing.get_type_hints(cls)
            fields = {
                f.name: self._overrides.get((cls, f.name)) or self.of_annotation(hints[f.name])
                for f in dataclasses.fields(cls)
            }
            coder = self._made[cls] = record(cls, fields, self._checks.get(cls))
        return coder

    def of_annotation(self, hint: Any) -> Coder:
        """The coder of a type annotation.

        Raises:
            TypeError: a type that does not exist on this wire.
        """
        if hint in self._leaves:
            return self._leaves[hint]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.of_class(hint)
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union) and len(arguments) == 2 and type(None) in arguments:
            return optional(self.of_annotation(arguments[0] if arguments[1] is type(None) else arguments[1]))
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return many(self.of_annotation(arguments[0]))
        if origin is tuple and Ellipsis not in arguments:
            return fixed(tuple(self.of_annotation(argument) for argument in arguments))
        if origin is dict and arguments == (str, object):
            return self._plain
        raise TypeError(f"a message cannot have a field of type {hint!r}; see core.requests for the types it can have")
