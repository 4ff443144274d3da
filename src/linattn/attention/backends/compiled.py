"""One token in one call of compiled code on a CPU, from linattn-compiled; letters as in blocked/__init__.py."""

import math

import torch
from torch import Tensor

from linattn.attention.backends.backend import Call, Rows
from linattn.attention.backends.blocked import Blocked
from linattn.attention.backends.blocked.blocks import RISE
from linattn.attention.sums import Sums
from linattn.feature_maps.powers import Powers
from linattn.softmax.extensions import IN_GRAPHS, objections_to
from linattn.softmax.precision import LOG2_E
from linattn.softmax.tracing import is_followed

# Numbers of S from which several threads, which torch has and a compiled step has not, are the faster.
_MANY = 2**20


class Compiled(Blocked):
    """Causal calls of one token; what else is asked of its sums is plain torch."""

    def objections(self, call: Call, before: Sums | None = None, window: int | None = None) -> list[str]:
        """Every reason, each with what to do about it."""
        if torch.compiler.is_compiling():
            return [IN_GRAPHS]
        query, key, feature_map = call.query, call.key, call.bound.feature_map
        tokens = query, key, call.value
        objections = objections_to(tokens, is_followed=is_followed(*tokens, call.bias, *(before or ())))
        if not (call.is_causal and key.shape[2] == query.shape[3] == 1):
            objections.append(
                f"it takes causal calls of one token, and this has {query.shape[3]} queries and {key.shape[2]} keys"
                f"{'' if call.is_causal else ', not causal'}"
            )
        if call.bound.tensors or _powers(call) is None:
            objections.append(f"it takes exponential maps that are one product of W and a token; not {feature_map}")
        if window is not None:
            objections.append("it reads no exact window beside the sums, and this call has one")
        return objections

    def is_faster(self, call: Call) -> bool:
        """Whether it is likely to be."""
        sizes = *call.key.shape[:2], call.bound.feature_map.num_features, call.value.shape[-1]
        return math.prod(sizes) < _MANY or torch.get_num_threads() == 1

    def attend(self, call: Call, before: Sums, *, span: int = 0) -> tuple[Rows, Sums]:
        """The token's row, and the sums after it."""
        powers = _powers(call)
        if span or powers is None:
            return super().attend(call, before, span=span)
        return _step(call, powers, before)


def _powers(call: Call) -> Powers | None:
    """The map's exponents taken apart, for as many heads as the keys have."""
    powers = call.bound.feature_map.powers(torch.float32)
    if powers is None or call.key.shape[1] == 0:
        return None
    of_heads = (powers.weights, *([] if powers.constants is None else [powers.constants]))
    return powers if all(x.dim() == 2 or x.shape[0] in (1, call.key.shape[1]) for x in of_heads) else None


def _step(call: Call, powers: Powers, before: Sums) -> tuple[Rows, Sums]:
    """Memory for the results, and the call."""
    # Imported here: as in `missing`.
    from linattn_compiled import step

    query, key, value = (x.float().contiguous() for x in (call.query, call.key, call.value))
    bias = None if call.bias is None else call.bias.contiguous()
    S, z, m = (x.contiguous() for x in before)
    batch, heads, groups = query.shape[:3]
    features, value_dim = S.shape[2:]
    out, den = query.new_empty(batch, heads, groups, 1, value_dim), query.new_empty(batch, heads, groups, 1)
    rows, after = Rows(out, den, torch.empty_like(den)), Sums(*(torch.empty_like(x) for x in (S, z, m)))
    weights = powers.doubled.contiguous()
    constants = None if powers.constants is None else powers.constants.contiguous()
    memory = (query, key, value, bias, weights, constants, S, z, m, *rows, *after)
    step(
        *(0 if x is None else x.data_ptr() for x in memory),
        *(batch, heads, groups, key.shape[-1], value_dim, features, weights.shape[-1]),
        *(1 if bias is None else bias.shape[1], _apart(weights), _apart(constants)),
        *(powers.scale, powers.constant, RISE * LOG2_E),
    )
    return (rows if call.query.dtype == out.dtype else rows._replace(out=out.to(call.query.dtype))), after


def _apart(x: Tensor | None) -> int:
    """How many numbers lie from one head's to the next's; 0 where all heads share one set."""
    return 0 if x is None or x.dim() == 2 or x.shape[0] == 1 else x.stride(0)
