"""How often each episode may still be delivered (B35–B38).

Quotas belong to episodes, not to rows: what an episode was charged stays charged after its row is reused, and what is
given back to an episode that is gone already is never credited to its successor.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ods_async.core.requests import BudgetRow, BudgetSnapshot
from ods_async.core.store import Occupant
from ods_async.errors import ConfigError, OnlineDataBudgetExhaustedError

__all__ = ["Receipt", "SamplingBudget"]

_INT64_MAX: Final = 2**63 - 1


class Receipt:
    """What one batch was charged. Keep it while the batch may turn out never to have been delivered, then drop it."""

    __slots__ = ("_counts", "_episodes", "_open", "_rows", "windows")

    def __init__(
        self, rows: NDArray[np.int64], episodes: NDArray[np.int64], counts: NDArray[np.int64], windows: int
    ) -> None:
        self._rows = rows
        self._episodes = episodes
        self._counts = counts
        self._open = True
        self.windows = windows


class SamplingBudget:
    """The quotas of all retained episodes, and the lifetime count of delivered windows.

    Args:
        budget: windows every published episode may be delivered; None switches budgets off.
        hard_limit: a ceiling for ``budget``; given exactly when ``budget`` is.
        rows: rows of the buffer.
        run_id: for the snapshot.
        clock_origin_ns: for the snapshot: the broker's monotonic clock when the run began.

    Raises:
        ConfigError: one of the two without the other, or not ``1 <= budget <= hard_limit <= 2**63 - 1``.
    """

    def __init__(
        self,
        budget: int | None,
        hard_limit: int | None,
        rows: int,
        *,
        run_id: int = 0,
        clock_origin_ns: int = 0,
    ) -> None:
        if budget is not None or hard_limit is not None:
            _check(budget, hard_limit)
        self.budget = budget
        self.hard_limit = hard_limit
        self.enabled = budget is not None
        self._run_id = run_id
        self._clock_origin_ns = clock_origin_ns
        self._delivered = 0
        self._remaining = np.zeros(rows, np.int64)
        self._episode = np.full(rows, -1, np.int64)
        self._generation = np.zeros(rows, np.int64)
        self._slot = np.zeros(rows, np.int64)
        self._eligible = np.zeros(rows, np.bool_)

    @property
    def remaining_by_row(self) -> NDArray[np.int64] | None:
        """Windows each row's episode may still be delivered, 0 for empty rows; None when budgets are off.

        The array itself, kept up to date: read it, never write it. Sums over it can exceed int64.
        """
        return self._remaining if self.enabled else None

    @property
    def delivered(self) -> int | None:
        """Windows delivered in this run, retired episodes included; None when budgets are off."""
        return self._delivered if self.enabled else None

    @property
    def unlocked_remaining(self) -> int | None:
        """Windows still to be had from retained episodes with at least one eligible anchor; None when off."""
        if self.budget is None:
            return None
        left = self._remaining[self._eligible]
        return int(left.sum()) if self.budget <= _INT64_MAX // max(1, left.size) else sum(left.tolist())

    def assign(self, row: int, slot: int, occupant: Occupant) -> None:
        """Give a newly published episode its full quota. ``row`` must be free: :meth:`retire` its episode first."""
        if self.budget is None:
            return
        if self._episode[row] >= 0:
            raise ValueError(f"row {row} still holds episode {self._episode[row]}; retire it first")
        self._remaining[row] = self.budget
        self._episode[row] = occupant.episode_id
        self._generation[row] = occupant.generation
        self._slot[row] = slot
        self._eligible[row] = occupant.eligible_anchors > 0

    def retire(self, row: int) -> None:
        """The episode in ``row`` was replaced: it cannot be drawn any more; what was delivered stays counted."""
        self._remaining[row] = 0
        self._episode[row] = -1
        self._eligible[row] = False

    def book(self, rows: NDArray[np.integer]) -> Receipt | None:
        """Charge one window for each entry of ``rows`` (one batch, repeats included); None when budgets are off.

        Raises:
            OnlineDataBudgetExhaustedError: some episode has less left than that; nothing is charged.
        """
        if not self.enabled:
            return None
        distinct, counts = np.unique(np.asarray(rows, np.int64), return_counts=True)
        counts = counts.astype(np.int64, copy=False)
        windows = int(np.size(rows))
        left = self._remaining[distinct]
        if (left < counts).any() or windows > _INT64_MAX - self._delivered:
            remaining = sum(left.tolist())
            raise OnlineDataBudgetExhaustedError(
                f"the sampling budgets of the planned episodes cannot supply these {windows} windows: {remaining} left "
                "over all of them; nothing was spent; wait for new episodes or raise episode_sample_budget",
                requested=windows,
                remaining=remaining,
            )
        self._remaining[distinct] = left - counts
        self._delivered += windows
        return Receipt(distinct, self._episode[distinct], counts, windows)

    def ample(self, rows: NDArray[np.integer], windows: int) -> bool:
        """Whether each of ``rows`` may be drawn for at least ``windows`` more windows; True when budgets are off."""
        return not self.enabled or bool((self._remaining[rows] >= windows).all())

    def refund(self, receipt: Receipt | None) -> int:
        """Take back a charge because that batch provably never reached anyone; how many windows that gave back.

        Safe to repeat: a receipt is good for one refund. For an episode retired meanwhile only the lifetime count
        shrinks.
        """
        if receipt is None or not receipt._open:
            return 0
        receipt._open = False
        here = self._episode[receipt._rows] == receipt._episodes
        self._remaining[receipt._rows[here]] += receipt._counts[here]
        self._delivered -= receipt.windows
        return receipt.windows

    def snapshot(self) -> BudgetSnapshot:
        """The audit of B38, detached, in order of slot. No row is ever locked: nothing is overwritten in place."""
        if self.budget is None:
            return BudgetSnapshot(False, (), None, None, None, None, None)
        held = np.flatnonzero(self._episode >= 0)
        rows = []
        for row in held[np.argsort(self._slot[held], kind="stable")].tolist():
            remaining = int(self._remaining[row])
            rows.append(
                BudgetRow(
                    run_id=self._run_id,
                    episode_id=int(self._episode[row]),
                    generation=int(self._generation[row]),
                    slot=int(self._slot[row]),
                    assigned=self.budget,
                    delivered=self.budget - remaining,
                    remaining=remaining,
                    locked=False,
                )
            )
        return BudgetSnapshot(
            enabled=True,
            rows=tuple(rows),
            unlocked_remaining_chunks=self.unlocked_remaining,
            total_delivered_chunks=self._delivered,
            episode_sample_budget=self.budget,
            episode_sample_hard_limit=self.hard_limit,
            clock_origin_monotonic_ns=self._clock_origin_ns,
        )


def _check(budget: int | None, hard_limit: int | None) -> None:
    rule = "both or neither, integers with 1 <= episode_sample_budget <= episode_sample_hard_limit <= 2**63 - 1"
    both = type(budget) is int and type(hard_limit) is int
    if not both or not 1 <= budget <= hard_limit <= _INT64_MAX:  # type: ignore[operator]
        raise ConfigError(
            f"episode_sample_budget={budget!r} with episode_sample_hard_limit={hard_limit!r}: {rule}",
            argument="episode_sample_budget",
            value=repr(budget),
            rule=rule,
        )
