"""Faults of merged keys in few bits."""

from __future__ import annotations

from faults.fault import Fault

FEW_BITS, LAWS = "attention/exact/few_bits.py", "tests/laws/test_few_bits.py"
MERGED_KEYS = "attention/exact/merged_keys.py"

FAULTS = (
    Fault("round down", FEW_BITS, ".round().clamp(0, most)", ".clamp(0, most)", LAWS),
    Fault(
        "let numbers overflow float16",
        FEW_BITS,
        "step = ((grouped.amax(-1) - zero) / most).clamp(max=_LARGEST).half()",
        "step = ((grouped.amax(-1) - zero) / most).half()",
        LAWS,
    ),
    Fault(
        "take a new frame at every merge",
        FEW_BITS,
        "if before is not None and held is not None:",
        "if before is None and held is not None:",
        LAWS,
    ),
    Fault("leave the mean in", FEW_BITS, "mean = share @ x", "mean = 0 * (share @ x)", LAWS),
    Fault(
        "measure all coordinates alike",
        FEW_BITS,
        "deviation = torch.maximum(variance, least)",
        "deviation = torch.maximum(0 * variance, least)",
        LAWS,
    ),
    Fault(
        "round by the unit where there is but one key",
        FEW_BITS,
        "mean.square().mean(-1, keepdim=True), deviation)",
        "0, deviation)",
        LAWS,
    ),
    Fault(
        "round in the model's own basis",
        FEW_BITS,
        "found: Tensor = x.unflatten(-1, (-1, piece)) @ (matrix * piece**-0.5)",
        "found: Tensor = x.unflatten(-1, (-1, piece))",
        LAWS,
    ),
    Fault(
        "cut the gradient where keys are rounded",
        MERGED_KEYS,
        "x + (y - x).detach() if x.requires_grad else y",
        "y",
        LAWS,
    ),
    Fault(
        "round keys that would fit as they are",
        MERGED_KEYS,
        "(coded is None and merged.bias.shape[2] <= rule.num_whole)",
        "(coded is None and merged.bias.shape[2] < 0)",
        LAWS,
    ),
    Fault(
        "give padding's frame to the text after it",
        FEW_BITS,
        "(before.bias != -torch.inf).any(-1)",
        "(before.bias == before.bias).any(-1)",
        LAWS,
    ),
)
