"""Plain scripts that measure ods_async; not part of the package. Run ``bash scripts/bench``."""
