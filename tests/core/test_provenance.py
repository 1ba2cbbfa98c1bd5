"""Provenance stamps: B34."""

from __future__ import annotations

from ods_async.core.provenance import provenance_of
from ods_async.core.schema import PROVENANCE
from ods_async.core.stimuli import Instant


def test_b34_each_episode_of_a_rollout_gets_the_next_id_and_the_same_times() -> None:
    found = provenance_of(9, 3, 40, 2, Instant(monotonic_ns=111, unix_ns=222))
    assert found == ((9, 40, 3, 222, 111), (9, 41, 3, 222, 111))


def test_b34_the_stamps_follow_the_order_of_the_fields_without_the_step_number() -> None:
    (stamps,) = provenance_of(9, 3, 40, 1, Instant(monotonic_ns=111, unix_ns=222))
    fields = [spec.path[0].removeprefix("ods_") for spec in PROVENANCE if spec.path != ("ods_frame_index",)]
    assert [name.replace("_at_mono", "_mono") for name in fields] == list(stamps._fields)
