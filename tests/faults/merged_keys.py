"""Faults of merged keys."""

from __future__ import annotations

from faults.fault import Fault

EXACT = "attention/exact/"
MERGING, MERGED = "tests/laws/test_merging.py", "tests/laws/test_merged_keys.py"

FAULTS = (
    Fault(
        "leave the mean query out of a merged key's bias",
        EXACT + "merging.py",
        "safe.log() + peak - key @ mean.unsqueeze(-1)",
        "safe.log() + peak",
        MERGING,
    ),
    Fault(
        "round the biases of keys that stay alone",
        EXACT + "merging.py",
        "torch.where(size == 1, alone, bias)",
        "bias",
        MERGING,
    ),
    Fault(
        "measure keys without the queries",
        EXACT + "merging.py",
        "key @ moments.covariance @ key.mT",
        "key @ key.mT",
        MERGING,
    ),
    Fault(
        "merge the nearest keys whatever their masses",
        EXACT + "partitioning.py",
        "inertia * distance, torch.inf",
        "distance, torch.inf",
        MERGING,
    ),
    Fault(
        "put a cluster's centre at its first key",
        EXACT + "partitioning.py",
        "torch.where(is_pair, joining / (own + joining), 0)",
        "torch.zeros_like(own)",
        MERGING,
    ),
    Fault(
        "merge absent keys",
        EXACT + "partitioning.py",
        "alive = log_weight != -torch.inf",
        "alive = log_weight == log_weight",
        MERGING,
    ),
    Fault(
        "take the queries' second moment for their covariance",
        EXACT + "query_moments.py",
        "scatter = self.scatter + apart.mT @ apart + between",
        "scatter = self.scatter + rows.flatten(2, 3).mT @ rows.flatten(2, 3)",
        MERGING,
    ),
    Fault(
        "let queries count less with every call of a stream",
        EXACT + "merged_keys.py",
        "        if begin >= num_kept:\n            moments = moments.decay(window)\n",
        "        moments = moments.decay(window)\n        if begin >= num_kept:\n",
        MERGED,
    ),
    Fault(
        "count the queries of masked tokens",
        EXACT + "merged_keys.py",
        "tokens.bias[..., start:end] != -torch.inf",
        "tokens.bias[..., start:end] < torch.inf",
        MERGED,
    ),
    Fault(
        "cut a stream's gradient at the mean query",
        EXACT + "query_moments.py",
        "self.mean + share.unsqueeze(-1) * (mean - self.mean)",
        "(self.mean + share.unsqueeze(-1) * (mean - self.mean)).detach()",
        MERGED,
    ),
    Fault(
        "count the neighbouring block twice",
        EXACT + "merged_everywhere.py",
        "(0, 0, 0, 0, 2, 0)",
        "(0, 0, 0, 0, 1, 0)",
        MERGED,
    ),
    Fault(
        "keep merged keys in the tokens' precision",
        EXACT + "merged_keys.py",
        "dtype = torch.promote_types(key.dtype, torch.float32)",
        "dtype = key.dtype",
        MERGED,
    ),
)
