"""Child processes: started, heard, watched and ended."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ods_async.supervise.children import Child, end_all, exit_in_words, import_path

PREAMBLE = """
import json, os, signal, sys, time
from ods_async.supervise.child import OwnerWatch, _read_document, _say
document = _read_document(0)
say = lambda **what: _say(document["report_fd"], what)
watch = OwnerWatch(os.dup(0), document["owner_pid"], 30.0)
"""

Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[Child] = []

    def make(code: str, document: dict[str, Any] | None = None, **options: Any) -> Child:
        command = [sys.executable, "-P", "-c", PREAMBLE + textwrap.dedent(code)]
        children.append(Child("worker-7", document or {}, command=command, **options))
        return children[-1]

    yield make
    end_all(children, time.monotonic())
    assert not any(psutil.pid_exists(child.pid) for child in children)


def heard(child: Child, key: str) -> Any:
    reports = child.hear(20.0)
    assert reports, f"nothing was heard; the child {'runs' if child.running else 'ended with ' + str(child.exit_code)}"
    return reports[0][key]


def gone(pid: int, within: float) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(within)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal 9 (SIGKILL)"), (-11, "signal 11 (SIGSEGV)")],
)
def test_an_exit_is_named_by_its_code_or_its_signal(code: int, words: str) -> None:
    """C34."""
    assert exit_in_words(code) == words


def test_a_child_is_told_its_document_and_heard(start: Start) -> None:
    child = start("say(told=document['sizes'], owner=document['owner_pid'], parent=os.getppid())", {"sizes": [3, "é"]})
    (report,) = child.hear(20.0)
    assert report == {"told": [3, "é"], "owner": os.getpid(), "parent": os.getpid()}
    assert child.wait(10.0)
    assert child.exit_code == 0
    assert child.hear(5.0) == []


def test_what_a_child_prints_does_not_get_into_the_owners_output(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start("print('hello there', flush=True)")
    assert child.wait(20.0)
    out, err = capfd.readouterr()
    assert out == ""
    assert "hello there" in err


def test_noise_on_the_report_pipe_is_no_report(start: Start) -> None:
    child = start("os.write(document['report_fd'], b'{not json}\\n[1]\\n'); say(after=1)")
    assert heard(child, "after") == 1


def test_b10_an_exit_is_noticed_at_once_with_its_code(start: Start) -> None:
    """B10: within a second, without anyone asking."""
    exits: queue.Queue[Child] = queue.Queue()
    child = start("say(up=1); os._exit(3) if sys.stdin.buffer.read() == b'' else None", on_exit=exits.put)
    assert heard(child, "up") == 1
    before = time.monotonic()
    child.let_go()
    assert exits.get(timeout=10.0) is child
    assert time.monotonic() - before < 1.0
    assert (child.exit_code, child.running) == (3, False)


def test_b10_a_kill_is_noticed_at_once_with_its_signal(start: Start) -> None:
    """B10."""
    exits: queue.Queue[Child] = queue.Queue()
    child = start("say(up=1); time.sleep(60)", on_exit=exits.put)
    heard(child, "up")
    os.kill(child.pid, signal.SIGKILL)
    assert exits.get(timeout=1.0).exit_code == -signal.SIGKILL


def test_what_a_child_started_ends_with_it(start: Start) -> None:
    child = start("import subprocess; p = subprocess.Popen(['sleep', '60']); say(pid=p.pid); time.sleep(60)")
    grandchild = heard(child, "pid")
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(5.0)
    assert gone(grandchild, 5.0)


def test_a_child_that_is_let_go_ends_by_itself(start: Start) -> None:
    child = start("say(up=1); os.read(watch.alive_fd, 1); say(gone=watch.gone)")
    heard(child, "up")
    assert end_all([child], time.monotonic() + 20.0) == []
    assert (child.exit_code, child.forced) == (0, False)


@pytest.mark.parametrize("stubborn", ["signal.signal(signal.SIGTERM, signal.SIG_IGN)", "os.kill(os.getpid(), 19)"])
def test_b8_a_child_that_does_not_end_is_terminated_then_killed(start: Start, stubborn: str) -> None:
    """B8: also when it ignores SIGTERM or was stopped."""
    child = start(f"say(up=1); {stubborn}; say(still=1); time.sleep(60)")
    heard(child, "up")
    before = time.monotonic()
    assert end_all([child], before + 0.2) == [child]
    assert 0.2 <= time.monotonic() - before < 5.0
    assert child.forced
    assert child.exit_code in (-signal.SIGKILL, -signal.SIGTERM)


OWNER = """
import os, sys, time
from ods_async.supervise.children import Child
child = Child("worker-0", {}, command=[sys.executable, "-P", "-c", sys.argv[1]])
print(child.hear(20.0)[0]["pid"], flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(20)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_b10_a_child_ends_when_its_owner_was_killed(how: str) -> None:
    """The second case: a process that the owner forked still holds the pipe."""
    code = PREAMBLE + "say(pid=os.getpid()); os.read(watch.alive_fd, 1)"
    command = [sys.executable, "-c", OWNER, code, how]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": import_path()},
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
        try:
            assert gone(pid, 5.0)
        finally:
            os.killpg(owner.pid, signal.SIGKILL)


def test_a_child_that_is_gone_before_it_reads_its_document_is_no_error() -> None:
    child = Child("worker-0", {"text": "x" * 1_000_000}, command=[sys.executable, "-c", "pass"])
    assert child.wait(20.0)
    assert end_all([child], time.monotonic()) == []


def test_a_child_imports_what_the_owner_can_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_experts.py").write_text("NUMBER = 41")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    code = PREAMBLE + "import my_experts; say(number=my_experts.NUMBER, before=document['python_path'])"
    child = Child("worker-0", {}, command=[sys.executable, "-P", "-c", code])
    assert child.hear(20.0) == [{"number": 41, "before": "/somewhere/else"}]
    end_all([child], math.inf)


def test_the_standard_library_is_left_out_of_the_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/a", "/a", str(Path(os.__file__).parent), "/usr/lib/python311.zip"])
    assert import_path() == os.pathsep.join([str(Path.cwd()), "/a"])
