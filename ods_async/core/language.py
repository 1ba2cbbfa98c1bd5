"""The dictionaries behind ``task_index`` and ``subtask_index``: append-only, so an index stays right (B42–B44)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ods_async.core.episode import Rollout
from ods_async.errors import ArgumentError, ConfigError, LanguageCapacityError

__all__ = ["KINDS", "UNKNOWN_TASK", "LanguageRegistry", "SharedLanguageRegistry"]

KINDS: Final = ("task", "subtask")
UNKNOWN_TASK: Final = "unknown_task"


class SharedLanguageRegistry:
    """Two append-only dictionaries of text, one for tasks and one for subtasks, with one capacity for both.

    Text is kept exactly: no stripping, no folding, no normalisation.

    Args:
        capacity_bytes: UTF-8 bytes of all entries of both kinds, for the registry's life.

    Raises:
        ConfigError: (a ``ValueError``) the capacity is not a positive integer.
    """

    def __init__(self, capacity_bytes: int = 1024 * 1024) -> None:
        if type(capacity_bytes) is not int or capacity_bytes < 1:
            rule = "a positive integer"
            raise ConfigError(
                f"language_buffer_bytes={capacity_bytes!r} must be {rule}",
                argument="language_buffer_bytes",
                value=repr(capacity_bytes),
                rule=rule,
            )
        self.capacity_bytes = capacity_bytes
        self._used = 0
        self._texts: dict[str, list[str]] = {kind: [] for kind in KINDS}
        self._index: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
        self._lookup: dict[str, NDArray[np.object_]] = {}

    @property
    def used_bytes(self) -> int:
        """UTF-8 bytes of all entries so far."""
        return self._used

    @property
    def sizes(self) -> tuple[int, int]:
        """How many tasks and how many subtasks there are."""
        return len(self._texts["task"]), len(self._texts["subtask"])

    def intern(self, text: str, *, kind: str = "task") -> int:
        """The index of ``text`` in the dictionary of ``kind``, which gets a new entry if it has none.

        Raises:
            ArgumentError: (a ``ValueError``) an unknown kind, or a text that is no string, empty, or not valid Unicode.
            LanguageCapacityError: (an ``OverflowError``) no room; nothing was added and old entries stay usable.
        """
        known = self._index[_known(kind)].get(text) if isinstance(text, str) else None
        if known is not None:
            return known
        self._add_all([(kind, text)])
        return self._index[kind][text]

    def resolve(self, indices: Any, *, kind: str = "task") -> Any:
        """The texts behind ``indices``, as lists nested like them (one text for a single index).

        Args:
            indices: an integer, nested sequences of integers, an integer array or a CPU tensor of integers.
            kind: the dictionary they point into.

        Raises:
            ArgumentError: (a ``ValueError``) an unknown kind; indices that are no integers, padding (-1) or unknown.
        """
        texts = self._texts[_known(kind)]
        array = _as_indices(indices, kind)
        wrong = (array < 0) | (array >= len(texts))
        if wrong.any():
            position = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(wrong)))
            value = int(np.atleast_1d(array)[position])
            where = f" at {list(position)}" if array.ndim else ""
            what = "padding: select valid steps before decoding" if value == -1 else f"unknown: {len(texts)} entries"
            raise ArgumentError(
                f"{kind} index {value}{where} is {what}",
                argument="indices",
                value=str(value),
                rule=f"0 <= index < {len(texts)}",
            )
        if array.ndim == 0:
            return texts[int(array)]
        lookup = self._lookup.get(kind)
        if lookup is None or len(lookup) != len(texts):
            lookup = self._lookup[kind] = np.array(texts, dtype=np.object_)
        return lookup[array].tolist() if array.size else array.tolist()

    def _add_all(self, entries: Sequence[tuple[str, str]]) -> None:
        """Add those entries that are new: all of them, or none when they do not fit."""
        fresh: dict[tuple[str, str], int] = {}
        for kind, text in entries:
            size = _utf8_bytes(text)
            if text not in self._index[kind]:
                fresh[kind, text] = size
        needed = self._used + sum(fresh.values())
        if needed > self.capacity_bytes:
            raise LanguageCapacityError(
                f"the language dictionaries would need {needed} bytes and language_buffer_bytes is "
                f"{self.capacity_bytes}; raise it, or use fewer different instructions; earlier texts stay usable",
                needed=needed,
                capacity=self.capacity_bytes,
            )
        for kind, text in fresh:
            self._index[kind][text] = len(self._texts[kind])
            self._texts[kind].append(text)
        self._used = needed


class LanguageRegistry(SharedLanguageRegistry):
    """What the broker and its consumers add: interning whole rollouts, and following another registry."""

    def intern_rollout(self, rollout: Rollout) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """The indices of a rollout's instructions: all are interned, or none.

        An episode's task is its instruction, else ``unknown_task``; a segment's subtask is its instruction, else the
        task's text. An empty instruction counts as none.

        Returns:
            One task index an episode; and for each episode one subtask index a segment (-1 for an empty segment, which
            marks no step and adds no entry), then the one for steps outside segments.

        Raises:
            ArgumentError: an instruction that is no text.
            LanguageCapacityError: no room; nothing was added.
        """
        tasks = [episode.instruction or UNKNOWN_TASK for episode in rollout.episodes]
        subtasks = [
            [None if s.start == s.end else (s.instruction or task) for s in episode.segments]
            for episode, task in zip(rollout.episodes, tasks, strict=True)
        ]
        entries = []
        for task, own in zip(tasks, subtasks, strict=True):
            entries += [("task", task), ("subtask", task)]
            entries += [("subtask", text) for text in own if text is not None]
        self._add_all(tuple(dict.fromkeys(entries)))  # episodes of one rollout mostly say the same
        task_index, subtask_index = self._index["task"], self._index["subtask"]
        return tuple(task_index[task] for task in tasks), tuple(
            (*(-1 if text is None else subtask_index[text] for text in own), subtask_index[task])
            for task, own in zip(tasks, subtasks, strict=True)
        )

    def entries(self, kind: str, since: int = 0) -> tuple[str, ...]:
        """The texts of ``kind`` from index ``since`` on.

        Raises:
            ArgumentError: an unknown kind, or a negative ``since``.
        """
        if since < 0:
            raise ArgumentError(f"since={since} must not be negative", argument="since", value=str(since), rule=">= 0")
        return tuple(self._texts[_known(kind)][since:])

    def follow(self, kind: str, since: int, entries: Sequence[str]) -> None:
        """Take over what another registry answered to :meth:`entries`, so that its indices mean the same here.

        What is known already is skipped. The other registry has kept its capacity, so this one is not checked again.

        Raises:
            ArgumentError: an unknown kind, entries that start beyond what is known, or that contradict it.
        """
        texts, index = self._texts[_known(kind)], self._index[kind]
        known = texts[since:] if 0 <= since <= len(texts) else None
        if known is None or known[: len(entries)] != list(entries[: len(known)]):
            raise ArgumentError(
                f"{kind} entries from {since} on do not continue the {len(texts)} known ones",
                argument="entries",
                value=f"{len(entries)} entries from {since}",
                rule="the next entries of the same dictionary",
            )
        fresh = entries[len(known) :]
        self._used += sum(_utf8_bytes(text) for text in fresh)
        for text in fresh:
            index[text] = len(texts)
            texts.append(text)


def _known(kind: str) -> str:
    if kind not in KINDS:
        rule = " or ".join(repr(known) for known in KINDS)
        raise ArgumentError(f"kind={kind!r} must be {rule}", argument="kind", value=repr(kind), rule=rule)
    return kind


def _utf8_bytes(text: object) -> int:
    rule = "a non-empty string that can be written as UTF-8"
    try:
        if isinstance(text, str) and text:
            return len(text.encode())
    except UnicodeEncodeError:
        pass
    shown = ascii(text)[:80]
    raise ArgumentError(f"a language entry must be {rule}, found {shown}", argument="text", value=shown, rule=rule)


def _as_indices(indices: Any, kind: str) -> NDArray[np.integer]:
    rule = "integers"
    try:
        array = np.asarray(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{kind} indices must be {rule}, nested evenly: {error}",
            argument="indices",
            value=type(indices).__name__,
            rule=rule,
        ) from error
    if array.size == 0 and not hasattr(indices, "dtype"):
        array = array.astype(np.int64)  # an empty list has no type of its own
    if array.dtype.kind not in "iu":
        raise ArgumentError(
            f"{kind} indices must be {rule}, found {array.dtype}",
            argument="indices",
            value=str(array.dtype),
            rule=rule,
        )
    return array
