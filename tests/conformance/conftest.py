"""The published suite's services, and its tests' assertions told in full."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("ods_async.testing.conformance")

from ods_async.testing.conformance.fixtures import *  # noqa: E402, F403


@pytest.fixture(autouse=True)
def _nothing_left() -> None:
    """The services outlive their tests, and open what they need when it is needed; the whole run is checked."""
