"""Faults of parts of a sequence on several ranks."""

from __future__ import annotations

from faults.fault import Fault

ROOM = "parallel/"
NAMES = ("agreement", "parts", "collectives", "models")
AGREEMENT, PARTS, COLLECTIVES, MODELS = (f"tests/parallel/test_{name}.py" for name in NAMES)

FAULTS = (
    Fault(
        "cut a rank's keys by gates of other tokens",
        "parallel/parts.py",
        "beside = zip(checked_gates(gates, weights[0], key), gates, strict=True)",
        "beside = zip(gates, gates, strict=True)",
        "tests/parallel/test_parts.py",
    ),
    Fault(
        "number a part's tokens by place where a mask numbers them",
        "hf/context_parallel.py",
        'counts[arguments.get("attention_mask") is not None]',
        "counts[0]",
        "tests/hf/test_context_parallel.py",
    ),
    Fault(
        "let a block within a block end it",
        "hf/context_parallel.py",
        "if any(layer.attend_to_parts is not None for layer in layers):",
        "if False:",
        "tests/hf/test_context_parallel.py",
    ),
    Fault(
        "take tokens that were dealt out from both ends for consecutive ones",
        "parallel/ranks.py",
        "at_work._cp_options.enable_load_balance:",
        "False:",
        "tests/parallel/test_collectives.py",
    ),
    Fault(
        "let a rank read its own keys twice",
        ROOM + "functional.py",
        "joined(every[: ranks.rank], nothing)",
        "joined(every[: ranks.rank + 1], nothing)",
        PARTS,
    ),
    Fault(
        "absorb tokens in float32 beside gates in float64",
        ROOM + "parts.py",
        "bias.to(decayed.m).expand",
        "bias.expand",
        PARTS,
    ),
    Fault(
        "cut the graph where the reference has no keys",
        "attention/backends/reference.py",
        "torch.maximum(m, log_k.detach().amax(-2)) if log_k.shape[-2] else m",
        "m\n    if not log_k.shape[-2]:\n        return Sums(sums[..., :-1], sums[..., -1], m)\n"
        "    peak = torch.maximum(m, log_k.detach().amax(-2))",
        PARTS,
    ),
    Fault(
        "leave the last rank's keys out where all are seen",
        ROOM + "functional.py",
        "if is_causal and ranks.is_last else part",
        "if ranks.is_last else part",
        PARTS,
    ),
    Fault(
        "let the exponents of all states be the first one's",
        ROOM + "parts.py",
        "of_m.detach(), like.state.built_with",
        "like.state.m, like.state.built_with",
        PARTS,
    ),
    Fault(
        "keep what came before from fading",
        ROOM + "parts.py",
        "self.state.decay(later.log_decay).merge(later.state)",
        "self.state.merge(later.state)",
        PARTS,
    ),
    Fault(
        "give a rank the gradients of its own loss alone",
        ROOM + "ranks.py",
        "dist.reduce_scatter_single(total, grad.flatten(0, 1).contiguous(), group=ctx.ranks.group)",
        "dist.reduce_scatter_single(grad.new_empty(grad.shape[1:]), grad.flatten(0, 1).contiguous(), "
        "group=ctx.ranks.group); total = grad[ctx.ranks.rank].clone()",
        PARTS,
    ),
    Fault(
        "send no gradients of a window's tokens back",
        ROOM + "ranks.py",
        "returned = _swapped(ctx.ranks, grad, received, sent)",
        "returned = 0 * _swapped(ctx.ranks, grad, received, sent)",
        PARTS,
    ),
    Fault(
        "count a window's blocks from each part's start",
        ROOM + "parts.py",
        "[max(start // window - 1, 0) * window for start in starts]",
        "[max(start - window, 0) for start in starts]",
        PARTS,
    ),
    Fault(
        "let a part's last rows miss the block after them",
        ROOM + "parts.py",
        "min((-(-end // window) + 1) * window, starts[-1])",
        "min(-(-end // window) * window, starts[-1])",
        PARTS,
    ),
    Fault(
        "exchange states once more",
        ROOM + "functional.py",
        "    part, nothing = part._replace(query=query)",
        "    gathered(ranks, [sent.absorbed(feature_map, backend)], query)\n"
        "    part, nothing = part._replace(query=query)",
        COLLECTIVES,
    ),
    Fault(
        "take ranks in different calls for ranks in one",
        ROOM + "ranks.py",
        "if len(set(every[:, 0].tolist())) > 1:",
        "if not size:",
        AGREEMENT,
    ),
    Fault(
        "leave the map out of what ranks compare",
        ROOM + "ranks.py",
        'fields["feature_map"] = feature_map.fingerprint()',
        'fields["feature_map"] = type(feature_map).__name__',
        AGREEMENT,
    ),
    Fault(
        "let a rank that refuses its call leave the others waiting",
        ROOM + "ranks.py",
        "        failure, lengths = error, (0, 0)",
        "        raise",
        AGREEMENT,
    ),
    Fault(
        "leave directions out of what ranks compare",
        ROOM + "functional.py",
        'options = {"is_causal": is_causal, "enable_gqa"',
        'options = {"enable_gqa"',
        AGREEMENT,
    ),
    Fault(
        "begin the positions of every part at 0",
        ROOM + "context_parallel.py",
        "lengths[: self.ranks.rank, 0]",
        "lengths[:0, 0]",
        MODELS,
    ),
    Fault(
        "take parts of equal lengths to be one token longer",
        ROOM + "context_parallel.py",
        "self.ranks.rank * length, device",
        "self.ranks.rank * (length + 1), device",
        MODELS,
    ),
    Fault(
        "forget the gates of keys that softmax is sent",
        ROOM + "context_parallel.py",
        "gate_bias(before.gates, key_mask=key_mask).key_bias",
        "0 * gate_bias(before.gates, key_mask=key_mask).key_bias",
        MODELS,
    ),
)
