"""The package's version, for those parts that must not import the package's public names."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
