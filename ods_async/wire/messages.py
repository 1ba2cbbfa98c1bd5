"""Everything that can be said on the wire: which messages go where, and what a received one must also hold.

A message is a dataclass of ``core.requests``, ``core.reports`` or ``core.events``; its tag is the class's name. A new
member of the unions there is on the wire at once.
"""

from __future__ import annotations

import math
import operator
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from ods_async.core import events
from ods_async.core.events import EpisodeEvicted, EpisodePublished, Event
from ods_async.core.reports import Report, RevokeTickets, ServiceBeat, ShutDown, Ticket, Verdict
from ods_async.core.requests import Answer, Batch, BufferDescription, FieldDescription, Limits, Plan, Request, Sample
from ods_async.wire.coders import UINT64_TOO, Coder, Refused, optional
from ods_async.wire.plain import SCALARS

__all__ = [
    "ANSWERS",
    "BROADCASTS",
    "CHECKS",
    "EVENTS",
    "LIMITS",
    "OVERRIDES",
    "PROTOCOL",
    "REPORTS",
    "REQUESTS",
    "TICKETS",
    "Broadcast",
    "ErrorReport",
]

PROTOCOL: Final = 1
"""Version of this wire; the first element of every message, so that a foreign version is told apart from noise."""

LIMITS: Final = Limits()
"""What is taken where the broker's own limits are not known yet."""

MAX_DIMENSIONS: Final = 32
MAX_STEPS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An exception in words: never an object, never code.

    ``fields`` are the attributes of the package's own errors; of any other exception they hold its plain ``args``.
    """

    module: str
    type_name: str
    message: str
    fields: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


Broadcast = Event | Verdict | RevokeTickets | ShutDown | ServiceBeat


def _by_name(*classes: Any) -> Mapping[str, type[Any]]:
    return {cls.__name__: cls for cls in classes}


REQUESTS: Final = _by_name(*typing.get_args(Request))
ANSWERS: Final = _by_name(*typing.get_args(Answer), ErrorReport)
REPORTS: Final = _by_name(*typing.get_args(Report))
TICKETS: Final = _by_name(Ticket)
EVENTS: Final = _by_name(
    *(
        cls
        for name in events.__all__
        if isinstance(cls := getattr(events, name), type) and issubclass(cls, Event) and cls.kind
    )
)
BROADCASTS: Final = {**EVENTS, **_by_name(Verdict, RevokeTickets, ShutDown, ServiceBeat)}

OVERRIDES: Final[dict[tuple[type[Any], str], Coder]] = {
    # Seeds of torch and numpy fill 64 bits without a sign; every other int must fit numpy's int64.
    (Sample, "seed"): optional(UINT64_TOO),
}


def _check_field(description: FieldDescription) -> None:
    if not description.path:
        raise Refused("a field without a path")
    if description.dtype not in SCALARS:
        raise Refused(f"dtype {description.dtype[:40]!r} is not one of {', '.join(SCALARS)}").under("dtype")
    if len(description.shape) > MAX_DIMENSIONS or min(description.shape, default=0) < 0:
        raise Refused(f"a shape has at most {MAX_DIMENSIONS} sizes, none negative").under("shape")
    if math.prod(description.shape) * SCALARS[description.dtype].itemsize > 2**62:
        raise Refused("one step of the field does not fit any memory").under("shape")
    if description.offset < 0:
        raise Refused(f"offset {description.offset} is negative").under("offset")


def _check_plan(plan: Plan) -> None:
    count = plan.batch_size
    if count < 1 or plan.length < 1 or plan.history < 0:
        raise Refused(f"{count} windows of {plan.length} steps, {plan.history} of history, are no plan")
    ends = 4 * count if plan.history else 0
    for name, data, expected in (
        ("rows", plan.rows, 4 * count),
        ("starts", plan.starts, 4 * count),
        ("first", plan.first, ends),
        ("last", plan.last, ends),
        ("stamps", plan.stamps, 8 * count),
    ):
        if len(data) != expected:
            raise Refused(f"{count} windows need {expected} bytes, found {len(data)}").under(name)


def _check_batch(batch: Batch) -> None:
    if batch.batch_size < 1 or batch.length < 1 or batch.history < 0 or batch.payload_bytes < 0:
        raise Refused(f"{batch.batch_size} windows of {batch.length} steps in {batch.payload_bytes} bytes are no batch")


def _check_buffer(buffer: BufferDescription) -> None:
    if buffer.rows < 1 or buffer.steps < 1 or buffer.segment_bytes < 0 or buffer.stamps_offset < 0:
        raise Refused(f"{buffer.rows} rows of {buffer.steps} steps in {buffer.segment_bytes} bytes are no buffer")


def _check_episode(event: EpisodePublished | EpisodeEvicted) -> None:
    # What is written out to single steps when someone reads it must not be larger than any row can be.
    for name, runs, steps in (
        ("valid_runs", event.valid_runs, event.valid_frames),
        ("anchor_runs", event.anchor_runs, event.eligible_anchors),
    ):
        if not 0 <= steps <= MAX_STEPS:
            raise Refused(f"{steps} steps are not in any row").under(name)
        ends = [0, *chain.from_iterable(runs)]
        if any(map(operator.gt, ends, ends[1:])) or sum(end - start for start, end in runs) != steps:
            raise Refused(f"no runs of {steps} steps in order").under(name)


CHECKS: Final[dict[type[Any], Callable[[Any], None]]] = {
    FieldDescription: _check_field,
    Plan: _check_plan,
    Batch: _check_batch,
    BufferDescription: _check_buffer,
    EpisodePublished: _check_episode,
    EpisodeEvicted: _check_episode,
}
