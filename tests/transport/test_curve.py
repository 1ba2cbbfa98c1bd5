"""CURVE keys and their files: who may read them, and what is said about each way in which they can be wrong (C18)."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest
import zmq

from ods_async.errors import ConfigError
from ods_async.transport.curve import CurveKeys, CurveServer, as_keys, make_keys, read_public_key


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ("alice", "bob"))
    return tmp_path / "keys"


def test_a_made_folder_holds_pairs_that_only_the_user_can_read_and_a_list_of_the_clients(folder: Path) -> None:
    for name in ("server", "alice", "bob"):
        assert mode(folder / f"{name}.key") == 0o600
    assert mode(folder) == mode(folder / "clients") == 0o700
    assert sorted(path.name for path in (folder / "clients").iterdir()) == ["alice.pub", "bob.pub"]
    alice, bob = CurveKeys.load(folder, "alice"), CurveKeys.load(folder / "bob.key")
    server = CurveServer.load(folder)
    assert alice.server_public == bob.server_public == server.public == read_public_key(folder / "server.pub")
    assert len({server.public, alice.public, bob.public, server.secret, alice.secret, bob.secret}) == 6
    assert read_public_key(folder / "clients" / "alice.pub") == alice.public
    assert server.allowed == folder / "clients"


def test_a_client_needs_only_its_own_key_and_the_servers_public_one(folder: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    for name in ("server.pub", "bob.key"):
        (away / name).write_bytes((folder / name).read_bytes())
        (away / name).chmod(0o600)
    assert CurveKeys.load(away).public == CurveKeys.load(folder, "bob").public
    assert CurveKeys.load(away).path == str(away / "bob.key")


def test_which_client_is_meant_is_client_or_the_only_one_and_else_it_is_asked(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"several clients \(alice.key, bob.key\)"):
        CurveKeys.load(folder)
    make_keys(folder)
    assert CurveKeys.load(folder).path == str(folder / "client.key")


def test_making_keys_again_changes_nothing_that_is_there(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "clients" / "bob.pub").unlink()
    made = make_keys(folder, ("bob", "carol"))
    assert set(made.kept) == {folder / "server.key", folder / "bob.key"}
    assert set(made.written) == {folder / "carol.key", folder / "clients" / "carol.pub"}
    assert not (folder / "clients" / "bob.pub").exists(), "who was taken off the list stays off it"
    for path, data in before.items():
        assert path.name == "bob.pub" or path.read_bytes() == data


def test_a_listed_client_whose_key_is_elsewhere_is_not_made_anew(folder: Path) -> None:
    (folder / "bob.key").unlink()
    with pytest.raises(ConfigError, match=r"bob.pub: lists a client 'bob' whose key is elsewhere"):
        make_keys(folder, ("bob",))


@pytest.mark.parametrize("name", ["", "server", "../x", ".hidden", "a b", "x" * 65])
def test_names_that_are_no_names_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="client's name"):
        make_keys(tmp_path / "keys", (name,))
    assert not (tmp_path / "keys").exists()


def test_keys_of_ones_own_are_generated_saved_and_loaded(tmp_path: Path) -> None:
    server_public = zmq.curve_keypair()[0].decode()
    keys = CurveKeys.generate(server_public)
    file = keys.save(tmp_path / "mine", "dora")
    assert mode(file) == 0o600
    loaded = CurveKeys.load(tmp_path / "mine")
    assert (loaded.public, loaded.secret, loaded.server_public) == (keys.public, keys.secret, server_public)
    with pytest.raises(ConfigError, match="is there already"):
        keys.save(tmp_path / "mine", "dora")
    with pytest.raises(ConfigError, match="another broker"):
        CurveKeys.generate(zmq.curve_keypair()[0].decode()).save(tmp_path / "mine", "emil")


def test_secrets_show_in_no_repr_and_keys_survive_pickling(folder: Path) -> None:
    keys, server = CurveKeys.load(folder, "bob"), CurveServer.load(folder)
    assert keys.secret not in repr(keys)
    assert server.secret not in repr(server)
    assert pickle.loads(pickle.dumps(keys)) == keys


def spoil(folder: Path, case: str) -> Path:
    """Spoil bob's key file in that way; returns the file that the message must name."""
    file = folder / "bob.key"
    public = read_public_key(folder / "clients" / "bob.pub")
    if case == "missing":
        file.unlink()
    elif case == "39 characters":
        file.write_text(file.read_text().rstrip()[:-1])
    elif case == "public only":
        file.write_text(f"public {public}\n")
    elif case == "public as secret":
        file.write_text(f"public {public}\nsecret {public}\n")
    elif case == "no pair":
        file.write_text(f"public {public}\nsecret {CurveKeys.load(folder, 'alice').secret}\n")
    elif case == "not Z85":
        file.write_text(f"secret {'~' * 40}\n")
    elif case == "readable by others":
        file.chmod(0o640)
    elif case == "binary":
        file.write_bytes(os.urandom(64))
    elif case == "too long":
        file.write_bytes(b"# " + b"x" * 10_000)
    elif case == "other words":
        file.write_text("metadata\n    curve\n        public-key = x\n")
    elif case == "a pipe":
        file.unlink()
        os.mkfifo(file, 0o600)
    elif case == "a folder":
        file.unlink()
        file.mkdir()
    else:
        assert case == "no server key"
        (folder / "server.pub").unlink()
        (folder / "server.key").unlink()
        return folder / "server.pub"
    return file


CASES = {
    "missing": "no such file",
    "39 characters": "39 characters; a key has 40",
    "public only": "holds a public key only",
    "public as secret": "the public key in place of the secret one",
    "no pair": "two keys that are no pair",
    "not Z85": "a character that no key has",
    "readable by others": r"read by other users \(mode 640\); chmod 600",
    "binary": "no key file",
    "too long": "no key file",
    "other words": "in line 1 has 8 characters",
    "a pipe": "no key file",
    "a folder": "cannot be read|no key file",
    "no server key": "no such file",
}


@pytest.mark.timeout(5)
@pytest.mark.parametrize("case", CASES)
def test_each_way_a_key_file_can_be_wrong_names_the_file_and_no_secret(folder: Path, case: str) -> None:
    """C18: at once, and never the key itself."""
    secret = CurveKeys.load(folder, "bob").secret
    file = spoil(folder, case)
    with pytest.raises(ConfigError, match=CASES[case]) as caught:
        as_keys(folder / "bob.key", "tcp://10.0.0.1:5555")
    assert str(file) in str(caught.value)
    assert "tcp://10.0.0.1:5555" in caught.value.__notes__[0]
    assert secret[:-1] not in str(caught.value)


def test_a_bare_key_is_a_public_key_file_and_may_begin_like_a_comment(tmp_path: Path) -> None:
    file = tmp_path / "x.pub"
    key = "#" + zmq.curve_keypair()[0].decode()[1:]
    file.write_text(f"# of the robot lab\n{key}\n")
    assert read_public_key(file) == key


def test_something_else_than_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="keys is dict"):
        as_keys({"secret": 1}, "tcp://127.0.0.1:1")  # type: ignore[arg-type]
    assert as_keys(None, "tcp://127.0.0.1:1") is None
    with pytest.raises(ConfigError, match="has 5 characters"):
        CurveKeys("short", "s" * 39, "")


def test_a_broker_is_refused_without_a_list_and_with_one_that_others_can_write(folder: Path, tmp_path: Path) -> None:
    """C19: no list never means everybody."""
    with pytest.raises(ConfigError, match="nobody could come in"):
        CurveServer.load(folder, tmp_path / "nowhere")
    (folder / "clients").chmod(0o777)
    with pytest.raises(ConfigError, match=r"other users can write to \(mode 777\); chmod go-w"):
        CurveServer.load(folder / "server.key")
