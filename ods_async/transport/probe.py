"""Which security a zmq listener demands, read from the first bytes it sends.

A listener that gets a client without keys, or one with the wrong ones, closes the connection, and whether its reason
arrives before that is chance. So does a proxy with nothing behind it. The greeting tells them apart.
"""

from __future__ import annotations

import socket
import time
from typing import Final

from ods_async.transport.endpoint import parse_endpoint

__all__ = ["PROBE_SECONDS", "mechanism_of"]

PROBE_SECONDS: Final = 1.0
_GREETING_BYTES: Final = 64
# The signature and the version, and no more: the listener answers with its whole greeting and then waits for the rest.
_FIRST_BYTES: Final = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03"


def mechanism_of(endpoint: str, timeout: float = PROBE_SECONDS) -> str | None:
    """What listens at a tcp endpoint demands: ``"CURVE"``, ``"NULL"`` (nothing), …; None if it does not say.

    It waits for at most ``timeout`` seconds and raises nothing.
    """
    parsed = parse_endpoint(endpoint)
    if parsed.scheme != "tcp":
        return None
    deadline = time.monotonic() + timeout
    greeting = b""
    try:
        with socket.create_connection((parsed.host.strip("[]"), parsed.port), timeout) as line:
            line.sendall(_FIRST_BYTES)
            while len(greeting) < _GREETING_BYTES:
                line.settimeout(max(0.001, deadline - time.monotonic()))
                data = line.recv(_GREETING_BYTES - len(greeting))
                if not data:
                    return None
                greeting += data
    except OSError:
        return None
    if greeting[0] != 0xFF or greeting[9] != 0x7F or greeting[10] < 3:
        return None
    return greeting[12:32].rstrip(b"\0").decode("ascii", "replace") or None
