"""Answers as the dicts that callers get: the names of B38, B39 and B47, detached from everything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ods_async.core.events import to_plain
from ods_async.core.requests import BudgetSnapshot, FlowStatus, ServiceStatus, Stats
from ods_async.wire.codec import event_from_record

__all__ = ["budget_dict", "flow_dict", "record_list", "stats_dict", "status_dict"]


def stats_dict(stats: Stats) -> dict[str, Any]:
    """B47; what is beyond the original's names is under ``extra``."""
    return _plain(stats)


def flow_dict(flow: FlowStatus) -> dict[str, int | None]:
    """B47."""
    return _plain(flow)


def budget_dict(budget: BudgetSnapshot) -> dict[str, Any]:
    """B38: ``rows`` is a list of dicts."""
    return _plain(budget) | {"rows": [_plain(row) for row in budget.rows]}


def status_dict(status: ServiceStatus) -> dict[str, Any]:
    """State, workers (a list of dicts), counters."""
    return _plain(status) | {"workers": [_plain(worker) for worker in status.workers]}


def record_list(records: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """B39: one dict a record, indices as lists.

    Raises:
        ProtocolError: a record of something else.
    """
    return [
        {key: list(value) if isinstance(value, tuple) else value for key, value in to_plain(event).items()}
        for event in map(event_from_record, records)
    ]


def _plain(value: Any) -> dict[str, Any]:
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
