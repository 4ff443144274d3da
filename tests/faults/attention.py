"""Faults of the op, its states and its exact part."""

from __future__ import annotations

from faults.fault import Fault

BLOCKED = "attention/backends/blocked/"

FAULTS = (
    Fault(
        "add an epsilon to the denominator",
        BLOCKED + "rows.py",
        "    den.copy_(total.reshape(den.shape))",
        "    total = total + 1e-6\n    den.copy_(total.reshape(den.shape))",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "mask the values only",
        "attention/backends/blocked/features.py",
        "rise = None if bias is None else bias.unsqueeze(-1)",
        "rise = None",
        "tests/laws/test_masking.py",
    ),
    Fault(
        "let masked tokens hold NaN",
        "attention/backends/blocked/blocks.py",
        "return rows if masked is None else rows.masked_fill_(masked.unsqueeze(-1), 0)",
        "return rows",
        "tests/laws/test_masking.py",
    ),
    Fault(
        "one key maximum for all rows, heads and features",
        BLOCKED + "features.py",
        "torch.maximum(m, self.log.amax(-2))",
        "torch.maximum(m, self.log.amax())",
        "tests/laws/test_independence.py tests/laws/test_convexity.py",
    ),
    Fault(
        "sum over heads instead of tokens",
        BLOCKED + "causal.py",
        "rows.tril_()",
        "scores.transpose(0, 1).tril_()",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "no guard against jumps",
        BLOCKED + "causal.py",
        "_MAX_JUMP = 60.0 - FLOOR",
        "_MAX_JUMP = 1e30",
        "tests/laws/test_causality.py",
    ),
    Fault(
        "allow jumps up to the limit of float32",
        BLOCKED + "causal.py",
        "_MAX_JUMP = 60.0 - FLOOR",
        "_MAX_JUMP = 84.0",
        "tests/laws/test_causality.py",
    ),
    Fault(
        "do not rescale the state when the maximum rises",
        BLOCKED + "blocks.py",
        "decay = per_feature((self.m - c).exp_(), self.z.shape[-1]).flatten(0, 1)",
        "decay = torch.ones_like(self.z[..., :1])",
        "tests/laws/test_fold.py",
    ),
    Fault(
        "keep the state in the inputs' dtype",
        "attention/sums.py",
        "return torch.promote_types(dtype, torch.float32)",
        "return dtype",
        "tests/laws/test_precision.py",
    ),
    Fault(
        "unwind the state by subtraction",
        BLOCKED + "causal.py",
        "        found.append(BlockState(block, entry, c, x, keys, phi_k, safe))",
        "        rise = (c - entry.m).exp()\n"
        "        S = entry.S * (entry.m - c).exp().unsqueeze(-1) + phi_k.mT @ v\n"
        "        entry = Sums((S - phi_k.mT @ v) * rise.unsqueeze(-1), entry.z, entry.m) if block.start else entry\n"
        "        found.append(BlockState(block, entry, c, x, keys, phi_k, safe))",
        "tests/laws/test_gradient.py",
    ),
    Fault(
        "forget the normaliser's gradient",
        BLOCKED + "rows.py",
        "torch.sub(self.grad_den.unsqueeze(-1).masked_fill(dead, 0), from_out)",
        "self.grad_den.unsqueeze(-1).masked_fill(dead, 0)",
        "tests/laws/test_gradient.py",
    ),
    Fault(
        "ignore the incoming state",
        "attention/functional.py",
        "        if state is None:\n            sizes",
        "        if True:\n            sizes",
        "tests/laws/test_fold.py",
    ),
    Fault(
        "start a segment's recomputation from the state before it",
        BLOCKED + "causal.py",
        "outputs.kept(index) if index",
        "outputs.kept(max(index - 1, 1)) if index",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "let a step forget the old state",
        BLOCKED + "__init__.py",
        "z = phi.addcmul_(z, decay)",
        "z = phi",
        "tests/laws/test_fold.py",
    ),
    Fault(
        "interleave grouped heads",
        "attention/functional.py",
        "query.unflatten(1, (key.shape[1], -1))",
        "query.unflatten(1, (-1, key.shape[1])).transpose(1, 2)",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "merge without a common exponent",
        "attention/sums.py",
        "m = torch.maximum(self.m, other.m)",
        "m = self.m",
        "tests/laws/test_fold.py",
    ),
    Fault(
        "accept a state of another draw",
        "attention/state.py",
        "if self.built_with != fingerprint:",
        "if False:",
        "tests/laws/test_fold.py tests/laws/test_refusals.py",
    ),
    Fault(
        "read the state at another scale than the block",
        BLOCKED + "grouped_causal.py",
        "decay = torch.exp(from_state - reference).unsqueeze(-1)",
        "decay = torch.ones_like(reference).unsqueeze(-1)",
        "tests/laws/test_fold.py",
    ),
    Fault(
        "count a repeated query twice in a key's mass",
        BLOCKED + "grouped_reading.py",
        "(den == 0) | part.free",
        "den == 0",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "see one's own span of tokens",
        BLOCKED + "blocks.py",
        "return number.unsqueeze(-1) > number",
        "return number.unsqueeze(-1) >= number",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "leave heavy keys to the map too",
        "attention/exact/bidirectional.py",
        "call = call._replace(bias=every)",
        "pass",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "see one key ahead in the window",
        "attention/exact/neighbourhood.py",
        ".tril(self.window)",
        ".tril(self.window + 1)",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "keep the lightest keys",
        "attention/exact/rule.py",
        "descending=True",
        "descending=False",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "favour keys that many queries saw",
        "attention/exact/causal.py",
        "(2 * window - places)",
        "(2 * window)",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "forget the masks of earlier calls of a stream",
        "attention/exact/causal.py",
        "bias is None and recent.bias.shape[2] == 0 and",
        "bias is None and",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "take a lone key of an earlier span for the row's own",
        BLOCKED + "__init__.py",
        "not (span or bound.is_grouped)",
        "not bound.is_grouped",
        "tests/laws/test_exact_part.py",
    ),
    Fault(
        "measure a jump from 0",
        BLOCKED + "causal.py",
        "(c - torch.maximum(m, first))",
        "(c + torch.maximum(m, first))",
        "tests/laws/test_causality.py",
    ),
)
