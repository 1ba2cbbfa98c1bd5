"""What one socket of a client remembers between calls: leases to hand back, and plans that came for later. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ods_async.core.requests import Plan, Release, Sample

__all__ = ["HOLD_SECONDS", "MOST_SPARES", "Session"]

HOLD_SECONDS: Final = 0.02  # so long what is owed, and what was planned ahead, waits for the next call

MOST_SPARES: Final = 7
MOST_SPARE_WINDOWS: Final = 2048


@dataclass(slots=True)
class Session:
    """What one socket of the client remembers: whether it said hello, what it has to hand back, and plans for later.

    ``overslept`` says that a lease ran out before its batch was copied: whoever was away for so long (stopped, or
    swapped out) may find that the broker has cut the connection meanwhile, and then asks again over another one.
    """

    greeted: bool = False
    overslept: bool = False
    finished: list[int] = field(default_factory=list)
    undelivered: list[int] = field(default_factory=list)
    _spares: deque[Plan] = field(default_factory=deque)
    _wanted: Sample | None = None
    _known: object = None
    _edition: int = 0
    _ahead: int = 0
    _used: bool = False
    _paused: float = 0.0

    # --- leases -----------------------------------------------------------------------------------------------------

    @property
    def owes(self) -> bool:
        """Whether there is anything to hand back, now or when it was not used for a while."""
        return bool(self.finished or self.undelivered or self._spares)

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The leases to hand back now, each told once: done with, and never delivered."""
        if not self.finished and not self.undelivered:
            return (), ()
        owed = tuple(self.finished), tuple(self.undelivered)
        self.finished.clear()
        self.undelivered.clear()
        return owed

    def notice(self, *, gently: bool = False) -> Release | None:
        """The notice that hands back what is owed, or None when nothing is.

        Plans for later are handed back as well; ``gently``, only those that nobody used since the last gentle notice.
        """
        if not gently or not self._used:
            self._rest()
        self._used = False
        finished, undelivered = self.take()
        return Release(finished, undelivered) if finished or undelivered else None

    def pause(self, now: float) -> None:
        """A call has ended at ``now`` (monotonic seconds)."""
        self._paused = now

    def resume(self, now: float) -> None:
        """A call begins at ``now``. Who comes back late has no use for plans ahead: their rows are held meanwhile."""
        if now - self._paused > HOLD_SECONDS:
            self._rest()

    # --- plans for later --------------------------------------------------------------------------------------------

    def spares_for(self, wanted: Sample) -> int:
        """How many plans for later to ask for with ``wanted``: none at first, more whenever the last ones were used."""
        alike = self._wanted == wanted
        if not alike or self._spares:  # what is still there has gone stale, which says nothing about how many are used
            self._ahead = self._ahead if alike else 0
        else:
            self._ahead = min(MOST_SPARES, 2 * self._ahead + 1)
        self._used = True
        return min(self._ahead, MOST_SPARE_WINDOWS // max(1, wanted.batch_size))

    def keep(self, wanted: Sample, known: object, plans: Sequence[Plan], edition: int) -> None:
        """``wanted`` was served: keep the plans for later calls that want the same of the same run."""
        self._spares.extend(plans)
        self._wanted, self._known, self._edition = wanted, known, edition

    def spare(self, wanted: Sample, known: object, edition: int | None) -> Plan | None:
        """A plan for ``wanted``, if one is there and ``known`` and ``edition`` are what it was drawn from."""
        if not self._spares or edition != self._edition or known is not self._known or wanted != self._wanted:
            return None
        self._used = True
        return self._spares.popleft()

    def _rest(self) -> None:
        self.drop_spares()
        self._ahead, self._wanted = 0, None

    def drop_spares(self) -> None:
        """Plans for later are not wanted any more: hand them back with the next words."""
        if self._spares:
            self.undelivered += [plan.lease_id for plan in self._spares]
            self._spares.clear()

    def forget_spares(self) -> None:
        """The broker has forgotten this connection, and its leases with it."""
        self._spares.clear()
