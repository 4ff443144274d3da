"""What a causal language model loses by a constant memory: contenders at equal bytes, on texts and on recall.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, n measured positions, V vocabulary, D head width, Dv
value width.
"""
