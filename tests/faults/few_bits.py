"""Faults of merged keys in few bits."""

from __future__ import annotations

from faults.fault import Fault

CODES, FRAMES, LEVELS = "kv_cache/codes.py", "kv_cache/frames.py", "kv_cache/levels.py"
MEMORY, TIER = "kv_cache/memory.py", "kv_cache/memory.py"
STREAMS, LAWS, TIERS = (f"tests/kv_cache/test_{name}.py" for name in ("codes", "levels", "tiers"))
MOVING = "tests/kv_cache/test_moving_texts.py"

FAULTS = (
    Fault("stop before levels are fixed", LEVELS, "_STEPS = 12", "_STEPS = 1", LAWS),
    Fault("round to the level of the listed multiple", LEVELS, "+ is_higher.int() - is_lower.int()", "", LAWS),
    Fault("follow the scale of a state's codes", CODES, "x = x.detach()", "x = x", STREAMS),
    Fault(
        "scale every row by its root mean square", CODES, "factors[best.argmax(0)]", "factors[0 * best.argmax(0)]", LAWS
    ),
    Fault("weigh errors of all blocks alike", CODES, "4.0 ** bits.to(precise)", "1.0 ** bits.to(precise)", LAWS),
    Fault("let scales overflow float16", CODES, ".clamp(-LARGEST, LARGEST)", "", LAWS),
    Fault("let scales of cut rows overflow float16", CODES, "LARGEST = 2.0**14", "LARGEST = 2.0**15", LAWS),
    Fault(
        "begin numbers a bit late",
        CODES,
        "first = (wide.cumsum(-1) - wide).int()",
        "first = wide.cumsum(-1).int()",
        LAWS,
    ),
    Fault("give all blocks the same bits", FRAMES, "pad(power * variance", "pad(0 * power * variance", LAWS),
    Fault(
        "leave coordinates in their order",
        FRAMES,
        "order = (_STEPS * weight.log2()).round()",
        "order = (0 * weight).round()",
        LAWS,
    ),
    Fault("leave the mean in", FRAMES, "mean = mean + share @ (x - mean)", "mean = 0 * mean", STREAMS),
    Fault("take a mean's rounding for a deviation", FRAMES, "mean = mean + share @ (x - mean)", "pass", LAWS),
    Fault(
        "cut what differs from rows nearly alike", FRAMES, "torch.maximum(size, _SHORTEST * length)", "size", STREAMS
    ),
    Fault(
        "measure all coordinates alike",
        FRAMES,
        "variance = torch.maximum(variance, torch",
        "variance = torch.maximum(0 * variance, torch",
        STREAMS,
    ),
    Fault(
        "round by the unit where there is but one key",
        FRAMES,
        "torch.where(size == 0, length, size)",
        "torch.where(size == 0, 1, size)",
        LAWS,
    ),
    Fault("take squares of numbers of any size", FRAMES, ".log2().round().exp2()", ".clamp(1, 1)", STREAMS),
    Fault("round in the model's own basis", FRAMES, "@ matrix", "@ (matrix.abs() > 2).to(x)", LAWS),
    Fault(
        "take a new frame at every block",
        TIER,
        "if not has_values(fits) or not bool(fits.all()):",
        "fits = fits & False\n        if True:",
        STREAMS,
    ),
    Fault(
        "keep frames that a text has moved away from",
        TIER,
        "(far[0] | far[1]) & (count",
        "(far[0] | far[1]) & (0 * count",
        MOVING,
    ),
    Fault("cut what outgrows its frames", TIER, " & ~((sizes > LARGEST) & (sizes < torch.inf)).any(0)", "", MOVING),
    Fault("take frames of what is no number", TIER, "(sizes < torch.inf)", "(sizes > 0)", MOVING),
    Fault(
        "begin frames with what is no number",
        "kv_cache/frames.py",
        " & tokens.key.isfinite().all(-1) & tokens.value.isfinite().all(-1)",
        "",
        MOVING,
    ),
    Fault(
        "take frames anew for a few tokens that are alike",
        TIER,
        "moved & _have_moved(every.at(place, bias.gather(-1, place)).decoded(), least)",
        "moved",
        MOVING,
    ),
    Fault(
        "take frames again of two tokens that have moved",
        TIER,
        "_LOOKED, _FEWEST = 64, 8",
        "_LOOKED, _FEWEST = 64, 1",
        MOVING,
    ),
    Fault(
        "look at the tokens there were alone",
        TIER,
        "every.at(place, bias.gather(-1, place))",
        "every.at(place[..., :self.number], bias.gather(-1, place)[..., :self.number])",
        MOVING,
    ),
    Fault(
        "take frames anew of heads whose texts stay",
        TIER,
        "return torch.where(fits.view(*fits.shape, *[1] * (x.ndim - 2)), x, anew)",
        "return anew",
        MOVING,
    ),
    Fault(
        "lose gradients of numbers rounded anew",
        TIER,
        "followed and numbers and Tokens(*map(by_head, followed, numbers))",
        "followed",
        MOVING,
    ),
    Fault(
        "give padding's frame to the text after it",
        TIER,
        "fits = (self.held.bias != -torch.inf).any(-1)",
        "fits = (self.held.bias == self.held.bias).any(-1)",
        STREAMS,
    ),
    Fault(
        "cut the gradient where keys are rounded",
        TIER,
        "if not is_followed(*exact[:2]):",
        "if exact:",
        STREAMS,
    ),
    Fault(
        "round keys that would fit as they are",
        TIER,
        "size.bits is None or tokens.bias.shape[2] <= size.num_unquantized(tokens.bias.element_size())",
        "size.bits is None",
        STREAMS,
    ),
    Fault(
        "take wide numbers for as narrow as float32",
        "kv_cache/config.py",
        "// (8 * number_bytes)",
        "// 32",
        "tests/kv_cache/test_budget.py",
    ),
    Fault(
        "round keys again at every merge",
        TIER,
        "if isinstance(self.held, Tokens):\n            return self.of(few, sample, size)",
        "if True:\n            return self.of(few, sample, size)",
        STREAMS,
    ),
    Fault(
        "quantize a full tier anew at every block",
        MEMORY,
        "sample, size, gone=count)",
        "sample, size)",
        "tests/kv_cache/test_tiers.py",
    ),
    Fault("merge the sinks", MEMORY, "count = min(config.num_sinks", "count = min(0 * config.num_sinks", STREAMS),
    Fault(
        "read rows without their keys' mean",
        "kv_cache/coded_tokens.py",
        "log + scoring.scale * lacking",
        "log + 0 * lacking",
        STREAMS,
    ),
    Fault(
        "cap what logits are relative to their keys' mean",
        "kv_cache/coded_tokens.py",
        "if scoring.soft_cap is not None:",
        "if False:",
        "tests/kv_cache/test_soft_caps.py",
    ),
    Fault(
        "merge at every block, however many keys there are",
        MEMORY,
        "config.num_left + config.num_newest",
        "size.number",
        "tests/kv_cache/test_attention.py",
    ),
    Fault(
        "lose numbers of the newest tokens where others merge",
        "kv_cache/merging.py",
        "key[size:].expand",
        "key[: number - size].expand",
        "tests/kv_cache/test_tiers.py",
    ),
    Fault(
        "merge the newest tokens among the merged keys",
        MEMORY,
        "sample, left, config.num_newest, soft_cap, ",
        "sample, left, 0 * config.num_newest, soft_cap, ",
        "tests/kv_cache/test_tiers.py",
    ),
    Fault(
        "evict the newest of a tier",
        TIER,
        "self.cut(0, count).tokens(), self.cut(count, self.number)",
        "self.cut(0, count).tokens(), self.cut(0, self.number - count)",
        TIERS,
    ),
    Fault("lose what passes a tier", TIER, "oldest.then(tokens.cut(0, through))", "oldest", TIERS),
    Fault(
        "forget the frames of tiers",
        "kv_cache/budget.py",
        "for each in framed)",
        "for each in (bits,))",
        TIERS,
    ),
    Fault(
        "take a damaged tier",
        "kv_cache/state_checks.py",
        '_check_tier(f"coded[{place}]"',
        'continue\n        _check_tier(f"coded[{place}]"',
        TIERS,
    ),
)
