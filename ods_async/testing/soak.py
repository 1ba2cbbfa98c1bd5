"""``python -m ods_async.testing.soak``: a service at work for an hour, and what every process holds meanwhile.

A broker, two workers and three consumers (asyncio and blocking over shared memory, blocking over tcp frames), all at
a moderate rate. Every few seconds each process's private memory (resident minus shared), open file descriptors and
threads go into a file, one JSON value a line. At the end the first and the last quarter's medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ods_async.client.sync import Client
from ods_async.errors import OdsError
from ods_async.testing.trial.ending import ended_by_signals
from ods_async.testing.trial.house import Figures, House, figures_of, until

__all__ = ["Growth", "growth_of", "main"]

_MB: Final = 1_000_000
_NAMES: Final = ("private_bytes", "fds", "threads")
_START_SECONDS: Final = 120.0
_CONSUMERS: Final = 3


class Growth:
    """First and last quarter's medians of one figure of one process, and whether it grew more than allowed."""

    def __init__(self, process: str, figure: str, series: Sequence[int], allowed: float) -> None:
        quarter = max(1, len(series) // 4)
        self.process, self.figure = process, figure
        self.first = statistics.median(series[:quarter])
        self.last = statistics.median(series[-quarter:])
        self.most = max(series)
        self.too_much = self.last - self.first > allowed

    def __str__(self) -> str:
        unit = _MB if self.figure == "private_bytes" else 1
        first, last, most = (f"{value / unit:.2f}" for value in (self.first, self.last, self.most))
        words = "GREW" if self.too_much else "flat"
        return f"{self.process:<18} {self.figure:<14} first {first:>9}  last {last:>9}  most {most:>9}  {words}"


def growth_of(samples: Sequence[dict[str, Any]], memory_mb: float, fds: int, threads: int) -> list[Growth]:
    """One :class:`Growth` per process and figure.

    Args:
        samples: what the file holds: ``process`` and the three figures each.
        memory_mb: megabytes that private memory may grow.
        fds: how many more descriptors there may be.
        threads: how many more threads there may be.
    """
    allowed = dict(zip(_NAMES, (memory_mb * _MB, fds, threads), strict=True))
    series: dict[tuple[str, str], list[int]] = {}
    for sample in samples:
        for name in _NAMES:
            series.setdefault((sample["process"], name), []).append(sample[name])
    return [Growth(process, name, found, allowed[name]) for (process, name), found in sorted(series.items())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak.

    Returns:
        0 when everything stayed flat and every window was right, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m ods_async.testing.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second of each consumer (default 20)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks (default 5)")
    parser.add_argument("--log", type=Path, default=Path("soak.jsonl"), help="where the figures go")
    parser.add_argument("--memory-mb", type=float, default=8.0, help="growth of private memory allowed (default 8 MB)")
    parser.add_argument("--fds", type=int, default=2, help="growth of descriptors allowed (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="growth of threads allowed (default 1)")
    given = parser.parse_args(arguments)
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="ods-soak-", dir="/tmp") as name:
        return _soak(given, Path(name))


def _soak(given: argparse.Namespace, folder: Path) -> int:
    ipc = f"ipc://{folder / 's.sock'}"
    settings = {
        "buffer_size": 64,
        "max_episode_steps": 48,
        "refill_policy": "continuous",
        "include_provenance": True,
        "endpoint": ipc,
        "extra_endpoints": ["tcp://127.0.0.1:0"],
        "gym_config": {
            "id": "ods_async/Counting-v0",
            "kwargs": {"min_length": 12, "max_length": 40, "image_shape": [24, 24, 3], "step_delay": 0.01},
        },
    }
    trouble: list[str] = []
    samples: list[dict[str, Any]] = []
    with House(folder, settings) as house:
        house.add_broker()
        tcp = _tcp_endpoint(house)
        for worker in ("worker-0", "worker-1"):
            house.add_worker(worker, ipc)
        with Client(ipc, timeout=_START_SECONDS, connect_timeout=_START_SECONDS) as client:
            client.wait_ready()
        rate = ("--rate", str(given.rate))
        house.add_consumer("asyncio-shared", ipc, "--style", "asyncio", "--data-path", "shared_memory", *rate)
        house.add_consumer("blocking-shared", ipc, "--data-path", "shared_memory", "--seed", "1", *rate)
        house.add_consumer("blocking-frames", tcp, "--data-path", "frames", "--seed", "2", *rate)
        started = (len(list(house.reports())) == _CONSUMERS for _ in until(time.monotonic() + _START_SECONDS, 0.1))
        if not any(started):
            trouble.append(f"consumers were not at work within {_START_SECONDS:g} s")
        begun = time.monotonic()
        with given.log.open("w") as log:
            for _ in until(begun + 60 * given.minutes, given.every):
                for program in house.programs.values():
                    if not program.running:
                        trouble.append(f"{program.name} ended with code {program.exit_codes[-1]}: {program.words()}")
                        continue
                    figures = figures_of(program.pid)
                    if figures is not None:
                        samples.append(_sample(time.monotonic() - begun, program.name, program.pid, figures))
                        print(json.dumps(samples[-1]), file=log, flush=True)
                if trouble:
                    break
        with Client(ipc, timeout=30.0) as client:
            stats = client.get_stats()
        programs = dict(house.programs)
        house.end()
        trouble += [f"{name} had to be killed at the end" for name in house.stubborn]
        for name, program in programs.items():
            if program.exit_codes and program.exit_codes[-1] != 0:
                trouble.append(f"{name} ended with code {program.exit_codes[-1]}: {program.words()}")
        reports = list(house.reports())
    return _tell(given, samples, reports, trouble, stats, time.monotonic() - begun)


def _tell(
    given: argparse.Namespace,
    samples: list[dict[str, Any]],
    reports: list[dict[str, Any]],
    trouble: list[str],
    stats: dict[str, Any],
    seconds: float,
) -> int:
    counts = {
        key: sum(report["counts"].get(key, 0) for report in reports)
        for key in ("requests", "answers", "refusals", "batches", "windows", "torn", "late", "surprises")
    }
    told = ", ".join(f"{value} {key}" for key, value in counts.items())
    print(f"{seconds / 60:.1f} minutes: {stats['successful_episodes']} episodes published; {told}")
    for report in reports:
        trouble += report["faults"]
        if report["errors"]:
            print(f"errors of {report['pid']}: {report['errors']}")
    grown = growth_of(samples, given.memory_mb, given.fds, given.threads)
    for growth in grown:
        print(growth)
    for words in trouble:
        print(f"FAULT: {words}")
    return 1 if trouble or any(growth.too_much for growth in grown) else 0


def _sample(seconds: float, name: str, pid: int, figures: Figures) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 2),
        "process": name,
        "pid": pid,
        "private_bytes": figures.private_bytes,
        "fds": figures.fds,
        "threads": figures.threads,
    }


def _tcp_endpoint(house: House) -> str:
    """The address the broker printed."""
    broker = house.programs["broker"]
    for _ in until(time.monotonic() + _START_SECONDS, 0.1):
        for line in broker.told()[-1]:
            if line.startswith("{"):
                return next(str(end) for end in json.loads(line)["endpoints"] if end.startswith("tcp"))
        if not broker.running:
            break
    raise OdsError(f"the broker did not start: {broker.words()}")


if __name__ == "__main__":
    sys.exit(main())
