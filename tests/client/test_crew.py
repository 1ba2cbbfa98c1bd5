"""A large batch copied by several threads is the same batch, and nothing is left of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ods_async.client.crew import Crew


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.close()


def helpers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ods-copy")]


@pytest.mark.parametrize(
    ("count", "hands", "threads"), [(1, 4, 1), (7, 1, 1), (7, 2, 2), (7, 3, 3), (64, 9, 4), (3, 0, 1)]
)
def test_every_number_is_done_once_by_as_many_threads_as_there_are_hands(
    crew: Crew, count: int, hands: int, threads: int
) -> None:
    done: list[int] = []
    who: set[int] = set()
    together = threading.Barrier(threads)

    def work(part: tuple[int, int]) -> bool:
        together.wait(10.0)
        who.add(threading.get_ident())
        done.extend(range(*part))
        return True

    assert crew.share(count, hands, work)
    assert sorted(done) == list(range(count))
    assert len(who) == threads
    assert threading.get_ident() in who


def test_no_thread_is_started_where_one_hand_is_enough(crew: Crew) -> None:
    assert crew.share(5, 1, lambda part: part == (0, 5))
    assert not helpers()


@pytest.mark.parametrize("torn", [0, 1, 2])
def test_one_torn_part_makes_the_whole_torn(crew: Crew, torn: int) -> None:
    assert not crew.share(6, 3, lambda part: part[0] != 2 * torn)


@pytest.mark.parametrize("bad", [0, 2, 4])
def test_what_a_part_raises_is_raised_when_no_part_is_under_way_any_more(crew: Crew, bad: int) -> None:
    begun = threading.Barrier(3)
    under_way: set[int] = set()
    raised = threading.Event()

    def work(part: tuple[int, int]) -> bool:
        under_way.add(part[0])
        begun.wait(10.0)
        if part[0] == bad:
            raised.set()
            under_way.discard(part[0])
            raise ValueError(f"part {part[0]}")
        assert raised.wait(10.0)
        under_way.discard(part[0])
        return True

    with pytest.raises(ValueError, match=f"part {bad}"):
        crew.share(6, 3, work)
    assert not under_way


def test_with_all_threads_busy_the_work_is_done_without_them(crew: Crew) -> None:
    """Two trainers' threads may copy at once: neither waits for the other's helpers."""
    go, busy = threading.Event(), threading.Barrier(5)

    def hold(part: tuple[int, int]) -> bool:
        busy.wait(10.0)
        return go.wait(10.0)

    other = threading.Thread(target=crew.share, args=(4, 4, hold))
    other.start()
    busy.wait(10.0)
    alone: set[int] = set()

    def work(part: tuple[int, int]) -> bool:
        alone.add(threading.get_ident())
        return True

    assert crew.share(4, 4, work)
    assert alone == {threading.get_ident()}
    go.set()
    other.join()


def test_after_closing_the_work_is_done_by_its_own_thread_and_no_helper_is_left() -> None:
    crew = Crew()
    assert crew.share(8, 4, lambda part: True)
    assert helpers()
    crew.close()
    crew.close()
    assert not helpers()
    who: set[int] = set()
    assert crew.share(8, 4, lambda part: who.add(threading.get_ident()) is None)
    assert who == {threading.get_ident()}
