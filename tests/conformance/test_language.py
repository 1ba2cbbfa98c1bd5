"""The suite's tests of language, run here."""

from ods_async.testing.conformance.language import *  # noqa: F403
