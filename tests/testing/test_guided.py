"""The inputs that atheris changes, and what reads them; atheris itself is for long runs by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ods_async.core.events import KINDS as EVENTS
from ods_async.testing import fuzz
from ods_async.testing.guided import Guided, input_of, seeds
from ods_async.wire import codec
from ods_async.wire.messages import ANSWERS, REPORTS, REQUESTS, TICKETS


def test_the_corpus_begins_with_messages_of_every_class_and_all_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C26, C38: every decoder has its seeds, also endpoints and keys, and the reader finds nothing wrong with any."""
    seen: set[str] = set()
    dialect = type(codec.dialect_of(codec.LIMITS))
    unpack = dialect.unpack

    def watched(self: object, tag: object, *rest: object) -> object:
        seen.add(str(tag))
        return unpack(self, tag, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(dialect, "unpack", watched)
    guided = Guided(tmp_path)
    for data in seeds():
        guided.feed(data)
    assert guided.findings == {}
    assert {*REQUESTS, *ANSWERS, *REPORTS, *TICKETS} | {cls.__name__ for cls in EVENTS.values()} <= seen
    assert {kind for kind in Guided.kinds if guided.counts[f"{kind} taken"]} == set(Guided.kinds)


def test_a_decoder_that_raises_anything_else_is_found_once_and_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planted fault."""

    def careless(data: bytes) -> object:
        return data[1000]

    monkeypatch.setattr(codec, "decode_ticket", careless)
    guided = Guided(tmp_path)
    for number in range(3):
        guided.feed(input_of("ticket", bytes(number)))
    ((words, data),) = guided.findings.items()
    assert words.startswith("ticket: IndexError at test_guided.py:")
    kept = tmp_path / "finding-0"
    kept.write_bytes(data)
    assert fuzz.main(["--input", str(kept)]) == 1
    monkeypatch.undo()
    assert fuzz.main(["--input", str(kept)]) == 0
    assert "1 ticket refused; 0 findings" in capsys.readouterr().out


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xff\xff", b"\x02\xff\xff", b"\x04\x00\x09event"])
def test_inputs_that_are_cut_anywhere_are_read(data: bytes, tmp_path: Path) -> None:
    guided = Guided(tmp_path)
    guided.feed(data)
    assert (guided.inputs, guided.findings) == (1, {})


def test_a_port_of_thousands_of_digits_is_an_endpoint_error_c44(tmp_path: Path) -> None:
    """C44: Python reads no number that long, and its error came out instead of ours."""
    guided = Guided(tmp_path)
    guided.feed(input_of("endpoint", b"tcp://host:" + b"1" * 5000))
    assert (guided.counts, guided.findings) == ({"endpoint refused": 1}, {})


def test_without_atheris_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    assert fuzz.main(["--atheris", "1"]) == 2
    assert "ods-async[fuzz]" in capsys.readouterr().err
