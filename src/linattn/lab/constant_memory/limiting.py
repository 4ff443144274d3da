"""A language model's memory bounded to a budget of bytes, and what the exact cache takes beside it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.attention import Exact
from linattn.attention.exact import parse_exact
from linattn.hf import AttentionCall, PreTrainedModel, cache_bytes, filled_cache, is_linearized, linearize_, restore_
from linattn.lab.constant_memory.answering import GlobalLayers, log_probabilities, recording, sizes_of
from linattn.lab.constant_memory.planning import PLAIN, MemoryPlan
from linattn.lab.contenders import Sizes
from linattn.lab.contenders.merged import Merged
from linattn.lab.contenders.shelf import NEAR
from linattn.planning.methods import together

_STEPS = 8
# What a window is best at on real text, its block included, and at most: more bytes are better spent on merged keys.
_WINDOW, _SHARE = 256, 0.5
# The window's share beside merged keys in few bits, which hold several times as many.
_FEW_BITS_SHARE = NEAR[0]
# Keys of a budget at most: no model has a text as long.
_MOST = 2**20
FEW_BITS = 4
"""What merged keys are kept in where nothing is said."""


@dataclass(frozen=True)
class Limit:
    """What `limit_` did.

    Attributes:
        exacts: the window and the merged keys of each global layer, in order.
        num_key_heads: key/value heads of each.
        sizes: of their keys and values.
    """

    exacts: tuple[Exact, ...]
    num_key_heads: int
    sizes: Sizes

    @property
    def label(self) -> str:
        """Their written forms, once where all are alike."""
        return together([exact.label for exact in self.exacts])

    def kept(self, num_tokens: int) -> int:
        """Bytes that the global layers keep of so many tokens at most."""
        return self.num_key_heads * sum(Merged(exact).num_bytes(self.sizes, num_tokens) for exact in self.exacts)

    def exactly(self, num_tokens: int) -> int:
        """Bytes that exact attention keeps of them in these layers."""
        return len(self.exacts) * self.num_key_heads * self.sizes.key_bytes * num_tokens


def check_budget(budget: int) -> None:
    """Refuse budgets of no key, and beyond any text."""
    if not 1 <= budget <= _MOST:
        raise ValueError(f"budget must be from 1 to {_MOST} keys, got {budget}")


def limit_(model: PreTrainedModel, budget: int, *, near: float | None = None, bits: int | None = FEW_BITS) -> Limit:
    """Bound what the global layers of a language model keep, in place, by merged keys behind a window.

    Cost: one step of the model, and `linattn.hf.linearize_`.

    Args:
        model: a causal language model with softmax attention.
        budget: bytes per layer and key/value head, said in exact keys and their values; biases and the sampled queries
            are paid from it too.
        near: share of the bytes that the window takes with a block; None for 15 %, and beside merged keys that are kept
            as they are for that of 256 keys, half of the bytes at most. What is best says `linattn audit --budget`.
        bits: of merged keys and values, as in `linattn.Exact`; None for 32 a number.

    Returns:
        A `Limit`; `linattn.hf.restore_` takes it off again.

    Raises:
        ValueError: if the budget is beyond 2²⁰ keys or leaves no room beside the sampled queries, the bits are none of
            `linattn.Exact`'s, or the model is linearized already.
    """
    check_budget(budget)
    layers, num_key_heads, sizes = _probed(model)
    best = min(_WINDOW / budget, _SHARE) if bits is None else _FEW_BITS_SHARE
    exact = Merged.within(budget * sizes.key_bytes, sizes, best if near is None else near, bits).exact
    linearize_(model, feature_map=exact.label, layers=layers.numbers)
    return Limit((exact,) * len(layers.names), num_key_heads, sizes)


def limit_by_plan_(model: PreTrainedModel, plan: MemoryPlan) -> Limit:
    """`limit_` by what an audit chose for each global layer.

    Args:
        model: a causal language model with softmax attention.
        plan: made for it.

    Returns:
        A `Limit`.

    Raises:
        ValueError: if the model is linearized already, the plan is of other layers, or it is a plain window, which is
            no method of a model.
    """
    layers, num_key_heads, sizes = _probed(model)
    if plan.layers != list(layers.numbers):
        raise ValueError(
            f"the plan is of {plan.model}, whose global layers are {plan.layers}, and {type(model).__name__} has "
            f"{list(layers.numbers)}; give the plan of this model"
        )
    if PLAIN in plan.choices:
        raise ValueError(
            f"at the bytes of {plan.budget:,} keys the plan found nothing better by a margin than {plan.label}, which "
            "is no method of a model; give a larger budget, or no plan"
        )
    linearize_(model, feature_map=plan.labels, layers=plan.layers)
    return Limit(tuple(map(parse_exact, plan.labels)), num_key_heads, sizes)


def _probed(model: PreTrainedModel) -> tuple[GlobalLayers, int, Sizes]:
    """The global layers of a model, and their key/value heads and widths."""
    if is_linearized(model):
        raise ValueError(f"{type(model).__name__} is linearized already, and keeps what it keeps; leave the budget out")
    layers, probe = GlobalLayers.of(model), list[AttentionCall]()
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    log_probabilities(model, one, torch.zeros(1, dtype=torch.long), recording(layers, probe))
    return layers, probe[0].key.shape[1], sizes_of(probe)


@dataclass(frozen=True)
class ExactPace:
    """What exact attention takes at a length.

    Attributes:
        num_bytes: of the whole cache, sliding windows included.
        seconds: per token, the median of some.
    """

    num_bytes: int
    seconds: float


def exact_pace(model: PreTrainedModel, num_tokens: int) -> ExactPace:
    """The time of a token and the bytes of the cache with so many tokens before it, under the model's own attention.

    Cost: some steps of the model, and the exact cache's memory.

    Args:
        model: one that `limit_` bounded; it is as it was before when this returns.
        num_tokens: the length.

    Returns:
        An `ExactPace`.
    """
    restore_(model)
    cache, token = filled_cache(model, num_tokens), torch.zeros(1, 1, dtype=torch.long, device=model.device)
    held = cache_bytes(cache)
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        _step(model, token, cache)
        times.append(time.perf_counter() - start)
    return ExactPace(held, statistics.median(times))


def _step(model: PreTrainedModel, token: Tensor, cache: object) -> None:
    """One token."""
    with torch.no_grad():
        model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
