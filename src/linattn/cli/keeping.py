"""Tokens that `linattn generate --budget` keeps and merges, and what that costs, in words."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from linattn.cli.terminal import of_option
from linattn.hf import BoundedCache, BoundedLayer, Cache, PreTrainedModel, stream_tokens
from linattn.kv_cache.budget import BITS_BY_DEFAULT, RECALLS, Recall
from linattn.kv_cache.coded_tokens import CodedTokens
from linattn.kv_cache.layer_plans import read_memory_plans
from linattn.methods.method import together

# Bits that say no quantization, and tokens at the end of a prompt whose predictions are compared.
_UNQUANTIZED, _COMPARED = 32, 64


@dataclass(frozen=True)
class Keeping:
    """The options of a bounded cache."""

    budget: int  # in exact keys
    bits: int | None = None  # of merged keys, 32 for no quantization; None for the default
    recall: Recall | None = None  # None for the default
    plan: Path | None = None  # a file of plans; None for the same in every layer
    measure: bool = False  # whether the KL divergence is measured

    def cache(self, model: PreTrainedModel) -> BoundedCache:
        """An empty cache of this budget; ValueError, by the option's name, where there is none."""
        with of_option("--budget" if self.plan is None else "--plan"):
            if self.plan is not None:
                return BoundedCache(model, self.budget, plan=self.plan)
            bits = {None: BITS_BY_DEFAULT, _UNQUANTIZED: None}.get(self.bits, self.bits)
            return BoundedCache(model, self.budget, bits=bits, recall=self.recall or RECALLS[0])

    def planned(self) -> Iterator[str]:
        """KL divergence that the plan itself has measured; nothing without a plan."""
        for plan in [] if self.plan is None else read_memory_plans(self.plan):
            if plan.budget == self.budget:
                yield (
                    f"by the plan, KL divergence from the full cache {plan.kl:.3g} nats a token at "
                    f"{plan.num_tokens:,} tokens; sinks and a window in as many bytes: {plan.window_kl:.3g}"
                )


def last_predictions(model: PreTrainedModel, tokens: Tensor, cache: Cache, notify: Callable[[int], None]) -> Tensor:
    """Log-probabilities (≤ 64, vocabulary) after each of a text's last tokens, all of which the cache takes in."""
    count = min(_COMPARED, tokens.shape[1])
    before, last = tokens[:, :-count], tokens[:, -count:]
    if before.numel():
        next(stream_tokens(model, before, temperature=0, cache=cache, notify=notify))
    with torch.no_grad():
        logits: Tensor = model(input_ids=last, past_key_values=cache, use_cache=True).logits
    return logits[0].float().log_softmax(-1)


def divergence_in_words(bounded: Tensor, full: Tensor, seconds: float) -> str:
    """The KL divergence of predictions (tokens, vocabulary) from those of the full cache."""
    each = kl_div(bounded, full, reduction="none", log_target=True).nan_to_num().sum(-1).double()
    error = f" ± {each.std() / len(each) ** 0.5:.2g}" if len(each) > 1 else ""
    return (
        f"KL divergence from the full cache {each.mean():.3g}{error} nats a token over the last {len(each)} tokens of "
        f"the prompt, measured in {seconds:.1f} s"
    )


def kept_in_words(cache: BoundedCache) -> Iterator[str]:
    """Tokens that bounded layers hold one by one, tokens that are merged, and the bytes beside the full cache's."""
    bounded = [layer for layer in cache.layers if isinstance(layer, BoundedLayer)]
    for words, count in Counter(map(_tokens_in_words, bounded)).items():
        yield f"{words} in each of {count} global layers"
    reports = [report for report in cache.report if report.config is not None]
    number = cache.get_seq_length()
    most, now = (sum(report.kept_bytes(length) for report in reports) for length in (2**62, number))
    full = sum(report.exact_bytes(number) for report in reports)
    labels = together([layer.config.label for layer in bounded])
    yield (
        f"{len(bounded)} global layers by {labels}: they keep at most {most:,} bytes, {now:,} after {number:,} tokens; "
        f"the full cache keeps {full:,} of them"
    )


def _tokens_in_words(layer: BoundedLayer) -> str:
    """Of one layer's tokens, how many are exact, quantized, and merged into how many keys or evicted."""
    assert layer.state is not None
    keys, config = layer.state.groups[0], layer.config
    exact, num_keys = (sum(x.bias.shape[2] for x in parts) for parts in ((keys.sinks, keys.recent), [keys.merged]))
    rest = layer.num_tokens - exact - sum(part.bias.shape[2] for part in keys.coded)
    # Merged keys that are no fewer than their tokens are these tokens; else no merge has taken the newest.
    alone = rest if rest <= num_keys else config.num_newest
    parts = [(part, part.bias.shape[2]) for part in keys.coded] + [(keys.merged, alone)]
    quantized: Counter[str] = Counter()
    for (part, number), size in zip(parts, (*config.tiers, config.merged_tier), strict=True):
        if isinstance(part, CodedTokens):
            quantized[size.in_bits] += number
        else:
            exact += number
    rest, num_keys = rest - alone, num_keys - alone
    held = [f"{exact:,} exact", *(f"{number:,}{bits}" for bits, number in quantized.items() if number)]
    merged = f"{rest:,} merged into {num_keys:,} keys{config.merged_tier.in_bits}" if num_keys else f"{rest:,} evicted"
    if not rest:
        merged = "none merged" if config.num_merged else "none evicted"
    return f"of {layer.num_tokens:,} tokens {', '.join(held)}, {merged}"
