from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ods_async.broker import memory
from ods_async.broker.memory import BrokerMemory
from ods_async.core.memory import SegmentHeader, SegmentLayout
from ods_async.core.schema import EpisodeSchema, FieldSpec
from ods_async.errors import SharedMemoryError
from ods_async.transport.shm import attach_segment

SCHEMA = EpisodeSchema((FieldSpec(("obs", "a"), "float32", (3,)), FieldSpec(("valid",), "bool")))


def create(shared: str) -> BrokerMemory:
    return BrokerMemory.create(SCHEMA, 5, 7, shared=shared, run_id=11)


def test_a_consumer_sees_through_the_segment_what_the_broker_writes() -> None:
    """C39: the token proves that it is the same memory; the header says whose it is."""
    made = create("on")
    described = made.description
    assert described.segment is not None
    made.arrays["obs", "a"][4, 6] = 2.5
    made.stamps[4] = 8
    with attach_segment(described.segment, described.segment_bytes, described.token) as attached:
        layout = SegmentLayout.from_description(described)
        header = SegmentHeader.read(attached.buffer)
        assert header is not None
        assert (header.token, header.run_id, header.nbytes) == (described.token, 11, layout.nbytes)
        assert layout.arrays(attached.buffer)["obs", "a"][4, 6].tolist() == [2.5] * 3
        assert layout.stamps(attached.buffer).tolist() == [0, 0, 0, 0, 8]
    made.close()
    made.close()
    assert not Path(described.segment).exists()


def test_without_shared_memory_everything_is_there_but_nothing_can_be_mapped() -> None:
    made = create("off")
    assert made.description.segment is None
    assert not made.shared
    assert made.arrays["valid",].shape == (5, 7)
    made.close()


def test_too_little_room_is_a_warning_with_auto_and_an_error_with_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C32: found at start, never a bus error; the run goes on over the socket unless shared memory was demanded."""

    def no_room(*args: Any) -> None:
        raise SharedMemoryError("no room", path="/dev/shm/x", needed_bytes=4096, free_bytes=7)

    monkeypatch.setattr(memory, "create_segment", no_room)
    with pytest.raises(SharedMemoryError, match="no room"):
        create("on")
    with caplog.at_level(logging.WARNING):
        made = create("auto")
    assert not made.shared
    assert "no room" in caplog.text
    made.close()


def test_a_batch_kept_by_somebody_survives_the_end() -> None:
    """C40: closing with live views."""
    made = create("on")
    view = made.arrays["obs", "a"]
    view[:] = 1.5
    made.close()
    assert view[3, 2, 1] == np.float32(1.5)
