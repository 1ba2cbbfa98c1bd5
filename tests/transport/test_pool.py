"""Pooled memory comes back when the last look at it is gone, and never before."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from ods_async.transport.pool import BufferPool
from ods_async.transport.sockets import Hub, open_channel

MB = 1 << 20


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_after_its_last_array_is_gone() -> None:
    pool = BufferPool(10 * MB)
    first = pool.take(MB)
    first[:] = 7
    where = address(first)
    view = first[100:200].view(np.int32).reshape(5, 5)[::2]
    del first
    assert pool.idle_bytes == 0
    other = pool.take(MB)
    assert address(other) != where, "never before"
    other[:] = 9
    assert (view.view(np.uint8) == 7).all()
    del view
    assert pool.idle_bytes >= MB
    again = pool.take(MB)
    assert address(again) == where
    assert again[0] == 7, "the same pages, touched already"


@pytest.mark.parametrize("keep", ["tensor", "view", "alias", "numpy", "memoryview", "storage"])
def test_every_kind_of_look_keeps_it(keep: str) -> None:
    pool = BufferPool(10 * MB)
    array = pool.take(MB)
    where = address(array)
    tensor = torch.from_numpy(array)
    looks: dict[str, object] = {
        "tensor": tensor,
        "view": tensor[64:128].view(torch.float32),
        "alias": tensor.detach()[7],
        "numpy": tensor[3:9].numpy(),
        "memoryview": memoryview(array)[5:6],
        "storage": tensor.untyped_storage(),
    }
    look = [looks.pop(keep)]
    del array, tensor, looks
    gc.collect()
    assert pool.idle_bytes == 0
    assert address(pool.take(MB)) != where
    look.clear()
    gc.collect()
    assert pool.idle_bytes == 2 * MB
    assert where in {address(block) for block in [pool.take(MB), pool.take(MB)]}


def test_a_frame_on_its_way_keeps_it(ipc_folder: Path) -> None:
    """Sent without copying: not used again before zmq has let go of it, and what arrives is what was sent."""
    pool = BufferPool(100 * MB)
    with Hub() as hub:
        pull = open_channel(hub, "pull", bind=[f"ipc://{ipc_folder}/p.sock"])
        push = open_channel(hub, "push", connect=pull.endpoints)
        assert push.wait(5, write=True)
        for number in range(20):
            array = pool.take(3 * MB)
            array[:] = number
            assert push.send([b"header", memoryview(array)], copy=False)
            del array
        for number in range(20):
            assert pull.wait(5)
            frames = pull.receive()
            assert frames is not None
            assert (np.frombuffer(frames[1], np.uint8) == number).all()
        del frames
    assert pool.idle_bytes % (3 * MB) == 0


def test_idle_memory_is_bounded() -> None:
    pool = BufferPool(3 * MB)
    arrays = [pool.take(MB) for _ in range(5)]
    arrays.clear()
    assert pool.idle_bytes == 3 * MB
    pool.close()
    assert pool.idle_bytes == 0
    late = pool.take(MB)
    late[:] = 1
    del late
    assert pool.idle_bytes == 0, "after close nothing is kept"


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 70_001, MB + 1, 57_345_678])
def test_sizes_are_exact_and_aligned(size: int) -> None:
    array = BufferPool(0).take(size)
    assert array.nbytes == size
    assert array.flags.writeable
    assert size == 0 or address(array) % 4096 == 0


def test_a_little_larger_or_smaller_finds_the_same_block_but_a_small_one_wastes_no_big_one() -> None:
    pool = BufferPool(100 * MB)
    where = address(pool.take(10 * MB))
    assert address(pool.take(10 * MB - 100_000)) == where
    assert address(pool.take(MB)) != where


def test_many_threads_and_the_garbage_collector_never_share_a_block() -> None:
    pool = BufferPool(4 * MB)
    wrong: list[int] = []

    class Cycle:
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.me = array, self

    def work(number: int) -> None:
        for turn in range(300):
            array = pool.take(64 * 1024 + 4096 * (turn % 3))
            array[:] = number
            if turn % 5 == 0:
                Cycle(array)
            if not (array == number).all():
                wrong.append(number)
            if turn % 50 == 0:
                gc.collect()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_after_a_fork_parent_and_child_share_nothing() -> None:
    pool = BufferPool(10 * MB)
    pool.take(MB)[:] = 1
    array = pool.take(MB)
    pid = os.fork()
    if pid == 0:
        array[:] = 9
        mine = pool.take(MB)
        mine[:] = 8
        os._exit(0)
    os.waitpid(pid, 0)
    assert (array == 1).all()
