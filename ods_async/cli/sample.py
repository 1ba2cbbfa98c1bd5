"""``sample``: draw batches, and print what they are made of and how fast they came."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

from ods_async.cli.output import print_json
from ods_async.errors import ArgumentError

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Draw ``--batches`` batches."""
    if (options.history is None) != (options.horizon is None):
        raise ArgumentError(
            "--history and --horizon make a context together; give both or neither",
            argument="--history",
            value=repr(options.history),
            rule="with --horizon",
        )
    from ods_async.client.sync import Client
    from ods_async.transport.allocator import keep_big_blocks

    keep_big_blocks()
    with Client(
        options.endpoint,
        data_path=options.data_path,
        timeout=options.timeout,
        connect_timeout=options.timeout,
        keys=options.keys,
        name="ods-async sample",
    ) as client:
        seconds: list[float] = []
        batch: Any = None
        for index in range(options.batches):
            seed = None if options.seed is None else options.seed + index
            before = time.perf_counter()
            if options.history is None:
                batch = client.sample_batch(options.batch_size, options.chunk_size, options.mode, seed=seed)
            else:
                batch = client.sample_batch_with_context(
                    options.batch_size, options.history, options.horizon, sampling_mode=options.mode, seed=seed
                )
            seconds.append(time.perf_counter() - before)
        report = _report(batch, seconds) | {"endpoint": options.endpoint, "data_path": client.data_path}
        report["run_id"] = client.run_id
    if options.json:
        print_json(report)
    else:
        _print(report)
    return 0


def _report(batch: Any, seconds: list[float]) -> dict[str, Any]:
    fields = {
        ".".join(key) if isinstance(key, tuple) else key: {"dtype": str(value.dtype), "shape": list(value.shape)}
        for key, value in batch.items(include_nested=True, leaves_only=True)
    }
    nbytes = sum(value.numel() * value.element_size() for value in batch.values(True, True))
    # The first draw also connects and maps the memory, and says little about those that follow.
    counted = seconds[1:] or seconds
    rate = len(counted) / sum(counted) if sum(counted) else math.inf
    return {
        "batches": len(seconds),
        "batch_size": list(batch.batch_size),
        "fields": fields,
        "batch_bytes": nbytes,
        "first_seconds": seconds[0],
        "batches_per_second": rate,
        "bytes_per_second": rate * nbytes,
    }


def _print(report: dict[str, Any]) -> None:
    width = max(len(name) for name in report["fields"])
    for name, spec in report["fields"].items():
        print(f"{name:<{width}}  {spec['dtype'].removeprefix('torch.'):<8} {spec['shape']}")
    print(
        f"{report['batches']} batches of {report['batch_size']} ({report['batch_bytes'] / 1e6:.2f} MB) over "
        f"{report['data_path']}: {report['batches_per_second']:.0f} batches/s, "
        f"{report['bytes_per_second'] / 1e9:.2f} GB/s; the first took {report['first_seconds'] * 1e3:.1f} ms"
    )
