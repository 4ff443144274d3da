"""The planner: the cheapest method whose expected error meets a target, head by head.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, n sampled rows, D head width, Dv value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.feature_maps import Expansion, FeatureMap
from linattn.feature_maps._dense import check_dense
from linattn.planning import measures
from linattn.planning.costs import exact_flops_per_token, exact_state_numbers, flops_per_token, state_numbers
from linattn.planning.methods import Method, fit, parse_method
from linattn.planning.paying import pays_not
from linattn.planning.plans import EXACT, HeadPlan, Plan

_PARTS = ("", " + window 16", " + window 32", " + window 16 + heavy 32", " + window 32 + heavy 64")
_MERGED = tuple(
    f"{part}merged {count}" for part in ("", "window 16 + ", "window 32 + ") for count in (32, 64, 96, 128, 256)
)
_MAPS = tuple(f"Expansion(num_centres={count}{order})" for order in ("", ", order=2") for count in (1, 4, 16, 64))
CANDIDATES = (*(f"{name}{part}" for name in _MAPS for part in _PARTS), *_MERGED)
"""Written forms of the methods a plan chooses from unless told otherwise; "exact" is always among them."""

# A method that passes is more often lucky than unlucky on its sample: it must meet this share of the target.
MARGIN = 0.9
_NUM_ROWS = 256
_HIGHEST_ORDER = 2


class _Candidate(NamedTuple):
    """A method with its costs, which are the same on every head."""

    method: Method
    num_features: int
    numbers: int
    flops: int


class _Sample(NamedTuple):
    """Calibration tensors with keys and values per query head, and the exact answers of some rows."""

    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, H, L, D)
    value: Tensor  # (B, H, L, Dv)
    rows: Tensor  # (n,)
    exact: Tensor  # (B, H, n, Dv), float64
    known: Tensor  # the tokens that a map is fitted to, none where it takes its statistics from each call
    scale: float
    is_causal: bool
    num_sharing: int  # query heads of a key/value head

    @property
    def is_fixed(self) -> bool:
        """Whether maps are fitted beforehand."""
        return len(self.known) > 0

    def answer(self, method: Method, feature_map: FeatureMap, heads: Sequence[int]) -> Tensor:
        """A method's output on the sampled rows of some heads, (B, heads, n, Dv)."""
        q, k, v = (x[:, list(heads)] for x in (self.query, self.key, self.value))
        return method.attend(feature_map, q, k, v, is_causal=self.is_causal)[:, :, self.rows]

    def pays(self, method: Method, num_tokens: int) -> bool:
        """Whether a method is faster than exact attention, causally or smaller, for all heads of one text."""
        feature_map = method.build(self.query.shape[-1], num_features=None, scale=self.scale, seed=0)
        text = self.query[:1], self.key[:1], self.value[:1]
        found = pays_not(
            method,
            feature_map.to(self.query.device),
            text,
            num_tokens=num_tokens,
            is_causal=self.is_causal,
            num_sharing=self.num_sharing,
            # An encoder keeps nothing between calls.
            by_time_alone=not self.is_causal,
        )
        return found is None

    def map_of(self, method: Method, heads: Sequence[int]) -> FeatureMap:
        """A method's map for some heads: fitted beforehand, or left to learn from each call."""
        feature_map = method.build(self.query.shape[-1], num_features=None, scale=self.scale, seed=0)
        feature_map.to(self.query.device)
        if self.is_fixed:
            query, key = (x[:, list(heads)].index_select(2, self.known) for x in (self.query, self.key))
            fit(feature_map, query, key)
        return feature_map


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    target_error: float | None = None,
    max_features: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    candidates: Sequence[str] | None = None,
    num_tokens: int | None = None,
    fixed_maps: bool = False,
    even_if_slower: bool = False,
) -> Plan:
    """For each query head of a layer, the method to use, chosen on calibration tensors.

    With `target_error`: the method of the fewest operations per token whose expected error is at most 0.9 of the
    target; "exact" where there is none, or where exact attention takes fewer. With `max_features`: the method of the
    least expected error among those whose map has at most so many features and which take fewer operations than exact
    attention; "exact" where there is none. Operations are counted, and time is measured: unless `even_if_slower` no
    method is chosen that takes longer than exact attention in this process, on all heads of one text. Causally one that
    keeps fewer numbers than a head's share of the keys and values is chosen all the same; an encoder keeps nothing.

        expected error = ‖Ŷ_I − Y_I‖_F / ‖Y_I‖_F,   I = 256 query rows drawn at random (all, where there are fewer)

    Ŷ is the method's output on the whole calibration sample, Y exact attention on the rows I alone, in float64. Maps
    take their centres as they will in use: bidirectionally from the call itself; causally from the first half of each
    sample, the rows I being drawn from the second half; with `fixed_maps` from every second token, the rows I being
    drawn from the others. So no map that is fitted beforehand was fitted to a measured query. The factor 0.9 allows for
    selection: the cheapest method that passes is more often lucky than unlucky on its sample.

    Each head's plan also holds the error as the expansion's next order estimates it, without exact attention.

    Cost: O(n·L·(D + Dv)) per head for the exact rows, and one linear attention per candidate over the heads that no
    cheaper one serves: linear in L; eight calls more for each method that would be chosen and that has to be timed.

    Args:
        query: (B, H, L, D), B samples of calibration text, unpadded.
        key: (B, Hkv, L, D), H a multiple of Hkv.
        value: (B, Hkv, L, Dv).
        target_error: relative error of a head's output to be met, > 0; or
        max_features: the most features of a map, > 0; merged keys, which have none, are left out. One of both.
        is_causal: whether later keys are hidden.
        scale: factor of q·k in the exponent; D**-0.5 if None.
        candidates: written forms of methods, widths included; `CANDIDATES` if None, causally those of them that merge
            keys having a window.
        num_tokens: the length the plan is for, which decides where exact attention takes fewer operations; L if None.
        fixed_maps: whether maps are fitted beforehand, as for a model that is converted, and never learn from a call;
            causal ones never do.
        even_if_slower: whether methods are chosen that are not faster than exact attention, causally neither faster
            nor smaller, by the time of calls on the first sample.

    Returns:
        A `Plan`, which attends by the methods chosen.

    Raises:
        ValueError: if not one of target_error and max_features is given, a candidate cannot be read, built or used,
            shapes do not fit, a value is not finite, or a sample to fit on has fewer than 2 tokens.

    Example:
        >>> q = torch.zeros(1, 1, 512, 4)
        >>> k, v = torch.randn(2, 1, 1, 512, 4)
        >>> made = plan(q, k, v, target_error=0.1, even_if_slower=True)
        >>> made.heads[0].method, made.heads[0].expected_error < 1e-4  # every query is its own centre
        ('Expansion(num_centres=1)', True)
    """
    _check(query, key, value, target_error, max_features)
    dims = {"head_dim": query.shape[-1], "value_dim": value.shape[-1]}
    length = query.shape[2] if num_tokens is None else num_tokens
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    sample = _sampled(query, key, value, scale, is_causal=is_causal, is_fixed=is_causal or fixed_maps)
    exact_flops = exact_flops_per_token(length, is_causal=is_causal, **dims)
    ladder = [
        one
        for one in _ladder(_usual(is_causal=is_causal) if candidates is None else candidates, sample)
        if one.flops < exact_flops and (max_features is None or 0 < one.num_features <= max_features)
    ]

    def pays(candidate: _Candidate) -> bool:
        """Whether the method is faster or smaller than exact attention."""
        return even_if_slower or sample.pays(candidate.method, length)

    chosen = _choose(sample, ladder, None if target_error is None else MARGIN * target_error, pays)
    estimates, fitted = _settle(sample, chosen)
    heads = []
    for head, uniform in enumerate(_uniform_errors(sample)):
        method, error, numbers, flops = EXACT, 0.0, exact_state_numbers(length, **dims), exact_flops
        if head in chosen:
            candidate, error = chosen[head]
            method, numbers, flops = candidate.method.label, candidate.numbers, candidate.flops
        heads.append(HeadPlan(method, error, estimates.get(head), uniform, numbers, flops))
    return Plan(
        tuple(heads),
        scale=scale,
        is_causal=is_causal,
        num_tokens=length,
        target_error=target_error,
        max_features=max_features,
        fitted=fitted,
        **dims,
    )


def _check(query: Tensor, key: Tensor, value: Tensor, target_error: float | None, max_features: int | None) -> None:
    """Refuse what cannot be planned for."""
    check_dense(query=query, key=key, value=value)
    if (target_error is None) == (max_features is None):
        raise ValueError(f"give one of target_error and max_features, got {target_error} and {max_features}")
    for name, wanted in (("target_error", target_error), ("max_features", max_features)):
        if wanted is not None and not 0 < wanted < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {wanted}")
    fitting = query.ndim == key.ndim == value.ndim == 4 and query.shape[::2] == key.shape[::2] == value.shape[::2]
    if not fitting or query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1] or not query.numel():
        raise ValueError(
            "calibration wants self-attention's query (B, H, L, D), key (B, Hkv, L, D) and value (B, Hkv, L, Dv), got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if not all(bool(x.isfinite().all()) for x in (query, key, value)):
        raise ValueError("a calibration tensor holds nan or inf; calibrate on unpadded text with a working model")


def _sampled(query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool, is_fixed: bool) -> _Sample:
    """Draw the rows and answer them exactly."""
    length, shared = query.shape[2], query.shape[1] // key.shape[1]
    tokens = torch.arange(length)
    known, free = tokens[:0], tokens
    if is_causal:
        known, free = tokens.tensor_split([length // 2])
    elif is_fixed:
        # Of all positions: heads of models with absolute ones may be another method's at the end than at the start.
        known, free = tokens[::2], tokens[1::2]
    if is_fixed and length < 2:
        raise ValueError(f"calibration of fixed maps wants at least 2 tokens, one half to fit on, got {length}")
    drawn = torch.randperm(len(free), generator=torch.Generator().manual_seed(0))[:_NUM_ROWS]
    rows = free[drawn.sort().values].to(query.device)
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    visible = measures.visible_keys(rows, num_queries=length, num_keys=length, is_causal=is_causal)
    # Head by head: the weights of all heads would be the largest thing in memory.
    exact = [
        measures.softmax_log_rows(q[:, :, rows], k, visible, scale=scale).exp() @ v.double()
        for q, k, v in zip(query.split(1, 1), key.split(1, 1), value.split(1, 1), strict=True)
    ]
    return _Sample(query, key, value, rows, torch.cat(exact, 1), known.to(query.device), scale, is_causal, shared)


def _usual(*, is_causal: bool) -> list[str]:
    """The candidates unless told otherwise, those that a causal call refuses left out."""
    methods = map(parse_method, CANDIDATES)
    return [one.label for one in methods if not is_causal or one.exact is None or one.exact.window is not None]


def _uniform_errors(sample: _Sample) -> list[float]:
    """The error of averaging the values, by head."""
    heads, length = sample.query.shape[1:3]
    mean = measures.uniform_average(sample.value, num_heads=heads, num_queries=length, is_causal=sample.is_causal)
    errors: list[float] = measures.relative_error(mean[:, :, sample.rows], sample.exact).tolist()
    return errors


def _ladder(labels: Sequence[str], sample: _Sample) -> list[_Candidate]:
    """Every candidate, the cheapest first; as many merged keys as the sample has tokens would lose nothing on it."""
    found, width = [], sample.value.shape[-1]
    for method in map(parse_method, labels):
        if method.exact is not None and method.exact.num_merged >= sample.query.shape[2]:
            continue
        if method.takes_features:
            raise ValueError(f"{method.label} leaves its width open; write num_features=… into every candidate")
        feature_map = method.build(sample.query.shape[-1], num_features=None, scale=sample.scale, seed=0)
        numbers = state_numbers(method, feature_map, value_dim=width, is_causal=sample.is_causal)
        flops = flops_per_token(method, feature_map, value_dim=width, is_causal=sample.is_causal)
        found.append(_Candidate(method, feature_map.num_features, numbers, flops))
    return sorted(found, key=lambda one: (one.flops, one.numbers))


def _choose(
    sample: _Sample, ladder: Sequence[_Candidate], bound: float | None, pays: Callable[[_Candidate], bool]
) -> dict[int, tuple[_Candidate, float]]:
    """The candidate of a head with its expected error: the first within the bound, or the best where there is none.

    Whether one pays is asked where it would be chosen.
    """
    chosen: dict[int, tuple[_Candidate, float]] = {}
    heads = list(range(sample.query.shape[1]))
    for candidate in ladder:
        answer = sample.answer(candidate.method, sample.map_of(candidate.method, heads), heads)
        errors = measures.relative_error(answer, sample.exact[:, heads]).tolist()
        better = {
            head: (candidate, error)
            for head, error in zip(heads, errors, strict=True)
            if error < (chosen[head][1] if head in chosen else torch.inf) and (bound is None or error <= bound)
        }
        if better and pays(candidate):
            chosen.update(better)
        if bound is not None:
            heads = [head for head in heads if head not in chosen]
        if not heads:
            break
    return chosen


def _settle(
    sample: _Sample, chosen: dict[int, tuple[_Candidate, float]]
) -> tuple[dict[int, float], dict[str, dict[str, Tensor]]]:
    """The next order's estimate of each head's error, and the tensors of maps that are fixed beforehand."""
    groups: dict[Method, list[int]] = {}
    for head in sorted(chosen):
        groups.setdefault(chosen[head][0].method, []).append(head)
    estimates: dict[int, float] = {}
    fitted: dict[str, dict[str, Tensor]] = {}
    for method, heads in groups.items():
        feature_map = sample.map_of(method, heads)
        if sample.is_fixed:
            fitted[method.label] = {name: x.detach().clone() for name, x in feature_map.state_dict().items()}
        if isinstance(feature_map, Expansion) and feature_map.order < _HIGHEST_ORDER:
            ours = sample.answer(method, feature_map, heads)
            higher = sample.answer(method, feature_map.next_order(), heads)
            estimates.update(zip(heads, measures.relative_error(ours, higher).tolist(), strict=True))
    return estimates, fitted
