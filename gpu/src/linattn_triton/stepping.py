"""One token, without gradients: one launch. Letters as in linattn_triton."""

from __future__ import annotations

import triton

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.records import Causal, empty_rows, empty_sums, sums_of
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap
from linattn_triton.kernels.token_step import token_step
from linattn_triton.launching import bias_rows, plan, rows, without_masked

# Values of one program: parts of a head's state go to several, which all make its features.
_PART = 32


def step(feature_map: FeatureMap, inputs: Causal) -> tuple[Rows, Sums]:
    """The rows of a token's queries (B, H, G, 1, D), and the sums after it; of an exponential map.

    Each program takes a part of the values.
    """
    rows_of_token, after = empty_rows(inputs.query, inputs.S), empty_sums(inputs)
    query, key, value, *_, bias = inputs
    batch, heads, members, _, _ = query.shape
    work = plan(feature_map, key, (batch, heads, members, 1, value.shape[-1]), span=0, saved=None)
    # The queries of a head stand in the place of tokens.
    width = min(_PART, work.shape.padded_dv)
    block = max(16, triton.next_power_of_2(members))
    work = work._replace(shape=work.shape._replace(padded_dv=width, block=block))
    out = work.as_operand(rows_of_token.out)
    masked = without_masked(key, bias) if work.is_given else key
    tokens = rows(work.given(query.squeeze(3), "query")), rows(work.given(masked, "key"))
    sides = (*tokens, rows(work.as_operand(value)), work.query_side.side(), work.key_side.side())
    biases = tokens[0] if bias is None else bias_rows(bias)
    before = tuple(x.contiguous() for x in sums_of(inputs))
    arguments = (*sides, biases, before, tuple(after), (out, rows_of_token.den, rows_of_token.reference), work.cut)
    parts = triton.cdiv(work.shape.dv, width)
    work.run(token_step, batch * heads * parts, arguments, (bias is not None,))
    return rows_of_token._replace(out=out.to(query.dtype)), after
