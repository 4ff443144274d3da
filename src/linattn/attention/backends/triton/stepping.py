"""One token, without gradients: one launch. Letters as in triton/__init__.py."""

from __future__ import annotations

import triton
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.records import Causal, empty_sums, sums_of
from linattn.attention.backends.blocked.rows import empty_rows
from linattn.attention.backends.triton.centring import constants, plan_causal
from linattn.attention.backends.triton.kernels.centre_step import centre_step
from linattn.attention.backends.triton.kernels.token_step import token_step
from linattn.attention.backends.triton.launching import bias_rows, plan, rows, without_masked
from linattn.attention.sums import Sums
from linattn.feature_maps import Expansion, FeatureMap

# Values of one program: parts of a head's state go to several, which all make its features.
_PART = 32


def step(feature_map: FeatureMap, inputs: Causal) -> tuple[Rows, Sums]:
    """The rows of a token's queries (B, H, G, 1, D), and the sums after it; of an exponential map or an expansion."""
    found, after = empty_rows(inputs.query, inputs.S), empty_sums(inputs)
    if isinstance(feature_map, Expansion):
        out = _around_centres(feature_map, inputs, found, after)
    else:
        out = _exponential(feature_map, inputs, found, after)
    return found._replace(out=out.to(inputs.query.dtype)), after


def _around_centres(feature_map: Expansion, inputs: Causal, found: Rows, after: Sums) -> Tensor:
    """Of an expansion, a centre and a part of the values a program: writes all, and returns the outputs."""
    query, key, value, *_, bias = inputs
    batch, heads, members, _, _ = query.shape
    assert feature_map.probes is not None, "centres come with their probes"
    work = plan_causal(feature_map, key, (batch, heads, members, 1, value.shape[-1]), span=0, is_backward=False)
    # The queries of a head are the rows of a tile.
    width = min(_PART, work.shape.padded_dv)
    rows = max(16, triton.next_power_of_2(members))
    work = work._replace(shape=work.shape._replace(padded_dv=width, rows=rows))
    out = work.as_operand(found.out)
    given = work.rows(query.squeeze(3)), work.rows(key), work.rows(value), work.biases(bias)
    before: tuple[Tensor, ...] = tuple(x.contiguous() for x in sums_of(inputs))
    arguments = (*given, work.places, constants(feature_map.probes, work.shape), before, tuple(after))
    programs = batch * heads * work.shape.num_centres * triton.cdiv(work.shape.dv, width)
    work.run(centre_step, programs, (*arguments, (out, found.den, found.reference), work.cut), (bias is not None,))
    return out


def _exponential(feature_map: FeatureMap, inputs: Causal, found: Rows, after: Sums) -> Tensor:
    """The same of an exponential map, a part of the values a program."""
    query, key, value, *_, bias = inputs
    batch, heads, members, _, _ = query.shape
    work = plan(feature_map, key, (batch, heads, members, 1, value.shape[-1]), span=0, saved=None)
    # The queries of a head stand in the place of tokens.
    width = min(_PART, work.shape.padded_dv)
    block = max(16, triton.next_power_of_2(members))
    work = work._replace(shape=work.shape._replace(padded_dv=width, block=block))
    out = work.as_operand(found.out)
    masked = without_masked(key, bias) if work.is_given else key
    tokens = rows(work.given(query.squeeze(3), "query")), rows(work.given(masked, "key"))
    given = (*tokens, rows(work.as_operand(value)), work.query_side.side(), work.key_side.side())
    biases = tokens[0] if bias is None else bias_rows(bias)
    before = tuple(x.contiguous() for x in sums_of(inputs))
    arguments = (*given, biases, before, tuple(after), (out, found.den, found.reference), work.cut)
    parts = triton.cdiv(work.shape.dv, width)
    work.run(token_step, batch * heads * parts, arguments, (bias is not None,))
    return out
