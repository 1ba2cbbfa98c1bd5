"""Connections that have introduced themselves."""

from __future__ import annotations

from collections import OrderedDict

from ods_async.core.requests import Connect

__all__ = ["Sessions"]


class Sessions:
    """The newest sessions by the identity of their socket; the longest unused is forgotten when there are too many.

    A forgotten session loses nothing: its next request is told to connect again. Its leases end by their deadline.

    Args:
        limit: how many to remember.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: OrderedDict[bytes, Connect] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, identity: bytes, connect: Connect) -> None:
        """Remember who this is."""
        self._sessions[identity] = connect
        self._sessions.move_to_end(identity)
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)

    def known(self, identity: bytes) -> bool:
        """Whether the session is remembered; it counts as used."""
        if identity not in self._sessions:
            return False
        self._sessions.move_to_end(identity)
        return True

    def count(self, role: str) -> int:
        """How many sessions have this role."""
        return sum(connect.role == role for connect in self._sessions.values())
