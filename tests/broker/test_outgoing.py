from __future__ import annotations

import gc
import threading

import numpy as np

from ods_async.broker.outgoing import OutgoingBook, Reservation


def reserved(book: OutgoingBook, session: bytes, nbytes: int) -> Reservation:
    room = book.reserve(session, nbytes)
    assert isinstance(room, Reservation)
    return room


def test_one_session_has_so_many_payloads_and_another_is_not_held_up() -> None:
    book = OutgoingBook(1000, 2)
    first = reserved(book, b"a", 10)
    reserved(book, b"a", 20)
    assert "2 earlier batches" in str(book.reserve(b"a", 1))
    reserved(book, b"b", 30)
    assert book.nbytes == 60
    first.free()
    first.free()
    assert book.nbytes == 50
    reserved(book, b"a", 5)


def test_all_sessions_together_have_so_many_bytes_but_a_single_payload_always_passes() -> None:
    book = OutgoingBook(100, 9)
    large = reserved(book, b"a", 5000)
    assert "5000 bytes" in str(book.reserve(b"b", 1))
    large.free()
    reserved(book, b"b", 100)
    assert isinstance(book.reserve(b"c", 1), str)


def test_room_comes_back_when_the_last_view_is_gone_in_whatever_thread() -> None:
    book = OutgoingBook(100, 9)
    payload = np.zeros(64, np.uint8)
    reserved(book, b"a", 64).hold_until_gone(payload)
    views = [memoryview(payload)]
    del payload
    gc.collect()
    assert book.nbytes == 64
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert book.nbytes == 0
