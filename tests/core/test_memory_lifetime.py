from __future__ import annotations

import mmap

import pytest

from ods_async.core.memory import BatchLayout, SegmentLayout
from ods_async.core.schema import EpisodeSchema, FieldSpec

SCHEMA = EpisodeSchema((FieldSpec(("obs", "a"), "float32", (3,)), FieldSpec(("valid",), "bool")))


def test_memory_cannot_be_unmapped_under_an_array() -> None:
    """C40: a mapping that is closed while an array looks into it says so; the next read does not end the process."""
    for layout in (SegmentLayout.of(SCHEMA, 5, 7), BatchLayout.of(SCHEMA, 5, 7, context=True)):
        mapping = mmap.mmap(-1, layout.nbytes)
        views = layout.arrays(mapping) if isinstance(layout, SegmentLayout) else layout.views(mapping)
        part = views["obs", "a"][2:, 1]
        views.clear()
        with pytest.raises(BufferError):
            mapping.close()
        part[:] = 1.5
        del part
        mapping.close()
