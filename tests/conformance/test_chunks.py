"""The suite's tests of chunks, run here."""

from ods_async.testing.conformance.chunks import *  # noqa: F403
