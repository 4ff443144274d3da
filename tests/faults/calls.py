"""Faults of what surrounds the sums: shared maps, empty inputs, dtypes, rows that see nothing."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "let the last token of a packed sequence count again",
        "attention/packed.py",
        "own = numbers < lengths",
        "own = numbers <= lengths",
        "tests/laws/test_packed.py",
    ),
    Fault(
        "states of packed sequences in the order they were computed in",
        "attention/packed.py",
        "places = sorted(range(len(order)), key=order.__getitem__)",
        "places = list(range(len(order)))",
        "tests/laws/test_packed.py",
    ),
    Fault(
        "one batch for packed sequences of all lengths",
        "attention/packed.py",
        "groups.setdefault(self._length(sequence).bit_length(), [])",
        "groups.setdefault(0, [])",
        "tests/laws/test_packed.py",
    ),
    Fault(
        "write the call's tensors into the shared map",
        "feature_maps/_swapping.py",
        "dict(module._parameters), dict(module._buffers)",
        "module._parameters, module._buffers",
        "tests/laws/test_threads.py",
    ),
    Fault(
        "forget the parameters of a replica",
        "feature_maps/_swapping.py",
        '.get("_former_parameters", {})',
        '.get("_no_parameters", {})',
        "tests/laws/test_threads.py",
    ),
    Fault(
        "one maximum for all rows of a weighted map",
        "attention/softmax.py",
        "    peak = logs.detach().amax(-1, keepdim=True) if logs.shape[-1] else logs.new_zeros(1)\n",
        "    peak = logs.detach().amax() if logs.numel() else logs.new_zeros(1)\n",
        "tests/laws/test_combination.py",
    ),
    Fault(
        "take the logarithm of rows that saw nothing",
        "attention/partial.py",
        "torch.log(safe_total)",
        "torch.log(total)",
        "tests/laws/test_combination.py",
    ),
    Fault(
        "let a block's first live key drown rows that read the state alone",
        "attention/backends/blocked/joint_causal.py",
        "torch.where(masked[..., :1] & (m > lowest(m.dtype)), m, first)",
        "first",
        "tests/laws/test_causality.py",
    ),
    Fault(
        "take the first dtype instead of the widest under autocast",
        "attention/_check.py",
        "dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))",
        "dtype = torch.bfloat16",
        "tests/laws/test_precision.py",
    ),
    Fault(
        "keep buffers of inference mode",
        "feature_maps/_base.py",
        "    if not tensor.is_inference():\n        return tensor",
        "    if True:\n        return tensor",
        "tests/laws/test_transforms.py",
    ),
    Fault(
        "name a draw by its seed alone",
        "feature_maps/_random_base.py",
        "self._draw_digest = digest(self.projection)",
        'self._draw_digest = ""',
        "tests/laws/test_fold.py",
    ),
    Fault(
        "keep the neighbourhood's masses out of vmap",
        "attention/exact/neighbourhood.py",
        "weights.new_zeros(batch, heads, length)",
        "torch.zeros(batch, heads, length, dtype=weights.dtype)",
        "tests/laws/test_transforms.py",
    ),
    Fault(
        "cut no chunk where there are no tokens",
        "attention/exact/heavy.py",
        "return found or [(first, last)]",
        "return found",
        "tests/laws/test_empty.py",
    ),
    Fault(
        "let cancellation make a normaliser negative",
        "attention/backends/blocked/grouped_reading.py",
        "den = self.feature_map.normalizer(phi_q, z)",
        "den = (phi_q * z).sum(-1)",
        "tests/laws/test_combination.py",
    ),
    Fault(
        "invert denormal normalisers",
        "attention/backends/blocked/rows.py",
        "(self.den.abs() < torch.finfo(den.dtype).tiny)",
        "(self.den == 0)",
        "tests/laws/test_gradient.py",
    ),
    Fault(
        "import torch's compiler with the core",
        "attention/softmax.py",
        "import torch\nfrom torch import Tensor\n",
        "import torch\nimport torch._dynamo\nfrom torch import Tensor\n",
        "tests/laws/test_imports.py",
    ),
    Fault(
        "ask for the autocast of tensors without values",
        "attention/_check.py",
        " or x.is_meta",
        "",
        "tests/laws/test_refusals.py",
    ),
)
