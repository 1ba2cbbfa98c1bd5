"""``dashboard``: a web page that shows a service, until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import TYPE_CHECKING

from ods_async.cli.output import print_json
from ods_async.cli.signals import SignalWatch
from ods_async.errors import ConfigError

if TYPE_CHECKING:
    from ods_async.observe.dashboard.server import Dashboard

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Serve the page.

    Raises:
        ConfigError: the libraries that serve it are not installed.
    """
    return asyncio.run(_serve(options, options.watch))


async def _serve(options: argparse.Namespace, watch: SignalWatch) -> int:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    watch.tell(lambda: loop.call_soon_threadsafe(asked.set))
    try:
        from ods_async.observe.dashboard.server import Dashboard
    except ModuleNotFoundError as error:
        rule = "pip install 'ods-async[dashboard]'"
        raise ConfigError(
            f"the dashboard needs {error.name}, which is not installed: {rule}",
            argument="dashboard",
            value=repr(error.name),
            rule=rule,
        ) from error
    dashboard = Dashboard(
        options.endpoint,
        options.bind,
        allow_insecure_bind=options.allow_insecure_bind,
        keys=options.keys,
        timeout=options.timeout,
    )
    ending = asyncio.ensure_future(asked.wait())
    serving = asyncio.ensure_future(_show(dashboard, options))
    try:
        await asyncio.wait((ending, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        return watch.exit_code(service=True)
    finally:
        ending.cancel()
        serving.cancel()
        await asyncio.wait((serving,))


async def _show(dashboard: Dashboard, options: argparse.Namespace) -> None:
    async with dashboard:
        if options.json:
            print_json({"url": dashboard.url, "endpoint": options.endpoint, "pid": os.getpid()})
        else:
            print(f"dashboard of {options.endpoint} on {dashboard.url}", flush=True)
        await dashboard.wait()
