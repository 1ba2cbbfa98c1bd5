from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ods_async
from ods_async.wire import messages
from ods_async.wire.text import NAME_FIELDS, WORDS_FIELDS

PACKAGE = Path(ods_async.__file__).parent
# Two of the published tests pickle: one sends pickles to a broker to see them refused, one pickles errors of its own
# process and takes them back.
PICKLING_TESTS = {PACKAGE / "testing/trial/noise.py", PACKAGE / "testing/conformance/errors.py"}
SOURCES = sorted(set(PACKAGE.rglob("*.py")) - PICKLING_TESTS)


@pytest.mark.parametrize("path", sorted(PICKLING_TESTS), ids=lambda path: path.name)
def test_the_published_tests_that_pickle_unpickle_only_what_they_pickled(path: Path) -> None:
    """C45"""
    assert not re.search(r"\bloads?\b|Unpickler", path.read_text().replace("pickle.loads(pickle.dumps(", ""))


def test_what_can_be_said_where() -> None:
    """A change here changes the wire: raise PROTOCOL with it once a version is released."""
    assert messages.PROTOCOL == 1
    assert sorted(messages.TICKETS) == ["Ticket"]
    assert sorted(messages.REPORTS) == sorted(
        ["AttemptFailed", "Goodbye", "Heartbeat", "Hello", "RolloutReport", "TicketStarted", "WorkerFailed"]
    )
    assert set(messages.BROADCASTS) == set(messages.EVENTS) | {"Verdict", "RevokeTickets", "ShutDown", "ServiceBeat"}
    assert {"Connect", "Sample", "Release", "Cancel"} < set(messages.REQUESTS)
    assert {"Welcome", "Plans", "Batch", "ErrorReport"} < set(messages.ANSWERS)
    assert {"EpisodePublished", "EpisodeEvicted", "WorkerFailure"} < set(messages.EVENTS)
    assert "Event" not in messages.EVENTS


def test_tags_are_unique() -> None:
    tables = (messages.REQUESTS, messages.ANSWERS, messages.REPORTS, messages.TICKETS, messages.BROADCASTS)
    tags = [tag for table in tables for tag in table]
    assert len(tags) == len(set(tags))


def test_every_kind_of_text_field_exists() -> None:
    tables = (messages.REQUESTS, messages.ANSWERS, messages.REPORTS, messages.BROADCASTS)
    names = {name for table in tables for cls in table.values() for name in cls.__dataclass_fields__}
    assert names >= WORDS_FIELDS
    assert names >= NAME_FIELDS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_nothing_in_the_package_can_run_what_it_receives(path: Path) -> None:
    """C45: no unpickling, no evaluation, anywhere in the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = {node.func.id} & {"eval", "exec", "__import__"}
        else:
            continue
        assert not names & {
            "pickle",
            "cPickle",
            "_pickle",
            "cloudpickle",
            "dill",
            "marshal",
            "shelve",
            "eval",
            "exec",
            "__import__",
        }
        assert not (isinstance(node, ast.Call) and names)
