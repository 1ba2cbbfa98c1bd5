"""From messages to frames and back: the coders compiled for one set of limits, and the bytes around them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgpack

from ods_async.core.requests import Limits
from ods_async.errors import LimitExceededError, ProtocolError
from ods_async.wire.coders import (
    BOOL,
    BYTES,
    FLOAT,
    INT,
    INT64_MAX,
    Coder,
    Refused,
    fixed,
    many,
    optional,
    record,
    short_repr,
)
from ods_async.wire.messages import (
    ANSWERS,
    BROADCASTS,
    CHECKS,
    LIMITS,
    OVERRIDES,
    PROTOCOL,
    REPORTS,
    REQUESTS,
    TICKETS,
)
from ods_async.wire.plain import plain_coder, sender_error
from ods_async.wire.text import text_coders

__all__ = ["DEFAULT", "CoderMaker", "Dialect", "Frame", "dialect_of", "is_id", "malformed", "to_bytes", "to_tree"]

Frame = bytes | bytearray | memoryview

# Shorter frames cannot make the decoder reserve much whatever sizes they announce; longer ones are walked first.
_WALK_BYTES: Final = 1024


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

        text, self._by_name = text_coders(text_bytes)
        self._leaves = {int: INT, float: FLOAT, bool: BOOL, bytes: BYTES, str: text}

    def of_class(self, cls: type[Any]) -> Coder:
        """The coder of a dataclass."""
        coder = self._made.get(cls)
        if coder is None:
            hints = typing.get_type_hints(cls)
            fields = {f.name: self._of_field(cls, f.name, hints[f.name]) for f in dataclasses.fields(cls)}
            coder = self._made[cls] = record(cls, fields, self._checks.get(cls))
        return coder

    def _of_field(self, cls: type[Any], name: str, hint: Any) -> Coder:
        if (cls, name) in self._overrides:
            return self._overrides[cls, name]
        if hint is str and name in self._by_name:
            return self._by_name[name]
        return self.of_annotation(hint)

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


class Dialect:
    """The compiled coders under one set of limits."""

    __slots__ = ("by_class", "by_tag", "limits")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        maker = CoderMaker(limits.text_bytes, plain_coder(limits), OVERRIDES, CHECKS)
        tables = (REQUESTS, ANSWERS, REPORTS, TICKETS, BROADCASTS)
        self.by_class = {cls: (cls.__name__, maker.of_class(cls).pack) for table in tables for cls in table.values()}
        self.by_tag = {cls.__name__: maker.of_class(cls).unpack for table in tables for cls in table.values()}

    def pack(self, message: Any) -> tuple[str, Any]:
        """Tag and tree of a message."""
        found = self.by_class.get(type(message))
        if found is None:
            raise TypeError(f"{type(message).__name__} is no message; see wire.messages")
        tag, pack = found
        try:
            return tag, pack(message)
        except Refused as refused:
            raise sender_error(refused.under(tag)) from None

    def unpack(self, tag: Any, tree: Any, allowed: Mapping[str, type[Any]], what: str) -> Any:
        """The message of a tag that is allowed here."""
        if type(tag) is not str or tag not in allowed:
            raise Refused(f"{short_repr(tag)} is no {what}")
        try:
            return self.by_tag[tag](tree)
        except Refused as refused:
            raise refused.under(tag)  # noqa: B904


DEFAULT: Final = Dialect(LIMITS)


@lru_cache(maxsize=16)
def _madedialect_of(limits: Limits) -> Dialect:
    return Dialect(limits)


def dialect_of(limits: Limits) -> Dialect:
    """The compiled coders for ``limits``, made once."""
    return DEFAULT if limits is LIMITS else _madedialect_of(limits)


def to_bytes(tree: Any, limits: Limits, what: str) -> bytes:
    """The frame of a tree; LimitExceededError when the receiver would not take it."""
    data: bytes = msgpack.packb(tree, buf_size=512)
    if len(data) > limits.header_bytes:
        raise LimitExceededError(
            f"{what} of {len(data)} bytes is larger than the {limits.header_bytes} bytes the receiver takes "
            "(header_bytes); send less at a time",
            what=what,
            size=len(data),
            limit=limits.header_bytes,
        )
    return data


def malformed(reason: str, request_id: int | None = None) -> ProtocolError:
    """The error for bytes that are no valid message."""
    return ProtocolError(f"malformed message: {reason}", reason=reason, request_id=request_id)


def to_tree(data: Frame, limits: Limits, what: str, length: int) -> tuple[Any, ...]:
    """The array of ``length`` elements that ``data`` is; the first one, the version, is checked."""
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > limits.header_bytes:
        raise malformed(f"{what} of {size} bytes, at most {limits.header_bytes} are taken")
    try:
        if size > _WALK_BYTES:
            # Walks over everything announced without building it, so that no size below is larger than its bytes.
            walker = msgpack.Unpacker(max_buffer_size=size, read_size=size)
            walker.feed(data)
            walker.skip()
        tree = msgpack.unpackb(
            data,
            use_list=False,
            raw=False,
            strict_map_key=True,
            max_str_len=limits.text_bytes,
            max_bin_len=size,
            max_array_len=size,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise malformed(f"{what} of {size} bytes: {reason[:200]}") from None
    if type(tree) is not tuple or not tree or type(tree[0]) is not int:
        raise malformed(f"{what} is no array that begins with a version")
    if tree[0] != PROTOCOL:
        raise malformed(
            f"the peer speaks version {tree[0]} of the protocol, this is version {PROTOCOL}; install the same version "
            "of ods_async at both ends",
            _readable_id(tree),
        )
    if len(tree) != length:
        raise malformed(f"{what} of {len(tree)} parts, expected {length}", _readable_id(tree))
    return tree


def _readable_id(tree: tuple[Any, ...]) -> int | None:
    return tree[1] if len(tree) > 1 and is_id(tree[1]) else None


def is_id(value: Any) -> bool:
    """Whether this can be the id of a request."""
    return type(value) is int and 0 <= value <= INT64_MAX
