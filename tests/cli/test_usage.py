"""Bad usage is exit code 2, with the bad value and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from ods_async.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice"),
        (["stats"], "ENDPOINT"),
        (["stats", "tcp:/host"], "tcp://127.0.0.1:5555"),
        (["stats", "tcp://host:70000"], "70000"),
        (["stats", "tcp://host"], "a host and a port"),
        (["stats", "tcp://host:5/"], "no slash"),
        (["stats", "tcp://host:0"], "port 0 is for binding"),
        (["worker", "c.json", "--connect", "tcp://host:0"], "port 0 is for binding"),
        (["stats", "tcp://h:1", "--timeout", "0"], "above 0"),
        (["stats", "tcp://h:1", "--timeout", "nan"], "above 0"),
        (["sample", "tcp://h:1", "-b", "0"], "at least 1"),
        (["sample", "tcp://h:1", "-c", "two"], "at least 1"),
        (["sample", "tcp://h:1", "--mode", "all"], "invalid choice"),
        (["worker", "c.json"], "--connect"),
        (["broker", "c.json", "--endpoint", "http://x"], "tcp://"),
    ],
)
def test_c44_bad_usage_is_code_2_and_says_what_is_right(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C44."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("verb", ["up", "broker"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "cannot be read as json"),
        ('{"bufer_size": 3}', "did you mean 'buffer_size'"),
        ('{"buffer_size": 0}', "buffer_size=0"),
    ],
)
def test_b1_bad_settings_are_code_2_before_anything_starts(
    verb: str, text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B1."""
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    assert main([verb, str(path)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert str(path) in captured.err


def test_up_and_worker_need_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    path.write_text("{}")
    assert main(["up", str(path)]) == 2
    assert main(["worker", str(path), "--connect", "tcp://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.count("gym_config") == 2


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["sample", "--help"]])
def test_help_and_version_are_fine(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "ods-async" in capsys.readouterr().out


def test_half_a_context_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "tcp://127.0.0.1:9", "--history", "3"]) == 2
    assert "--horizon" in capsys.readouterr().err
