"""The lifecycle of a service, as its users see it (B6)."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["OnlineDataEngineState"]


class OnlineDataEngineState(StrEnum):
    """``CREATED → STARTING → READY → STOPPED``, or ``FAILED`` from any of them; the last two are terminal."""

    CREATED = "CREATED"
    STARTING = "STARTING"
    READY = "READY"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
