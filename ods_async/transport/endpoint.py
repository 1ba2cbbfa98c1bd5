"""Endpoints: reading them, refusing bad ones in plain words, deriving the broker's other addresses from the first.

``tcp://HOST:PORT`` (an IPv6 host in brackets) or ``ipc:///absolute/path``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ods_async.errors import EndpointError

__all__ = [
    "Endpoint",
    "default_ipc",
    "for_peer",
    "is_loopback",
    "is_wildcard",
    "parse_address",
    "parse_endpoint",
    "resolve_for_bind",
    "sibling",
]

IPC_PATH_MAX: Final = 107  # sun_path holds 108 bytes, the last one zero
_EXAMPLE: Final = "tcp://127.0.0.1:5555 or ipc:///tmp/ods/default.sock"
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed endpoint. ``host`` is without brackets and ``port`` 0 asks for a free one; ``path`` is for ipc only."""

    scheme: Literal["tcp", "ipc"]
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Read an endpoint.

    Raises:
        EndpointError: with the value, what is wrong with it, and a valid example.
    """
    if not isinstance(text, str):
        raise _bad(repr(text), "an endpoint is text")
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("tcp", "ipc"):
        raise _bad(text, "an endpoint begins with tcp:// or ipc://")
    return _parse_ipc(text, rest) if scheme == "ipc" else _parse_tcp(text, rest)


def _parse_ipc(text: str, path: str) -> Endpoint:
    if not path.startswith("/"):
        raise _bad(text, "an ipc endpoint holds an absolute path")
    if path.endswith("/") or "\0" in path or not path.isprintable():
        raise _bad(text, "an ipc endpoint holds the path of a file, without a slash at its end or control characters")
    size = len(os.fsencode(path))
    if size > IPC_PATH_MAX:
        raise _bad(text, f"the path of an ipc endpoint has at most {IPC_PATH_MAX} bytes, this one has {size}")
    return Endpoint("ipc", path=path)


def _parse_tcp(text: str, rest: str) -> Endpoint:
    if rest.endswith("/"):
        raise _bad(text, "an endpoint has no slash at its end")
    host, separator, port_text = rest.rpartition(":")
    if not separator or host.endswith(":") or (":" in host and not host.startswith("[")):
        raise _bad(text, "a tcp endpoint has a host and a port, an IPv6 host in brackets: tcp://[::1]:5555")
    if port_text == "*":
        port_text = "0"
    # Five digits at most: Python itself refuses to read numbers of thousands of them.
    if not re.fullmatch(r"[0-9]{1,5}", port_text) or int(port_text) > 65_535:
        raise _bad(text, "a port is a number from 1 to 65535, or 0 for any free one")
    if host.startswith("["):
        try:
            if not host.endswith("]"):
                raise ValueError(host)
            host = str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            raise _bad(text, "what is in the brackets is not an IPv6 address, as in tcp://[::1]:5555") from None
    elif host != "*" and not _HOST.fullmatch(host):
        raise _bad(text, "the host is a name, an address, or * for all addresses of this machine")
    elif re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise _bad(text, "the host is not an IPv4 address, as in tcp://127.0.0.1:5555") from None
    return Endpoint("tcp", host, int(port_text))


def parse_address(text: str) -> Endpoint:
    """As :func:`parse_endpoint`, for somebody to connect to: a place where a broker can really be.

    Raises:
        EndpointError: also for the tcp port 0, which means "any free one" to who binds it, and nothing to who connects.
    """
    parsed = parse_endpoint(text)
    if parsed.scheme == "tcp" and parsed.port == 0:
        raise _bad(text, "port 0 is for binding; connect to the port that the broker got and tells at its start")
    return parsed


def _bad(value: str, rule: str) -> EndpointError:
    shown = value if len(value) <= 200 else value[:200] + "…"
    return EndpointError(
        f"bad endpoint {shown!r}: {rule}; for example {_EXAMPLE}", argument="endpoint", value=shown, rule=rule
    )


def sibling(endpoint: Endpoint | str, name: Literal["tickets", "rollouts", "events"]) -> Endpoint:
    """Where a broker that answers on ``endpoint`` binds another of its sockets.

    ipc: the path with ``.tickets`` (…) added. tcp: the same host, port 0.

    Raises:
        EndpointError: the longer ipc path is too long.
    """
    base = parse_endpoint(endpoint) if isinstance(endpoint, str) else endpoint
    if base.scheme == "tcp":
        return Endpoint("tcp", base.host, 0)
    path = f"{base.path}.{name}"
    room = IPC_PATH_MAX - len(".rollouts")
    if len(os.fsencode(base.path)) > room:
        raise _bad(str(base), f"the path of an ipc endpoint to listen on has at most {room} bytes")
    return Endpoint("ipc", path=path)


def is_wildcard(endpoint: Endpoint | str) -> bool:
    """True if it stands for every address of this machine (``*``, ``0.0.0.0``, ``[::]``)."""
    base = parse_endpoint(endpoint) if isinstance(endpoint, str) else endpoint
    return base.scheme == "tcp" and base.host in ("*", "0.0.0.0", "::")


def is_loopback(endpoint: Endpoint | str) -> bool:
    """True if only programs on this machine can reach it: ipc, 127.x.x.x, ::1, localhost.

    A name counts only if all it resolves to is loopback; one that does not resolve does not count.
    """
    base = parse_endpoint(endpoint) if isinstance(endpoint, str) else endpoint
    if base.scheme == "ipc":
        return True
    if is_wildcard(base):
        return False
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(base.host).is_loopback
    try:
        found = socket.getaddrinfo(base.host, base.port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def resolve_for_bind(endpoint: Endpoint) -> Endpoint:
    """The endpoint with its host name turned into an address (IPv4 first), as binding needs it; ipc as it is.

    Raises:
        EndpointError: a name that is unknown, or an ipc path whose folder does not exist.
    """
    if endpoint.scheme == "ipc":
        return endpoint
    if endpoint.host == "*":
        return Endpoint("tcp", "0.0.0.0", endpoint.port)
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(endpoint.host)
        return endpoint
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _bad(
            str(endpoint), f"the name {endpoint.host!r} cannot be resolved here ({error.strerror}); bind an address"
        ) from error
    hosts = [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
    return Endpoint("tcp", hosts[0], endpoint.port)


def for_peer(bound: Endpoint | str, dialled: Endpoint | str) -> Endpoint:
    """The address under which a client that dialled ``dialled`` reaches the socket that is bound at ``bound``.

    The host is the one that the client itself used, since that one works from there (wildcards, NAT, container names);
    ipc addresses are the same for all.
    """
    real = parse_endpoint(bound) if isinstance(bound, str) else bound
    used = parse_endpoint(dialled) if isinstance(dialled, str) else dialled
    if real.scheme == "ipc":
        return real
    if used.scheme == "tcp" and not is_wildcard(used):
        return Endpoint("tcp", used.host, real.port)
    if is_wildcard(real):
        return Endpoint("tcp", "::1" if real.host == "::" else "127.0.0.1", real.port)
    return real


def default_ipc(name: str, runtime_dir: str | Path | None = None) -> Endpoint:
    """The ipc endpoint of a broker called ``name``, in a folder that only this user can enter (made if missing).

    Args:
        name: letters, digits, ``_``, ``-`` and ``.``, at most 32.
        runtime_dir: where the folder ``ods`` goes; None: the user's runtime folder, else ``/tmp/ods-UID``. Always
            short, whatever the folder for temporary files is.

    Raises:
        EndpointError: a bad name, or a folder that belongs to somebody else.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}", name):
        raise EndpointError(
            f"bad name {name!r}: 1 to 32 letters, digits, '_', '-' or '.', not beginning with '-' or '.'",
            argument="name",
            value=name,
            rule="1 to 32 letters, digits, '_', '-' or '.'",
        )
    if runtime_dir is not None:
        folder = Path(runtime_dir) / "ods"
    else:
        users = Path(f"/run/user/{os.getuid()}")
        folder = users / "ods" if os.access(users, os.W_OK) else Path(f"/tmp/ods-{os.getuid()}")
    _private_folder(folder)
    return parse_endpoint(f"ipc://{folder}/{name}.sock")


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise _bad(f"ipc://{folder}/", f"the folder cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise _bad(f"ipc://{folder}/", "the folder belongs to somebody else; give an endpoint of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
