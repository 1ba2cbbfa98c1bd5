"""What callers pass, checked before anything is asked: only its type; what it may be is the broker's to say (B23)."""

from __future__ import annotations

import operator
from typing import Final

from ods_async.errors import ArgumentError

__all__ = ["MOST_AHEAD", "at_least_one", "bad_argument", "checked_ahead", "mode_text", "whole"]

MOST_AHEAD: Final = 128


def whole(argument: str, value: object) -> int:
    """The value as an int: any integer of 64 bits, numpy's too, but no bool.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(value, bool):
        raise bad_argument(argument, value, "an integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise bad_argument(argument, value, "an integer") from None
    if not -(2**63) <= number < (2**64 if argument == "seed" else 2**63):
        raise bad_argument(argument, value, "an integer of 64 bits")
    return number


def at_least_one(argument: str, value: object) -> int:
    """An int from 1 to 2**31 - 1, or ``ArgumentError``."""
    number = whole(argument, value)
    if not 1 <= number < 2**31:
        raise bad_argument(argument, value, "an integer of at least 1")
    return number


def mode_text(argument: str, value: object) -> str:
    """A string, or ``ArgumentError``; whether it names a mode is the broker's to say."""
    if not isinstance(value, str):
        raise bad_argument(argument, value, "one of 'episode', 'segment', 'boundary'")
    return value


def bad_argument(argument: str, value: object, rule: str) -> ArgumentError:
    """The error that says which argument, what it was, and what it must be."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ArgumentError(f"{argument} must be {rule}, got {shown}", argument=argument, value=shown, rule=rule)


def checked_ahead(prefetch: object) -> int:
    """How many batches to draw ahead.

    Raises:
        ArgumentError: no integer from 0 to 128.
    """
    number = whole("prefetch", prefetch)
    if not 0 <= number <= MOST_AHEAD:
        raise bad_argument("prefetch", prefetch, f"an integer from 0 to {MOST_AHEAD}")
    return number
