"""Interface of a backend, and rows as partial results; letters as in attention/__init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from linattn.attention.bound_map import BoundMap, bind
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.softmax.partial import Partial
from linattn.softmax.precision import accumulation_dtype, lift, rescaled
from linattn.softmax.tracing import is_followed


class Rows(NamedTuple):
    """Rows of queries: outputs, and denominators Σ φ(q)·φ(k)·exp(-reference); 0 and 0 where no key was seen."""

    out: Tensor  # (B, H, G, Lq, Dv), in the query's dtype
    den: Tensor  # (B, H, G, Lq)
    reference: Tensor  # (B, H, G, Lq)


def lifts(record: Any, feature_map: FeatureMap) -> dict[str, Tensor]:
    """Factors, by field, that bring a plain map's faint denominators near 1, and sums where a head's z is faint."""
    # A row's gradient is divided by its denominator, and becomes as small again only on its way through the map.
    if feature_map.exponential or isinstance(feature_map, GroupedFeatureMap):
        return {}
    factors = {"den": lift(record.den)} if "den" in record._fields else {}
    if "z" in record._fields:
        factors["z"] = lift(record.z.detach().abs().amax(-1, keepdim=True))
        factors["S"] = factors["z"].unsqueeze(-1)
    return factors


def lifted(record: Any, feature_map: FeatureMap, least: float | None = None) -> Any:
    """Rows or sums times these factors, exponents less their logarithms; gradients times factor·least, None for 1."""
    factors, fields = lifts(record, feature_map), record._asdict()
    changed = {name: rescaled(fields[name], x, 1 if least is None else x * least) for name, x in factors.items()}
    for name, place in (("reference", "den"), ("m", "z")):
        if place in factors:
            changed[name] = fields[name] - factors[place].log()
    return record._replace(**changed)


class Call(NamedTuple):
    """One call of attention as backends take it: checked, queries grouped by key/value head."""

    bound: BoundMap
    query: Tensor  # (B, H, G, Lq, D)
    key: Tensor  # (B, H, Lk, D)
    value: Tensor  # (B, H, Lk, Dv), in the outputs' dtype, which may be narrower than that of queries and keys
    bias: Tensor | None  # (B, H or 1, Lk), in the accumulation dtype, -inf for masked keys
    is_causal: bool

    @classmethod
    def causal(
        cls, feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
    ) -> Call:
        """A causal call, of which a map takes no statistics."""
        return cls(bind(feature_map, key, key, is_causal=True)[0], query, key, value, bias, is_causal=True)

    def weighed(self, *, is_part: bool = False) -> Call:
        """Widen half-precision queries that have weights: gradients through those and through features may cancel.

        Of a part of the keys rows of such maps may be beyond a narrow dtype, where those of all keys are not.
        """
        query, dtype = self.query, accumulation_dtype(self.query.dtype)
        is_wide_enough = query.dtype == dtype or not (is_part or is_followed(query))
        if is_wide_enough or self.bound.query_log_weight(query[..., :0, :]) is None:
            return self
        return self._replace(query=query.to(dtype))

    def with_keys(self, part: slice) -> Call:
        """The call over some of its keys."""
        bias = None if self.bias is None else self.bias[..., part]
        return self._replace(key=self.key[:, :, part], value=self.value[:, :, part], bias=bias)


class Backend(Protocol):
    """Three functions of a call. Differentiable in all tensors, by whatever means.

    A key's weight is φ(q)·φ(k)·exp(bias); one of bias -inf is inert, whatever it holds. The maximum m of the sums is
    a constant for gradients.
    """

    def objections(self, call: Call) -> list[str]:
        """Every reason why this backend cannot run the call; none if it can."""

    def attend(self, call: Call, before: Sums, *, span: int = 0) -> tuple[Rows, Sums]:
        """Queries over the sums' keys and the call's, and the sums after all; causal is aligned bottom-right.

        With `span`, for as many queries as keys, causal rows see the keys of earlier spans of so many tokens only.
        """

    def absorb(self, call: Call, before: Sums) -> Sums:
        """The sums after the call's keys."""

    def read(self, call: Call, sums: Sums) -> Rows:
        """The call's queries over the sums' keys alone."""


def attend_aligned(
    backend: Backend, fold: Callable[[Call, Sums, int], tuple[Rows, Sums]], call: Call, before: Sums, span: int
) -> tuple[Rows, Sums]:
    """Causal rows aligned bottom-right, and the sums after them, by a fold of as many queries as keys."""
    extra = call.key.shape[2] - call.query.shape[3]
    if extra > 0:
        before = backend.absorb(call.with_keys(slice(extra)), before)
        return fold(call.with_keys(slice(extra, None)), before, span)
    late, after = fold(call._replace(query=call.query[..., -extra:, :]), before, span)
    early = backend.read(call._replace(query=call.query[..., :-extra, :]), before)
    return Rows(*(torch.cat(parts, 3) for parts in zip(early, late, strict=True))), after


def as_partial(call: Call, rows: Rows) -> Partial:
    """The rows (B, H, G, L, …) of a call as a partial result of that shape, on the kernel's true scale."""
    # The guarded logarithm keeps the gradient of rows that saw no key at 0 instead of NaN.
    dead = rows.den == 0
    log_normalizer = torch.where(dead, -torch.inf, torch.where(dead, 1, rows.den).log() + rows.reference)
    weight = call.bound.query_log_weight(call.query.to(rows.den.dtype))
    return Partial(rows.out, log_normalizer if weight is None else log_normalizer + weight)


def map_rows(call: Call, backend: Backend, before: Sums, *, span: int = 0) -> tuple[Partial, Sums]:
    """`Backend.attend` with its rows as a partial result."""
    rows, after = backend.attend(call, before, span=span)
    return as_partial(call, rows), after
