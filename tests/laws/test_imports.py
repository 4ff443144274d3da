"""`import linattn` needs torch and nothing else, and converting says what it needs."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

SCRIPT = """
import sys
for name in "triton linattn_triton transformers accelerate tensorboard peft jinja2 typer rich scipy numpy".split():
    sys.modules[name] = None
import torch, linattn, linattn.methods.measures, linattn.methods.method
x = torch.randn(1, 2, 70, 8, requires_grad=True)
for is_causal in (False, True):
    out = linattn.linear_attention(x, x, x, linattn.feature_maps.FavorPlus(8, 16), is_causal=is_causal)
    out.sum().backward()
    linattn.merged_attention(x, x, x, linattn.MergedKV(4, 6), is_causal=is_causal).sum().backward()
    layer = linattn.nn.LinearAttention(8, 2, linattn.feature_maps.FavorPlus(4, 8), is_causal=is_causal)
    linattn.nn.Block(layer)(x[0]).sum().backward()
assert x.grad.isfinite().all()
assert "linattn.hf" not in sys.modules and "linattn_lab" not in sys.modules
try:
    import linattn.convert
except ImportError as error:
    print(error)
"""
WITHOUT_PEFT = """
import sys
sys.modules["peft"] = None
import linattn.hf
try:
    import linattn.convert
except ImportError as error:
    print(error)
"""
LIGHT = """
import sys, torch
before = set(sys.modules)
import linattn
print(sorted(name for name in set(sys.modules) - before if not name.startswith("linattn")))
"""
MISSING = "linattn.convert trains transformers models, and {} is missing: pip install 'linattn[convert]'"


Run = Callable[..., CompletedProcess[str]]


def printed(run_program: Run, program: str) -> str:
    """What a process of its own prints."""
    result = run_program(program, warned="ignore")
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_core_runs_with_torch_alone(run_program: Run) -> None:
    assert printed(run_program, SCRIPT) == MISSING.format("transformers, tensorboard, peft")


def test_importing_the_core_loads_nothing_that_torch_has_not(run_program: Run) -> None:
    """torch's compiler and sympy above all, which take longer than torch itself."""
    assert printed(run_program, LIGHT) == "[]"


def test_converting_says_what_it_needs(run_program: Run) -> None:
    assert printed(run_program, WITHOUT_PEFT) == MISSING.format("peft")
