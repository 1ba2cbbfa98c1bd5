"""``python -m ods_async.testing.fuzz``: malformed messages by the million, at everything that reads what a peer sent.

Valid messages of every kind are mutated by structure (values replaced, dropped, doubled, nested) and by bytes (flipped,
cut, spliced, lengths that lie), among plain noise. The decoders must return a message or raise ``ProtocolError``; a
rollout's header is then unpacked over a payload, a description of a buffer is laid out, a plan is taken: these, too,
work or raise ``ProtocolError``. What was taken can be encoded and read again. Memory must not grow.

With ``--atheris SECONDS`` the inputs are chosen by coverage instead, see ``ods_async.testing.guided``.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ods_async.core.episode import Episode, Rollout, Segment
from ods_async.core.memory import SegmentLayout
from ods_async.core.reports import Report, RolloutReport
from ods_async.core.requests import BufferDescription, Plans
from ods_async.core.schema import FieldSpec
from ods_async.core.window_plan import WindowPlan
from ods_async.errors import OdsError, ProtocolError
from ods_async.testing.trial.house import figures_of
from ods_async.testing.trial.mutation import mutate_bytes, mutate_tree, random_message
from ods_async.wire import codec
from ods_async.wire.messages import ANSWERS, BROADCASTS, REPORTS, REQUESTS, TICKETS, ErrorReport
from ods_async.wire.rollout import pack_rollout, plan_rollout, unpack_rollout

__all__ = ["KINDS", "Fuzzer", "main"]

KINDS: Final = ("request", "answer", "report", "ticket", "broadcast", "error", "rollout")
"""The kinds of messages there are; a rollout is a report with its payload."""

_WARM_SHARE: Final = 0.1
_SLOW_SECONDS: Final = 0.25
_WEIGHTS: Final = (4, 4, 3, 1, 2, 1, 5)


class Fuzzer:
    """Makes and reads messages; every one follows from the seed and its number alone.

    Attributes:
        counts: messages by kind and outcome: ``taken`` or ``refused``.
        crashes: what must not happen, in words, with the number to replay.
        slowest: processor seconds that reading one message took at most.
    """

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.crashes: list[str] = []
        self.slowest = 0.0
        self._seed = seed
        self._readers: dict[str, Callable[[bytes, bytes], None]] = {
            "request": self._read_request,
            "answer": self._read_answer,
            "report": self._read_report,
            "ticket": lambda data, _: _and_back(codec.decode_ticket(data), codec.encode_ticket, codec.decode_ticket),
            "broadcast": self._read_broadcast,
            "error": self._read_error,
            "rollout": self._read_report,
        }

    def one(self, number: int) -> None:
        """Make message ``number`` and read it."""
        rng = random.Random(self._seed * 1_000_003 + number)
        kind = rng.choices(KINDS, _WEIGHTS)[0]
        data, second = self.message(kind, rng)
        begun = time.thread_time()
        try:
            self.read(kind, data, second)
            self.counts[f"{kind} taken"] += 1
        except ProtocolError:
            self.counts[f"{kind} refused"] += 1
        except Exception as error:
            self.crashes.append(f"message {number} ({kind}): {type(error).__name__}: {error}; {data[:200].hex()}")
        taken = time.thread_time() - begun
        self.slowest = max(self.slowest, taken)
        if taken > _SLOW_SECONDS:
            self.crashes.append(f"message {number} ({kind}, {len(data)} bytes) took {taken:.2f} s of processor time")

    def message(self, kind: str, rng: random.Random) -> tuple[bytes, bytes]:
        """A mutated message of that kind, and its second frame (a payload, or a topic)."""
        data, second = self.valid(kind, rng)
        choice = rng.random()
        if choice < 0.5:
            data = mutate_tree(data, rng)
        elif choice < 0.95:
            data = mutate_bytes(data, rng, self.valid(rng.choice(KINDS), rng)[0])
        if kind == "rollout" and rng.random() < 0.3:
            second = second[: rng.randrange(len(second) + 1)] + rng.randbytes(rng.choice((0, 0, 1, 64)))
        return data, second

    def read(self, kind: str, data: bytes, second: bytes) -> None:
        """Read a message as its receiver does, and whatever hangs on it.

        Raises:
            ProtocolError: it is refused, as it should be.
            Exception: a fault of ours.
        """
        self._readers[kind](data, second)

    @staticmethod
    def valid(kind: str, rng: random.Random) -> tuple[bytes, bytes]:
        """A message of that kind with nothing wrong, and its second frame."""
        number = rng.randrange(2**40)
        if kind == "request":
            request = random_message(rng.choice(list(REQUESTS.values())), rng)
            return codec.encode_request(number, rng.random(), request), b""
        if kind == "answer":
            cls = rng.choice([found for found in ANSWERS.values() if found is not ErrorReport])
            return codec.encode_answer(number, random_message(cls, rng)), b""
        if kind == "report":
            return codec.encode_report(random_message(rng.choice(list(REPORTS.values())), rng)), rng.randbytes(64)
        if kind == "ticket":
            return codec.encode_ticket(random_message(TICKETS["Ticket"], rng)), b""
        if kind == "broadcast":
            topic, data = codec.encode_broadcast(random_message(rng.choice(list(BROADCASTS.values())), rng))
            return data, topic
        if kind == "error":
            return codec.encode_error(rng.choice((ValueError("no", 5), OdsError("no", a=1), KeyError("x")))), b""
        return _rollout(rng)

    # --- reading ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _read_request(data: bytes, _: bytes) -> None:
        number, timeout, request = codec.decode_request(data)
        again = codec.decode_request(codec.encode_request(number, timeout, request))
        assert repr(again) == repr((number, timeout, request)), "it reads differently a second time"

    @staticmethod
    def _read_answer(data: bytes, _: bytes) -> None:
        number, answer = codec.decode_answer(data)
        if not isinstance(answer, OdsError):
            again = codec.decode_answer(codec.encode_answer(number, answer))
            assert repr(again) == repr((number, answer)), "it reads differently a second time"
        if isinstance(answer, BufferDescription):
            SegmentLayout.from_description(answer)
        elif isinstance(answer, Plans):
            for plan in answer.plans:
                WindowPlan.from_message(plan, 8, 16)

    @staticmethod
    def _read_report(data: bytes, payload: bytes) -> None:
        report: Report = codec.decode_report(data)
        _and_back(report, codec.encode_report, codec.decode_report)
        if isinstance(report, RolloutReport):
            rollout = unpack_rollout(report, memoryview(payload))
            for episode in rollout.episodes:
                for array in episode.arrays.values():
                    array.tobytes()

    @staticmethod
    def _read_error(data: bytes, _: bytes) -> None:
        assert isinstance(codec.decode_error(data), Exception)

    @staticmethod
    def _read_broadcast(data: bytes, topic: bytes) -> None:
        codec.decode_broadcast(topic, data)


def _and_back(message: Any, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
    again = decode(encode(message))
    assert repr(again) == repr(message), "it reads differently a second time"


def _rollout(rng: random.Random) -> tuple[bytes, bytes]:
    fields = [
        FieldSpec(("obs", "state"), "float32", (3,)),
        FieldSpec(("ends",), "bool"),
        FieldSpec(("a",), "uint8", (2, 2)),
    ][: rng.randint(1, 3)]
    episodes = []
    for _ in range(rng.randint(1, 3)):
        length = rng.randint(1, 9)
        arrays: dict[tuple[str, ...], Any] = {f.path: np.zeros((length, *f.shape), f.dtype) for f in fields}
        segments = (Segment("part", 0, length, rng.choice((None, "go"))),)
        episodes.append(Episode(length, arrays, segments, "task", {"n": rng.randrange(9)}))
    rollout = Rollout(rng.randrange(99), "w0", tuple(episodes), 1, 0.5)
    report, nbytes = plan_rollout(rollout, fields)
    payload = bytearray(nbytes)
    pack_rollout(rollout, report, memoryview(payload))
    return codec.encode_report(report), bytes(payload)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz.

    Returns:
        0 when nothing crashed and memory did not grow, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m ods_async.testing.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first message (to replay one)")
    parser.add_argument("--growth-mb", type=float, default=8.0, help="growth of private memory allowed (default 8 MB)")
    parser.add_argument("--atheris", type=float, metavar="SECONDS", help="let coverage choose the inputs, for so long")
    parser.add_argument("--corpus", metavar="DIR", help="with --atheris: where inputs are kept (default: nowhere)")
    parser.add_argument("--input", metavar="FILE", help="read one input that --atheris has kept, and stop")
    given = parser.parse_args(arguments)
    if given.atheris is not None or given.input is not None:
        from ods_async.testing import guided

        if given.input is not None:
            return guided.replay(given.input)
        return guided.run(given.atheris, given.corpus, given.seed)
    fuzzer = Fuzzer(given.seed)
    warm = given.first + int(given.messages * _WARM_SHARE)
    before, begun = _private_mb(), time.monotonic()
    for number in range(given.first, given.first + given.messages):
        if number == warm:
            before = _private_mb()
        fuzzer.one(number)
        if len(fuzzer.crashes) > 20:
            break
    growth = _private_mb() - before
    for words in fuzzer.crashes:
        print(f"CRASH: {words}")
        print(f"  replay: python -m ods_async.testing.fuzz --seed {given.seed} --messages 1 --first NUMBER")
    done = sum(fuzzer.counts.values())
    told = ", ".join(f"{count} {what}" for what, count in sorted(fuzzer.counts.items()))
    print(
        f"{done} messages, seed {given.seed}, {time.monotonic() - begun:.0f} s: {told}; {len(fuzzer.crashes)} crashes; "
        f"slowest {1000 * fuzzer.slowest:.1f} ms; private memory {growth:+.2f} MB after the first tenth"
    )
    return 1 if fuzzer.crashes or growth > given.growth_mb else 0


def _private_mb() -> float:
    figures = figures_of(os.getpid())
    return 0.0 if figures is None else figures.private_bytes / 1e6


if __name__ == "__main__":
    sys.exit(main())
