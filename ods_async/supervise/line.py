"""A plain line to a broker: one question at a time, blocking, with deadlines. For owners and for the command line.

Unlike the clients it knows nothing of batches, so that who only asks, watches or stops a service imports no torch.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Self, TypeVar

from ods_async.core.requests import Answer, Connect, Request, Welcome
from ods_async.errors import BrokerUnreachableError, ProtocolError, RequestTimeoutError, SessionLostError
from ods_async.transport.curve import CurveKeys, as_keys
from ods_async.transport.endpoint import parse_endpoint
from ods_async.transport.lane import Lane
from ods_async.transport.sockets import ChannelOptions, Hub
from ods_async.wire.messages import LIMITS, PROTOCOL

__all__ = ["Line"]

A = TypeVar("A", bound=Answer)


class Line:
    """One connection to a broker, made anew when it was lost. Several threads may use it, one question after the other.

    Args:
        endpoint: the broker's address.
        role: "owner", "observer" or "consumer".
        name: how the broker calls this line when it speaks to people.
        connect_timeout: seconds within which a broker must answer the first words.
        keys: CURVE keys for a tcp endpoint, or the path of their folder or file.

    Raises:
        EndpointError: an address that cannot be dialled.
        ConfigError: keys that cannot be read.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        role: str,
        name: str,
        connect_timeout: float = 5.0,
        keys: CurveKeys | str | os.PathLike[str] | None = None,
    ) -> None:
        self.endpoint = str(parse_endpoint(endpoint))
        self._hello = Connect(via=self.endpoint, role=role, name=name, protocol=PROTOCOL)
        self._connect_timeout = connect_timeout
        self._keys = as_keys(keys, self.endpoint)
        self._hub = Hub()
        self._lock = threading.Lock()
        self._lane: Lane | None = None
        self._welcome: Welcome | None = None

    def ask(self, request: Request, expected: type[A], timeout: float) -> A:
        """Ask, and return the answer.

        Args:
            request: what to ask.
            expected: the class of the answer.
            timeout: seconds to wait at most, connecting included.

        Raises:
            BrokerUnreachableError: nobody is there, or the broker went away while it was asked.
            RequestTimeoutError: the broker did not answer in time.
            ProtocolError: the answer makes no sense.
            Exception: whatever error the broker answered with.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            try:
                answer = self._connected(deadline).ask(request, deadline).answer
            except SessionLostError:
                self._drop()
                answer = self._connected(deadline).ask(request, deadline).answer
        if not isinstance(answer, expected):
            raise self._foreign(f"expected {expected.__name__}, got {type(answer).__name__}")
        return answer

    def connect(self, timeout: float | None = None) -> Welcome:
        """Say hello if that was not done yet; returns what the broker answered.

        Raises:
            BrokerUnreachableError: nobody answers within ``timeout`` seconds (None: the line's own).
        """
        with self._lock:
            self._connected(time.monotonic() + (self._connect_timeout if timeout is None else timeout))
            assert self._welcome is not None
            return self._welcome

    def close(self) -> None:
        """Hang up. Again: no effect."""
        with self._lock:
            self._drop()
            self._hub.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _connected(self, deadline: float) -> Lane:
        if self._lane is not None and self._welcome is not None and self._lane.check() is None:
            return self._lane
        self._drop()
        options = ChannelOptions(max_message_bytes=LIMITS.header_bytes, heartbeat_ms=1000, curve=self._keys)
        self._lane = lane = Lane(self._hub, self.endpoint, options)
        start = time.monotonic()
        try:
            answer = lane.ask(self._hello, min(deadline, start + self._connect_timeout)).answer
        except (RequestTimeoutError, BrokerUnreachableError) as error:
            self._drop()
            seconds = time.monotonic() - start
            raise BrokerUnreachableError(
                f"no broker answers at {self.endpoint} (tried for {seconds:.1f} s); is it running, and is the address "
                "right?",
                endpoint=self.endpoint,
                timeout=seconds,
            ) from error
        if not isinstance(answer, Welcome) or answer.protocol != PROTOCOL:
            self._drop()
            raise self._foreign(f"greeted with {type(answer).__name__}, protocol {getattr(answer, 'protocol', '?')}")
        self._welcome = answer
        return lane

    def _foreign(self, what: str) -> ProtocolError:
        return ProtocolError(
            f"the broker at {self.endpoint} does not speak this version's protocol ({PROTOCOL}): {what}; install the "
            "same version on both sides",
            reason="protocol",
        )

    def _drop(self) -> None:
        self._welcome = None
        if self._lane is not None:
            self._lane.close()
            self._lane = None
