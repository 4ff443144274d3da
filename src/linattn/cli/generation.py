"""The work of `linattn generate`: a prompt read with a bar, tokens as they come, and figures of both at the end."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice, pairwise
from typing import TextIO

import torch
from rich.console import Console
from torch import Tensor

from linattn.cli.keeping import Keeping, divergence_in_words, kept_in_words, last_predictions
from linattn.cli.terminal import ending, of_option, share_bar
from linattn.hf import BoundedCache, Cache, LoadedModel, PreTrainedModel, cache_bytes
from linattn.hf.streaming import IncrementalDecoder, end_tokens, load_language_model, new_cache, stream_tokens


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
        with of_option("--prompt-file"):
            text = prompt if isinstance(prompt, str) else prompt.read().removesuffix("\n")
        loaded = load_language_model(model)
        tokens: Tensor = loaded.tokenizer(text, return_tensors="pt")["input_ids"].long()
        if not tokens.numel():
            raise ValueError("the prompt gives no token; give a text")
        cache = new_cache(loaded.model) if keeping is None else keeping.cache(loaded.model)
        # Of a table of positions; rotary ones, made as they are needed, have no end.
        most, length = getattr(loaded.model.config, "max_position_embeddings", None), tokens.shape[1] + num_tokens
        is_rotary = any(name.endswith("inv_freq") for name, _ in loaded.model.named_buffers())
        if most is not None and length - 1 > most and not is_rotary:
            raise ValueError(f"the model has {most} positions, prompt and --tokens are {length} together; give fewer")
        draws = torch.Generator().manual_seed(seed)
        draw = partial(stream_tokens, loaded.model, cache=cache, temperature=temperature, top_p=top_p, generator=draws)
        costs = [] if keeping is None else list(keeping.planned())
        if keeping is not None and keeping.measure:
            seconds, words = _measured(console, loaded.model, tokens, cache)
            costs.append(words)
            first, stream, more = _begun(console, draw, tokens[:, -1:])
            seconds += more
        else:
            first, stream, seconds = _begun(console, draw, tokens)
        if isinstance(prompt, str):
            sys.stdout.write(prompt)
        times = []
        for part in _texts(loaded, tokens[0].tolist(), islice(chain([first], stream), num_tokens), written):
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


def _begun(
    console: Console, draw: Callable[..., Iterator[Tensor]], unread: Tensor
) -> tuple[Tensor, Iterator[Tensor], float]:
    """The first new token, a stream of those after it, and the seconds that the first one took."""
    start = time.perf_counter()
    with _bar(console, "Reading the prompt", unread.shape[1]) as notify:
        stream = draw(unread, notify=notify)
        first = next(stream)
    return first, stream, time.perf_counter() - start


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
    steps = torch.tensor([after - before for before, after in pairwise(times)], dtype=torch.float64)
    shares = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    slow, median, fast = (1 / steps.clamp_min(1e-9).quantile(shares)).tolist()
    return f"{median:,.1f} tokens/s in the median (10 to 90 %: {slow:,.1f} to {fast:,.1f})"
