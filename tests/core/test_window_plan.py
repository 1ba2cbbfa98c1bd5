"""Plans on the wire: what comes back is what was planned, and nothing outside the buffer is believed."""

import dataclasses

import numpy as np
import pytest

from ods_async.core.window_plan import WindowPlan
from ods_async.errors import ProtocolError

ROWS, STEPS = 6, 40


def int32(*values):
    return np.array(values, np.int32)


def chunks():
    return WindowPlan(int32(5, 0, 5), int32(0, 33, 12), None, None, 7, 0)


def contexts():
    return WindowPlan(int32(1, 4), int32(-3, 36), int32(0, 30), int32(5, 40), 9, 4)


STAMPS = np.array([4, 2**40, 8], np.int64)


@pytest.mark.parametrize("make", [chunks, contexts])
def test_a_plan_survives_the_wire(make):
    plan = make()
    message = plan.to_message(17, STAMPS[: len(plan)])
    assert (message.lease_id, message.batch_size) == (17, len(plan))
    back, stamps = WindowPlan.from_message(message, ROWS, STEPS)
    assert stamps.tolist() == STAMPS[: len(plan)].tolist()
    assert (back.length, back.history) == (plan.length, plan.history)
    for name in ("rows", "starts", "first", "last"):
        one, other = getattr(plan, name), getattr(back, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert other.dtype == np.int32
            assert one.tolist() == other.tolist()


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (chunks, {"rows": b"\0\0\0\0"}),
        (chunks, {"rows": int32(0, 6, 0).tobytes()}),
        (chunks, {"rows": int32(0, -1, 0).tobytes()}),
        (chunks, {"starts": int32(0, 34, 12).tobytes()}),
        (chunks, {"starts": int32(0, -1, 12).tobytes()}),
        (chunks, {"starts": b""}),
        (chunks, {"stamps": b""}),
        (chunks, {"length": 0}),
        (chunks, {"length": 2**70}),
        (chunks, {"history": 8}),
        (chunks, {"history": -1}),
        (chunks, {"batch_size": 0}),
        (chunks, {"batch_size": -1}),
        (chunks, {"first": int32(0, 0, 0).tobytes()}),
        (chunks, {"history": 3}),
        (contexts, {"first": int32(0, 40).tobytes()}),
        (contexts, {"first": int32(-1, 30).tobytes()}),
        (contexts, {"last": int32(5, 41).tobytes()}),
        (contexts, {"last": int32(0, 40).tobytes()}),
        (contexts, {"starts": int32(-4, 36).tobytes()}),
        (contexts, {"starts": int32(-3, 2**31 - 1).tobytes()}),
        (contexts, {"history": 0}),
    ],
)
def test_c38_a_plan_that_contradicts_itself_or_the_buffer_is_refused(make, change):
    message = dataclasses.replace(make().to_message(1, STAMPS[: len(make())]), **change)
    with pytest.raises(ProtocolError):
        WindowPlan.from_message(message, ROWS, STEPS)
