"""Merged keys in place of a map: which keys are merged, what is kept of a stream, and what queries read.

`causal` and `bidirectional` are what is called. A stream goes block by block (`stream`): keys that leave the window
join a `memory`, whole or in `few_bits`, and are merged (`merging`) by what a sample of the queries attends to
(`query_sample`, `partitioning`). With every key in view a `window` takes back what it sees as it is. `compiled` is both
in compiled code. Letters as in exact/__init__.py.
"""
