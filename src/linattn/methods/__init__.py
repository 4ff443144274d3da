"""Methods in their written form: a feature map, with a window or without, or merged keys; their size and error.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), n chosen queries, D head width, Dv value width,
R features, M exponents, W window.
"""
