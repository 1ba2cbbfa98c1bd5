"""``python -m ods_async.testing.fuzz --atheris SECONDS``: inputs chosen by what code they reach.

The corpus begins with valid messages of every class, endpoints and key files; atheris (an extra of its own, ``fuzz``)
changes them and keeps what reaches new branches of ``wire``, ``core`` and the parsers of ``transport``. The first byte
of an input says what it is, the next two how long its second frame is. Only documented errors may come out.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import tempfile
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from ods_async.core.events import KINDS as EVENTS
from ods_async.core.events import to_record
from ods_async.core.requests import Records
from ods_async.errors import ConfigError, EndpointError, ProtocolError
from ods_async.testing.fuzz import KINDS, Fuzzer
from ods_async.testing.trial.mutation import random_message
from ods_async.transport.curve import read_public_key
from ods_async.transport.endpoint import for_peer, is_loopback, parse_address, parse_endpoint
from ods_async.wire.codec import decode_answer, encode_answer, event_from_record

__all__ = ["Guided", "input_of", "replay", "run", "seeds"]

_INSTRUMENTED: Final = ("ods_async.wire", "ods_async.core", "ods_async.transport.endpoint", "ods_async.transport.curve")
_LONGEST: Final = 16_384
_SEEDS_PER_KIND: Final = 200
_MISSING: Final = (
    "atheris is not installed: pip install 'ods-async[fuzz]' (it has wheels for some Pythons on Linux only)"
)
_ENDPOINTS: Final = (
    "tcp://127.0.0.1:5555",
    "tcp://[::1]:5555",
    "tcp://*:0",
    "tcp://0.0.0.0:*",
    "tcp://sim-host.example:65535",
    "ipc:///tmp/ods/default.sock",
)
_KEY_FILE: Final = (
    "# the example of the manual of zmq\n"
    "public Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID\nsecret D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs\n"
)
_OTHERS: Final = ("records", "endpoint", "keys")


class Guided:
    """Reads inputs and keeps count.

    Attributes:
        inputs: how many were read.
        counts: by kind and outcome: ``taken`` or ``refused``.
        findings: what must not happen, each kind of it once: the words, and the first input that did it.
    """

    kinds: Final = (*KINDS, *_OTHERS)

    def __init__(self, scratch: Path) -> None:
        self.inputs = 0
        self.counts: Counter[str] = Counter()
        self.findings: dict[str, bytes] = {}
        self._fuzzer = Fuzzer(0)
        self._scratch = scratch / "scratch.pub"
        self._others: dict[str, Callable[[bytes], None]] = {
            "records": _read_records,
            "endpoint": _read_endpoint,
            "keys": self._read_keys,
        }

    def feed(self, data: bytes) -> None:
        """Read one input."""
        self.inputs += 1
        if len(data) < 3:
            return
        kind = self.kinds[data[0] % len(self.kinds)]
        end = 3 + int.from_bytes(data[1:3])
        try:
            if kind in self._others:
                self._others[kind](data[3:])
            else:
                self._fuzzer.read(kind, data[end:], data[3:end])
            self.counts[f"{kind} taken"] += 1
        except (ProtocolError, EndpointError):
            self.counts[f"{kind} refused"] += 1
        except ConfigError as error:
            if kind != "keys":
                self._found(kind, error, data)
            self.counts[f"{kind} refused"] += 1
        except Exception as error:
            self._found(kind, error, data)

    def in_words(self) -> str:
        """What was read, in a line."""
        told = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return f"{self.inputs} inputs: {told}; {len(self.findings)} findings"

    def _found(self, kind: str, error: Exception, data: bytes) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        self.findings.setdefault(f"{kind}: {type(error).__name__} at {place}: {str(error)[:200]}", data)

    def _read_keys(self, data: bytes) -> None:
        self._scratch.write_bytes(data)
        read_public_key(self._scratch)


def _read_records(data: bytes) -> None:
    _, answer = decode_answer(data)
    if isinstance(answer, Records):
        for record in answer.events:
            event_from_record(record)


def _read_endpoint(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    parsed = parse_endpoint(text)
    assert parse_endpoint(str(parsed)) == parsed, "it reads differently a second time"
    for_peer(parsed, "tcp://127.0.0.1:5555")
    if not any(letter.isalpha() for letter in parsed.host):  # names would be looked up
        is_loopback(parsed)
    parse_address(text)


def input_of(kind: str, data: bytes, second: bytes = b"") -> bytes:
    """The input that means this message."""
    if kind in _OTHERS:
        second = b""
    return bytes([Guided.kinds.index(kind)]) + len(second).to_bytes(2) + second + data


def seeds() -> Iterator[bytes]:
    """Valid inputs: messages of every class, endpoints, a key file."""
    for kind in KINDS:
        for number in range(_SEEDS_PER_KIND):
            yield input_of(kind, *Fuzzer.valid(kind, random.Random(number)))
    yield from (input_of("records", data) for data in _records())
    yield from (input_of("endpoint", text.encode()) for text in _ENDPOINTS)
    yield input_of("keys", _KEY_FILE.encode())


def _records() -> Iterator[bytes]:
    for number, cls in enumerate(EVENTS.values()):
        rng = random.Random(number)
        yield encode_answer(number, Records((to_record(random_message(cls, rng)),), 0, 1))


def replay(path: str) -> int:
    """Read the input in a file.

    Returns:
        0 when it was taken or refused, else 1.
    """
    with tempfile.TemporaryDirectory(prefix="ods-fuzz-") as folder:
        guided = Guided(Path(folder))
        guided.feed(Path(path).read_bytes())
    print("\n".join([*guided.findings, guided.in_words()]))
    return int(bool(guided.findings))


def run(seconds: float, corpus: str | None, seed: int) -> int:
    """Fuzz for so long. Inputs worth keeping go to ``corpus``, those that found something beside it, as ``finding-*``.

    Returns:
        2 when atheris is not there. Otherwise it does not return: the process ends with code 0, or 1 after findings.
    """
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        print(_MISSING, file=sys.stderr)
        return 2
    # libFuzzer never gives the process back, so that nothing could tidy up later: its files are in a folder of its own.
    folder = Path(corpus) if corpus is not None else Path(tempfile.mkdtemp(prefix="ods-fuzz-"))
    inputs = folder / "corpus"
    inputs.mkdir(parents=True, exist_ok=True)
    guided = Guided(folder)
    for number, data in enumerate(seeds()):
        (inputs / f"seed-{number}").write_bytes(data)
        guided.feed(data)  # builds what is built at first use, before it is instrumented
    _instrument(atheris)
    deadline = time.monotonic() + seconds

    def one(data: bytes) -> None:
        guided.feed(data)
        if time.monotonic() > deadline:
            _end(guided, folder)

    limits = [f"-max_len={_LONGEST}", "-timeout=20", "-rss_limit_mb=4096", f"-seed={seed + 1}"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={folder}/", str(inputs)], one)
    atheris.Fuzz()
    return 1  # only a crash of the interpreter itself comes here


def _instrument(atheris: Any) -> None:
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType) and str(thing.__module__).startswith(_INSTRUMENTED):
            atheris.instrument_func(thing)


def _end(guided: Guided, folder: Path) -> NoReturn:
    for number, (words, data) in enumerate(guided.findings.items()):
        path = folder / f"finding-{number}"
        path.write_bytes(data)
        print(f"FOUND {words}\n  replay: python -m ods_async.testing.fuzz --input {path}")
    print(f"{guided.in_words()}; corpus of {len(list((folder / 'corpus').iterdir()))} in {folder}", flush=True)
    os._exit(int(bool(guided.findings)))
