"""`import linattn` needs torch and nothing else."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
for name in ("triton", "transformers", "plotly", "jinja2", "typer", "rich", "scipy", "numpy"):
    sys.modules[name] = None
import torch, linattn
x = torch.randn(1, 2, 70, 8, requires_grad=True)
for is_causal in (False, True):
    out = linattn.linear_attention(x, x, x, linattn.feature_maps.FavorPlus(8, 16), is_causal=is_causal)
    out.sum().backward()
assert x.grad.isfinite().all()
assert "linattn.hf" not in sys.modules and "linattn.lab" not in sys.modules
print("ran")
"""


def test_the_core_runs_with_torch_alone() -> None:
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "ran", result.stderr
