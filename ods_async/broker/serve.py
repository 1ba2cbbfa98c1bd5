"""Requests: from the frames of the answering socket to what the state is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ods_async.broker.effects import EffectRunner
from ods_async.core.requests import Connect, Limits
from ods_async.core.stimuli import AskedFor, Malformed, Stimulus
from ods_async.errors import OdsError, ProtocolError
from ods_async.transport.sockets import Frame, split_envelope
from ods_async.wire.codec import decode_request

__all__ = ["Requests"]

UNKNOWN_REQUEST = 0
LONGEST_TIMEOUT = 7 * 86400.0


class Requests:
    """Turns what arrives on the answering socket into :class:`~ods_async.core.stimuli.AskedFor`.

    Args:
        feed: tells the state.
        effects: sends what has to be answered without the state.
        limits: what a peer may send.
    """

    def __init__(self, feed: Callable[[Stimulus], None], effects: EffectRunner, limits: Limits) -> None:
        self._feed = feed
        self._effects = effects
        self._limits = limits

    def on_message(self, frames: Sequence[Frame]) -> None:
        """One message, whatever it is: a request, or bytes that are counted and, if possible, answered (C12)."""
        try:
            peer, body = split_envelope(frames)
        except ProtocolError as error:
            self._feed(Malformed("requests", error.reason))
            return
        try:
            if len(body) != 1:
                raise _malformed(f"{len(body)} frames instead of 1")
            request_id, timeout, request = decode_request(body[0], self._limits)
        except OdsError as error:
            self._feed(Malformed("requests", str(error.fields.get("reason", error.message))))
            readable = error.fields.get("request_id")
            self._effects.refuse(peer, UNKNOWN_REQUEST if readable is None else readable, error)
            return
        if isinstance(request, Connect):
            with self._effects.dialled(peer, request.via):
                self._feed(AskedFor(peer, request_id, request, min(timeout, LONGEST_TIMEOUT)))
        else:
            self._feed(AskedFor(peer, request_id, request, min(timeout, LONGEST_TIMEOUT)))


def _malformed(reason: str) -> ProtocolError:
    return ProtocolError(f"this is no request: {reason}", reason=reason)
