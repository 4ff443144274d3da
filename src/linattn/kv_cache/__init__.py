"""A KV cache of constant size for pretrained softmax models: exact keys, then quantized ones, then merged ones.

q, k, v -> `functional` checks -> `stream` or `bidirectional` (every key in view) -> merged keys, values and
biases -> softmax over these and the exact ones. A stream goes block by block (`stream`): keys that leave the window
join a `memory`: the first stay exact, others pass through each tier, and are merged (`merging`) by what a sample of
the queries attends to (`query_sample`, `partitioning`). A tier keeps numbers or `coded_tokens`: `codes` of `levels`,
relative to `frames`. With every key in view, `window` takes exact keys out of clusters; `compiled` has both in C.

Letters: B batch, H key/value heads, G query heads per key/value head, L tokens, D head width, Dv value width, w tokens
of the window, b of a block, C merged keys.
"""

from linattn.kv_cache.config import MergedKV as MergedKV
from linattn.kv_cache.functional import merged_attention as merged_attention
from linattn.kv_cache.functional import merged_attention_with_state as merged_attention_with_state
from linattn.kv_cache.functional import merged_partial as merged_partial
from linattn.kv_cache.functional import merged_partial_with_state as merged_partial_with_state
from linattn.kv_cache.keys import MergedKeys as MergedKeys
from linattn.kv_cache.state import MergedState as MergedState
