"""Where a worker is in its work, for whoever has to tell."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Trace"]


@dataclass(slots=True)
class Trace:
    """Kept up to date while a demonstration is carried out; any thread may read it.

    ``phase`` is make, reset, plan, step, close or idle; ``step`` counts the steps of the episode, ``steps`` all steps
    since the start.
    """

    phase: str = "idle"
    step: int | None = None
    steps: int = 0
