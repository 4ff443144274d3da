"""What a causal language model loses by a bounded KV cache: methods at equal bytes, beside the full cache.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, n measured positions, V vocabulary, D head width, Dv
value width.
"""
