"""Versions of what a measurement depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions(*packages: str) -> dict[str, str]:
    """Python's version and those of packages.

    Cost: one look into the installation per package.

    Args:
        packages: names as pip knows them.

    Returns:
        Versions by name, "python" first; "not installed" for a source tree that never was.

    Example:
        >>> list(versions("torch"))
        ['python', 'torch']

    Source: `importlib.metadata`.
    """
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(name: str) -> str:
    """A package's version; a source tree that was never installed has none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
