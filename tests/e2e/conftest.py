"""Three consumer programs, kept for all tests: starting one costs seconds, most of them torch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.programs import Consumer

Consumers = tuple[Consumer, Consumer, Consumer]


@pytest.fixture(scope="session")
def consumers(_nothing_left_by_the_run: None) -> Iterator[Consumers]:
    three = Consumer(), Consumer(), Consumer()
    for consumer in three:
        consumer.hear("ready")
    yield three
    for consumer in three:
        consumer.end()
