"""Packages of faster code beside this one: whether one is installed, and has the interface that is called here."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import NamedTuple


class Extension(NamedTuple):
    """How to install a package, and the INTERFACE it should have: what its functions take, and what that means."""

    extra: str
    interface: int


EXTENSIONS = {"linattn_compiled": Extension("compiled", 5), "linattn_triton": Extension("gpu", 1)}


@cache
def missing(package: str) -> str:
    """Why the package cannot be called, or ""."""
    name, (extra, interface) = package.replace("_", "-"), EXTENSIONS[package]
    try:
        installed = import_module(package).INTERFACE
    except ModuleNotFoundError:
        return f"{name} is not installed (pip install 'linattn[{extra}]')"
    except ImportError as error:
        return f"{name} cannot be loaded: {error}"
    if installed != interface:
        return f"{name} has interface {installed}, wanted {interface} (pip install -U 'linattn[{extra}]')"
    return ""
