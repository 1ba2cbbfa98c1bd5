"""Text on the wire: three kinds, by what a longer one deserves.

* *Text* in general (an instruction, an entry of a dictionary) is kept exactly, or refused at the sender.
* *Names* (a worker's id, a phase, a mode) are short, or refused at both ends: they are put into sentences.
* *Words* for people (a reason, a message, a traceback) are cut, and say so: no sentence about a failure may be lost, or
  fail in its turn, because it is long.
"""

from __future__ import annotations

from typing import Any, Final

from ods_async.wire.coders import Coder, Refused, refuse

__all__ = ["NAME_BYTES", "NAME_FIELDS", "WORDS_BYTES", "WORDS_FIELDS", "check_text", "clip", "text_coders"]

NAME_BYTES: Final = 1024
WORDS_BYTES: Final = 16_384

NAME_FIELDS: Final = frozenset(
    (
        *(
            "host",
            "kind",
            "mode",
            "module",
            "name",
            "outcome",
            "phase",
            "previous",
            "role",
            "server",
            "socket",
            "state",
        ),
        *("type_name", "via", "worker_id"),
    )
)
"""Fields of messages that are names."""

WORDS_FIELDS: Final = frozenset(("reason", "message", "traceback_text", "waiting", "last_failure", "environment"))
"""Fields of messages that are words."""


def check_text(value: str, limit: int) -> str:
    """``value`` if it is valid Unicode of at most ``limit`` UTF-8 bytes."""
    size = len(value)
    if size * 4 > limit or not value.isascii():
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise Refused(
                f"expected valid Unicode, found a lone surrogate at position {error.start}; "
                "decode the text properly, or send bytes",
                value,
            ) from None
        if size > limit:
            raise Refused(f"expected at most {limit} bytes of text, found {size}", value, size=size, limit=limit)
    return value


def clip(text: str, size: int, *, tail: bool = False) -> str:
    """``text`` in at most ``size`` bytes of UTF-8; what is cut is counted. With ``tail`` its end is kept.

    Lone surrogates are written out as escapes, so that any text can be sent.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= size:
        return data.decode()
    mark = f"[{len(data) - size} bytes and a little more left out]"
    keep = max(0, size - len(mark) - 1)
    kept = (data[len(data) - keep :] if tail else data[:keep]).decode("utf-8", "ignore")
    joined = f"{mark}\n{kept}" if tail else f"{kept}\n{mark}"
    return joined.encode()[:size].decode("utf-8", "ignore")


def _unpack_text(tree: Any) -> str:
    if type(tree) is str:
        return tree
    raise refuse("text", tree)


def text_coders(text_bytes: int) -> tuple[Coder, dict[str, Coder]]:
    """The coder of text in general, and those of single fields by their name.

    Words get a quarter of ``text_bytes`` at most (a traceback half of it), so that a sentence made of them still fits.
    """

    def limited(limit: int) -> Coder:
        def pack(value: Any) -> str:
            if not isinstance(value, str):
                raise refuse("text", value)
            return str(check_text(value, limit))

        return Coder(pack, _unpack_text)

    name_bytes = min(NAME_BYTES, text_bytes)
    name = limited(name_bytes)

    def unpack_name(tree: Any) -> str:
        return check_text(_unpack_text(tree), name_bytes)

    def words(limit: int, tail: bool) -> Coder:
        def convert(value: Any) -> str:
            if not isinstance(value, str):
                raise refuse("text", value)
            return clip(value, limit, tail=tail)

        return Coder(convert, convert)

    by_name = dict.fromkeys(NAME_FIELDS, Coder(name.pack, unpack_name))
    by_name |= dict.fromkeys(WORDS_FIELDS, words(min(WORDS_BYTES, text_bytes // 4), False))
    by_name["traceback_text"] = words(min(2 * WORDS_BYTES, text_bytes // 2), True)
    return limited(text_bytes), by_name
