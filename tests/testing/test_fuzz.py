from __future__ import annotations

import random

import pytest

from ods_async.testing import fuzz
from ods_async.testing.fuzz import Fuzzer
from ods_async.wire import codec


def test_no_malformed_message_crashes_what_reads_it() -> None:
    """C26, C38, C43, C45: a short run; the long one is ``python -m ods_async.testing.fuzz``."""
    fuzzer = Fuzzer(seed=3)
    for number in range(1500):
        fuzzer.one(number)
    assert fuzzer.crashes == []
    kinds = ("request", "answer", "report", "ticket", "broadcast", "error", "rollout")
    assert {f"{kind} {outcome}" for kind in kinds for outcome in ("taken", "refused")} == set(fuzzer.counts)


def test_a_decoder_that_raises_anything_else_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the fuzzer would notice."""

    def careless(data: bytes) -> object:
        return data[1000]

    monkeypatch.setattr(codec, "decode_ticket", careless)
    fuzzer = Fuzzer(seed=3)
    for number in range(200):
        fuzzer.one(number)
    assert fuzzer.crashes
    assert all("(ticket): IndexError" in words for words in fuzzer.crashes)
    number = int(fuzzer.crashes[0].split()[1])
    again = Fuzzer(seed=3)
    again.one(number)
    assert again.crashes == fuzzer.crashes[:1]


def test_messages_follow_from_seed_and_number() -> None:
    one, two = Fuzzer(1), Fuzzer(1)
    assert [one.message("rollout", random.Random(n)) for n in range(20)] == [
        two.message("rollout", random.Random(n)) for n in range(20)
    ]


def test_the_command_counts_and_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--messages", "60", "--seed", "5", "--growth-mb", "100"]) == 0
    assert "60 messages, seed 5" in capsys.readouterr().out
