"""The suite's tests of errors, run here."""

from ods_async.testing.conformance.errors import *  # noqa: F403
