"""Methods that keep a language model's keys and values: the full cache, and bounded ones by their written form."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from linattn.hf import AttentionCall, BoundedCache, BoundedLayerReport, Cache, PreTrainedModel, intercept, new_cache
from linattn.hf.linearization import choose_layers
from linattn.kv_cache import MergedKV
from linattn.kv_cache.budget import Sizes, check_budget, kept_bytes, within_budget
from linattn.kv_cache.config import BITS
from linattn_lab.kv_audit.names import BOUNDED, FULL, NO_BUDGET, UNIFORM, WINDOW

_ANY_LENGTH = 2**62
# Of a small budget, the part that is exact before tokens in few bits, beside a block of as many.
_PART = 16

Maker = Callable[[int, Sizes], MergedKV]
"""Makes the largest configuration of a kind in the bytes of a number of exact keys of a layer's sizes."""


def exact_window(budget: int, sizes: Sizes) -> MergedKV:
    """Sinks and the widest exact window; before it a single token in 8 bits, since tiers alone may have none merged."""
    make = partial(MergedKV, num_merged=0, coded=((1, 8),))
    narrow = largest(make, budget, sizes)
    # A window of more than 64, 128 or 192 tokens has finer blocks, and may keep fewer bytes than a narrower one.
    wider = map(make, range(256, narrow.window or 1, -1))
    return next((one for one in wider if kept_bytes(one, sizes, _ANY_LENGTH) <= budget * sizes.key_bytes), narrow)


def coded_window(budget: int, sizes: Sizes, bits: float) -> MergedKV:
    """Sinks, the latest tokens exact, and the most before them in few bits."""
    latest = _latest(budget, sizes)
    return largest(lambda size: MergedKV(latest, num_merged=0, coded=((size, bits),)), budget, sizes)


def merged_keys(budget: int, sizes: Sizes) -> MergedKV:
    """Sinks, the latest tokens exact, and the most merged keys in 4 bits; no tiers."""
    latest = _latest(budget, sizes)
    return largest(lambda size: MergedKV(latest, size, bits=4), budget, sizes)


WINDOWS_IN_BITS: dict[str, Maker] = {f"{WINDOW} in {bits:g} bits": partial(coded_window, bits=bits) for bits in BITS}
KINDS: dict[str, Maker] = {
    BOUNDED: within_budget,
    "bounded cache, middle": partial(within_budget, recall="middle"),
    "bounded cache, far": partial(within_budget, recall="far"),
    "merged keys": merged_keys,
    WINDOW: exact_window,
    **WINDOWS_IN_BITS,
}
"""By name, what can be measured at each budget; the first is what `BoundedCache` takes by default."""

DEFAULT_KINDS = tuple(kind for kind in KINDS if ".5" not in kind)
"""Names of what is measured where nothing is said: of windows in few bits those in whole bits."""


class Bounded(NamedTuple):
    """The layers of a model that a cache bounds."""

    numbers: tuple[int, ...]  # of their attention modules
    names: tuple[str, ...]  # of these modules
    num_exact: int  # layers that keep transformers' own cache, such as those with a sliding window
    num_heads: int  # query heads of a layer
    num_key_heads: int  # key/value heads of a layer
    sizes: Sizes  # of their keys and values
    layers: tuple[BoundedLayerReport, ...]  # reports on them

    @classmethod
    def of(cls, model: PreTrainedModel) -> Bounded:
        """Those of a causal model that attend to all tokens; a few short forward passes."""
        choose_layers(model)
        report = BoundedCache(model, config=MergedKV(window=1, num_merged=1, bits=None)).report
        layers = [layer for layer in report if layer.config is not None]
        widths = {(layer.sizes, layer.num_key_heads) for layer in layers if layer.sizes is not None}
        if len(widths) != 1:
            raise ValueError(f"budgets want layers of one width; these have {widths}: audit another model")
        ((sizes, heads),) = widths
        return cls(
            tuple(layer.layer for layer in layers),
            tuple(layer.module_name for layer in layers),
            len(report) - len(layers),
            heads * sizes.num_groups,
            heads,
            sizes,
            tuple(layers),
        )


@dataclass(frozen=True)
class Method:
    """What keeps the keys and values."""

    name: str  # of its kind
    label: str  # its written form
    budget: int = NO_BUDGET  # in exact keys; 0 for none
    config: MergedKV | None = None  # of every bounded layer; None for baselines and plans
    plan: Path | None = None  # file of a plan; None for others

    def cache(self, model: PreTrainedModel) -> Cache:
        """A cache of no tokens yet."""
        if self.plan is not None:
            return BoundedCache(model, self.budget, plan=self.plan)
        return new_cache(model) if self.config is None else BoundedCache(model, config=self.config)

    def attending(self, model: PreTrainedModel, names: Sequence[str]) -> AbstractContextManager[None]:
        """Within it the model's layers of these names attend as the method does."""
        return intercept(model, partial(_averaged, frozenset(names))) if self.name == UNIFORM else nullcontext()


def methods(budgets: Iterable[int], kinds: Sequence[str], sizes: Sizes) -> tuple[list[Method], dict[str, str]]:
    """The baselines, and every kind at every budget, in the bytes of so many exact keys, everything counted.

    Args:
        budgets: in exact keys and values of a key/value head.
        kinds: names among `KINDS`, or written forms, which are measured once.
        sizes: of the layers.

    Returns:
        The methods, and by "name at budget" why others are left out.
    """
    written = {kind: written_form(kind) for kind in kinds if kind not in KINDS}
    named = [written[kind].label if kind in written else kind for kind in kinds]
    if len(set(named)) < len(named):
        raise ValueError(f"kinds must be different, got {', '.join(named)}; name each once")
    several = [Method(FULL, "all keys, exact"), Method(UNIFORM, "mean of all values")]
    several += [Method(config.label, config.label, config=config) for config in written.values()]
    left_out: dict[str, str] = {}
    for budget in budgets:
        check_budget(budget)
        for kind in kinds:
            if kind in written:
                continue
            try:
                config = KINDS[kind](budget, sizes)
            except ValueError as error:
                left_out[f"{kind} at {budget}"] = str(error)
            else:
                several.append(Method(kind, config.label, budget, config))
    if left_out and not several[2:]:
        raise ValueError("no method fits: " + ": ".join(next(iter(left_out.items()))))
    return several, left_out


def largest(make: Callable[[int], MergedKV], budget: int, sizes: Sizes) -> MergedKV:
    """The largest configuration of one free size in the bytes of a number of exact keys.

    Args:
        make: a configuration of a size of 1 or more, which keeps more bytes the larger it is.
        budget: in exact keys.
        sizes: of the layer.
    """
    room = budget * sizes.key_bytes
    size = largest_size(lambda size: kept_bytes(make(size), sizes, _ANY_LENGTH) <= room)
    if size == 0:
        raise ValueError(f"{make(1).label} keeps more than the {room:,} bytes of {budget} keys; give more bytes")
    return make(size)


def largest_size(fits: Callable[[int], bool]) -> int:
    """The largest of 1, 2, … that fits, where all smaller ones do; 0 where none fits."""
    most = 1
    while fits(most):
        most *= 2
    return bisect_right(range(1, most), False, key=lambda size: not fits(size))


def _latest(budget: int, sizes: Sizes) -> int:
    """Exact tokens before those in few bits: the bounded cache's, or of budgets too small for it a sixteenth."""
    try:
        return within_budget(budget, sizes).blocks.window
    except ValueError:
        return max(budget // _PART, 1)


def num_unmerged(config: MergedKV) -> int:
    """Tokens of a text that a cache holds one by one, the block under way included, before any are merged or evicted.

    Example:
        >>> num_unmerged(MergedKV(64, 512, coded=((800, 4),)))  # 4 sinks too; 1,316 leave the window block by block
        1408
    """
    before = config.num_sinks + sum(number for number, _ in config.coded) + config.num_merged
    return config.blocks.window + (before // config.blocks.size + 1) * config.blocks.size


def kept(cache: Cache, num_tokens: int, full: Sequence[BoundedLayerReport]) -> tuple[int, float]:
    """Bytes that a cache keeps of a text's tokens in all bounded layers, and the share of them that it holds unmerged.

    Of `full`, a report on these layers, everything is kept where the cache bounds none.
    """
    layers = [one for one in cache.report if one.config is not None] if isinstance(cache, BoundedCache) else []
    if not layers:
        return sum(layer.exact_bytes(num_tokens) for layer in full), 1.0
    unmerged = min(num_unmerged(layer.config) for layer in layers if layer.config is not None)
    return sum(layer.kept_bytes(num_tokens) for layer in layers), min(unmerged / num_tokens, 1.0)


def _averaged(names: frozenset[str], call: AttentionCall) -> Tensor:
    """The mean of the values in some layers, softmax attention in others."""
    return call.uniform() if call.module_name in names else call.softmax()


def written_form(kind: str) -> MergedKV:
    """A configuration by its written form."""
    try:
        return MergedKV.parse(kind)
    except ValueError as error:
        raise ValueError(
            f"kinds must be among {', '.join(map(repr, KINDS))}, or a written form, as in 'sinks 4 + window 64 + "
            f"merged 512 in 4 bits'; got {kind!r}: {error}"
        ) from None
