"""The engines: an owner's client, and the broker and worker processes behind it (B6–B13).

Sampling goes through a client, so that whatever a consumer elsewhere sees, the owner sees too.
"""

from __future__ import annotations

from ods_async.engine.aio import AsyncOnlineDataEngine
from ods_async.engine.blocking import OnlineDataEngine

__all__ = ["AsyncOnlineDataEngine", "OnlineDataEngine"]
