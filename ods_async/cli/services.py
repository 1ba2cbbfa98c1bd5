"""The two halves of a service, each in a process of its own: ``broker`` and ``worker``."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys

from ods_async.cli.output import print_json
from ods_async.cli.settings import settings_for
from ods_async.cli.signals import SignalWatch
from ods_async.cli.tokens import published_token, withdraw_token
from ods_async.config import OnlineDataEngineCfg

__all__ = ["run_broker", "run_one_worker"]


def run_broker(options: argparse.Namespace) -> int:
    """Serve until a signal, or the owner's stop, ends it."""
    return asyncio.run(_serve(settings_for(options), options.json, options.watch))


async def _serve(cfg: OnlineDataEngineCfg, as_json: bool, watch: SignalWatch) -> int:
    from ods_async.broker.process import settle_in
    from ods_async.broker.service import Broker
    from ods_async.transport.cut import remove_own_files

    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    watch.tell(lambda: loop.call_soon_threadsafe(asked.set))
    watch.before_cut = remove_own_files
    settle_in()
    broker = Broker(cfg)
    async with broker:

        def cut() -> None:
            remove_own_files()
            withdraw_token(broker.endpoints, broker.owner_token)

        watch.before_cut = cut
        with published_token(broker.endpoints, broker.owner_token):
            if as_json:
                print_json({"endpoints": broker.endpoints, "run_id": broker.run_id, "pid": os.getpid()})
            else:
                print(f"broker listens on {', '.join(broker.endpoints)} (run {broker.run_id})", flush=True)
            closed, ending = asyncio.ensure_future(broker.wait_closed()), asyncio.ensure_future(asked.wait())
            await asyncio.wait((closed, ending), return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if not closed.done():
                await broker.stop()
            end = await closed
    if end.failed:
        print(f"ods-async: error: {end.reason}", file=sys.stderr)
        return 1
    if not as_json:
        print(f"ended: {end.reason}", flush=True)
    return watch.exit_code(service=True)


def run_one_worker(options: argparse.Namespace) -> int:
    """Make demonstrations until the broker, or a signal, ends it."""
    cfg = settings_for(options, standing=False)
    cfg.require_environment()
    from ods_async.transport.allocator import keep_big_blocks
    from ods_async.worker.runtime import run_worker

    keep_big_blocks()
    name = options.worker_id or f"{socket.gethostname()[:64]}-{os.getpid()}"
    return run_worker(cfg, options.connect, worker_id=name, keys=options.keys, patience=options.patience)
