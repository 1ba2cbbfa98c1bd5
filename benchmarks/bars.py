"""What must be reached, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Bar:
    """A figure computed from the rows of one run; ``least`` or ``most`` is the bar."""

    name: str
    figure: Callable[[Rows], float]
    least: float | None = None
    most: float | None = None

    def judge(self, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Name, figure, bar and verdict; None when the run has not measured what is needed."""
        try:
            measured = self.figure({row["name"]: row for row in rows})
        except (KeyError, ZeroDivisionError):
            return None
        ok = (self.least is None or measured >= self.least) and (self.most is None or measured <= self.most)
        wanted = f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"
        return {"bar": self.name, "measured": measured, "wanted": wanted, "ok": ok}


def rate(name: str) -> Callable[[Rows], float]:
    return lambda rows: float(rows[name]["batches_s"]["median"])


def ratio(above: str, below: str, what: str = "batches_s") -> Callable[[Rows], float]:
    return lambda rows: float(rows[above][what]["median"]) / float(rows[below][what]["median"])


BARS = (
    Bar("S, shared memory, blocking: batches/s", rate("S blocking"), least=3000),
    Bar("S, shared memory, asyncio: batches/s", rate("S asyncio"), least=2000),
    Bar("S, shared memory, prefetching 32: batches/s", rate("S prefetch 32"), least=6000),
    Bar("I, shared memory, blocking: share of memcpy", ratio("I blocking", "memcpy I"), least=0.8),
    Bar("I, shared memory, prefetching: share of memcpy", ratio("I prefetch", "memcpy I"), least=0.8),
    *(
        Bar(
            f"{size}, tcp, {client}: share of raw frames ({kind})",
            ratio(f"{size} tcp {client}", f"raw zmq tcp {kind} {size}"),
            least=0.9,
        )
        for size in ("I", "V")
        for client, kind in (("blocking", "ask"), ("prefetch", "pull"))
    ),
    *(
        Bar(f"S {mode}: times as long as plain", ratio("S plain", f"S {mode}"), most=1.5)
        for mode in ("segment", "boundary", "context", "budget, provenance")
    ),
    Bar("S at 65,536 rows: times as long as at 64", ratio("S at 64 rows", "S at 65536 rows"), most=1.3),
    Bar("S at 4,096 rows: times as long as at 64", ratio("S at 64 rows", "S at 4096 rows"), most=1.3),
    *(
        Bar(
            f"{size} while publishing: p99 against idle",
            ratio(f"{size} while publishing", f"{size} idle", "p99_us"),
            most=3.0,
        )
        for size in ("S", "I")
    ),
    Bar("I, 4 consumers: bytes/s against one", ratio("I, 4 consumers", "I, 1 consumers", "gb_s"), least=1.0),
    Bar(
        "ingest of 57 MB rollouts over ipc: GB/s", lambda rows: float(rows["ingest ipc I"]["gb_s"]["median"]), least=1.0
    ),
    Bar(
        "ingest: broker's loop held up, ms at worst",
        lambda rows: float(rows["ingest ipc I"]["loop"]["worst_ms"]),
        most=5.0,
    ),
    Bar(
        "ingest: the same, apart from waits for a processor",
        lambda rows: float(rows["ingest ipc I"]["loop"]["worst_without_waiting_ms"]),
        most=5.0,
    ),
)
