"""Dashboards beside real brokers, in this process, as a browser and a scraper see them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.requests import GetStats, GetStatus, Release, Sample, WaitReady
from ods_async.errors import BrokerUnreachableError, EndpointError, EndpointInUseError
from ods_async.observe.dashboard import server
from ods_async.observe.dashboard.html import Markup
from ods_async.observe.dashboard.server import Dashboard, parse_bind
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.peers import RawConsumer, RawWorker

CFG = OnlineDataEngineCfg(buffer_size=4, max_episode_steps=12, refill_policy="manual")
SECONDS = 60.0
NAME = 'w"0\\\n<script>'


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    """With a full buffer, three windows drawn, and a worker with an odd name."""
    with run_broker(CFG) as running:
        fill(running)
        yield running


def fill(running: RunningBroker, name: str = "w0") -> None:
    with RawWorker(running.endpoint, name) as worker, RawConsumer(running.endpoint) as consumer:
        worker.work_in_background()
        consumer.ask(WaitReady())
        plans: Any = consumer.ask(Sample(batch_size=3, length=4))
        consumer.send(Release((plans.plans[0].lease_id,)))
        consumer.ask(GetStatus())


@contextlib.asynccontextmanager
async def opened(endpoint: str, **options: Any) -> AsyncIterator[tuple[Dashboard, aiohttp.ClientSession]]:
    dashboard = Dashboard(endpoint, "127.0.0.1:0", interval=0.05, **options)
    async with dashboard, aiohttp.ClientSession(dashboard.url) as browser:
        yield dashboard, browser


async def state(browser: aiohttp.ClientSession, holds: Callable[[Any], object] = bool) -> Any:
    """The state once ``holds`` is true of it."""
    async with asyncio.timeout(SECONDS):
        while True:
            async with browser.get("/state.json") as answer:
                found = await answer.json()
            if holds(found):
                return found


async def figures(browser: aiohttp.ClientSession) -> dict[str, float]:
    async with browser.get("/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = text_string_to_metric_families(await answer.text())
    return {sample.name: sample.value for family in families for sample in family.samples}


async def test_c38_counts_agree_with_those_of_the_broker(broker: RunningBroker) -> None:
    """C38: on the page, in the state, in the metrics, in the events."""
    async with opened(broker.endpoint) as (_, browser):
        with RawConsumer(broker.endpoint) as consumer:
            stats: Any = consumer.ask(GetStats())
            total = stats.extra["events"]
            found = await state(browser, lambda found: found["snapshot"]["next_sequence"] == total)
            assert {key: value for key, value in found["stats"].items() if key != "extra"} == {
                name: getattr(stats, name) for name in found["stats"] if name != "extra"
            }
            assert found["stats"]["extra"]["sampled_batches"] == stats.extra["sampled_batches"] == 1
            assert found["snapshot"]["published_episodes"] == found["stats"]["successful_episodes"] == 4
            assert found["snapshot"]["occupied_slots"] == found["status"]["episodes"] == 4
            told = await figures(browser)
            assert told["ods_windows_sampled_total"] == stats.sampled_chunks == 3
            assert told["ods_episodes_successful_total"] == told["ods_episodes_retained"] == 4
            async with browser.get("/") as answer:
                text = await answer.text()
            assert "<dt>sampled_chunks</dt><dd>3</dd>" in text
            assert f"<dt>valid_frames</dt><dd>{stats.valid_frames}</dd>" in text


async def test_the_page_trusts_nothing_but_itself(broker: RunningBroker) -> None:
    async with opened(broker.endpoint) as (_, browser):
        async with browser.get("/") as answer:
            rules, text = answer.headers["Content-Security-Policy"], await answer.text()
            assert answer.headers["Cache-Control"] == "no-store"
        nonce = rules.partition("'nonce-")[2].partition("'")[0]
        assert rules.startswith("default-src 'none'; ")
        assert text.count(f'nonce="{nonce}"') == 2
        async with browser.get("/") as answer:
            assert nonce not in await answer.text()
        for method in ("POST", "PUT", "DELETE"):
            async with browser.request(method, "/state.json") as answer:
                assert answer.status == 405


async def test_other_names_for_this_machine_are_refused(broker: RunningBroker) -> None:
    """A page elsewhere can let its own name lead to 127.0.0.1; its browser must not read this one for it."""
    async with opened(broker.endpoint) as (dashboard, browser):
        port = dashboard.url.rpartition(":")[2].rstrip("/")
        names = {"evil.example": 403, f"evil.example:{port}": 403, "127.0.0.1.evil.example": 403}
        names |= {
            f"localhost:{port}": 200,
            "LOCALHOST": 200,
            f"127.0.0.1:{port}": 200,
            f"[::1]:{port}": 200,
            "[::1]": 200,
        }
        for name, code in names.items():
            for path in ("/", "/state.json", "/metrics"):
                async with browser.get(path, headers={"Host": name}) as answer:
                    assert (name, answer.status) == (name, code)


async def changes(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, str]]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def test_an_open_page_is_told_what_changes_and_only_that(broker: RunningBroker) -> None:
    """C47: also of a worker with an odd name."""
    async with opened(broker.endpoint) as (_, browser), asyncio.timeout(SECONDS), browser.get("/changes") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        told = changes(answer)
        first = await anext(told)
        assert list(first) == ["link", "cards", "workers", "counters", "gaps", "events"]
        with RawWorker(broker.endpoint, NAME):
            async for parts in told:
                assert "gaps" not in parts
                if "w&quot;0\\\n&lt;script&gt;" in parts.get("workers", ""):
                    break


async def test_more_pages_than_allowed_are_refused(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_BROWSERS", 2)
    async with (
        opened(broker.endpoint) as (_, browser),
        browser.get("/changes") as one,
        browser.get("/changes") as two,
        browser.get("/changes") as three,
    ):
        assert [answer.status for answer in (one, two, three)] == [200, 200, 503]


async def state_of_two(dashboard: Dashboard) -> None:
    """Wait until two pages are kept up to date."""
    async with asyncio.timeout(SECONDS):
        while dashboard._browsers < 2:
            await dashboard.watch.changed(dashboard.watch.version)


async def test_it_ends_at_once_although_pages_are_open(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """C46: one that reads, and one that never does and has more to read than the sockets hold."""
    monkeypatch.setattr(server, "sections", lambda view: {"link": Markup("x" * 20_000_000)})
    async with aiohttp.ClientSession() as browser:
        dashboard = Dashboard(broker.endpoint, "127.0.0.1:0", interval=0.05)
        async with dashboard:
            answer = await browser.get(f"{dashboard.url}changes")
            assert (await answer.content.readexactly(7)) == b"data: {"
            idle = socket.create_connection(("127.0.0.1", int(dashboard.url.rpartition(":")[2].rstrip("/"))))
            idle.sendall(b"GET /changes HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await state_of_two(dashboard)
            begun = time.monotonic()
        assert time.monotonic() - begun < 2.0 + 2.0
        idle.close()
        answer.close()


async def test_c47_started_and_stopped_three_times_each_with_its_own_broker() -> None:
    """C47: figures begin anew with each, none is doubled."""
    for count in (1, 2, 3):
        with run_broker(CFG) as running:
            for number in range(count):
                fill(running, f"w{number}")
            async with opened(running.endpoint) as (_, browser):
                found = await figures(browser)
                assert found["ods_windows_sampled_total"] == 3.0 * count
                assert found["ods_episodes_successful_total"] == 4.0


async def test_c47_two_side_by_side_show_their_own_broker(broker: RunningBroker) -> None:
    """C47: two brokers and three dashboards in one process."""
    with run_broker(CFG) as other:
        async with (
            opened(broker.endpoint) as (_, one),
            opened(broker.endpoint) as (_, same),
            opened(other.endpoint) as (_, two),
        ):
            runs = [(await state(browser))["stats"]["run_id"] for browser in (one, same, two)]
            assert runs == [broker.run_id, broker.run_id, other.run_id]
            sampled = [(await figures(browser))["ods_windows_sampled_total"] for browser in (one, same, two)]
            assert sampled == [3.0, 3.0, 0.0]


async def test_c47_a_busy_port_is_said_and_the_broker_goes_on(broker: RunningBroker) -> None:
    """C47"""
    async with opened(broker.endpoint) as (dashboard, browser):
        taken = dashboard.url.removeprefix("http://").rstrip("/")
        with pytest.raises(EndpointInUseError, match=f"{taken}: address already in use; choose another port"):
            async with Dashboard(broker.endpoint, taken):
                pass
        assert (await state(browser))["connected"]
    with RawConsumer(broker.endpoint) as consumer:
        assert consumer.ask(GetStatus()).state == "READY"


async def test_c42_the_page_says_that_the_broker_is_away_and_goes_on_when_it_is_back() -> None:
    """C42"""
    async with contextlib.AsyncExitStack() as stack:
        with run_broker(CFG) as first:
            fill(first)
            dashboard, browser = await stack.enter_async_context(opened(first.endpoint))
            await state(browser, lambda found: found["snapshot"]["published_episodes"] == 4)
        found = await state(browser, lambda found: not found["connected"])
        assert found["problem"]
        assert (await figures(browser))["ods_up"] == 0.0
        async with browser.get("/") as answer:
            assert "No broker" in await answer.text()
        with run_broker(CFG, int(first.endpoint.rpartition(":")[2])) as second:
            found = await state(
                browser, lambda found: found["connected"] and found["snapshot"]["run_id"] == second.run_id
            )
            assert found["runs"] == 2
            assert (await figures(browser))["ods_episodes_successful_total"] == 0.0
            async with browser.get("/") as answer:
                assert "run 2" in await answer.text()
            assert dashboard.watch.view.connected


async def test_without_a_broker_it_does_not_start() -> None:
    with pytest.raises(BrokerUnreachableError):
        async with Dashboard("tcp://127.0.0.1:9", "127.0.0.1:0", timeout=0.2):
            pass


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "*:0", "192.0.2.7:80"])
def test_beyond_this_machine_only_by_the_flag_named_for_what_it_is(bind: str) -> None:
    with pytest.raises(EndpointError, match="--allow-insecure-bind"):
        Dashboard("tcp://127.0.0.1:9", bind)


async def test_with_the_flag_others_may_look(broker: RunningBroker) -> None:
    async with (
        Dashboard(broker.endpoint, "0.0.0.0:0", allow_insecure_bind=True) as dashboard,
        aiohttp.ClientSession(dashboard.url) as browser,
        browser.get("/state.json", headers={"Host": "sim-host:8555"}) as answer,
    ):
        assert answer.status == 200


@pytest.mark.parametrize("bind", ["", "8555", "localhost", "http://localhost:1", "a b:5", "x:70000", ":80", "::1:80"])
def test_a_place_to_listen_is_checked(bind: str) -> None:
    with pytest.raises(EndpointError, match="HOST:PORT"):
        parse_bind(bind)


async def test_an_address_of_another_machine_cannot_be_bound(broker: RunningBroker) -> None:
    with pytest.raises(EndpointError, match=r"cannot listen for browsers on 192\.0\.2\.7:8555"):
        async with Dashboard(broker.endpoint, "192.0.2.7:8555", allow_insecure_bind=True):
            pass
