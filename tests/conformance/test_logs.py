"""The suite's tests of logs, run here."""

from ods_async.testing.conformance.logs import *  # noqa: F403
