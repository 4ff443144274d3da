"""Claim: on a language model's wide heads merged keys lose far less than as many bytes of sinks and window.

The global layers of Gemma 3 270M (4 query heads on one key/value head, D = 256) on 3,840 tokens of the language
reference by topic, on the exact model's own queries, keys and values: the mean over layers and heads of the relative
error of the last 256 queries' outputs. Bytes are counted whole, in keys of 512 numbers: keys, values, biases and
sampled queries. Sizes were chosen on the first passage; the second shows how far they carry. Verified first: with as
many merged keys as tokens the output is exact.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch

import linattn
from linattn.hf import AttentionCall, LoadedModel, intercept, load
from linattn.hf.linearization import global_layers
from linattn.kv_cache.budget import Sizes, kept_bytes
from linattn.methods.measures import relative_error, uniform_average
from linattn_lab.kv_audit.methods import exact_window
from linattn_lab.kv_audit.planning import attended
from measuring import record, require

NUM_TOKENS, LAST, STARTS = 3840, 256, (0, 150_000)
# Keys' bytes, sizes, bound on the error.
CASES = ((256, linattn.MergedKV(24, 195, None), 0.20), (449, linattn.MergedKV(24, 388, None), 0.125))
CASES += ((1024, linattn.MergedKV(64, 882, None), 0.07),)


def calls_of(loaded: LoadedModel, text: str) -> list[AttentionCall]:
    """What the global layers attend with."""
    names, found = {layer.module_name for layer in global_layers(loaded.model).replaced}, []

    def answer(call: AttentionCall) -> torch.Tensor:
        """Keep what is global, answer exactly."""
        if call.module_name in names:
            found.append(call)
        return call.softmax()

    with intercept(loaded.model, answer):
        loaded.model(**loaded.encode(text, NUM_TOKENS))
    return found


def exact(call: AttentionCall) -> torch.Tensor:
    """Softmax attention of the last queries."""
    options = {"is_causal": True, "scale": call.scale, "enable_gqa": True}
    return linattn.softmax_attention(call.query[:, :, -LAST:], call.key, call.value, **options)


def error(kept: linattn.MergedKV, calls: list[AttentionCall]) -> float:
    """Mean relative error over all heads."""
    found = [attended({call.module_name: kept}, call)[:, :, -LAST:] for call in calls]
    return float(torch.cat([relative_error(x, exact(call)) for x, call in zip(found, calls, strict=True)]).mean())


def uniform_error(calls: list[AttentionCall]) -> float:
    """The same of averaging the values."""
    found = []
    for call in calls:
        options = {"num_heads": call.query.shape[1], "num_queries": call.query.shape[2], "is_causal": True}
        found.append(relative_error(uniform_average(call.value, **options)[:, :, -LAST:], exact(call)))
    return float(torch.cat(found).mean())


@torch.no_grad()
def main() -> None:
    """Verify, measure and record every budget, beside sinks and window and averaging the values."""
    loaded, prose = load("gemma-3-270m"), "\n\n".join(topics[name] for name in sorted(topics))
    first, second = (calls_of(loaded, prose[start:]) for start in STARTS)
    require("as many merged keys as tokens", error(linattn.MergedKV(256, NUM_TOKENS, None), first), 1e-4)
    call = first[0]
    sizes = Sizes(call.query.shape[-1], call.value.shape[-1], 4, call.query.shape[1] // call.key.shape[1])
    for budget, rule, bound in CASES:
        window = exact_window(budget, sizes)
        held = kept_bytes(rule, sizes, NUM_TOKENS) / sizes.key_bytes
        require(f"{rule.label} in the bytes of {budget} keys", held, budget)
        claim = f"error per head on Gemma 3 270M's global layers, {rule.label}, {budget:,} keys' bytes"
        others = {"sinks and window": error(window, first), "averaging the values": uniform_error(first)}
        record(claim, figure=error(rule, first), unit="", bound=f"<= {bound}", beside=others, keys_held=held)
        ratio = error(rule, second) / error(window, second)
        claim = f"the same over sinks and window's on another passage, {rule.label}, {budget:,} keys' bytes"
        record(claim, figure=ratio, unit="×", bound="<= 1")


if __name__ == "__main__":
    main()
