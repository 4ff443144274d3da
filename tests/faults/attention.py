"""Faults of the op, its states and its window."""

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
        BLOCKED + "joint_causal.py",
        "rows.tril_()",
        "scores.transpose(0, 1).tril_()",
        "tests/laws/test_truth.py",
    ),
    Fault(
        "no guard against jumps",
        BLOCKED + "joint_causal.py",
        "_MAX_JUMP = 40.0",
        "_MAX_JUMP = 1e30",
        "tests/laws/test_causality.py",
    ),
    Fault(
        "allow jumps up to the limit of float32",
        BLOCKED + "joint_causal.py",
        "_MAX_JUMP = 40.0",
        "_MAX_JUMP = 84.0",
        "tests/laws/test_causality.py",
    ),
    Fault(
        "leave the length out of a step's exponents",
        "feature_maps/_powers.py",
        "unsqueeze(-1), alpha=-self.scale / 2)",
        "unsqueeze(-1), alpha=0.0)",
        "tests/laws/test_fold.py",
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
        "softmax/precision.py",
        "return torch.promote_types(dtype, torch.float32)",
        "return dtype",
        "tests/laws/test_precision.py",
    ),
    Fault(
        "unwind the state by subtraction",
        BLOCKED + "causal.py",
        "        visits.append(BlockState(block, entry, c, x, keys, phi_k, safe))",
        "        rise = (c - entry.m).exp()\n"
        "        S = entry.S * (entry.m - c).exp().unsqueeze(-1) + phi_k.mT @ v\n"
        "        entry = Sums((S - phi_k.mT @ v) * rise.unsqueeze(-1), entry.z, entry.m) if block.start else entry\n"
        "        visits.append(BlockState(block, entry, c, x, keys, phi_k, safe))",
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
        "let queries before the first key read the later ones",
        "attention/backends/alignment.py",
        "call.query[..., :-extra, :]), before)",
        "call.query[..., :-extra, :]), after)",
        "tests/laws/test_causality.py",
    ),
    Fault(
        "lose the keys before the first query",
        "attention/backends/alignment.py",
        "        before = backend.absorb(call.with_keys(slice(extra)), before)\n",
        "",
        "tests/laws/test_causality.py",
    ),
    Fault(
        "let a step forget the old state",
        BLOCKED + "__init__.py",
        "torch.addcmul(S, phi.unsqueeze(-1), v), z + phi",
        "torch.addcmul(S, phi.unsqueeze(-1), v), phi",
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
        "see one's own span of tokens",
        BLOCKED + "blocks.py",
        "return number.unsqueeze(-1) > number",
        "return number.unsqueeze(-1) >= number",
        "tests/laws/test_window.py",
    ),
    Fault(
        "see one key ahead in the window",
        "attention/window/neighbourhood.py",
        "causal_mask(self.num_rows, around.shape[-1], bias.device)",
        "causal_mask(self.num_rows, around.shape[-1], bias.device).roll(1, -1)",
        "tests/laws/test_window.py",
    ),
    Fault(
        "pad a part of a block to the window",
        "attention/window/neighbourhood.py",
        "return min(self.stop - self.start, self.window)",
        "return self.window",
        "tests/laws/test_window_cost.py",
    ),
    Fault(
        "forget the masks of earlier calls of a stream",
        "attention/window/causal.py",
        "bias is None and recent.bias.shape[2] == 0",
        "bias is None",
        "tests/laws/test_window.py",
    ),
    Fault(
        "take a lone key of an earlier span for the row's own",
        BLOCKED + "__init__.py",
        "not (span or bound.is_grouped or bound.tensors)",
        "not (bound.is_grouped or bound.tensors)",
        "tests/laws/test_window.py",
    ),
    Fault(
        "measure a jump from 0",
        BLOCKED + "joint_causal.py",
        "(c - torch.maximum(m, first))",
        "(c + torch.maximum(m, first))",
        "tests/laws/test_causality.py",
    ),
    Fault(
        "leave out what follows the first block where no gradient follows",
        "attention/backends/blocked/causal.py",
        "    for index, block in enumerate(_cut(inputs, span)):",
        "    for index, block in enumerate(_cut(inputs, span)[: None if checkpoints else 1]):",
        "tests/laws/test_truth.py",
    ),
)
