"""Endpoint strings (C44) and what is derived from them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ods_async.errors import EndpointError
from ods_async.transport.endpoint import (
    Endpoint,
    default_ipc,
    for_peer,
    is_loopback,
    is_wildcard,
    parse_endpoint,
    resolve_for_bind,
    sibling,
)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tcp://127.0.0.1:5555", Endpoint("tcp", "127.0.0.1", 5555)),
        ("tcp://localhost:0", Endpoint("tcp", "localhost", 0)),
        ("tcp://sim-host.lab_2.example:65535", Endpoint("tcp", "sim-host.lab_2.example", 65535)),
        ("tcp://[::1]:5555", Endpoint("tcp", "::1", 5555)),
        ("tcp://*:5555", Endpoint("tcp", "*", 5555)),
        ("tcp://0.0.0.0:5555", Endpoint("tcp", "0.0.0.0", 5555)),
        ("ipc:///tmp/ods/default.sock", Endpoint("ipc", path="/tmp/ods/default.sock")),
        ("ipc://" + "/" + "x" * 106, Endpoint("ipc", path="/" + "x" * 106)),
    ],
)
def test_good_endpoints_are_read_and_written_back(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:5555",
        "tcp:/host",
        "tcp:/host:5555",
        "tcp://host",
        "tcp://host:",
        "tcp://:5555",
        "tcp://host:70000",
        "tcp://host:-1",
        "tcp://host:٣",
        "tcp://host:5555/",
        "tcp://host:5555/path",
        "tcp://::1:5555",
        "tcp://[::1:5555",
        "tcp://[::zz]:5555",
        "tcp://300.1.1.1:5555",
        "tcp://ho st:5555",
        "udp://host:5555",
        "inproc://x",
        "ipc://",
        "ipc://relative.sock",
        "ipc://@abstract",
        "ipc:///tmp/folder/",
        "ipc:///tmp/a\0b",
        "ipc:///" + "x" * 107,
        "ipc:///" + "é" * 54,
    ],
)
def test_bad_endpoints_are_refused_with_the_value_and_an_example(text: str) -> None:
    """C44."""
    with pytest.raises(EndpointError) as caught:
        parse_endpoint(text)
    assert "tcp://127.0.0.1:5555" in str(caught.value)
    assert caught.value.value == text
    assert caught.value.rule


def test_what_is_no_text_is_no_endpoint() -> None:
    with pytest.raises(EndpointError, match="is text"):
        parse_endpoint(5555)  # type: ignore[arg-type]


def test_siblings() -> None:
    assert str(sibling("ipc:///tmp/a.sock", "tickets")) == "ipc:///tmp/a.sock.tickets"
    assert str(sibling("tcp://0.0.0.0:5555", "rollouts")) == "tcp://0.0.0.0:0"
    with pytest.raises(EndpointError, match="at most 98 bytes"):
        sibling("ipc:///" + "x" * 98, "events")
    assert len(str(sibling("ipc:///" + "x" * 97, "rollouts"))) == len("ipc://") + 107


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("ipc:///tmp/a.sock", True),
        ("tcp://127.3.2.1:5", True),
        ("tcp://localhost:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://*:5", False),
        ("tcp://0.0.0.0:5", False),
        ("tcp://[::]:5", False),
        ("tcp://192.0.2.1:5", False),
        ("tcp://no-such-name.invalid:5", False),
    ],
)
def test_loopback_is_told_from_the_rest(text: str, loopback: bool) -> None:
    assert is_loopback(text) is loopback


def test_names_are_resolved_for_binding_and_unknown_ones_named() -> None:
    """C44."""
    assert str(resolve_for_bind(parse_endpoint("tcp://localhost:7"))) == "tcp://127.0.0.1:7"
    assert str(resolve_for_bind(parse_endpoint("tcp://*:7"))) == "tcp://0.0.0.0:7"
    assert str(resolve_for_bind(parse_endpoint("tcp://[::1]:7"))) == "tcp://[::1]:7"
    with pytest.raises(EndpointError, match=r"no-such-name\.invalid.*cannot be resolved"):
        resolve_for_bind(parse_endpoint("tcp://no-such-name.invalid:7"))


@pytest.mark.parametrize(
    ("bound", "dialled", "told"),
    [
        ("tcp://0.0.0.0:6000", "tcp://sim-host:5555", "tcp://sim-host:6000"),
        ("tcp://10.0.0.3:6000", "tcp://broker:5555", "tcp://broker:6000"),
        ("tcp://[::]:6000", "tcp://[2001:db8::1]:5555", "tcp://[2001:db8::1]:6000"),
        ("tcp://0.0.0.0:6000", "tcp://0.0.0.0:5555", "tcp://127.0.0.1:6000"),
        ("tcp://0.0.0.0:6000", "ipc:///tmp/a.sock", "tcp://127.0.0.1:6000"),
        ("tcp://[::]:6000", "ipc:///tmp/a.sock", "tcp://[::1]:6000"),
        ("tcp://10.0.0.3:6000", "ipc:///tmp/a.sock", "tcp://10.0.0.3:6000"),
        ("ipc:///tmp/a.sock.events", "ipc:///tmp/a.sock", "ipc:///tmp/a.sock.events"),
    ],
)
def test_what_is_told_to_a_client_is_reachable_from_where_it_is(bound: str, dialled: str, told: str) -> None:
    """C44: behind a wildcard, a NAT or a container's name."""
    assert str(for_peer(bound, dialled)) == told
    assert not is_wildcard(told)


def test_the_default_path_is_short_and_private(tmp_path: Path) -> None:
    """C44: whatever TMPDIR says."""
    endpoint = default_ipc("lab-1", tmp_path)
    assert endpoint.path == f"{tmp_path}/ods/lab-1.sock"
    assert stat.S_IMODE((tmp_path / "ods").stat().st_mode) == 0o700
    (tmp_path / "ods").chmod(0o755)
    default_ipc("lab-1", tmp_path)
    assert stat.S_IMODE((tmp_path / "ods").stat().st_mode) == 0o700
    assert len(str(default_ipc("x" * 32))) < 90


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "x" * 33, "a b"])
def test_names_that_make_no_file_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="1 to 32"):
        default_ipc(name, tmp_path)


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ods").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EndpointError, match="somebody else"):
        default_ipc("x", tmp_path)
    if os.getuid() == 0:
        (tmp_path / "ods").unlink()
        (tmp_path / "ods").mkdir()
        os.chown(tmp_path / "ods", 12345, 12345)
        with pytest.raises(EndpointError, match="somebody else"):
            default_ipc("x", tmp_path)
