"""A view for programs."""

from __future__ import annotations

import json
import math

from ods_async.core import events as ev
from ods_async.observe.fold import fold_all
from ods_async.observe.view import View, lost_in_words, to_json
from tests.observe.views import HOSTILE, lost, stats, view_of


def test_it_is_json_with_every_name_as_it_is() -> None:
    found = json.loads(json.dumps(to_json(view_of(*HOSTILE)), allow_nan=False))
    assert [worker["worker_id"] for worker in found["status"]["workers"]] == list(HOSTILE)
    assert [event["worker_id"] for event in found["events"]] == list(HOSTILE)
    assert found["stats"]["extra"]["sampled_batches"] == 1000
    assert found["rates"] == [None, 3.0, 1234.5]


def test_slots_are_told_by_their_number_and_odd_floats_as_null() -> None:
    events = [
        ev.EpisodePublished(
            sequence=number,
            run_id=7,
            monotonic_ns=5,
            episode_id=number,
            generation=1,
            slot=number,
            valid_runs=((0, 4 + number),),
            anchor_runs=(),
            valid_frames=4 + number,
            eligible_anchors=0,
        )
        for number in range(3)
    ]
    view = view_of(snapshot=fold_all(events), events=tuple(events), stats=stats(production_seconds=math.inf))
    found = to_json(view)
    assert (found["snapshot"]["occupied_slots"], found["snapshot"]["retained_steps"]) == (3, 15)
    assert "slots" not in found["snapshot"]
    assert found["stats"]["production_seconds"] is None
    assert "valid_frame_indices" not in found["events"][0]


def test_c42_missed_events_are_told() -> None:
    """C42"""
    found = to_json(View("ipc:///x", gaps=(lost(),), events=(lost(),), missed_events=5))
    assert (found["missed_events"], found["gaps"][0]["first"], found["events"][0]["kind"]) == (5, 3, "events_lost")
    assert lost_in_words(lost()) == "run 7: missed 5 events from number 3 on: the broker holds no more of them"
    assert "an unknown number" in lost_in_words(lost(None))
