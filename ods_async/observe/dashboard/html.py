"""HTML that is escaped unless it was made here. What goes on a page comes from workers, and they may be anybody."""

from __future__ import annotations

import html
from collections.abc import Iterable

__all__ = ["Markup", "shortened", "table", "tag"]

# Control characters by their pictures, which are printed; spaces and line ends stay what they are.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
_VOID = frozenset({"meta", "link"})


class Markup(str):
    """Text that is HTML already. Only :func:`tag` makes it, of its parts."""

    __slots__ = ()


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """An element. Whatever is not :class:`Markup` is escaped; in names of attributes ``_`` stands for ``-``.

    A trailing ``_`` keeps clear of Python's words (``class_``); an attribute that is None is left out.
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(part if isinstance(part, Markup) else _escaped(part) for part in content)
    return Markup(f"<{name}{words}>" if name in _VOID else f"<{name}{words}>{inner}</{name}>")


def table(head: Iterable[object], rows: Iterable[Iterable[object]], **attributes: object) -> Markup:
    """A table with a row of headings."""
    first = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("table", tag("thead", first), tag("tbody", *body), **attributes)


def shortened(text: str, most: int = 300) -> str:
    """The text, cut where it is too long to be looked at."""
    return text if len(text) <= most else f"{text[:most]} …"


def _escaped(value: object) -> str:
    return html.escape(str(value).translate(_PICTURES).encode("utf-8", "replace").decode(), quote=True)
