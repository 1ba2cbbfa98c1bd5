"""The child's side: read what to be, watch the owner, be it, and leave in good order when the owner is gone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import json
import os
import select
import signal
import sys
import threading
import time
from typing import Any

from ods_async.config import OnlineDataEngineCfg
from ods_async.wire.errors import describe_error

__all__ = ["OwnerWatch", "main"]

_MAX_DOCUMENT_BYTES = 256 << 20
_LOOK_SECONDS = 0.5
_LAST_SECONDS = 2.0


def main() -> int:
    """Be the child that the document on standard input describes; returns the exit code."""
    faulthandler.enable()
    document = _read_document(0)
    if document is None:
        return 1
    report_fd = int(document["report_fd"])
    os.set_inheritable(report_fd, False)
    if document["python_path"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = document["python_path"]
    owner_fd = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    cfg = OnlineDataEngineCfg.from_dict(document["cfg"])
    watch = OwnerWatch(owner_fd, int(document["owner_pid"]), cfg.shutdown_timeout + _LAST_SECONDS)
    try:
        if document["role"] == "broker":
            return asyncio.run(_be_broker(cfg, document, report_fd, watch))
        return _be_worker(cfg, document, watch)
    except Exception as error:
        _say(report_fd, {"error": dataclasses.asdict(describe_error(error))})
        if document["role"] != "broker":
            raise  # the traceback goes to standard error
        return 1


async def _be_broker(cfg: OnlineDataEngineCfg, document: dict[str, Any], report_fd: int, watch: OwnerWatch) -> int:
    from ods_async.broker.process import settle_in
    from ods_async.broker.service import Broker

    settle_in()
    loop = asyncio.get_running_loop()
    asked_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _once_then_at_once(asked_to_end, number))

    def owner_gone() -> None:
        loop.remove_reader(watch.alive_fd)
        asked_to_end.set()

    loop.add_reader(watch.alive_fd, owner_gone)
    broker = Broker(
        cfg,
        endpoints=document["endpoints"],
        owner_token=bytes.fromhex(document["owner_token"]),
        run_id=document["run_id"],
        supervised=document["supervised"],
    )
    async with broker:
        _say(report_fd, {"endpoints": broker.endpoints, "run_id": broker.run_id})
        waits = asyncio.ensure_future(broker.wait_closed()), asyncio.ensure_future(asked_to_end.wait())
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
    return 0


def _once_then_at_once(asked: asyncio.Event, number: int) -> Any:
    def handle() -> None:
        if asked.is_set():
            os._exit(128 + number)
        asked.set()

    return handle


def _be_worker(cfg: OnlineDataEngineCfg, document: dict[str, Any], watch: OwnerWatch) -> int:
    from ods_async.transport.allocator import keep_big_blocks
    from ods_async.worker.runtime import run_worker

    keep_big_blocks()
    return run_worker(
        cfg,
        document["endpoint"],
        worker_id=document["worker_id"],
        restarts=int(document["restarts"]),
        alive_fd=watch.alive_fd,
    )


class OwnerWatch:
    """Tells when the owner is gone: its pipe ended, or this process has another parent.

    The second sign is needed because a process the owner forked holds a copy of the pipe.

    Args:
        owner_fd: read end of the owner's pipe; taken over.
        owner_pid: the owner.
        grace: seconds after which this process is ended when it has not ended by itself.

    Attributes:
        alive_fd: readable (end of file) from the moment the owner is gone.
        gone: whether it is.
    """

    def __init__(self, owner_fd: int, owner_pid: int, grace: float) -> None:
        self._owner_fd = owner_fd
        self._owner_pid = owner_pid
        self._grace = grace
        self.gone = False
        self.alive_fd, self._hold = os.pipe()
        threading.Thread(target=self._watch, name="ods-owner-watch", daemon=True).start()

    def _watch(self) -> None:
        while os.getppid() == self._owner_pid:
            readable, _, _ = select.select([self._owner_fd], [], [], _LOOK_SECONDS)
            if readable and not os.read(self._owner_fd, 4096):
                break
        self.gone = True
        os.close(self._hold)
        time.sleep(self._grace)
        sys.stderr.write(f"ods_async: process {os.getpid()} had to be ended: its owner is gone and it did not finish\n")
        os._exit(1)


def _read_document(fd: int) -> dict[str, Any] | None:
    header = _read_exactly(fd, 8)
    size = int.from_bytes(header, "big")
    if len(header) < 8 or size > _MAX_DOCUMENT_BYTES:
        sys.stderr.write("ods_async: this command is for the package's own use; see ods-async --help\n")
        return None
    data = _read_exactly(fd, size)
    if len(data) < size:
        return None  # the owner went away while it spoke
    found: dict[str, Any] = json.loads(data)
    return found


def _read_exactly(fd: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        data = os.read(fd, min(size - len(parts), 1 << 20))
        if not data:
            break
        parts += data
    return bytes(parts)


def _say(report_fd: int, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(report_fd, json.dumps(what, default=repr).encode() + b"\n")
