"""What a measurement depends on beside its settings: versions and the machine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def versions(*packages: str) -> dict[str, str]:
    """Python's version and those of packages."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def processor() -> str:
    """The processor's name as torch knows it, else as the system does."""
    name = torch.cpu.get_capabilities().get("cpu_name")
    return str(name or platform.processor() or platform.machine())


def _version(name: str) -> str:
    """A package's version; a source tree that was never installed has none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
