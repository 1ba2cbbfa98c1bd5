"""The owner's token in its file (B13): it stays while its service lives, whatever its pid is elsewhere."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ods_async.cli import tokens
from ods_async.cli.tokens import find_token, published_token
from ods_async.transport.endpoint import default_ipc

_OWN, _OTHER = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private folder for this test only, instead of the user's, where tokens of real services may lie."""
    monkeypatch.setattr(tokens, "default_ipc", functools.partial(default_ipc, runtime_dir=tmp_path))
    return Path(default_ipc("default", tmp_path).path).parent


def _publish_elsewhere(folder: Path, *before: str) -> None:
    """Another service's turn with the same folder, in a process of its own; it must have swept."""
    left = folder / "tcp-4.owner"
    left.write_text(f"{_OTHER.hex()}\n99999999\n")
    program = (
        "import functools, sys; from ods_async.cli import tokens as t\n"
        "t.default_ipc = functools.partial(t.default_ipc, runtime_dir=sys.argv[1])\n"
        "with t.published_token(['tcp://127.0.0.1:2'], b'x' * 32): pass"
    )
    subprocess.run([*before, sys.executable, "-c", program, str(folder.parent)], check=True, timeout=60)
    assert not left.exists()


def _may_unshare() -> bool:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def test_b13_another_service_of_this_user_leaves_a_live_ones_token(folder: Path) -> None:
    with published_token(["tcp://127.0.0.1:1"], _OWN):
        _publish_elsewhere(folder)
        assert find_token("tcp://127.0.0.1:1", "stop") == _OWN
    assert list(folder.glob("tcp-*")) == []


@pytest.mark.skipif(not _may_unshare(), reason="needs the right to make a pid namespace")
def test_b13_a_service_with_pids_of_its_own_leaves_a_live_ones_token(folder: Path) -> None:
    with published_token(["tcp://127.0.0.1:1"], _OWN):
        _publish_elsewhere(folder, "unshare", "--pid", "--fork", "--mount-proc")
        assert find_token("tcp://127.0.0.1:1", "stop") == _OWN


def test_b13_what_a_killed_service_left_is_removed_by_the_next(folder: Path) -> None:
    left = folder / "tcp-3.owner"
    left.write_text(f"{_OTHER.hex()}\n99999999\n")
    left.chmod(0o600)
    with published_token(["tcp://127.0.0.1:1"], _OWN):
        assert not left.exists()


def test_b13_a_token_whose_service_was_killed_before_it_had_its_name_is_removed_by_the_next(folder: Path) -> None:
    """One that is still empty may belong to a service that begins at this moment."""
    left, begun = folder / "tcp-1.owner.0123456789ab", folder / "tcp-1.owner.ba9876543210"
    left.write_text(f"{_OTHER.hex()}\n")
    begun.touch()
    with published_token(["tcp://127.0.0.1:1"], _OWN):
        assert not left.exists()
        assert begun.exists()


def test_b13_a_service_does_not_remove_its_successors_token(folder: Path) -> None:
    with published_token(["tcp://127.0.0.1:1"], _OWN):
        with published_token(["tcp://127.0.0.1:1"], _OTHER):
            assert find_token("tcp://127.0.0.1:1", "stop") == _OTHER
        assert not (folder / "tcp-1.owner").exists()
    with published_token(["tcp://127.0.0.1:1"], _OWN):
        path = folder / "tcp-1.owner"
        path.unlink()
        path.write_text(f"{_OTHER.hex()}\n")
    assert path.exists()
