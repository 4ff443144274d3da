"""A plan of the layers' bytes, chosen by the KL of candidates on a passage; letters as in __init__.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from linattn.feature_maps.digests import weights_digest
from linattn.hf import AttentionCall, LoadedModel, intercept, new_cache
from linattn.kv_cache import MergedKV, merged_attention
from linattn.kv_cache.budget import NEAR, Sizes, within_budget, within_bytes
from linattn.kv_cache.layer_plans import FEW_BITS, PLAIN, MemoryPlan, TrialRecord
from linattn_lab.kv_audit.divergence import divergence
from linattn_lab.kv_audit.methods import Bounded, Maker, exact_window
from linattn_lab.kv_audit.passage_figures import MOST_MEASURED
from linattn_lab.kv_audit.passages import TokenText
from linattn_lab.kv_audit.plans import Choice, choose
from linattn_lab.kv_audit.reading import read
from linattn_lab.kv_audit.records import MemoryHeader
from linattn_lab.texts import Text


def _exact(near: float, budget: int, sizes: Sizes) -> MergedKV:
    """Merged keys that are not quantized, and a window of this share of the bytes."""
    return within_bytes(budget * sizes.key_bytes, sizes, near, None, ())


CANDIDATES: dict[str, Maker] = {
    PLAIN: exact_window,
    **{f"merged keys, {near:.0%} near": partial(_exact, near) for near in NEAR},
    **{f"merged keys in {bits} bits": partial(within_budget, bits=bits) for bits in FEW_BITS},
}
"""By name, the largest of a kind in the bytes of a number of exact keys, the plain window first."""

_CHUNK = 512
# KL of softmax attention on the intercepted calls from the model's own, at most: rounding alone.
_ROUNDING = 1e-4


def plan_memory(
    loaded: LoadedModel, text: Text, budget: int, *, num_tokens: int, begin: Callable[[str], None]
) -> MemoryPlan:
    """Choose a candidate and a share of the bytes for each bounded layer, by KL on the first passage of a text.

    Cost: two forward passes, one per candidate, and two per bounded layer.

    Returns:
        A `MemoryPlan`, whose KL is the plain window's or lower.

    Raises:
        ValueError: if the model is no language model, the text too short, or the budget too small for a plain window.
        RuntimeError: if the model's attention is more than softmax(scale · q·k) v.
    """
    bounded = Bounded.of(loaded.model)
    kept_by(Choice(PLAIN, budget), bounded.sizes)
    begin(f"Planning at {budget:,} keys: the full cache")
    measure_kl = _measured_on(loaded, text, num_tokens)

    def measure(choices: tuple[Choice | None, ...]) -> float:
        """The KL of a choice for each layer."""
        try:
            layers = {
                name: kept_by(one, bounded.sizes)
                for name, one in zip(bounded.names, choices, strict=True)
                if one is not None
            }
        except ValueError:
            return math.inf
        begin(f"Planning at {budget:,} keys: {', '.join(dict.fromkeys(one.label for one in layers.values()))}")
        return measure_kl(layers)

    trials = choose(tuple(CANDIDATES), len(bounded.names), budget, measure)
    best = trials[0]
    return MemoryPlan(
        model=loaded.name,
        budget=budget,
        num_tokens=num_tokens,
        calibration=text.source,
        calibration_sha256=text.sha256,
        layers=list(bounded.numbers),
        choices=[one.name for one in best.choices],
        budgets=[one.num_keys for one in best.choices],
        labels=[kept_by(one, bounded.sizes).label for one in best.choices],
        kl=best.kl,
        window_kl=next(trial.kl for trial in trials if {one.name for one in trial.choices} == {PLAIN}),
        trials=[
            TrialRecord([one.name for one in choices], [one.num_keys for one in choices], kl) for choices, kl in trials
        ],
        weights_sha256=weights_digest(loaded.model),
    )


def is_of(plan: MemoryPlan, header: MemoryHeader, text: Text) -> bool:
    """Whether a plan was made for an audit's model, its weights in its dtype, and its first length, on this text."""
    wanted = header.weights_sha256, header.model, header.lengths[0], header.layers, text.sha256
    return wanted == (plan.weights_sha256, plan.model, plan.num_tokens, plan.layers, plan.calibration_sha256)


def kept_by(choice: Choice, sizes: Sizes) -> MergedKV:
    """What a layer keeps by a choice; ValueError where its bytes are too few."""
    try:
        return CANDIDATES[choice.name](choice.num_keys, sizes)
    except ValueError as error:
        raise ValueError(f"{choice.name}: {error}") from None


def attended(layers: Mapping[str, MergedKV], call: AttentionCall) -> Tensor:
    """Attention over an entire text by what a call's layer keeps of it; softmax in layers that keep all."""
    layer = layers.get(call.module_name)
    if layer is None:
        return call.softmax()
    # The op has a temperature of its own.
    query = call.query * (call.scale * call.query.shape[-1] ** 0.5)
    return merged_attention(query, call.key, call.value, layer, is_causal=True, enable_gqa=True)


def _measured_on(loaded: LoadedModel, text: Text, num_tokens: int) -> Callable[[Mapping[str, MergedKV]], float]:
    """A function giving the KL of what layers keep, by their names, on the first passage of a text."""
    content, model = TokenText.of(loaded, text), loaded.model
    tokens = content.passage(content.starts(num_tokens, 1)[0], num_tokens)
    last = min(MOST_MEASURED, num_tokens // 2) + 1
    exact = read(model, tokens, new_cache(model), last=last, chunk=_CHUNK).logs[:-1]

    def kl(layers: Mapping[str, MergedKV]) -> float:
        """The mean over the last predictions; the text is read in one pass."""
        with intercept(model, partial(attended, layers)):
            logs = read(model, tokens, new_cache(model), last=last, chunk=num_tokens).logs[:-1]
        return float(divergence(exact, logs, tokens[0, 1 - last :]).kl.mean())

    apart = kl({})
    if not apart < _ROUNDING:
        raise RuntimeError(
            f"softmax attention on the intercepted queries, keys and values gives other predictions than the model (KL "
            f"{apart:.1e}): no figure measured on it would be right"
        )
    return kl
