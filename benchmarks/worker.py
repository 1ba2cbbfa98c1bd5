"""A worker that costs next to nothing: it hands in the same episodes over and over, packed once."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import numpy as np

from benchmarks.children import serve
from benchmarks.workloads import WORKLOADS
from ods_async.core.episode import Rollout
from ods_async.core.reports import Heartbeat
from ods_async.testing.peers import RawWorker, marked_episode
from ods_async.wire.codec import encode_report
from ods_async.wire.rollout import pack_rollout, plan_rollout


class Factory:
    """Takes tickets while it is told to; each is answered with a rollout of ``num_envs`` episodes of full length."""

    def __init__(self, endpoint: str, workload: str) -> None:
        work = WORKLOADS[workload]
        episodes = tuple(marked_episode(mark, work.steps, work.fields) for mark in range(work.num_envs))
        random = np.random.default_rng(7)
        for episode in episodes:
            for path, array in episode.arrays.items():
                if array.dtype == np.uint8:
                    array[...] = random.integers(0, 256, array.shape, np.uint8)
                elif path[0] in ("obs", "actions"):
                    array[...] = random.standard_normal(array.shape)
        self.worker = RawWorker(endpoint, fields=work.fields, num_envs=work.num_envs)
        self._report, nbytes = plan_rollout(Rollout(0, "w0", episodes), self.worker.schema.fields)
        self._payload = np.ones(nbytes, np.uint8)
        pack_rollout(Rollout(0, "w0", episodes), self._report, self._payload.data)
        self.nbytes = nbytes
        self.sent = 0
        self._going = threading.Event()
        self._end = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def pause(self, pause: bool) -> int:
        (self._going.clear if pause else self._going.set)()
        return self.sent

    def close(self) -> None:
        self._end = True
        self._thread.join()
        self.worker.close()

    def _run(self) -> None:
        beat = 0.0
        while not self._end:
            if time.monotonic() > beat:
                beat = time.monotonic() + 0.5
                self.worker.report(Heartbeat("w0", "wait", None, self.sent))
            if not self._going.is_set():
                self._going.wait(0.1)
                continue
            ticket = self.worker.next_ticket(0.05)
            if ticket is not None:
                report = dataclasses.replace(self._report, ticket_id=ticket.ticket_id)
                self.worker.send([encode_report(report), self._payload.data])
                self.sent += 1


def main() -> None:
    factories: list[Factory] = []

    def begin(endpoint: str, workload: str) -> dict[str, Any]:
        factories.append(Factory(endpoint, workload))
        factories[0].pause(False)
        return {"rollout_bytes": factories[0].nbytes}

    serve({"begin": begin, "pause": lambda pause: factories[0].pause(pause)})
    for factory in factories:
        factory.close()


if __name__ == "__main__":
    main()
