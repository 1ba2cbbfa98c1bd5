"""CURVE keys: what they are, the files they lie in, and how a folder of them is made and read.

A folder made by ``ods-async keygen DIR`` holds::

    server.key          the broker's pair; secret, stays with the broker
    server.pub          the broker's public key; every client and worker needs it
    NAME.key            the pair of client NAME; secret, goes to that client together with server.pub
    clients/NAME.pub    the allow-list: public keys of the clients that the broker serves; stays with the broker

A key file is text: a line ``public KEY``, in the secret files also ``secret KEY``, each key 40 characters of Z85. Lines
that begin with ``# `` are comments. Keys are for tcp; ipc sockets are guarded by the rights of their files.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import zmq

from ods_async.errors import ConfigError

__all__ = ["CurveKeys", "CurveServer", "MadeKeys", "as_keys", "make_keys", "read_public_key"]

SERVER: Final = "server"
CLIENT: Final = "client"
ALLOWED: Final = "clients"

_KEY_CHARACTERS: Final = 40
_MOST_BYTES: Final = 4096
_Z85: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SECRET_WORDS: Final = "# secret: whoever has this file can speak as {who}; it must be readable by its user only\n"
_PUBLIC_WORDS: Final = "# public: may be given to anybody\n"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """What a client or worker needs on tcp: a pair of its own, and the public key of the broker it wants to speak to.

    Args:
        public: its own public key, 40 characters of Z85 text.
        secret: its own secret key.
        server_public: the broker's public key.
        path: the file they came from, for messages; empty when they came from elsewhere.

    Raises:
        ConfigError: something that is no key, or two keys that are no pair.
    """

    public: str
    secret: str = field(repr=False)
    server_public: str
    path: str = ""

    def __post_init__(self) -> None:
        _check_pair(self.public, self.secret, self.path)
        _check_key(self.server_public, "the broker's public key", self.path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], name: str | None = None) -> Self:
        """Read the keys of one client.

        Args:
            path: a folder that holds ``server.pub`` and the client's ``NAME.key``; or that key file itself, with
                ``server.pub`` beside it.
            name: which client to be; None: ``client``, or the only one whose key is there.

        Raises:
            ConfigError: naming the file: it is missing, can be read by other users, or does not hold what it should.
        """
        place = Path(path)
        file = _client_file(place, name) if place.is_dir() or name is not None else place
        folder = file.parent
        public, secret = _read_pair(file)
        beside = folder / f"{SERVER}.pub"
        if not beside.exists() and (folder / f"{SERVER}.key").exists():
            server_public, _ = _read_pair(folder / f"{SERVER}.key")
        else:
            server_public = read_public_key(beside)
        return cls(public, secret, server_public, str(file))

    @classmethod
    def generate(cls, server_public: str) -> Self:
        """A fresh pair for the broker with that public key; whoever runs the broker must put ``public`` on its list."""
        public, secret = _fresh_pair()
        return cls(public, secret, server_public)

    def save(self, folder: str | os.PathLike[str], name: str = CLIENT) -> Path:
        """Write ``NAME.key`` (0600) and ``server.pub`` into ``folder``; returns the path of the first.

        Raises:
            ConfigError: such a key file is there already, or it is not a name.
            OSError: the folder cannot be written.
        """
        place = _private_folder(Path(folder))
        beside = place / f"{SERVER}.pub"
        if not beside.exists():
            _write_public(beside, self.server_public)
        elif read_public_key(beside) != self.server_public:
            raise _bad(str(beside), "holds the key of another broker", "use another folder, or remove that file")
        file = place / f"{_checked_name(name)}.key"
        _write_pair(file, self.public, self.secret, f"client {name}")
        return file


@dataclass(frozen=True, slots=True)
class CurveServer:
    """What a broker needs: its pair, and the folder of public keys it serves.

    Attributes:
        public: the public key.
        secret: the secret key.
        allowed: the allow-list; None and a folder that is empty or gone let nobody in.
        path: the file the pair came from.
    """

    public: str
    secret: str = field(repr=False)
    allowed: Path | None = None
    path: str = ""

    def __post_init__(self) -> None:
        _check_pair(self.public, self.secret, self.path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], allowed: str | os.PathLike[str] | None = None) -> Self:
        """Read the broker's pair.

        Args:
            path: the key file, or the folder that holds it as ``server.key``.
            allowed: the allow-list; None: the folder ``clients`` beside the key file.

        Raises:
            ConfigError: naming the file or folder: it is missing, other users can read (the key) or write (the list),
                or it does not hold what it should.
        """
        place = Path(path)
        file = place / f"{SERVER}.key" if place.is_dir() else place
        public, secret = _read_pair(file)
        folder = Path(allowed) if allowed is not None else file.parent / ALLOWED
        _check_list(folder)
        return cls(public, secret, folder, str(file))


@dataclass(frozen=True, slots=True)
class MadeKeys:
    """What :func:`make_keys` did: the files it wrote, and the clients' key files that were there already."""

    written: tuple[Path, ...]
    kept: tuple[Path, ...]


def make_keys(folder: str | os.PathLike[str], clients: tuple[str, ...] = (CLIENT,)) -> MadeKeys:
    """Make the broker's pair, unless it is there, and a pair for every client that has none yet; list those clients.

    What is there is never changed; a client whose public key was taken off the list is not put back on it.

    Args:
        folder: where to; made if need be, for this user only.
        clients: their names: letters, digits, ``_``, ``-`` and ``.``.

    Raises:
        ConfigError: a name that is none, or a client that is on the list already but whose key is elsewhere.
        OSError: the folder cannot be written.
    """
    names = [_checked_name(name) for name in clients]
    place = _private_folder(Path(folder))
    allowed = _private_folder(place / ALLOWED)
    written: list[Path] = []
    kept: list[Path] = []
    server_key, server_pub = place / f"{SERVER}.key", place / f"{SERVER}.pub"
    if server_key.exists():
        kept.append(server_key)
        server_public, _ = _read_pair(server_key)
    else:
        server_public, secret = _fresh_pair()
        _write_pair(server_key, server_public, secret, "the broker")
        written.append(server_key)
        server_pub.unlink(missing_ok=True)  # of a pair that is gone
    if not server_pub.exists():
        _write_public(server_pub, server_public)
        written.append(server_pub)
    for name in names:
        key, listed = place / f"{name}.key", allowed / f"{name}.pub"
        if key.exists():
            kept.append(key)
            continue
        if listed.exists():
            why = f"lists a client {name!r} whose key is elsewhere"
            raise _bad(str(listed), why, "take another name, or remove that file")
        public, secret = _fresh_pair()
        _write_pair(key, public, secret, f"client {name}")
        _write_public(listed, public)
        written += [key, listed]
    return MadeKeys(tuple(written), tuple(kept))


def as_keys(keys: CurveKeys | str | os.PathLike[str] | None, endpoint: str) -> CurveKeys | None:
    """The keys, read from their folder or file if a path is given.

    Raises:
        ConfigError: as :meth:`CurveKeys.load`, with a note of the endpoint they are for.
    """
    if keys is None or isinstance(keys, CurveKeys):
        return keys
    if not isinstance(keys, str | os.PathLike):
        raise ConfigError(
            f"keys is {type(keys).__name__}; it must be CurveKeys, the path of a folder of keys, or None",
            argument="keys",
            value=type(keys).__name__,
            rule="CurveKeys, a path, or None",
        )
    try:
        return CurveKeys.load(keys)
    except ConfigError as error:
        error.add_note(f"needed for {endpoint}")
        raise


def read_public_key(file: Path) -> str:
    """The public key in a file: its ``public`` line, or the only thing in it.

    Raises:
        ConfigError: naming the file and what is wrong with it.
    """
    found, _ = _read(file)
    if "public" not in found:
        raise _bad(str(file), "holds no public key", "a line 'public KEY'")
    return found["public"]


def _client_file(folder: Path, name: str | None) -> Path:
    if name is not None:
        return folder / f"{_checked_name(name)}.key"
    found = sorted(file for file in folder.glob("*.key") if file.stem != SERVER)
    usual = folder / f"{CLIENT}.key"
    if len(found) == 1:
        return found[0]
    if usual in found or not found:
        return usual
    names = ", ".join(file.name for file in found[:8])
    raise _bad(str(folder), f"holds the keys of several clients ({names})", "name one: keys/NAME.key")


def _read_pair(file: Path) -> tuple[str, str]:
    found, mode = _read(file)
    if "secret" not in found:
        raise _bad(str(file), "holds a public key only", "a file with a 'secret' line, as `ods-async keygen DIR` makes")
    if mode & 0o077:
        raise _bad(str(file), f"can be read by other users (mode {stat.S_IMODE(mode):03o})", f"chmod 600 {file}")
    public = found.get("public") or _public_of(found["secret"], str(file))
    _check_pair(public, found["secret"], str(file))
    return public, found["secret"]


def _read(file: Path) -> tuple[dict[str, str], int]:
    try:
        # Not blocking: somebody may have put a pipe there.
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            data = stream.read(_MOST_BYTES + 1) if stat.S_ISREG(mode) else b"\0"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise _bad(str(file), f"cannot be read: {reason}", "make keys with `ods-async keygen DIR`") from error
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        text = "\0"
    if len(data) > _MOST_BYTES or "\0" in text:
        raise _bad(str(file), "is no key file", "lines 'public KEY' and 'secret KEY'")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0] == "#":
            continue
        kind, key = ("public", words[0]) if len(words) == 1 else (words[0], words[1])
        if len(words) > 2 or kind not in ("public", "secret") or kind in found:
            raise _bad(str(file), f"cannot be understood in line {number}", "lines 'public KEY' and 'secret KEY'")
        _check_key(key, f"the {kind} key in line {number}", str(file))
        found[kind] = key
    return found, mode


def _check_key(key: object, what: str, path: str) -> None:
    if not isinstance(key, str):
        raise _bad(path, f"{what} is {type(key).__name__}", "40 characters of Z85 text")
    if len(key) != _KEY_CHARACTERS:
        raise _bad(path, f"{what} has {len(key)} characters", f"a key has {_KEY_CHARACTERS}")
    if not _Z85.fullmatch(key):
        raise _bad(path, f"{what} has a character that no key has", "40 characters of Z85 text")


def _check_pair(public: str, secret: str, path: str) -> None:
    _check_key(public, "the public key", path)
    _check_key(secret, "the secret key", path)
    if _public_of(secret, path) != public:
        why = "has the public key in place of the secret one" if public == secret else "has two keys that are no pair"
        raise _bad(path, why, "the secret key and the public key made together with it")


def _public_of(secret: str, path: str) -> str:
    try:
        return zmq.curve_public(secret.encode()).decode()
    except (zmq.ZMQError, ValueError):
        raise _bad(path, "has a secret key that cannot be read", "40 characters of Z85 text") from None


def _check_list(folder: Path) -> None:
    if not folder.is_dir():
        raise _bad(str(folder), "is no folder of clients' public keys, so nobody could come in", "an existing folder")
    mode = folder.stat().st_mode
    if mode & 0o022:
        rule = f"chmod go-w {folder}"
        raise _bad(str(folder), f"is an allow-list that other users can write to (mode {stat.S_IMODE(mode):03o})", rule)


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == SERVER:
        rule = "1 to 64 letters, digits, '_', '-' or '.', beginning with a letter or digit, and not 'server'"
        raise _bad("", f"the client's name is {name!r}", rule)
    return name


def _fresh_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _private_folder(place: Path) -> Path:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


def _write_pair(file: Path, public: str, secret: str, who: str) -> None:
    _write(file, f"{_SECRET_WORDS.format(who=who)}public {public}\nsecret {secret}\n", 0o600)


def _write_public(file: Path, public: str) -> None:
    _write(file, f"{_PUBLIC_WORDS}public {public}\n", 0o644)


def _write(file: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise _bad(
            str(file), "is there already and is not written over", "take another name, or remove it first"
        ) from None
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _bad(path: str, what: str, rule: str) -> ConfigError:
    return ConfigError(f"{path}: {what}; {rule}" if path else f"{what}; {rule}", argument="keys", value=path, rule=rule)
