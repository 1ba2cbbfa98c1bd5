"""The suite's tests of spaces, run here."""

from ods_async.testing.conformance.spaces import *  # noqa: F403
