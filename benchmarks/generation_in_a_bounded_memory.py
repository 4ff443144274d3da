"""Claim: with a budget of 128 keys Gemma 3 270M generates in constant memory, at 32,768 tokens faster than exactly.

One text, and several at once: a token of one text alone takes little more than its reading of the weights, with any
cache; so one text is generated in bfloat16 too, whose weights are half as many bytes, beside the exact cache of both
dtypes. All else is float32. The global layers read random queries and keys up to each length (what they keep, and the
time of a token, do not depend on which), the layers with a sliding window hold what fits in it; then single tokens are
timed, a step at each length in turn with one of the exact cache of the longest. First a text is read, and the text that
is written greedily is held against the choice of one parallel pass. A budget of 512 keys, whose KL divergence and
retrieval the README gives, is timed as well, and a chunk of a long prompt beside a first one. Needs the package of the
extra demo-lm.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from linattn import MergedKV, merged_attention_with_state
from linattn.hf import BoundedCache, BoundedLayer, cache_bytes, load_language_model, stream_tokens
from measuring import ratios, record, relative_error, require, seconds

BUDGET, LENGTHS = 128, (2_048, 8_192, 32_768)
REPEATS, CHUNK, TEXTS = 12, 1_024, (4, 8)
# The budget of the README's table, and the tokens before a chunk of a prompt.
WIDE, BEFORE, CHUNK_REPEATS = 512, 8_192, 6
READ, WRITTEN = 900, 12


def filled_cache(model: PreTrainedModel, num_tokens: int) -> Cache:
    """A full cache of so many tokens of which only one was read: its sizes and the time of a step are those of any."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.update(*(x.repeat(1, 1, num_tokens - 1, 1) for x in (layer.keys, layer.values)))
    return cache


def verified(model: PreTrainedModel, tokens: Tensor, budget: int = BUDGET) -> float:
    """Share of greedily written tokens that are not the teacher-forced choice; refuses any."""
    stream = stream_tokens(model, tokens, temperature=0, cache=BoundedCache(model, budget))
    written = torch.cat([next(stream) for _ in range(WRITTEN)], 1)
    with torch.no_grad():
        whole = torch.cat((tokens, written), 1)
        cache = BoundedCache(model, budget)
        logits = model(input_ids=whole, past_key_values=cache, logits_to_keep=WRITTEN + 1).logits[:, :-1]
    wrong = float((logits.argmax(-1) != written).double().mean())
    require("greedy text against one parallel pass", wrong, 0.0)
    return wrong


def bounded_cache(model: PreTrainedModel, length: int, config: MergedKV | None = None) -> BoundedCache:
    """A cache of so many tokens whose global layers have read random queries, keys and values."""
    cache = BoundedCache(model, BUDGET) if config is None else BoundedCache(model, config=config)
    draw = torch.Generator().manual_seed(0)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            if isinstance(layer, BoundedLayer):
                state, width = layer.state, model.config.head_dim
                for start in range(1, length, CHUNK):
                    shape = (min(CHUNK, length - start), width)
                    tokens = (
                        (torch.randn(1, number, *shape, generator=draw) * width**0.25).to(model.dtype)
                        for number in (*heads, heads[1])
                    )
                    state = merged_attention_with_state(*tokens, layer.config, state, enable_gqa=True).state
                layer.advance_to(state, length - 1)
            if getattr(layer, "is_sliding", False):
                layer.update(*(x.repeat(1, 1, length - 1, 1) for x in (layer.keys, layer.values)))
    return cache


def step(model: PreTrainedModel, cache: Cache, num_texts: int = 1):
    """One token of each text, of a cache that grows by it."""
    tokens = torch.zeros(num_texts, 1, dtype=torch.long)

    def run() -> None:
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)

    return run


def time_in_bfloat16(
    exact: PreTrainedModel, bounded: PreTrainedModel, tokens: Tensor, beside: Cache, claim: str
) -> None:
    """One text's tokens in bfloat16, beside the exact cache in bfloat16 and in float32, which may be the faster."""
    theirs, ours = (copy.deepcopy(model).to(torch.bfloat16) for model in (exact, bounded))
    # One method in both dtypes: a budget in bfloat16 is half as many bytes.
    config = next(layer.config for layer in BoundedCache(bounded, BUDGET).report if layer.config is not None)
    with torch.no_grad():
        whole, coarse = (
            model(input_ids=tokens, past_key_values=BoundedCache(model, config=config)).logits.float()
            for model in (bounded, ours)
        )
    error = relative_error(coarse, whole)
    require("logits in bfloat16", error, 0.1)
    length = LENGTHS[-1]
    runs = {
        "exact": step(theirs, filled_cache(theirs, length)),
        "bounded": step(ours, bounded_cache(ours, length, config)),
        "exact in float32": step(exact, beside),
    }
    took = seconds(runs, repeats=REPEATS)
    for words, name in (("in bfloat16", "exact"), ("in bfloat16 over float32", "exact in float32")):
        figure = ratios(took[name], took["bounded"])
        record(f"{claim}, one text {words}", figure=figure, unit="×", bound=">= 2", budget=BUDGET, error=error)


def chunk(model: PreTrainedModel, tokens: Tensor, cache: Cache):
    """A chunk of a prompt after what a cache holds, which it leaves as it is."""

    def run() -> None:
        # Both kinds of cache join new keys to copies, so that layers may share what they hold.
        fork = copy.copy(cache)
        fork.layers = [copy.copy(layer) for layer in cache.layers]
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=fork, use_cache=True, logits_to_keep=1)

    return run


def time_at_a_wide_budget(exact: PreTrainedModel, bounded: PreTrainedModel, tokens: Tensor) -> None:
    """Tokens and chunks of the README's budget beside the full cache, of as many tokens before."""
    about = {"budget": WIDE, "wrong_tokens": verified(bounded, tokens, WIDE)}
    config = next(layer.config for layer in BoundedCache(bounded, WIDE).report if layer.config is not None)
    words, first, last = f"{WIDE} keys", LENGTHS[0], LENGTHS[-1]
    for length, bound in ((first, "<= 1"), (last, "<= 0.66")):
        caches = filled_cache(exact, length), bounded_cache(bounded, length, config)
        runs = {"exact": step(exact, caches[0]), "bounded": step(bounded, caches[1])}
        took = seconds(runs, repeats=REPEATS)
        claim = f"time of a token after {length:,} tokens over the exact cache's, {words}"
        record(claim, figure=ratios(took["bounded"], took["exact"]), unit="×", bound=bound, **about)
    for cache in caches:
        cache.batch_repeat_interleave(TEXTS[-1])
    runs = {"exact": step(exact, caches[0], TEXTS[-1]), "bounded": step(bounded, caches[1], TEXTS[-1])}
    took = seconds(runs, repeats=REPEATS)
    claim = f"tokens a second at {last:,} tokens over the exact cache's, {TEXTS[-1]} texts at once, {words}"
    record(claim, figure=ratios(took["exact"], took["bounded"]), unit="×", bound=">= 3", **about)
    prompt = tokens.repeat(1, -(-CHUNK // tokens.shape[1]))[:, :CHUNK]
    chunks = {
        "first": chunk(exact, prompt, DynamicCache(config=exact.config)),
        "exact": chunk(exact, prompt, filled_cache(exact, BEFORE)),
        "bounded": chunk(bounded, prompt, bounded_cache(bounded, BEFORE, config)),
    }
    took = seconds(chunks, repeats=CHUNK_REPEATS)
    for beside, whose, bound in (("first", "a first one's", "<= 1.15"), ("exact", "the exact cache's", "<= 1")):
        figure = ratios(took["bounded"], took[beside])
        claim = f"time of {CHUNK:,} tokens of a prompt after {BEFORE:,} tokens over {whose}, {words}"
        record(claim, figure=figure, unit="×", bound=bound, **about)


def main() -> None:
    """Verify, fill, time in turn."""
    loaded = load_language_model("gemma-3-270m")
    # The exact one attends by its own function.
    exact, bounded = loaded.model, copy.deepcopy(loaded.model)
    text = "The language that a model reads is bounded in length, and so is what it keeps of it. " * 60
    tokens = loaded.tokenizer(text, return_tensors="pt")["input_ids"][:, :READ]
    wrong = verified(bounded, tokens)
    caches = {length: bounded_cache(bounded, length) for length in LENGTHS}
    layers = [layer for layer in caches[LENGTHS[0]].report if layer.config is not None]
    sliding = [layer for layer in caches[LENGTHS[0]].layers if getattr(layer, "is_sliding", False)]
    windows = sum(x.nbytes for layer in sliding for x in (layer.keys, layer.values))
    held = {length: cache_bytes(cache) - windows for length, cache in caches.items()}
    beside = filled_cache(exact, LENGTHS[-1])
    whole = cache_bytes(beside)
    runs = {str(length): step(bounded, caches[length]) for length in LENGTHS} | {"exact": step(exact, beside)}
    took = seconds(runs, repeats=REPEATS)
    about = {"budget": BUDGET, "method": layers[0].config.label, "windows_bytes": windows, "wrong_tokens": wrong}
    first, last = LENGTHS[0], LENGTHS[-1]
    record(
        f"bytes of the global layers at {last:,} tokens over {first:,}",
        figure=held[last] / held[first],
        unit="×",
        bound="<= 1.01",
        bytes={str(length): number for length, number in held.items()},
        **about,
    )
    record(
        f"bytes of the global layers at {last:,} tokens over those of exact attention",
        figure=held[last] / sum(layer.exact_bytes(last) for layer in layers),
        unit="×",
        bound="<= 0.05",
        **about,
    )
    record(
        f"bytes of the whole cache at {last:,} tokens over the exact one's, sliding windows in both",
        figure=(held[last] + windows) / whole,
        unit="×",
        bound="<= 0.1",
        **about,
    )
    record(
        f"time of a token after {last:,} tokens over {first:,}",
        figure=ratios(took[str(last)], took[str(first)]),
        unit="×",
        bound="<= 1.1",
        **about,
    )
    faster = f"tokens a second at {last:,} tokens over the exact cache's"
    record(f"{faster}, one text", figure=ratios(took["exact"], took[str(last)]), unit="×", bound=">= 2", **about)
    time_in_bfloat16(exact, bounded, tokens, beside, faster)
    held_now = 1
    for number in TEXTS:
        for cache in (beside, caches[last]):
            cache.batch_repeat_interleave(number // held_now)
        held_now = number
        several = {"exact": step(exact, beside, number), "bounded": step(bounded, caches[last], number)}
        together = seconds(several, repeats=REPEATS)
        figure = ratios(together["exact"], together["bounded"])
        record(f"{faster}, {number} texts at once", figure=figure, unit="×", bound=">= 2", **about)
    time_at_a_wide_budget(exact, bounded, tokens)


if __name__ == "__main__":
    main()
