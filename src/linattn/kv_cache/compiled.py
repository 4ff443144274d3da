"""Merged keys in compiled code on a CPU, from the wheel linattn-compiled.

In float32 and without gradients: the merges, the rows and what a stream keeps are those of plain torch (`stream`,
`bidirectional`). Of streams in few bits it writes and reads the codes (`codes`, `coded_tokens`), and plain torch does
all else. Letters as in kv_cache/__init__.py.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from linattn.kv_cache.config import MergedKV
from linattn.kv_cache.keys import MergedKeys, Stream
from linattn.kv_cache.partitioning import Axes, Metric
from linattn.kv_cache.query_sample import QuerySample, sample_size, sampled_places
from linattn.softmax.attention import Reading, Scoring
from linattn.softmax.extensions import objections_to
from linattn.softmax.tokens import Tokens
from linattn.softmax.tracing import is_followed

# Queries of a call from which it is the faster: of fewer, a stream's memory is copied more often than it is read.
_FEWEST = 64
# Threads of torch that one of it is as fast as, about: half of the time with two of each.
_IN_ONE = 2
# Multiplications from which a second thread is worth its start.
_MANY = 2**22


def is_coded(config: MergedKV) -> bool:
    """Whether a stream keeps any keys in few bits."""
    return config.bits is not None or bool(config.coded)


def is_compiled(
    backend: str, cap: float | None, query: Tensor, tokens: Tokens, *others: Tensor, config: MergedKV | None = None
) -> bool:
    """Whether compiled code runs a call, on a stream if it has a config: where it can, and is asked for or faster."""
    has_codes = config is not None and is_coded(config)
    if backend == "torch" or (backend == "auto" and not has_codes and not _is_faster(query)):
        return False
    reasons = objections_to((query, *tokens[:2]), is_followed=is_followed(query, *tokens, *others))
    if config is not None and config.num_sinks and not has_codes:
        sinks = f"it keeps no attention sinks beside exact keys, and {config.num_sinks} are to be kept"
        reasons.append(f"{sinks}; give bits or num_sinks=0")
    if cap is not None:
        reasons.append(f"it has no soft caps, and this call has one of {cap}")
    if tokens.value.shape[-1] == 0:
        reasons.append("it takes values of a width, and these have none")
    if backend == "compiled" and reasons:
        raise ValueError(f'backend="compiled" cannot run this call: {"; ".join(reasons)}; choose another, or "auto"')
    return not reasons


def _is_faster(query: Tensor) -> bool:
    """Whether it is likely to be: it runs a head in one thread, where torch deals out each product to all."""
    # Graphs ask no sizes: they would be compiled anew for others.
    if torch.compiler.is_compiling():
        return False
    threads = torch.get_num_threads() if query.is_cpu else 0
    return query.shape[3] >= _FEWEST and _IN_ONE * query.shape[:2].numel() >= threads


def stream_in_compiled_code(stream: Stream, scale: float, *, with_log: bool) -> tuple[Reading, MergedKeys]:
    """`stream.stream_in_torch`."""
    # Imported here, and below: a wheel of its own, which most do not have.
    from linattn_compiled import merge_stream

    held, (batch, heads, groups, num_queries, head_dim) = stream.before, stream.query.shape
    assert isinstance(held.merged, Tokens)  # as others are not coded
    config = held.config
    query, *tokens = (x.float().contiguous() for x in (stream.query, *stream.tokens))
    before = [x.contiguous() for x in (*held.merged, *held.sample)]
    count, sampled = _after(stream)
    rows = _room(query, tokens[1].shape[3], with_log=with_log)
    merged = Tokens(*(x.new_empty(batch, heads, count, *x.shape[3:]) for x in tokens))
    sample = QuerySample(*(x.new_empty(batch, heads, sampled, *x.shape[3:]) for x in held.sample))
    places = torch.tensor(sampled_places(config.blocks.size, groups), device="cpu")
    memory = query, *tokens, *before, places, *rows, *merged, *sample
    sizes = (
        *(groups, head_dim, tokens[1].shape[3], stream.num_tokens, num_queries, stream.num_kept),
        *(before[0].shape[2], before[3].shape[2], len(places), sample_size(groups)),
        *(config.blocks.window, config.blocks.size, config.num_merged, config.num_left, count, sampled),
    )
    _over_heads(lambda first, stop: merge_stream(*_addresses(*memory), first, stop, *sizes, scale), query, config)
    keys = MergedKeys(held.sinks, held.coded, merged, sample, held.recent, config)
    return Reading(rows.out.to(stream.query.dtype), rows.log_normalizer), keys


def everywhere_in_compiled_code(
    query: Tensor,  # (B, H, G, Lq, D)
    tokens: Tokens,  # (B, H, L, ·), at least float32
    sample: QuerySample,
    distances: tuple[Metric, Axes],
    config: MergedKV,
    seeds: tuple[int, int],  # how many, and in how many rounds they are merged
    scoring: Scoring,
    *,
    with_log: bool,
) -> Reading:
    """Rows over all keys, as `bidirectional.attend_all_merging` has them from the sample on."""
    from linattn_compiled import merge_everywhere

    metric, axes = distances
    queries, *keys = (x.float().contiguous() for x in (query, *tokens))
    held = [x.contiguous() for x in (*sample, *metric, *axes)]
    rows = _room(queries, keys[1].shape[3], with_log=with_log)
    memory = queries, *keys, *held, *rows
    numbers = (
        *(query.shape[2], query.shape[4], keys[1].shape[3], query.shape[3], keys[0].shape[2]),
        *(sample.query.shape[2], config.num_merged, config.window or 0, *seeds, axes.turn.shape[-1], scoring.scale),
    )
    _over_heads(lambda first, stop: merge_everywhere(*_addresses(*memory), first, stop, *numbers), queries, config)
    return Reading(rows.out.to(query.dtype), rows.log_normalizer)


def _room(query: Tensor, value_dim: int, *, with_log: bool) -> Reading:
    """Memory for the rows of queries (B, H, G, Lq, D)."""
    log = query.new_empty(query.shape[:4]) if with_log else None
    return Reading(query.new_empty(*query.shape[:4], value_dim), log)


def _addresses(*memory: Tensor | None) -> list[int]:
    """Where numbers begin, 0 for none; what runs keeps them alive: of two interrupts a call ends before its threads."""
    return [0 if x is None else x.data_ptr() for x in memory]


def _over_heads(run: Callable[[int, int], None], query: Tensor, config: MergedKV) -> None:
    """Run some heads after the other, all dealt out to as many threads as torch has where there is enough to do."""
    number, work = query.shape[:2].numel(), query.numel() * (config.num_merged + (config.window or 0))
    threads = min(torch.get_num_threads(), number) if work > _MANY else 1
    if threads <= 1:
        run(0, number)
        return
    parts = itertools.pairwise(number * i // threads for i in range(threads + 1))
    # Threads of this call alone: a fork would leave a lasting pool without its own.
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: run(*part), parts))


def _after(stream: Stream) -> tuple[int, int]:
    """Numbers of merged keys and of sampled queries after all."""
    held, groups = stream.before, stream.query.shape[2]
    config, count, sampled = held.config, held.merged.bias.shape[2], held.sample.query.shape[2]
    places = sampled_places(config.blocks.size, groups)
    for begin in stream.begins:
        gone = stream.leaving(begin)
        count += gone.stop - gone.start
        count = count if count <= config.num_merged else config.num_left
        new = range(max(stream.first - begin, 0), stream.num_tokens - begin)
        sampled = min(sampled + sum(token in new for token, _ in places), sample_size(groups))
    return count, sampled
