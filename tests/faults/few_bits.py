"""Faults of merged keys in few bits."""

from __future__ import annotations

from faults.fault import Fault

CODES, LAWS = "kv_cache/codes.py", "tests/kv_cache/test_codes.py"
MEMORY = "kv_cache/memory.py"

FAULTS = (
    Fault("round down", CODES, ".round().clamp(0, most)", ".clamp(0, most)", LAWS),
    Fault(
        "let numbers overflow float16",
        CODES,
        "step = ((grouped.amax(-1) - zero) / most).clamp(max=_LARGEST).half()",
        "step = ((grouped.amax(-1) - zero) / most).half()",
        LAWS,
    ),
    Fault(
        "take a new frame at every merge",
        CODES,
        "return self.frames.where(self.is_there, Frames.of(others))",
        "return Frames.of(others)",
        LAWS,
    ),
    Fault("leave the mean in", CODES, "mean = share @ x", "mean = 0 * (share @ x)", LAWS),
    Fault(
        "measure all coordinates alike",
        CODES,
        "deviation = torch.maximum(variance, least)",
        "deviation = torch.maximum(0 * variance, least)",
        LAWS,
    ),
    Fault(
        "round by the unit where there is but one key",
        CODES,
        "mean.square().mean(-1, keepdim=True), deviation)",
        "0, deviation)",
        LAWS,
    ),
    Fault(
        "round in the model's own basis",
        CODES,
        "product: Tensor = x.unflatten(-1, (-1, piece)) @ (_signs(piece, x) * piece**-0.5)",
        "product: Tensor = x.unflatten(-1, (-1, piece))",
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
        "config.bits is None or tokens.bias.shape[2] <= config.num_unquantized",
        "config.bits is None",
        LAWS,
    ),
    Fault(
        "give padding's frame to the text after it",
        CODES,
        "return self.frames.where(self.is_there, Frames.of(others))",
        "return self.frames",
        LAWS,
    ),
    Fault(
        "read rows without their keys' mean",
        CODES,
        "log = log + scale * (query.to(log.dtype) * key.mean).sum(-1)",
        "pass",
        LAWS,
    ),
    Fault(
        "append keys in frames of their own",
        MEMORY,
        "more = self._rounded(leaving, frames, config.bits)",
        "more = self._rounded(leaving, Frames.of(leaving), config.bits)",
        LAWS,
    ),
    Fault(
        "merge at every block, however many keys there are",
        MEMORY,
        "config.num_left",
        "config.num_merged",
        "tests/kv_cache/test_attention.py",
    ),
)
