"""The work of `linattn generate`: a prompt read with a bar, tokens as they come, and figures of both at the end.

Beside them what a bounded cache keeps and merges, and what that costs, in words.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import kl_div

from linattn.cli.terminal import ending, of_option, share_bar
from linattn.hf import BoundedCache, BoundedLayer, Cache, LoadedModel, PreTrainedModel, cache_bytes
from linattn.hf.loading import most_tokens
from linattn.hf.streaming import IncrementalDecoder, end_tokens, load_language_model, new_cache, stream_tokens
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
            bits = {None: BITS_BY_DEFAULT, _UNQUANTIZED: None}.get(self.bits, self.bits)
            return BoundedCache(model, self.budget, bits=bits, recall=self.recall or RECALLS[0], plan=self.plan)

    def planned(self) -> Iterator[str]:
        """KL divergence that the plan itself has measured; nothing without a plan."""
        for plan in [] if self.plan is None else read_memory_plans(self.plan):
            if plan.budget == self.budget:
                yield (
                    f"by the plan, KL divergence from the full cache {plan.kl:.3g} nats a token at "
                    f"{plan.num_tokens:,} tokens; sinks and a window in as many bytes: {plan.window_kl:.3g}"
                )


def generation(
    model: str,
    prompt: str | TextIO,
    *,
    num_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    keeping: Keeping | None,
) -> None:
    """Write a text's next tokens to the standard output, and figures to the standard error."""
    console = Console(stderr=True)
    written: list[int] = []
    with ending(console, lambda: f"{len(written):,} tokens were written."):
        with of_option("--prompt-file: save the text in UTF-8"):
            text = prompt if isinstance(prompt, str) else prompt.read().removesuffix("\n")
        costs = [] if keeping is None else list(keeping.planned())
        loaded = load_language_model(model)
        tokens: Tensor = loaded.tokenizer(text, return_tensors="pt")["input_ids"].long()
        if not tokens.numel():
            raise ValueError("the prompt gives no token; give a text")
        cache = new_cache(loaded.model) if keeping is None else keeping.cache(loaded.model)
        # Of a table of positions; rotary ones, made as they are needed, have no end.
        most, length = most_tokens(loaded.model), tokens.shape[1] + num_tokens
        is_rotary = any(name.endswith("inv_freq") for name, _ in loaded.model.named_buffers())
        if most is not None and length - 1 > most and not is_rotary:
            raise ValueError(f"the model has {most} positions, prompt and --tokens are {length} together; give fewer")
        draws = torch.Generator().manual_seed(seed)
        draw = partial(stream_tokens, loaded.model, cache=cache, temperature=temperature, top_p=top_p, generator=draws)
        measured, unread = 0.0, tokens
        if keeping is not None and keeping.measure:
            measured, words = _measured(console, loaded.model, tokens, cache)
            costs.append(words)
            unread = tokens[:, -1:]
        stream, seconds = _begun(console, draw, unread)
        seconds += measured
        if isinstance(prompt, str):
            sys.stdout.write(prompt)
        times = []
        for part in _texts(loaded, tokens[0].tolist(), islice(stream, num_tokens), written):
            times.append(time.perf_counter())
            sys.stdout.write(part)
            sys.stdout.flush()
        sys.stdout.write("\n")
        del times[len(written) :]
        pace = f", {_throughput(times)}" if len(times) > 1 else ""
        read = f"{tokens.shape[1]:,} tokens read and the first written after {seconds:.1f} s"
        lines = [f"{read}, {len(written):,} written{pace}; the cache holds {cache_bytes(cache):,} bytes"]
        if isinstance(cache, BoundedCache):
            lines += kept_in_words(cache)
            lines += costs or [f"--measure says the KL divergence from the full cache, in about {seconds:.0f} s more"]
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _measured(console: Console, model: PreTrainedModel, tokens: Tensor, cache: Cache) -> tuple[float, str]:
    """The seconds in which a bounded cache takes in all but the last token, and its divergence from the full cache."""
    if tokens.shape[1] < 2:
        raise ValueError("--measure compares predictions within the prompt, got one token; give a longer prompt")
    predictions, seconds = [], []
    for words, each in (("Reading the prompt with the full cache", new_cache(model)), ("Reading the prompt", cache)):
        start = time.perf_counter()
        with _bar(console, words, tokens.shape[1]) as notify:
            predictions.append(last_predictions(model, tokens[:, :-1], each, notify))
        seconds.append(time.perf_counter() - start)
    full, bounded = predictions
    return seconds[1], divergence_in_words(bounded, full, seconds[0])


def _begun(console: Console, draw: Callable[..., Iterator[Tensor]], unread: Tensor) -> tuple[Iterator[Tensor], float]:
    """A stream of new tokens, whose first one is drawn already, and the seconds that it took."""
    start = time.perf_counter()
    with _bar(console, "Reading the prompt", unread.shape[1]) as notify:
        stream = draw(unread, notify=notify)
        first = next(stream)
    return chain([first], stream), time.perf_counter() - start


@contextmanager
def _bar(console: Console, words: str, num_tokens: int) -> Iterator[Callable[[int], None]]:
    """Show a bar over a prompt, on a terminal alone, and yield the function that moves it."""
    with share_bar(console) as bar:
        task = bar.add_task(words, total=num_tokens)
        yield lambda number: bar.update(task, completed=number)


def _texts(loaded: LoadedModel, prompt: list[int], stream: Iterator[Tensor], written: list[int]) -> Iterator[str]:
    """The text of each token, which `written` then has; ends with the model's own end of a text, if that comes."""
    decoder, ends = IncrementalDecoder(loaded.tokenizer, prompt), end_tokens(loaded.model)
    for token in map(int, stream):
        if token in ends:
            break
        written.append(token)
        yield decoder.decode(token)
    yield decoder.finish()


def _throughput(times: Sequence[float]) -> str:
    """Tokens a second in the median, and within which bounds 80 % of the tokens came; `times` has each token's."""
    steps = torch.tensor([after - before for before, after in pairwise(times)], dtype=torch.float64).clamp_min(1e-9)
    slow, median, fast = (1 / steps.quantile(share).item() for share in (0.9, 0.5, 0.1))
    return f"{median:,.1f} tokens/s in the median (10 to 90 %: {slow:,.1f} to {fast:,.1f})"


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
        f"the full cache keeps {full:,} bytes in these layers"
    )


def _tokens_in_words(layer: BoundedLayer) -> str:
    """Of one layer's tokens, how many are exact, quantized, and merged into how many keys or evicted."""
    assert layer.state is not None
    keys, config = layer.state.groups[0], layer.config
    exact, num_keys = keys.sinks.bias.shape[2] + keys.recent.bias.shape[2], keys.merged.bias.shape[2]
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
