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
from typing import Any, Final

from ods_async.core.events import Event
from ods_async.core.reports import Report, RevokeTickets, ShutDown, Ticket, Verdict
from ods_async.core.requests import Answer, Limits, Request
from ods_async.errors import OdsError
from ods_async.wire.coders import Refused, short_repr
from ods_async.wire.dialect import DEFAULT, Frame, dialect_of, is_id, malformed, to_bytes, to_tree
from ods_async.wire.errors import describe_error, own_type, restore_error
from ods_async.wire.messages import (
    ANSWERS,
    BROADCASTS,
    EVENTS,
    LIMITS,
    PROTOCOL,
    REPORTS,
    REQUESTS,
    TICKETS,
    Broadcast,
    ErrorReport,
)

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
    "event_from_record",
    "topic_of",
]

EVENT_TOPIC: Final = b"event."
VERDICT_TOPIC: Final = b"verdict."
TICKETS_TOPIC: Final = b"tickets"
STOP_TOPIC: Final = b"stop"
BEAT_TOPIC: Final = b"beat"

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
    if not is_id(request_id) or not 0 <= timeout < math.inf:
        raise ValueError(f"request_id {request_id!r} or timeout {timeout!r} is out of range")
    tag, tree = dialect_of(limits).pack(request)
    return to_bytes((PROTOCOL, request_id, float(timeout), tag, tree), limits, tag)


def decode_request(data: Frame, limits: Limits = LIMITS) -> tuple[int, float, Request]:
    """Id, time-out in seconds, and the request.

    Raises:
        ProtocolError: no valid request; its ``request_id`` is the asker's where it could be read, else None.
    """
    _, request_id, timeout, tag, body = to_tree(data, limits, "request", 5)
    if not is_id(request_id):
        raise malformed(f"request id {short_repr(request_id)} is out of range")
    if type(timeout) is not float or not 0 <= timeout < math.inf:
        raise malformed(f"time-out {short_repr(timeout)} is no finite, non-negative float", request_id)
    try:
        request: Request = dialect_of(limits).unpack(tag, body, REQUESTS, "request")
    except Refused as refused:
        raise malformed(str(refused), request_id) from None
    return request_id, timeout, request


def encode_answer(request_id: int, answer: Answer | OdsError, limits: Limits = LIMITS) -> bytes:
    """An answer, or an error as the answer, as one frame.

    An error always fits: its words are cut. An answer that does not is for the caller to refuse, who may have to take
    back what it says (a lease, drained records).

    Raises:
        ArgumentError: a field of the wrong type.
        LimitExceededError: the answer is too large to be taken; fit to be sent as the answer instead (C43).
    """
    if not is_id(request_id):
        raise ValueError(f"request_id {request_id!r} is out of range")
    if isinstance(answer, OdsError):
        tag, tree = dialect_of(limits).pack(describe_error(answer, limits))
        return to_bytes((PROTOCOL, request_id, tag, tree), LIMITS, tag)
    tag, tree = dialect_of(limits).pack(answer)
    return to_bytes((PROTOCOL, request_id, tag, tree), limits, tag)


def decode_answer(data: Frame, limits: Limits = LIMITS) -> tuple[int, Answer | OdsError]:
    """Id of the request, and the answer or the error that the broker answered with.

    A worker's exception comes as ``OnlineDataWorkerError``; ``wire.errors.own_type`` makes of it what to raise.

    Raises:
        ProtocolError: no valid answer.
    """
    _, request_id, tag, body = to_tree(data, limits, "answer", 4)
    if not is_id(request_id):
        raise malformed(f"request id {short_repr(request_id)} is out of range")
    try:
        answer = dialect_of(limits).unpack(tag, body, ANSWERS, "answer")
    except Refused as refused:
        raise malformed(str(refused), request_id) from None
    return request_id, restore_error(answer) if isinstance(answer, ErrorReport) else answer


# --- reports, tickets, broadcasts, errors ---------------------------------------------------------------------------


def _encode(message: Any, limits: Limits) -> bytes:
    tag, tree = dialect_of(limits).pack(message)
    return to_bytes((PROTOCOL, tag, tree), limits, tag)


def _decode(data: Frame, limits: Limits, allowed: Mapping[str, type[Any]], what: str) -> Any:
    _, tag, body = to_tree(data, limits, what, 3)
    try:
        return dialect_of(limits).unpack(tag, body, allowed, what)
    except Refused as refused:
        raise malformed(str(refused)) from None


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
        raise malformed(f"topic {short_repr(bytes(topic))} on a message for {short_repr(expected)}")
    return what


_EVENTS_BY_KIND: Final = {cls.kind: cls.__name__ for cls in EVENTS.values()}


def event_from_record(record: Mapping[str, object]) -> Event:
    """An event of an answer to ``Replay`` or ``Drain`` (see ``core.events.to_record``), with every field checked.

    Raises:
        ProtocolError: no valid event.
    """
    kind = record.get("kind")
    name = _EVENTS_BY_KIND.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise malformed(f"{short_repr(kind)} is no kind of event")
    cls = EVENTS[name]
    names = [f for f in cls.__dataclass_fields__ if f != "kind"]
    if len(record) != len(names) + 1 or not all(f in record for f in names):
        raise malformed(f"event {kind!r} has missing or unknown fields")
    try:
        event: Event = DEFAULT.unpack(name, tuple(record[f] for f in names), EVENTS, "event")
    except Refused as refused:
        raise malformed(str(refused)) from None
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
