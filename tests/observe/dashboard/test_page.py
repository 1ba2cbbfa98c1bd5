"""The page as a browser reads it. What workers say is text on it, whatever it looks like."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from ods_async.observe.dashboard.html import Markup, shortened, tag
from ods_async.observe.dashboard.page import page, sections
from ods_async.observe.view import View
from tests.observe.views import HOSTILE, lost, status, view_of

VOID = ("meta", "link")


class Browser(HTMLParser):
    """Elements, their attributes, and the text of every cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)
        if name == "td":
            self.cells.append("")

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.cells[-1] += data


def test_every_text_of_a_worker_is_text_c47() -> None:
    """C47: names with quotes, tags, newlines stay what they are, in cells, failures and events."""
    tame, hostile = view_of(*(f"w{number}" for number in range(len(HOSTILE)))), view_of(*HOSTILE)
    found = Browser(page(hostile, "n0"))
    assert [name for name, _ in found.elements] == [name for name, _ in Browser(page(tame, "n0")).elements]
    assert {key for _, attributes in found.elements for key in attributes if key.startswith("on")} == set()
    for name in HOSTILE:
        shown = name.replace("\x00", "␀").replace("\x1b", "␛")
        assert shown in found.cells
        assert f"step, step 3: ValueError: {shown}" in found.cells


@pytest.mark.parametrize("words", HOSTILE)
def test_so_is_every_other_text(words: str) -> None:
    """What the service waits for, why it failed, why it cannot be seen, what was missed, where it is."""
    views = [
        view_of("w", status=status(waiting=words, last_failure=words)),
        view_of("w", connected=False, problem=words),
        view_of("w", gaps=(lost(3, words),), events=(lost(3, words),), problem=words),
        View(words, problem=words),
    ]
    for view in views:
        found = Browser(page(view, "n0"))
        assert sum(name == "script" for name, _ in found.elements) == 1
        assert not any(name in ("img", "b") and "src" in attributes for name, attributes in found.elements)
        assert {key for _, attributes in found.elements for key in attributes if key.startswith("on")} == set()


def test_the_page_is_one_piece() -> None:
    """Nothing comes from elsewhere: no address in it but its own."""
    text = page(view_of("w0"), "n0")
    found = Browser(text)
    links = {value for _, a in found.elements for key, value in a.items() if key in ("src", "href")}
    assert links == {"data:,", "state.json", "metrics"}
    assert "http" not in text.replace("http-equiv", "")
    assert all(a.get("nonce") == "n0" for name, a in found.elements if name in ("script", "style"))


def test_figures_are_shown_as_they_are() -> None:
    parts = sections(view_of("w0"))
    assert "<b>2 of 3</b>" in parts["cards"]
    assert "<b>4 of 6</b>" in parts["cards"]
    assert "<b>64,000</b>" in parts["cards"]
    assert "<dt>sampled_chunks</dt><dd>64,000</dd>" in parts["counters"]
    assert "M120.0" in parts["cards"]  # the line begins where something is known
    assert "ValueError: w0" in parts["workers"]


def test_a_broker_that_is_away_and_what_was_missed_are_said() -> None:
    """C42"""
    parts = sections(view_of("w0", connected=False, silent_for=12.3, problem="nobody answers"))
    assert "silent for 12 s" in parts["link"]
    assert "nobody answers" in parts["link"]
    assert "not answered yet" in sections(View("ipc:///x"))["link"]
    assert "run 2" in sections(view_of("w0", runs=2))["link"]
    parts = sections(view_of("w0", gaps=(lost(5), lost(None)), missed_events=5))
    assert "Events missed: 5 at least" in parts["gaps"]
    assert "Events missed" not in sections(view_of("w0"))["gaps"]


def test_only_what_tag_has_made_is_markup() -> None:
    assert tag("p", "<b>", Markup("<i></i>"), title='"', class_=None) == '<p title="&quot;">&lt;b&gt;<i></i></p>'
    assert type(tag("b", "x") + "<i>") is str
    assert tag("p", "\ud800\x07") == "<p>?␇</p>"
    assert shortened("x" * 400) == "x" * 300 + " …"
