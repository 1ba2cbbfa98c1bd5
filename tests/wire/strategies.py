"""Hypothesis strategies for every message, made from the dataclasses' own annotations."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ods_async.core.events import EpisodeEvicted, EpisodePublished
from ods_async.core.requests import Batch, BufferDescription, FieldDescription, Plan, Sample
from ods_async.wire.plain import SCALARS

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


def numpy_scalars() -> st.SearchStrategy[Any]:
    def one(pair: tuple[str, bytes]) -> Any:
        name, data = pair
        dtype = SCALARS[name]
        value = np.frombuffer(data[: dtype.itemsize], dtype)[0]
        return np.bool_(data[0] & 1) if name == "bool" else value

    return st.tuples(st.sampled_from(sorted(SCALARS)), st.binary(min_size=16, max_size=16)).map(one)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | INT64
    | st.integers(-(2**300), 2**300)
    | st.floats()
    | TEXT
    | st.binary(max_size=20)
    | numpy_scalars(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(TEXT, inner, max_size=4)
        | st.lists(INT64, max_size=5).map(tuple)
    ),
    max_leaves=12,
)
PLAIN_DICTS = st.dictionaries(TEXT, PLAIN, max_size=4)


def of_annotation(hint: Any, *, plain: st.SearchStrategy[Any] = PLAIN_DICTS) -> st.SearchStrategy[Any]:
    leaves = {int: INT64, float: st.floats(), bool: st.booleans(), str: TEXT, bytes: st.binary(max_size=20)}
    if hint in leaves:
        return leaves[hint]
    if dataclasses.is_dataclass(hint):
        return of_class(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return st.one_of(*(st.none() if a is type(None) else of_annotation(a) for a in arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(of_annotation(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of_annotation, arguments))
    assert origin is dict
    return plain


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    count, history = draw(st.integers(1, 5)), draw(st.integers(0, 3))

    def data(size: int) -> bytes:
        return draw(st.binary(min_size=size, max_size=size))

    ends = 4 * count if history else 0
    rows, starts, first, last, stamps = data(4 * count), data(4 * count), data(ends), data(ends), data(8 * count)
    return Plan(draw(INT64), count, draw(st.integers(1, 99)), history, rows, starts, first, last, stamps)


POSITIVE = st.integers(1, 2**40)
FIELDS = st.builds(
    FieldDescription,
    path=st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(sorted(SCALARS)),
    shape=st.lists(st.integers(0, 100), max_size=4).map(tuple),
    pad=st.integers(-1, 0),
    offset=st.integers(0, 2**40),
)
SPECIAL: dict[type[Any], dict[str, st.SearchStrategy[Any]]] = {
    Sample: {"seed": st.none() | st.integers(-(2**63), 2**64 - 1)},
    Batch: {"batch_size": POSITIVE, "length": POSITIVE, "history": POSITIVE, "payload_bytes": POSITIVE},
    BufferDescription: {"rows": POSITIVE, "steps": POSITIVE, "segment_bytes": POSITIVE, "stamps_offset": POSITIVE},
}


@st.composite
def episode_events(draw: st.DrawFn, cls: type[Any]) -> Any:
    def runs() -> Any:
        turns = sorted(draw(st.sets(st.integers(0, 2**30), max_size=8)))
        return tuple(zip(turns[::2], turns[1::2], strict=False))

    hints = typing.get_type_hints(cls)
    fields = {f.name: draw(of_annotation(hints[f.name])) for f in dataclasses.fields(cls)}
    fields |= {"valid_runs": runs(), "anchor_runs": runs()}
    counts = {"valid_frames": "valid_runs", "eligible_anchors": "anchor_runs"}
    return cls(**fields | {name: sum(end - start for start, end in fields[key]) for name, key in counts.items()})


def of_class(cls: type[Any]) -> st.SearchStrategy[Any]:
    if cls in (EpisodePublished, EpisodeEvicted):
        return episode_events(cls)
    if cls is FieldDescription:
        return FIELDS
    if cls is Plan:
        return plans()
    hints = typing.get_type_hints(cls)
    parts = {f.name: of_annotation(hints[f.name]) for f in dataclasses.fields(cls)}
    return st.builds(cls, **(parts | SPECIAL.get(cls, {})))


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, all the way down; NaN equals NaN of the same bits."""
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    return bool(a == b)
