"""Messages as the other end reads them: encoded and decoded again, for the schedules that want it so."""

from __future__ import annotations

from typing import Any

import numpy as np

from ods_async.core.episode import Rollout
from ods_async.core.requests import FieldDescription
from ods_async.core.stimuli import Malformed, RolloutArrived
from ods_async.errors import OdsError, SchemaMismatchError
from ods_async.wire import codec
from ods_async.wire.errors import own_type
from ods_async.wire.rollout import pack_rollout, plan_rollout, unpack_rollout

__all__ = ["over_the_wire"]


def over_the_wire(channel: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a message's receiver, with the message in them read from its bytes."""
    if channel == "^requests":
        *before, number, request, wait = args
        number, wait, request = codec.decode_request(codec.encode_request(number, wait, request))
        return (*before, number, request, wait)
    if channel == "answers":
        number, answer, payload = args
        number, answer = codec.decode_answer(codec.encode_answer(number, answer))
        return number, own_type(answer) if isinstance(answer, OdsError) else answer, payload
    (message,) = args
    if channel == "tickets":
        return (codec.decode_ticket(codec.encode_ticket(message)),)
    if channel == "broadcast":
        return (codec.decode_broadcast(*codec.encode_broadcast(message)),)
    if isinstance(message, RolloutArrived):
        return (RolloutArrived(_packed(message.rollout)),)
    return (message if isinstance(message, Malformed) else codec.decode_report(codec.encode_report(message)),)


def _packed(rollout: Rollout) -> Rollout:
    arrays = rollout.episodes[0].arrays
    fields = tuple(FieldDescription(path, array.dtype.name, array.shape[1:], 0, 0) for path, array in arrays.items())
    try:
        header, nbytes = plan_rollout(rollout, fields)
    except SchemaMismatchError:
        return rollout  # the broker has to cope with senders that do not check, too
    payload = np.empty(nbytes, np.uint8).data
    pack_rollout(rollout, header, payload)
    report = codec.decode_report(codec.encode_report(header))
    return unpack_rollout(report, payload)  # type: ignore[arg-type]
