"""What the machine can do: memcpy into touched memory, and bare ZeroMQ frames between two processes."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import zmq

from benchmarks.children import serve
from ods_async.transport.allocator import keep_big_blocks


class Raw:
    def __init__(self) -> None:
        self._context = zmq.Context()

    def begin(self, keep: bool = False) -> dict[str, Any]:
        return {"kept": keep_big_blocks() if keep else False}

    def memcpy(self, nbytes: int, seconds: float) -> dict[str, Any]:
        """GB/s of copying between two blocks, both touched before."""
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        count, begin = 0, time.perf_counter()
        while (took := time.perf_counter() - begin) < seconds:
            np.copyto(target, source)
            count += 1
        return {"rate": count / took, "gb_s": count * nbytes / took / 1e9}

    def listen(self, endpoint: str, nbytes: int) -> str:
        """Answer requests with ``nbytes`` from one block, and push the same to whoever pulls."""
        answering = self._context.socket(zmq.ROUTER)
        pushing = self._context.socket(zmq.PUSH)
        pushing.set(zmq.SNDHWM, 2)
        pushing.set(zmq.LINGER, 0)
        answering.set(zmq.LINGER, 0)
        answering.bind(endpoint)
        pushing.bind(endpoint + "-push" if endpoint.startswith("ipc") else endpoint)
        payload = np.ones(nbytes, np.uint8)

        def answer() -> None:
            while True:
                peer, empty, _ = answering.recv_multipart()
                answering.send_multipart([peer, empty, b"header", payload.data], copy=False)

        def push() -> None:
            while True:
                pushing.send(payload.data, copy=False)

        for work in (answer, push):
            threading.Thread(target=work, daemon=True).start()
        return " ".join(socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0") for socket in (answering, pushing))

    def ask(self, endpoint: str, seconds: float) -> dict[str, Any]:
        """Request and answer, one at a time; what came is let go when the next has come."""
        with self._context.socket(zmq.REQ) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(endpoint)

            def take() -> Any:
                socket.send(b"give me")
                socket.recv()
                return socket.recv(copy=False)

            return self._take(take, seconds)

    def pull(self, endpoint: str, seconds: float) -> dict[str, Any]:
        """Whatever comes, as it comes."""
        with self._context.socket(zmq.PULL) as socket:
            socket.set(zmq.RCVHWM, 2)
            socket.set(zmq.LINGER, 0)
            socket.connect(endpoint)
            return self._take(lambda: socket.recv(copy=False), seconds)

    def _take(self, take: Any, seconds: float) -> dict[str, Any]:
        frame = None
        for _ in range(3):
            frame = take()
        count, begin = 0, time.perf_counter()
        while (took := time.perf_counter() - begin) < seconds or not count:
            frame = take()
            count += 1
        return {"rate": count / took, "gb_s": count * len(frame) / took / 1e9}


def main() -> None:
    raw = Raw()
    serve({name: getattr(raw, name) for name in ("begin", "memcpy", "listen", "ask", "pull")})
    import os

    os._exit(0)  # threads of this process wait for peers that never come


if __name__ == "__main__":
    main()
