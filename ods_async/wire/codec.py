"""Messages to bytes and back.

Every message is one msgpack array whose first element is the version of the protocol; a request and an answer then
carry the request's id. Decoding trusts nothing: sizes first, then structure, then every field's type, and whatever is
wrong is one :class:`~ods_async.errors.ProtocolError` with the reason and, where it could be read, the request's id.

Encoding refuses, before anything is sent, whatever the receiver would refuse: ``ArgumentError`` names the field,
``LimitExceededError`` both sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgpack

from ods_async.core.events import Event
from ods_async.core.reports import Report, RevokeTickets, ShutDown, Ticket, Verdict
from ods_async.core.requests import Answer, Limits, Request
from ods_async.errors import LimitExceededError, OdsError, ProtocolError
from ods_async.wire.coders import INT64_MAX, CoderMaker, Refused, short_repr
from ods_async.wire.errors import describe_error, own_type, restore_error
from ods_async.wire.messages import (
    ANSWERS,
    BROADCASTS,
    CHECKS,
    EVENTS,
    LIMITS,
    OVERRIDES,
    PROTOCOL,
    REPORTS,
    REQUESTS,
    TICKETS,
    Broadcast,
    ErrorReport,
)
from ods_async.wire.plain import plain_coder, sender_error

__all__ = [
    "BEAT_TOPIC",
    "EVENT_TOPIC",
    "STOP_TOPIC",
    "TICKETS_TOPIC",
    "VERDICT_TOPIC",
    "decode_answer",
    "decode_broadcast",
    "decode_error",
    "decode_report",
    "decode_request",
    "decode_ticket",
    "encode_answer",
    "encode_broadcast",
    "encode_error",
    "encode_report",
    "encode_request",
    "encode_ticket",
    "event_from_plain",
    "topic_of",
]

EVENT_TOPIC: Final = b"event."
VERDICT_TOPIC: Final = b"verdict."
TICKETS_TOPIC: Final = b"tickets"
STOP_TOPIC: Final = b"stop"
BEAT_TOPIC: Final = b"beat"

Frame = bytes | bytearray | memoryview

# Shorter frames cannot make the decoder reserve much whatever sizes they announce; longer ones are walked first.
_WALK_BYTES: Final = 1024


class _Dialect:
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


_DEFAULT: Final = _Dialect(LIMITS)


@lru_cache(maxsize=16)
def _made_dialect(limits: Limits) -> _Dialect:
    return _Dialect(limits)


def _dialect(limits: Limits) -> _Dialect:
    return _DEFAULT if limits is LIMITS else _made_dialect(limits)


def _to_bytes(tree: Any, limits: Limits, what: str) -> bytes:
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


def _malformed(reason: str, request_id: int | None = None) -> ProtocolError:
    return ProtocolError(f"malformed message: {reason}", reason=reason, request_id=request_id)


def _to_tree(data: Frame, limits: Limits, what: str, length: int) -> tuple[Any, ...]:
    """The array of ``length`` elements that ``data`` is; the first one, the version, is checked."""
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > limits.header_bytes:
        raise _malformed(f"{what} of {size} bytes, at most {limits.header_bytes} are taken")
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
        raise _malformed(f"{what} of {size} bytes: {reason[:200]}") from None
    if type(tree) is not tuple or not tree or type(tree[0]) is not int:
        raise _malformed(f"{what} is no array that begins with a version")
    if tree[0] != PROTOCOL:
        raise _malformed(
            f"the peer speaks version {tree[0]} of the protocol, this is version {PROTOCOL}; install the same version "
            "of ods_async at both ends",
            _readable_id(tree),
        )
    if len(tree) != length:
        raise _malformed(f"{what} of {len(tree)} parts, expected {length}", _readable_id(tree))
    return tree


def _readable_id(tree: tuple[Any, ...]) -> int | None:
    return tree[1] if len(tree) > 1 and _is_id(tree[1]) else None


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= INT64_MAX


# --- requests and answers -------------------------------------------------------------------------------------------


def encode_request(request_id: int, timeout: float, request: Request, limits: Limits = LIMITS) -> bytes:
    """A request as one frame.

    Args:
        request_id: not negative, below 2**63; comes back with the answer.
        timeout: how long the asker will wait, in seconds; finite.
        request: what is asked.
        limits: the broker's, once known.

    Raises:
        ArgumentError: a field of the wrong type.
        LimitExceededError: too large to be taken.
    """
    if not _is_id(request_id) or not 0 <= timeout < math.inf:
        raise ValueError(f"request_id {request_id!r} or timeout {timeout!r} is out of range")
    tag, tree = _dialect(limits).pack(request)
    return _to_bytes((PROTOCOL, request_id, float(timeout), tag, tree), limits, tag)


def decode_request(data: Frame, limits: Limits = LIMITS) -> tuple[int, float, Request]:
    """Id, time-out in seconds, and the request.

    Raises:
        ProtocolError: no valid request; its ``request_id`` is the asker's where it could be read, else None.
    """
    _, request_id, timeout, tag, body = _to_tree(data, limits, "request", 5)
    if not _is_id(request_id):
        raise _malformed(f"request id {short_repr(request_id)} is out of range")
    if type(timeout) is not float or not 0 <= timeout < math.inf:
        raise _malformed(f"time-out {short_repr(timeout)} is no finite, non-negative float", request_id)
    try:
        request: Request = _dialect(limits).unpack(tag, body, REQUESTS, "request")
    except Refused as refused:
        raise _malformed(str(refused), request_id) from None
    return request_id, timeout, request


def encode_answer(request_id: int, answer: Answer | OdsError, limits: Limits = LIMITS) -> bytes:
    """An answer, or an error as the answer, as one frame.

    An answer that is larger than ``header_bytes`` becomes the error that says so, so that the asker always hears
    something.
    """
    if not _is_id(request_id):
        raise ValueError(f"request_id {request_id!r} is out of range")
    message = describe_error(answer, limits) if isinstance(answer, OdsError) else answer
    try:
        tag, tree = _dialect(limits).pack(message)
        return _to_bytes((PROTOCOL, request_id, tag, tree), limits, tag)
    except LimitExceededError as error:
        tag, tree = _dialect(limits).pack(describe_error(error, limits))
        return msgpack.packb((PROTOCOL, request_id, tag, tree))  # type: ignore[no-any-return]


def decode_answer(data: Frame, limits: Limits = LIMITS) -> tuple[int, Answer | OdsError]:
    """Id of the request, and the answer or the error that the broker answered with.

    A worker's exception comes as ``OnlineDataWorkerError``; ``wire.errors.own_type`` makes of it what to raise.

    Raises:
        ProtocolError: no valid answer.
    """
    _, request_id, tag, body = _to_tree(data, limits, "answer", 4)
    if not _is_id(request_id):
        raise _malformed(f"request id {short_repr(request_id)} is out of range")
    try:
        answer = _dialect(limits).unpack(tag, body, ANSWERS, "answer")
    except Refused as refused:
        raise _malformed(str(refused), request_id) from None
    return request_id, restore_error(answer) if isinstance(answer, ErrorReport) else answer


# --- reports, tickets, broadcasts, errors ---------------------------------------------------------------------------


def _encode(message: Any, limits: Limits) -> bytes:
    tag, tree = _dialect(limits).pack(message)
    return _to_bytes((PROTOCOL, tag, tree), limits, tag)


def _decode(data: Frame, limits: Limits, allowed: Mapping[str, type[Any]], what: str) -> Any:
    _, tag, body = _to_tree(data, limits, what, 3)
    try:
        return _dialect(limits).unpack(tag, body, allowed, what)
    except Refused as refused:
        raise _malformed(str(refused)) from None


def encode_report(report: Report, limits: Limits = LIMITS) -> bytes:
    """A worker's report as one frame (a rollout's payload is a second one, see ``wire.rollout``).

    Raises:
        ArgumentError: a field of the wrong type, or metadata that cannot be sent; it names the way to it.
        LimitExceededError: too large to be taken.
    """
    return _encode(report, limits)


def decode_report(data: Frame, limits: Limits = LIMITS) -> Report:
    """The report. Raises ProtocolError when it is none."""
    report: Report = _decode(data, limits, REPORTS, "report")
    return report


def encode_ticket(ticket: Ticket) -> bytes:
    """A ticket as one frame."""
    return _encode(ticket, LIMITS)


def decode_ticket(data: Frame) -> Ticket:
    """The ticket. Raises ProtocolError when it is none."""
    ticket: Ticket = _decode(data, LIMITS, TICKETS, "ticket")
    return ticket


def topic_of(what: Broadcast) -> bytes:
    """The topic something is broadcast under: a subscriber's filter is a prefix of it."""
    if isinstance(what, Event):
        return EVENT_TOPIC + what.kind.encode()
    if isinstance(what, Verdict):
        return VERDICT_TOPIC + what.worker_id.encode()
    if isinstance(what, RevokeTickets):
        return TICKETS_TOPIC
    return STOP_TOPIC if isinstance(what, ShutDown) else BEAT_TOPIC


def encode_broadcast(what: Broadcast, limits: Limits = LIMITS) -> tuple[bytes, bytes]:
    """Topic and frame of something told to every subscriber."""
    data = _encode(what, limits)
    return topic_of(what), data


def decode_broadcast(topic: Frame, data: Frame, limits: Limits = LIMITS) -> Broadcast:
    """What was broadcast. Raises ProtocolError when it is nothing valid or does not belong to its topic.

    A filter is a prefix: a worker that subscribes to its verdicts also gets those of ids that begin with its own.
    """
    what: Broadcast = _decode(data, limits, BROADCASTS, "broadcast")
    expected = topic_of(what)
    if bytes(topic) != expected:
        raise _malformed(f"topic {short_repr(bytes(topic))} on a message for {short_repr(expected)}")
    return what


_EVENTS_BY_KIND: Final = {cls.kind: cls.__name__ for cls in EVENTS.values()}


def event_from_plain(plain: Mapping[str, object]) -> Event:
    """An event of an answer to ``Replay`` or ``Drain``, with every field checked.

    Raises:
        ProtocolError: no valid event.
    """
    kind = plain.get("kind")
    name = _EVENTS_BY_KIND.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise _malformed(f"{short_repr(kind)} is no kind of event")
    cls = EVENTS[name]
    names = [f for f in cls.__dataclass_fields__ if f != "kind"]
    if len(plain) != len(names) + 1 or not all(f in plain for f in names):
        raise _malformed(f"event {kind!r} has missing or unknown fields")
    try:
        event: Event = _DEFAULT.unpack(name, tuple(plain[f] for f in names), EVENTS, "event")
    except Refused as refused:
        raise _malformed(str(refused)) from None
    return event


def encode_error(error: BaseException, limits: Limits = LIMITS) -> bytes:
    """Any exception in words, of bounded size."""
    return _encode(describe_error(error, limits), limits)


def decode_error(data: Frame, limits: Limits = LIMITS) -> Exception:
    """The exception, as its own type where that is safely known, else as OnlineDataWorkerError (B11).

    Raises:
        ProtocolError: no valid description of an error.
    """
    report: ErrorReport = _decode(data, limits, {"ErrorReport": ErrorReport}, "error")
    return own_type(restore_error(report))
