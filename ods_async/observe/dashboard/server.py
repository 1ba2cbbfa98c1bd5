"""The dashboard: a small web server beside a service, which it only asks and listens to. Needs the extra ``dashboard``.

``/`` is the page, ``/changes`` keeps it up to date, ``/state.json`` and ``/metrics`` are for programs. Nothing can be
changed from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import os
import secrets
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from aiohttp import web

from ods_async.errors import EndpointError, EndpointInUseError
from ods_async.observe.dashboard.html import Markup
from ods_async.observe.dashboard.page import page, sections
from ods_async.observe.metrics import CONTENT_TYPE, Metrics
from ods_async.observe.view import to_json
from ods_async.observe.watch import ServiceWatch
from ods_async.transport.curve import CurveKeys
from ods_async.transport.endpoint import Endpoint, is_loopback, parse_endpoint, resolve_for_bind

__all__ = ["DEFAULT_BIND", "Dashboard", "parse_bind"]

DEFAULT_BIND: Final = "127.0.0.1:8555"

_PACE_SECONDS: Final = 0.25  # a browser is told of changes this often at most
_END_SECONDS: Final = 0.5  # waited for twice: for pages to end by themselves, and for those that are cut
_MOST_BROWSERS: Final = 64
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def parse_bind(text: str) -> Endpoint:
    """``HOST:PORT``, where to listen for browsers.

    Raises:
        EndpointError: it is none.
    """
    try:
        return parse_endpoint(f"tcp://{text}")
    except EndpointError as error:
        rule = f"HOST:PORT, for example {DEFAULT_BIND} or [::1]:0"
        words = f"{text!r} is nowhere to listen for browsers: {error.rule}; give {rule}"
        raise EndpointError(words, argument="bind", value=repr(text), rule=rule) from None


class Dashboard:
    """Serves while the ``async with`` block lasts. Any number of them can be in one process.

    Args:
        endpoint: the broker's address.
        bind: ``HOST:PORT`` to listen for browsers; port 0 takes a free one, see :attr:`url`.
        allow_insecure_bind: bind beyond this machine although whoever reaches the port can read everything.
        keys: CURVE keys for the broker, or the path of their folder or file.
        timeout: seconds within which the broker must answer at the start.
        interval: seconds between two looks at the broker's counters.

    Raises:
        EndpointError: an address that cannot be used, or that would open the dashboard to the network unasked.
        ConfigError: keys that cannot be read.
    """

    def __init__(
        self,
        endpoint: str,
        bind: str = DEFAULT_BIND,
        *,
        allow_insecure_bind: bool = False,
        keys: CurveKeys | str | os.PathLike[str] | None = None,
        timeout: float = 10.0,
        interval: float = 1.0,
    ) -> None:
        self._bind = parse_bind(bind)
        self._own = is_loopback(self._bind)
        if not self._own and not allow_insecure_bind:
            raise EndpointError(
                f"{bind} can be reached from other machines, and nothing is encrypted or authenticated there; bind to "
                f"{DEFAULT_BIND} (and reach it through ssh -L), or say --allow-insecure-bind",
                argument="bind",
                value=repr(bind),
                rule="loopback, unless allow_insecure_bind",
            )
        self.watch = ServiceWatch(endpoint, keys=keys, interval=interval, name="ods-async dashboard")
        self.metrics = Metrics(lambda: self.watch.view)
        self.url = ""
        self._timeout = timeout
        self._ending = asyncio.Event()
        self._browsers = 0
        self._rendered: tuple[int, dict[str, Markup]] = (-1, {})
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, and look at the broker for the first time.

        Raises:
            EndpointInUseError: the port is taken.
            EndpointError: no address of this machine.
            BrokerUnreachableError: no broker answers in time.
            AuthenticationError: the keys do not fit.
        """
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/changes", self._changes)
        app.router.add_get("/state.json", self._state)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_END_SECONDS)
        await self._runner.setup()
        place = resolve_for_bind(self._bind)
        try:
            await web.TCPSite(self._runner, place.host, place.port).start()
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            wrong = EndpointInUseError if error.errno == errno.EADDRINUSE else EndpointError
            raise wrong(
                f"cannot listen for browsers on {str(place).removeprefix('tcp://')}: {reason}; choose another port "
                "with --bind, or 0 for any",
                argument="bind",
                value=str(place),
                rule="a free port of this machine",
            ) from error
        port = self._runner.addresses[0][1]
        shown = "127.0.0.1" if place.host == "0.0.0.0" else "::1" if place.host == "::" else place.host
        self.url = str(Endpoint("tcp", shown, port)).replace("tcp://", "http://") + "/"
        await self.watch.connect(self._timeout)
        self._task = asyncio.create_task(self.watch.run())

    async def wait(self) -> None:
        """Go on until cancelled; raises what the watch fell over, which is a fault of ours."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """End: pages are told nothing more, the port is free. Again: no effect."""
        self._ending.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
            self._task = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self.watch.close()

    # --- what is served ---------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # A page elsewhere may have its own name lead here; then the browser would let it read what is for this user.
        if self._own and not _is_own_name(request.host):
            raise web.HTTPForbidden(text="this dashboard is for this machine: use localhost or 127.0.0.1\n")
        return await handler(request)

    async def _page(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        rules = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return web.Response(
            text=page(self.watch.view, nonce),
            content_type="text/html",
            charset="utf-8",
            headers={**_HEADERS, "Content-Security-Policy": rules},
        )

    async def _state(self, request: web.Request) -> web.Response:
        text = json.dumps(to_json(self.watch.view)) + "\n"
        return web.Response(text=text, content_type="application/json", headers=_HEADERS)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={**_HEADERS, "Content-Type": CONTENT_TYPE})

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        if self._browsers >= _MOST_BROWSERS:
            raise web.HTTPServiceUnavailable(text=f"{_MOST_BROWSERS} pages are open already\n")
        self._browsers += 1
        try:
            response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                await self._tell(response)
            return response
        finally:
            self._browsers -= 1

    async def _tell(self, response: web.StreamResponse) -> None:
        shown: dict[str, Markup] = {}
        version = -1
        while not self._ending.is_set():
            version = self.watch.version
            parts = self._sections(version)
            changed = {name: part for name, part in parts.items() if shown.get(name) != part}
            if changed:
                await response.write(f"data: {json.dumps(changed)}\n\n".encode())
                shown = parts
            await self._next(version)

    async def _next(self, version: int) -> None:
        """Wait for a change, then a moment for more of them; at most until the end."""

        async def news() -> None:
            await self.watch.changed(version)
            await asyncio.sleep(_PACE_SECONDS)

        waits = [asyncio.ensure_future(news()), asyncio.ensure_future(self._ending.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _sections(self, version: int) -> dict[str, Markup]:
        """Made once for all browsers."""
        if self._rendered[0] != version:
            self._rendered = (version, sections(self.watch.view))
        return self._rendered[1]


def _is_own_name(host: str) -> bool:
    name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
