"""A consumer in a process of its own, to be killed while it draws."""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import ods_async as ods

__all__ = ["start_consumer", "stream_episodes"]


def stream_episodes(endpoint: str, data_path: str, told: Connection) -> None:
    """Stream batches without end, and tell of each which episodes it was drawn from, as JSON."""
    with ods.Client(endpoint, data_path=data_path) as client:
        while True:
            try:
                with client.stream(3, 1, prefetch=2) as batches:
                    for batch in batches:
                        told.send_bytes(json.dumps(batch["ods_episode_id"][:, 0].tolist()).encode())
            except ods.OnlineDataBudgetExhaustedError:
                continue


def start_consumer(endpoint: str, data_path: str) -> tuple[BaseProcess, Connection]:
    """The process, and where it tells; forked off a server that has imported torch once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "ods_async.client.sync"])
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=stream_episodes, args=(endpoint, data_path, its), daemon=True)
    process.start()
    its.close()
    return process, mine
