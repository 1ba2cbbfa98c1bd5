"""What ``core/_copy.c`` is given directly: every bound, however far out, is seen before a byte moves."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ods_async.core.copying import COMPILED

pytestmark = pytest.mark.skipif(not COMPILED, reason="installed without a compiler")

EDGES = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63), 2**63 - 65]),
)
WORDS = st.lists(st.one_of(st.integers(-2, 12), st.sampled_from([2**31 - 1, -(2**31)])), max_size=4)
GUARD = b"\xa5" * 64


def copy_each(source: object, table: bytes, batches: tuple[object, ...], *sizes: int) -> list[bool]:
    module = importlib.import_module("ods_async.core._copy")
    went: list[bool] = module.copy_windows(source, table, batches, *sizes)
    return went


def copy_windows(source: object, target: object, table: bytes, *plan_and_sizes: object) -> bool:
    plan, sizes = plan_and_sizes[:5], plan_and_sizes[5:]
    (same,) = copy_each(source, table, ((target, *plan),), *sizes)  # type: ignore[arg-type]
    return same


def numbers(values: list[int], dtype: str = "<i4") -> bytes:
    return np.array(values, dtype).tobytes()


@settings(max_examples=300)
@given(
    fields=st.lists(st.tuples(EDGES, EDGES, EDGES, EDGES), max_size=3),
    plan=st.tuples(WORDS, WORDS, WORDS, WORDS),
    stamps=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    sizes=st.tuples(EDGES, EDGES, EDGES, EDGES, EDGES, EDGES),
)
def test_whatever_it_is_given_it_writes_inside_of_the_batch_or_not_at_all(fields, plan, stamps, sizes) -> None:
    source = bytes(range(200))
    around = bytearray(GUARD + b"\x5a" * 160 + GUARD)
    inside = memoryview(around)[len(GUARD) : -len(GUARD)]
    table = b"".join(numbers(list(field), "<i8") for field in fields)
    try:
        copy_windows(source, inside, table, *map(numbers, plan), numbers(stamps, "<i8"), *sizes)
    except ValueError:
        assert inside == b"\x5a" * 160
    assert around.startswith(GUARD)
    assert around.endswith(GUARD)


def test_a_window_is_copied_and_padded_and_its_mask_written() -> None:
    source = np.arange(100, dtype=np.uint8)
    target = bytearray(b"\xee" * 30)
    table = numbers([10, 2, 1, 0xFF], "<i8")
    # Row 1 of 3 rows of 5 steps of 2 bytes begins at byte 20; its run is steps 1 to before 4, the window is -1 to 4.
    same = copy_windows(
        source, target, table, numbers([1]), numbers([-1]), numbers([1]), numbers([4]), b"", 3, 5, 6, 4, 20, 0
    )
    assert same is True
    assert target[:1] == b"\xee"
    assert list(target[1:13]) == [0xFF] * 4 + [22, 23, 24, 25, 26, 27] + [0xFF] * 2
    assert list(target[20:26]) == [0, 0, 0, 1, 1, 0]  # three steps of history before "now" count for nothing
    assert target[26:] == b"\xee" * 4


def test_memory_that_overlaps_the_segment_and_memory_that_cannot_be_written_are_refused() -> None:
    both = bytearray(64)
    plan = (numbers([8, 1, 8, 0], "<i8"), numbers([0]), numbers([0]), b"", b"", b"")
    with pytest.raises(ValueError, match="share memory"):
        copy_windows(both, memoryview(both)[8:], *plan, 1, 4, 2, 0, -1, 0)
    with pytest.raises(TypeError, match="read-write"):
        copy_windows(both, bytes(64), *plan, 1, 4, 2, 0, -1, 0)


def test_every_order_is_checked_before_the_first_is_begun_and_all_are_let_go_of() -> None:
    source, one, other = bytes(range(64)), bytearray(8), bytearray(8)
    table = numbers([8, 1, 0, 0], "<i8")
    fine, outside = (numbers([0]), numbers([1]), b"", b"", b""), (numbers([9]), numbers([1]), b"", b"", b"")
    sizes = (2, 6, 3, 0, -1, 0)
    for wrong, error in ((other, *outside), ValueError), ((other, *fine[:-1]), TypeError), ([other], TypeError):
        with pytest.raises(error):
            copy_each(source, table, ((one, *fine), wrong, (other, *fine)), *sizes)
        assert one == other == bytes(8)
        one += b"x"  # cannot be done while anybody holds its memory
        del one[8:]
    assert copy_each(source, table, ((one, *fine), (other, *fine)), *sizes) == [True, True]
    assert one == other == bytes([9, 10, 11, 0, 0, 0, 0, 0])
    assert copy_each(source, table, (), *sizes) == []
