"""Faults of merged keys in few bits."""

from __future__ import annotations

from faults.fault import Fault

FEW_BITS, LAWS = "attention/exact/merged/few_bits.py", "tests/laws/test_few_bits.py"
MEMORY = "attention/exact/merged/memory.py"

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
        "return self.frames.where(self.is_there, Frames.of(others))",
        "return Frames.of(others)",
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
        "found: Tensor = x.unflatten(-1, (-1, piece)) @ (_signs(piece, x) * piece**-0.5)",
        "found: Tensor = x.unflatten(-1, (-1, piece))",
        LAWS,
    ),
    Fault(
        "cut the gradient where keys are rounded",
        MEMORY,
        "x + (y - x).detach() if is_followed(x) else y",
        "y",
        LAWS,
    ),
    Fault(
        "round keys that would fit as they are",
        MEMORY,
        "rule.bits is None or tokens.bias.shape[2] <= rule.num_whole",
        "rule.bits is None",
        LAWS,
    ),
    Fault(
        "give padding's frame to the text after it",
        FEW_BITS,
        "return self.frames.where(self.is_there, Frames.of(others))",
        "return self.frames",
        LAWS,
    ),
    Fault(
        "read the mean of what is forgotten",
        FEW_BITS,
        "Frame(torch.where(holds, mean, 0), deviation)",
        "Frame(mean, deviation)",
        LAWS,
    ),
    Fault(
        "read rows without their keys' mean",
        FEW_BITS,
        "log = log + scale * (exact * key.mean).sum(-1)",
        "pass",
        LAWS,
    ),
    Fault(
        "append keys in frames of their own",
        MEMORY,
        "more = self._rounded(leaving, frames, rule.bits)",
        "more = self._rounded(leaving, Frames.of(leaving), rule.bits)",
        LAWS,
    ),
    Fault(
        "merge at every block, however many keys there are",
        MEMORY,
        "rule.num_left",
        "rule.num_merged",
        "tests/laws/test_merged_keys.py",
    ),
)
