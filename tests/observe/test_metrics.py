"""A view as Prometheus reads it."""

from __future__ import annotations

import subprocess
import sys

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from ods_async.observe.metrics import Metrics
from ods_async.observe.view import View
from tests.observe.views import HOSTILE, view_of


def read(metrics: Metrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Every sample by its name and labels, as a scraper understands them."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {})
            found[sample.name][labels] = sample.value
    return found


def test_figures_are_those_of_the_broker() -> None:
    found = read(Metrics(lambda: view_of("w0")))
    assert found["ods_up"] == {(): 1.0}
    assert found["ods_windows_sampled_total"] == {(): 64_000.0}
    assert found["ods_batches_sampled_total"] == {(): 1000.0}
    assert found["ods_episodes_retained"] == {(): 4.0}
    assert found["ods_state"][("ods_state", "READY"),] == 1.0
    assert sum(found["ods_state"].values()) == 1.0
    assert found["ods_worker_rollouts_total"] == {(("worker", "w0"),): 5.0}
    assert found["ods_run_info"] == {(("endpoint", "tcp://sim-host:5555"), ("run_id", "7")): 1.0}


def test_c47_whatever_a_worker_calls_itself_is_one_label() -> None:
    """C47: quotes, backslash and newline are escaped by the library and come back as they were."""
    metrics = Metrics(lambda: view_of(*HOSTILE))
    found = read(metrics)["ods_worker_failures_total"]
    assert found == {(("worker", name),): 1.0 for name in HOSTILE}
    assert all(line.startswith(("#", "ods_")) for line in metrics.text().decode().split("\n") if line)


def test_c47_each_has_its_own_registry_and_figures() -> None:
    """C47: any number in one process; nothing goes into the registry that all of a process share."""
    before = {metric.name for metric in REGISTRY.collect()}
    views = [view_of("a"), view_of("b", "c")]
    many = [Metrics(lambda view=view: view) for view in (*views, views[0])]
    one, two, again = map(read, many)
    assert one == again
    assert set(two["ods_worker_ready"]) == {(("worker", "b"),), (("worker", "c"),)}
    assert {metric.name for metric in REGISTRY.collect()} == before


def test_of_a_broker_that_is_away_no_old_figures_are_told() -> None:
    views = [View("ipc:///x"), view_of("w0", connected=False, missed_events=9)]
    assert read(Metrics(lambda: views[0])) == {
        "ods_up": {(): 0},
        "ods_events_missed_total": {(): 0},
        "ods_runs_total": {(): 0},
    }
    found = read(Metrics(lambda: views[1]))
    assert (found["ods_up"], found["ods_events_missed_total"]) == ({(): 0.0}, {(): 9.0})
    assert "ods_windows_sampled_total" not in found


def test_neither_the_package_nor_the_command_line_imports_what_serves_pages() -> None:
    code = "import sys, ods_async, ods_async.cli.main, ods_async.observe.watch\n"
    code += "print([name for name in ('aiohttp', 'prometheus_client') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
