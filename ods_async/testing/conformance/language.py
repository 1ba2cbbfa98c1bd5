"""Texts of batches: right after slot reuse, on another connection, after the end (B42 to B44)."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

import ods_async as ods
from ods_async.testing.conformance.checks import fields_of, story, varied
from ods_async.testing.conformance.ways import CLIENT_WAYS, WAYS, LoopThread, Service, Way, make_engine, open_client


def check_texts(batch: Any, texts: dict[str, Any]) -> None:
    """Every step's texts are those its episode was told with, kept exactly."""
    fields = fields_of(batch)
    prints, steps = fields["obs", "fingerprint"].tolist(), fields["obs", "step"].tolist()
    for row, row_steps in zip(prints, steps, strict=True):
        assert len(row) == len(row_steps)
    expected = [
        [story(fingerprint).texts(step) for fingerprint, step in zip(row, row_steps, strict=True)]
        for row, row_steps in zip(prints, steps, strict=True)
    ]
    assert texts["task"] == [[task for task, _ in row] for row in expected]
    assert texts["subtask"] == [[subtask for _, subtask in row] for row in expected]


def test_b42_b43_every_step_has_its_task_and_subtask(plain: Way) -> None:
    """B42, B43: nested lists like the batch; a segment without an instruction has the task's."""
    batch = plain.sample_batch(80, 3)
    check_texts(batch, plain.resolve_language(batch))


def test_b43_texts_are_right_after_slot_reuse_and_on_another_connection(
    plain: Way, plain_service: Service, way_in: str
) -> None:
    """B43: a batch's indices mean the same for ever, whoever looks them up."""
    batch = plain.sample_batch(40, 2)
    owner = plain_service.owner_of(way_in)
    for _ in range(2):
        owner.wait_for_generation(owner.request_refill())
    check_texts(batch, plain.resolve_language(batch))
    if way_in == "async-engine":
        return
    for other in CLIENT_WAYS:
        with plain_service.open(other) as stranger:
            check_texts(batch, stranger.resolve_language(batch))


def test_b43_padding_unknown_and_other_indices_are_refused(plain: Way) -> None:
    """B43: ``ValueError``, or ``TypeError``'s kin for what is no integer."""
    batch = plain.sample_batch(3, 2)
    for index, bad in (("task_index", -1), ("subtask_index", 10**6)):
        broken = batch.clone()
        broken[index][1, 1] = bad
        with pytest.raises(ValueError, match="ind"):
            plain.resolve_language(broken)
    floats = batch.clone()
    floats["task_index"] = floats["task_index"].float()
    with pytest.raises(ValueError, match="integers"):
        plain.resolve_language(floats)
    with pytest.raises(ValueError, match="task_index"):
        plain.resolve_language(batch.exclude("task_index"))


def test_b43_texts_are_known_after_the_end(loop: LoopThread) -> None:
    """B43: to the engines, and to a client for every batch that it drew."""
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(Service(varied(), loop))
        ways = [stack.enter_context(service.open(way)) for way in WAYS]
        batches = [way.sample_batch(20, 2) for way in ways]
        service.stop()
        for way, batch in zip(ways, batches, strict=True):
            check_texts(batch, way.resolve_language(batch))
        check_texts(batches[-1], ways[0].resolve_language(batches[-1]))  # another's batch, of the same run


def test_b44_a_full_dictionary_fails_the_rollout_and_keeps_what_it_has(loop: LoopThread) -> None:
    """B44, B15: the error names ``language_buffer_bytes``; nothing of that rollout is seen."""
    engine = make_engine("engine", varied(language_buffer_bytes=4), loop)
    with pytest.raises(OverflowError, match="language_buffer_bytes") as caught:
        engine.start()
    assert isinstance(caught.value, ods.LanguageCapacityError)
    assert engine.state is ods.OnlineDataEngineState.FAILED


def test_b44_a_registry_keeps_texts_exactly_until_it_is_full() -> None:
    """B44: one dictionary a kind, capacity in UTF-8 bytes over both, old entries usable after overflow."""
    registry = ods.SharedLanguageRegistry(11)
    assert [registry.intern(text) for text in ("cup ", "cup", "cup ")] == [0, 1, 0]
    assert registry.intern("☕", kind="subtask") == 0
    with pytest.raises(OverflowError, match="language_buffer_bytes"):
        registry.intern("no")
    assert registry.resolve(torch.tensor([[1, 0], [0, 0]])) == [["cup", "cup "], ["cup ", "cup "]]
    assert registry.resolve(np.int64(0), kind="subtask") == "☕"
    for bad in ([-1], [2], [0.5]):
        with pytest.raises(ValueError):
            registry.resolve(bad)
    with pytest.raises(ValueError, match="kind"):
        registry.intern("x", kind="other")


def test_b42_b43_a_client_that_comes_later_learns_all_texts(plain_service: Service, loop: LoopThread) -> None:
    """B43: they are fetched when they are needed."""
    owner = plain_service.owner_of("engine")
    batch = owner.sample_batch(30, 1)
    client = open_client("client-tcp-frames", owner.endpoints, loop)
    try:
        check_texts(batch, client.resolve_language(batch))
    finally:
        client.close()
