"""The page: a view of a service as HTML, in sections that are sent anew when they change. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from ods_async.core.events import Event, to_record
from ods_async.core.requests import Stats
from ods_async.observe.dashboard.html import Markup, shortened, table, tag
from ods_async.observe.dashboard.look import SCRIPT, STYLE
from ods_async.observe.sequence import EventsLost
from ods_async.observe.view import View, lost_in_words

__all__ = ["page", "sections"]

_COMMON: Final = ("kind", "sequence", "run_id", "monotonic_ns")
_WIDE, _HIGH = 240, 36


def page(view: View, nonce: str) -> str:
    """The whole page as it is first sent; ``nonce`` is what the browser is told to trust (and nothing else)."""
    parts = sections(view)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"ods-async: {view.endpoint}"),
        tag("link", rel="icon", href="data:,"),
        tag("noscript", tag("meta", http_equiv="refresh", content="5")),
        tag("style", Markup(STYLE), nonce=nonce),
    )
    body = tag(
        "body",
        tag("h1", "ods-async ", tag("small", view.endpoint)),
        tag("p", "This dashboard does not answer; it is tried again.", id="away", class_="bad", hidden="hidden"),
        *(tag("section", part, id=name) for name, part in parts.items()),
        tag("p", tag("a", "state.json", href="state.json"), " · ", tag("a", "metrics", href="metrics"), class_="links"),
        tag("script", Markup(SCRIPT), nonce=nonce),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def sections(view: View) -> dict[str, Markup]:
    """The parts of the page by their ids, in order."""
    return {
        "link": _link(view),
        "cards": _cards(view),
        "workers": _workers(view),
        "counters": _counters(view.stats),
        "gaps": _gaps(view),
        "events": _events(view),
    }


def _link(view: View) -> Markup:
    if not view.connected:
        ago = "it has not answered yet" if view.silent_for is None else f"silent for {view.silent_for:.0f} s"
        text = f"No broker ({ago}); what follows is what was last known. It is looked for. "
        return tag("p", text, tag("span", shortened(view.problem)), class_="bad")
    lines = []
    if view.problem:
        lines.append(tag("p", shortened(view.problem), class_="bad"))
    if view.runs > 1:
        lines.append(tag("p", f"The broker was started anew: this is run {view.runs} since this dashboard began."))
    status = view.status
    if status is not None and status.last_failure:
        lines.append(tag("p", shortened(status.last_failure), class_="bad"))
    if status is not None and status.waiting:
        lines.append(tag("p", "Waiting for ", shortened(status.waiting), class_="note"))
    return tag("div", *lines)


def _cards(view: View) -> Markup:
    status, stats, snapshot = view.status, view.stats, view.snapshot
    if status is None or stats is None:
        return tag("div")
    seconds = snapshot.last_generation_seconds
    rate = "–" if view.windows_per_second is None else f"{view.windows_per_second:,.0f}"
    cards = [
        ("state", status.state, f"run {status.run_id}"),
        (
            "generation",
            f"{status.completed_generation} of {status.requested_generation}",
            "complete of requested" + ("" if seconds is None else f"; the last took {seconds:.1f} s"),
        ),
        ("episodes stored", f"{status.episodes} of {status.slots}", f"{stats.valid_frames:,} steps"),
        ("workers", str(sum(worker.state not in ("gone", "stalled") for worker in status.workers)), "there"),
        ("windows drawn", f"{stats.sampled_chunks:,}", f"{_extra(stats, 'sampled_batches')} batches"),
        ("windows/s", rate, _line(view.rates)),
    ]
    made = (
        tag("div", tag("h2", name), tag("b", value), tag("small", more), class_="card") for name, value, more in cards
    )
    return tag("div", *made, class_="cards")


def _extra(stats: Stats, name: str) -> str:
    found = stats.extra.get(name)
    return f"{found:,}" if isinstance(found, int) else "?"


def _line(rates: tuple[float | None, ...]) -> Markup:
    """The last rates as a line; where nothing is known it has a gap."""
    top = max((rate for rate in rates if rate is not None), default=0.0) or 1.0
    step = _WIDE / max(len(rates) - 1, 1)
    words, pen = [], "M"
    for at, rate in enumerate(rates):
        if rate is None:
            pen = "M"
            continue
        words.append(f"{pen}{at * step:.1f} {_HIGH - 1 - rate / top * (_HIGH - 2):.1f}")
        pen = "L"
    label = f"at most {top:,.0f}"
    path = tag("path", d="".join(words))
    return tag("svg", path, viewBox=f"0 0 {_WIDE} {_HIGH}", width=_WIDE, height=_HIGH, role="img", aria_label=label)


def _workers(view: View) -> Markup:
    if view.status is None:
        return tag("div")
    told = view.snapshot.workers
    rows = []
    for worker in view.status.workers:
        seen = told.get(worker.worker_id)
        rows.append(
            (
                shortened(worker.worker_id),
                tag("span", worker.state, class_="bad" if worker.state in ("gone", "stalled") else None),
                "" if seen is None else shortened(f"{seen.host}, {seen.pid}"),
                worker.rollouts,
                worker.failures,
                worker.restarts,
                f"{worker.silent_for:.0f} s",
                "" if seen is None else shortened(seen.last_failure),
            )
        )
    if not rows:
        return tag("div", tag("h2", "Workers"), tag("p", "None has come yet.", class_="note"))
    head = ("worker", "state", "host, process", "rollouts", "failures", "restarts", "last heard", "last failure")
    return tag("div", tag("h2", "Workers"), table(head, rows))


def _counters(stats: Stats | None) -> Markup:
    """The counters as ``ods-async stats`` has them, under the same names."""
    if stats is None:
        return tag("div")
    told = {f.name: getattr(stats, f.name) for f in dataclasses.fields(stats) if f.name not in ("extra", "run_id")}
    told |= {name: value for name, value in stats.extra.items() if name != "state"}
    cells = (tag("div", tag("dt", name), tag("dd", _figure(value))) for name, value in told.items())
    return tag("div", tag("h2", "Counters"), tag("dl", *cells))


def _figure(value: Any) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _gaps(view: View) -> Markup:
    if not view.gaps:
        return tag("div")
    items = (tag("li", shortened(lost_in_words(gap))) for gap in reversed(view.gaps))
    head = f"Events missed: {view.missed_events:,}" + ("" if all(gap.count for gap in view.gaps) else " at least")
    return tag("div", tag("h2", head), tag("ul", *items), class_="bad")


def _events(view: View) -> Markup:
    rows = [_event(item, view.origin_ns) for item in reversed(view.events)]
    if not rows:
        return tag("div", tag("h2", "Events"), tag("p", "None yet.", class_="note"))
    return tag("div", tag("h2", "Events, newest first"), table(("number", "after", "kind", "what"), rows))


def _event(item: Event | EventsLost, origin_ns: int) -> tuple[object, ...]:
    if isinstance(item, EventsLost):
        return item.first, "", tag("span", item.kind, class_="bad"), shortened(lost_in_words(item))
    told = {key: value for key, value in to_record(item).items() if key not in _COMMON and not key.endswith("_runs")}
    words = "  ".join(f"{key}={_short(value)}" for key, value in told.items() if value not in ("", None))
    return item.sequence, f"{(item.monotonic_ns - origin_ns) * 1e-9:.1f} s", item.kind, shortened(words, 600)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if not isinstance(value, str):
        return str(value)
    lines = value.splitlines() or [""]
    return f"{lines[0][:160]} …" if len(lines) > 1 or len(lines[0]) > 160 else lines[0]
