"""One token: absorb its key, read with its queries. The same sums as absorb and read, for calls too small for blocks.

A step costs as much in calls as in arithmetic, hence one product for queries and key where the map allows, and one pass
over the state for both its terms. Letters as in blocked/__init__.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked.blocks import exponential_, is_masked
from linattn.attention.backends.blocked.records import Causal
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap


def forward(feature_map: FeatureMap, inputs: Causal) -> tuple[Rows, Sums]:
    """The row of one token, and the sums after it."""
    query, key, value, S, z, m, bias = inputs
    q, k, v = query.squeeze(3).to(S.dtype), key.to(S.dtype), value.to(S.dtype)
    if bias is not None:
        k, v = (x.masked_fill(is_masked(bias).unsqueeze(-1), 0) for x in (k, v))
    t, key_output = _both(feature_map, q, k)
    log, linear = key_output, None
    if not feature_map.exponential:
        weight, linear = feature_map.key_log_weight(k), key_output
        log = m.new_zeros(()).expand(m.shape) if weight is None else weight
    if bias is not None:
        log = log + bias
    c = torch.maximum(m, log)
    phi, decay = exponential_(log - c), exponential_(m - c)
    if linear is not None:
        phi = linear * phi
    S = torch.mul(phi.unsqueeze(-1), v).addcmul_(S, decay.unsqueeze(-1))
    z = phi.addcmul_(z, decay)
    if feature_map.exponential:
        t = t + c.unsqueeze(-2)
        reference = t.amax(-1, keepdim=True)
        t = exponential_(t.sub_(reference))
    else:
        reference = c.unsqueeze(-2).expand(*t.shape[:-1], 1)
    den, num = torch.linalg.vecdot(t, z.unsqueeze(-2)).unsqueeze(-1), torch.matmul(t, S)
    # An exponential map gives every key weight: only a masked one can leave a row without any.
    sees_key = feature_map.exponential and bias is None
    out = num.div_(den if sees_key else den.masked_fill(den == 0, torch.inf))
    return Rows(out.unsqueeze(3).to(query.dtype), den, reference), Sums(S, z, c)


def _both(feature_map: FeatureMap, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """What the map says of queries (B, H, G, D), and of the key (B, H, 1, D) with its token dimension dropped."""
    if type(feature_map).key is not FeatureMap.key:
        return feature_map.query(q), feature_map.key(k).squeeze(-2)
    both = feature_map.query(torch.cat((q, k), -2))
    return both.narrow(-2, 0, q.shape[-2]), both.select(-2, -1)
