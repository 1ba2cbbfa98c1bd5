"""A view of a service as metrics for Prometheus. Needs the extra ``dashboard``.

Every :class:`Metrics` has a registry of its own: any number of them can be in one process, and none knows of another's
figures. They are counted by the broker and only read here, so that nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, StateSetMetricFamily
from prometheus_client.registry import Collector

from ods_async.core.requests import ServiceStatus, Stats
from ods_async.core.states import OnlineDataEngineState
from ods_async.observe.view import View

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_Family = CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily | StateSetMetricFamily

# Name of the metric, of the field in the stats or in their ``extra``, and what it says.
_COUNTERS: Final = (
    ("episodes_successful", "successful_episodes", "Episodes that were published"),
    ("episodes_failed", "failed_episodes", "Attempts at an episode that failed"),
    ("frames_generated", "generated_frames", "Steps that workers made"),
    ("production_seconds", "production_seconds", "Time that went into published episodes"),
    ("windows_sampled", "sampled_chunks", "Windows that were drawn"),
    ("batches_sampled", "sampled_batches", "Batches that were drawn"),
    (
        "episodes_evicted_undrawn",
        "evicted_undrawn_episodes",
        "Episodes that were replaced before anybody drew from them",
    ),
    ("rollouts_refused", "refused_rollouts", "Rollouts that were refused"),
    ("rollouts_duplicate", "duplicate_rollouts", "Rollouts that came twice"),
    ("tickets_reissued", "reissued_tickets", "Orders that were given to another worker"),
    ("messages_malformed", "malformed_messages", "Messages that could not be read"),
    ("connections_refused", "refused_connections", "Connections whose keys did not fit"),
    ("events", "events", "Events of this run"),
)
_GAUGES: Final = (
    ("generation_requested", "requested_generation", "The newest generation that was asked for"),
    ("generation_completed", "completed_generation", "The newest generation that is complete"),
    ("episodes_retained", "retained_episodes", "Episodes that can be drawn from"),
    ("frames_retained", "valid_frames", "Steps of the retained episodes"),
    ("episodes_undrawn", "undrawn_episodes", "Those of them that nobody has drawn from yet"),
    ("longest_episode_steps", "longest_episode_steps", "Steps of the longest retained episode"),
    ("open_leases", "open_leases", "Plans that were not handed back yet"),
    ("parked_requests", "parked_requests", "Requests that wait"),
    ("sessions", "sessions", "Connections that are remembered"),
)
_WELL: Final = ("starting", "idle", "busy")


class Metrics:
    """What :meth:`text` tells is read anew at every call.

    Args:
        view: tells the service as it is known now.
    """

    def __init__(self, view: Callable[[], View]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_Collector(view))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format, see :data:`CONTENT_TYPE`."""
        return generate_latest(self.registry)


class _Collector(Collector):
    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view

    def collect(self) -> Iterable[_Family]:
        view = self._view()
        yield GaugeMetricFamily("ods_up", "Whether the broker answered the last time it was asked", view.connected)
        yield CounterMetricFamily("ods_events_missed", "Events that this observer could not have", view.missed_events)
        yield CounterMetricFamily("ods_runs", "Runs of the broker that this observer saw", view.runs)
        # Figures of a broker that is away would look as if they were those of now.
        if view.connected and view.stats is not None and view.status is not None:
            yield InfoMetricFamily("ods_run", "The run", {"run_id": str(view.stats.run_id), "endpoint": view.endpoint})
            yield from _of_stats(view.stats)
            yield from _of_status(view.status)


def _of_stats(stats: Stats) -> Iterable[_Family]:
    for name, field, words in _COUNTERS:
        if (value := _number(stats, field)) is not None:
            yield CounterMetricFamily(f"ods_{name}", words, value)
    for name, field, words in _GAUGES:
        if (value := _number(stats, field)) is not None:
            yield GaugeMetricFamily(f"ods_{name}", words, value)


def _number(stats: Stats, field: str) -> float | None:
    found = stats.extra.get(field) if field in stats.extra else getattr(stats, field, None)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _of_status(status: ServiceStatus) -> Iterable[_Family]:
    states = {state.value: state.value == status.state for state in OnlineDataEngineState}
    state = StateSetMetricFamily("ods_state", "The service's state", labels=[])
    state.add_metric([], states)
    yield state
    yield GaugeMetricFamily("ods_slots", "Episodes that can be kept at once", status.slots)
    ready = GaugeMetricFamily("ods_worker_ready", "Whether the worker is there and at work", labels=["worker"])
    silent = GaugeMetricFamily("ods_worker_silent_seconds", "Since the worker was last heard of", labels=["worker"])
    rollouts = CounterMetricFamily("ods_worker_rollouts", "Rollouts that the worker handed in", labels=["worker"])
    failures = CounterMetricFamily("ods_worker_failures", "Failures of the worker", labels=["worker"])
    restarts = CounterMetricFamily("ods_worker_restarts", "Times that the worker was started anew", labels=["worker"])
    for worker in status.workers:
        label = [worker.worker_id]
        ready.add_metric(label, worker.state in _WELL)
        silent.add_metric(label, worker.silent_for)
        rollouts.add_metric(label, worker.rollouts)
        failures.add_metric(label, worker.failures)
        restarts.add_metric(label, worker.restarts)
    yield from (ready, silent, rollouts, failures, restarts)
