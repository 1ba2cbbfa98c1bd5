"""Language dictionaries: B42–B44, C28."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ods_async.core.episode import Episode, Rollout, Segment
from ods_async.core.language import KINDS, LanguageRegistry, SharedLanguageRegistry
from ods_async.core.requests import GetLanguage, GetStatus, Sample
from ods_async.errors import ArgumentError, ConfigError, LanguageCapacityError
from ods_async.testing.in_memory import InMemoryBroker, episode_of

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


def rollout(*episodes: tuple[str | None, tuple[Segment, ...]]) -> Rollout:
    return Rollout(1, "w", tuple(Episode(9, {}, segments, instruction) for instruction, segments in episodes))


def contents(registry: LanguageRegistry) -> tuple[tuple[str, ...], ...]:
    return tuple(registry.entries(kind) for kind in KINDS)


@given(st.lists(st.tuples(st.sampled_from(KINDS), texts), max_size=30))
def test_b44_text_is_kept_exactly_and_indices_never_change(entries: list[tuple[str, str]]) -> None:
    registry = SharedLanguageRegistry()
    first: dict[tuple[str, str], int] = {}
    for kind, text in entries:
        index = registry.intern(text, kind=kind)
        assert first.setdefault((kind, text), index) == index
    for kind in KINDS:
        own = [text for known, text in first if known == kind]
        assert [first[kind, text] for text in own] == list(range(len(own)))
        assert registry.resolve(list(range(len(own))), kind=kind) == own
    assert registry.used_bytes == sum(len(text.encode()) for _, text in first)


@given(st.lists(st.tuples(st.sampled_from(KINDS), texts), max_size=30), st.integers(1, 40))
def test_b44_capacity_counts_the_utf8_bytes_of_both_kinds(entries: list[tuple[str, str]], capacity: int) -> None:
    registry = LanguageRegistry(capacity)
    held: list[tuple[str, str]] = []
    for kind, text in entries:
        before = contents(registry)
        needed = sum(len(t.encode()) for _, t in held) + len(text.encode())
        if (kind, text) in held or needed <= capacity:
            registry.intern(text, kind=kind)
            held += [(kind, text)] * ((kind, text) not in held)
        else:
            with pytest.raises(LanguageCapacityError, match="language_buffer_bytes") as raised:
                registry.intern(text, kind=kind)
            assert isinstance(raised.value, OverflowError)
            assert (raised.value.needed, raised.value.capacity) == (needed, capacity)
            assert contents(registry) == before
    for kind, text in held:
        assert registry.resolve(registry.intern(text, kind=kind), kind=kind) == text


def test_b44_spaces_case_and_unicode_forms_are_different_texts() -> None:
    registry = SharedLanguageRegistry()
    written = ["pick", "pick ", "Pick", "place the cup ☕", "\u00e9", "e\u0301", "x" * 10_000, "a\nb", "\0"]
    assert registry.resolve([registry.intern(text) for text in written]) == written


def test_b44_the_two_kinds_count_for_themselves() -> None:
    registry = SharedLanguageRegistry()
    assert registry.intern("a") == 0
    assert registry.intern("b", kind="subtask") == 0
    assert registry.intern("b", kind="task") == 1
    assert registry.sizes == (2, 1)


@pytest.mark.parametrize("text", ["", None, 3, b"pick", "lone \ud800", ["pick"]])
def test_b44_what_is_no_text_is_refused(text: object) -> None:
    registry = SharedLanguageRegistry()
    with pytest.raises(ArgumentError, match="non-empty string"):
        registry.intern(text)  # type: ignore[arg-type]
    assert registry.sizes == (0, 0)


@pytest.mark.parametrize("capacity", [0, -1, True, 2.5, None, "9"])
def test_b44_the_capacity_is_a_positive_integer(capacity: object) -> None:
    with pytest.raises(ConfigError, match="language_buffer_bytes"):
        SharedLanguageRegistry(capacity)  # type: ignore[arg-type]


def test_b44_an_unknown_kind_is_refused() -> None:
    registry = LanguageRegistry()
    for call in (
        lambda: registry.intern("a", kind="goal"),
        lambda: registry.resolve(0, kind="goal"),
        lambda: registry.entries("goal"),
        lambda: registry.follow("goal", 0, ()),
    ):
        with pytest.raises(ArgumentError, match="'task' or 'subtask'"):
            call()


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint64])
def test_b43_resolved_texts_are_nested_like_the_indices(dtype: type[np.integer]) -> None:
    registry = SharedLanguageRegistry()
    for text in ("a", "b", "c"):
        registry.intern(text)
    assert registry.resolve(np.array([[0, 1], [2, 0], [1, 1]], dtype)) == [["a", "b"], ["c", "a"], ["b", "b"]]
    assert registry.resolve(np.array([[[2]]], dtype)) == [[["c"]]]
    assert registry.resolve(dtype(1)) == "b"
    assert registry.resolve(np.zeros((2, 0), dtype)) == [[], []]
    assert registry.resolve(()) == []


def test_b43_indices_stay_right_while_the_dictionary_grows() -> None:
    registry = SharedLanguageRegistry()
    registry.intern("a")
    assert registry.resolve([0]) == ["a"]
    registry.intern("b")
    assert registry.resolve([0, 1]) == ["a", "b"]


def test_b43_a_decoded_list_belongs_to_the_caller() -> None:
    registry = SharedLanguageRegistry()
    registry.intern("a")
    registry.resolve([0, 0])[0] = "edited"
    assert registry.resolve([0, 0]) == ["a", "a"]


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([[0, 1], [0, -1]], r"-1 at \[1, 1\] is padding"),
        (-1, "-1 is padding"),
        ([2], r"2 at \[0\] is unknown"),
        ([0, -2], "unknown"),
        (np.array([2**63], np.uint64), "unknown"),
        ([0.0], "must be integers"),
        (np.zeros(0, np.float32), "must be integers"),
        (True, "must be integers"),
        (np.array([True]), "must be integers"),
        ("0", "must be integers"),
        (None, "must be integers"),
        ([[0], [0, 1]], "must be integers"),
    ],
)
def test_b43_padding_unknown_and_non_integer_indices_are_refused(indices: object, says: str) -> None:
    registry = SharedLanguageRegistry()
    registry.intern("a")
    registry.intern("b")
    with pytest.raises(ArgumentError, match=says):
        registry.resolve(indices)


def test_b42_tasks_segments_and_the_fallback_for_steps_between() -> None:
    registry = LanguageRegistry()
    task, subtask = registry.intern_rollout(
        rollout(
            ("tidy", (Segment("r", 0, 2, "reach"), Segment("g", 3, 5, "grasp"), Segment("x", 5, 9))),
            (None, (Segment("r", 0, 9, "reach"),)),
            ("tidy", ()),
        )
    )
    assert registry.resolve(list(task)) == ["tidy", "unknown_task", "tidy"]
    assert [registry.resolve(list(own), kind="subtask") for own in subtask] == [
        ["reach", "grasp", "tidy", "tidy"],
        ["reach", "unknown_task"],
        ["tidy"],
    ]
    assert registry.sizes == (2, 4)


def test_b42_empty_segments_add_no_entry() -> None:
    registry = LanguageRegistry()
    _, subtask = registry.intern_rollout(rollout(("t", (Segment("e", 4, 4, "never"), Segment("s", 4, 9, "some")))))
    assert subtask == ((-1, 1, 0),)
    assert registry.entries("subtask") == ("t", "some")


def test_b42_an_empty_instruction_counts_as_none() -> None:
    registry = LanguageRegistry()
    registry.intern_rollout(rollout(("", (Segment("s", 0, 9, ""),))))
    assert contents(registry) == (("unknown_task",), ("unknown_task",))


@pytest.mark.parametrize("capacity", range(1, 14))
def test_b44_a_rollout_is_interned_whole_or_not_at_all(capacity: int) -> None:
    registry = LanguageRegistry(capacity)
    made = rollout(("aa", (Segment("s", 0, 3, "bbb"),)), ("cc", (Segment("s", 0, 3, "aa"), Segment("s", 3, 4, "aa"))))
    needed = 2 + 2 + 3 + 2 + 2
    if capacity >= needed:
        assert registry.intern_rollout(made) == ((0, 1), ((1, 0), (0, 0, 2)))
        assert registry.used_bytes == needed
        return
    registry.intern("z") if capacity > 1 else None
    before = contents(registry)
    with pytest.raises(LanguageCapacityError):
        registry.intern_rollout(made)
    assert contents(registry) == before
    assert registry.used_bytes == sum(len(text) for kind in before for text in kind)


def test_b44_after_an_overflow_known_instructions_are_still_taken() -> None:
    registry = LanguageRegistry(4)
    known = rollout(("ab", ()))
    registry.intern_rollout(known)
    with pytest.raises(LanguageCapacityError):
        registry.intern_rollout(rollout(("c", ())))
    assert registry.intern_rollout(known) == ((0,), ((0,),))


def test_b44_an_instruction_that_is_no_text_leaves_nothing_behind() -> None:
    registry = LanguageRegistry()
    with pytest.raises(ArgumentError):
        registry.intern_rollout(rollout(("fine", (Segment("s", 0, 3, "lone \udfff"),))))
    assert registry.sizes == (0, 0)


@given(st.lists(texts, unique=True, max_size=12), st.data())
def test_b43_a_follower_ends_with_the_same_indices(entries: list[str], data: st.DataObject) -> None:
    source, follower = LanguageRegistry(), LanguageRegistry()
    for text in entries:
        source.intern(text, kind="subtask")
        if data.draw(st.booleans()):
            since = data.draw(st.integers(0, follower.sizes[1]))
            follower.follow("subtask", since, source.entries("subtask", since))
    follower.follow("subtask", follower.sizes[1], source.entries("subtask", follower.sizes[1]))
    assert contents(follower) == contents(source)
    assert follower.used_bytes == source.used_bytes


@pytest.mark.parametrize(("since", "entries"), [(3, ["c"]), (-1, ["a"]), (0, ["b"]), (1, ["x", "c"])])
def test_b43_entries_that_do_not_continue_the_known_ones_are_refused(since: int, entries: list[str]) -> None:
    follower = LanguageRegistry()
    follower.follow("task", 0, ["a", "b"])
    with pytest.raises(ArgumentError, match="do not continue"):
        follower.follow("task", since, entries)
    assert follower.entries("task") == ("a", "b")


def test_b43_a_shorter_old_answer_changes_nothing() -> None:
    follower = LanguageRegistry()
    follower.follow("task", 0, ["a", "b", "c"])
    follower.follow("task", 0, ["a", "b"])
    follower.follow("task", 1, ["b"])
    assert follower.entries("task") == ("a", "b", "c")


def test_a_negative_start_is_refused() -> None:
    with pytest.raises(ArgumentError, match="since"):
        LanguageRegistry().entries("task", -1)


def test_b42_every_valid_step_carries_its_texts_and_padding_carries_none() -> None:
    broker = InMemoryBroker(refill_policy="manual")
    broker.join()
    broker.connect()
    reach = Segment("r", 1, 3, "reach")
    while broker.tickets:
        broker.hand_in(broker.start_ticket(), episode_of(4, segments=(reach,), instruction="tidy"))
    batch = broker.draw(Sample(batch_size=30, length=9, history=5, horizon=5))
    follower = LanguageRegistry()
    for kind in KINDS:
        follower.follow(kind, 0, broker.get(GetLanguage(kind, 0)).entries)
    steps, valid = batch[("episode_step",)], batch[("valid",)]
    assert set(follower.resolve(batch[("task_index",)][valid])) == {"tidy"}
    spoken = follower.resolve(batch[("subtask_index",)][valid], kind="subtask")
    assert spoken == ["reach" if 1 <= step < 3 else "tidy" for step in steps[valid].tolist()]
    assert (batch[("task_index",)][~valid] == -1).all()
    assert (batch[("subtask_index",)][~valid] == -1).all()
    assert not valid.all()


def test_b44_an_overflow_fails_the_rollout_before_it_is_published() -> None:
    broker = InMemoryBroker(refill_policy="manual", language_buffer_bytes=10, worker_failure="fail")
    broker.join()
    broker.connect()
    broker.hand_in(broker.start_ticket(), episode_of(4, instruction="tidy"))
    broker.hand_in(broker.start_ticket(), episode_of(4, instruction="too long"))
    status = broker.get(GetStatus())
    assert (status.episodes, status.refused_rollouts) == (1, 1)
    assert "language_buffer_bytes" in status.last_failure
    with pytest.raises(LanguageCapacityError):
        broker.get(Sample(batch_size=1, length=1))
    assert broker.get(GetLanguage("task", 0)).entries == ("tidy",)
