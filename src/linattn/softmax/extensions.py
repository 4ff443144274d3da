"""Packages of faster code beside this one: whether one is there, and which tensors compiled code takes."""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.softmax.tracing import is_transformed


class Extension(NamedTuple):
    """How to install a package, and the INTERFACE it should have: what its functions take, and what that means."""

    extra: str
    interface: int


EXTENSIONS = {"linattn_compiled": Extension("compiled", 8), "linattn_triton": Extension("gpu", 1)}


@cache
def missing(package: str) -> str:
    """Why the package cannot be called, or ""."""
    name, (extra, interface) = package.replace("_", "-"), EXTENSIONS[package]
    how = f"(pip install -U 'linattn[{extra}]', in a clone ./{extra})"
    try:
        # A folder that is left where it was has none.
        installed = getattr(import_module(package), "INTERFACE", None)
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == package
        return f"{name} is not installed {how}" if is_absent else f"{name} cannot be loaded: {error}"
    if installed != interface:
        return f"{name} has interface {installed}, wanted {interface} {how}"
    return ""


IN_GRAPHS = "it takes no calls inside torch.compile, whose graph would miss it"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def objections_to(tokens: Sequence[Tensor], *, is_followed: bool) -> list[str]:
    """Every reason why it cannot take a call with these tokens, each with what to do about it."""
    if torch.compiler.is_compiling():
        return [IN_GRAPHS]
    objections, first = [reason] if (reason := missing("linattn_compiled")) else [], tokens[0]
    if not first.is_cpu:
        objections.append(f"it runs on the CPU, and the tensors are on {first.device}")
    if first.dtype not in _DTYPES:
        objections.append(f"it takes float32, bfloat16 and float16, and the tensors are {first.dtype}")
    if _is_watched() or any(type(x) is not Tensor for x in tokens):
        objections.append("it takes plain tensors, where no tracer or mode looks at every operation")
    if is_followed:
        objections.append("it has no derivatives, and gradients follow this call; run it under torch.no_grad()")
    return objections


def is_readable(x: Tensor) -> bool:
    """Whether a tensor's numbers may be looked at without a wait: no graph, transform or mode would keep them."""
    if torch.compiler.is_compiling() or not x.is_cpu or type(x) is not Tensor:
        return False
    return not _is_watched() and not is_transformed()


def _is_watched() -> bool:
    """Whether a tracer or a dispatch mode follows torch's operations: it would miss these."""
    # torch has no public names for them.
    return torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0
