"""Settings from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ods_async.config import OnlineDataEngineCfg
from ods_async.errors import ConfigError

JSON = '{"buffer_size": 7, "gym_config": {"id": "X-v0", "num_envs": 2, "kwargs": {"a": [1, 2.5, null]}}}'
YAML = """
buffer_size: 7
gym_config:
  id: X-v0
  num_envs: 2
  kwargs: {a: [1, 2.5, null]}
"""
TOML = """
buffer_size = 7
[gym_config]
id = "X-v0"
num_envs = 2
[gym_config.kwargs]
a = [1, 2.5]
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "text"), [("c.json", JSON), ("c.yaml", YAML), ("c.YML", YAML), ("c.toml", TOML)])
def test_each_format_gives_the_same_settings(tmp_path: Path, name: str, text: str) -> None:
    cfg = OnlineDataEngineCfg.from_file(written(tmp_path, name, text))
    assert (cfg.buffer_size, cfg.gym_config["id"], cfg.num_envs) == (7, "X-v0", 2)
    assert cfg.gym_config["kwargs"]["a"][:2] == [1, 2.5]


def test_an_empty_yaml_file_means_the_defaults(tmp_path: Path) -> None:
    assert OnlineDataEngineCfg.from_file(written(tmp_path, "c.yaml", "")) == OnlineDataEngineCfg()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.ini", "", "must end in"),
        ("c.json", "{", "cannot be read as json"),
        ("c.json", "[1]", "mapping"),
        ("c.json", "", "cannot be read as json"),
        ("c.json", '{"buffer_size": 3, "buffer_size": 4}', "twice"),
        ("c.json", "[" * 100_000, "cannot be read as json"),
        ("c.toml", "= 3", "cannot be read as toml"),
        ("c.yaml", "a: [", "cannot be read as yaml"),
        ("c.yaml", "buffer_size: 3\nbuffer_size: 4", "twice"),
        ("c.yaml", "- 3", "mapping"),
        ("c.yaml", "? [a]\n: 3", "cannot be read as yaml"),
        ("c.yaml", "gym_config: !!python/object/apply:os.getcwd []", "cannot be read as yaml"),
        ("c.yaml", "bufer_size: 3", "did you mean 'buffer_size'"),
        ("c.yaml", "buffer_size: 1e3", "buffer_size='1e3'"),
        ("c.yaml", "gym_config: {kwargs: {day: 2024-01-02}}", "gym_config['kwargs']['day']"),
        ("c.yaml", "gym_config: &a\n  kwargs: {again: *a}", "cannot be read as yaml"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_which(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OnlineDataEngineCfg.from_file(written(tmp_path, name, text))
    assert words in str(caught.value)
    assert name in "".join(caught.value.__notes__)


def test_merged_yaml_keys_may_be_overridden(tmp_path: Path) -> None:
    text = "gym_config:\n  kwargs:\n    a: &base {x: 1, y: 2}\n    b: {<<: *base, y: 3}\n"
    cfg = OnlineDataEngineCfg.from_file(written(tmp_path, "c.yaml", text))
    assert cfg.gym_config["kwargs"]["b"] == {"x": 1, "y": 3}


def test_a_missing_file_is_an_os_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        OnlineDataEngineCfg.from_file(tmp_path / "nowhere.json")
