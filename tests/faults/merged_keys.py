"""Faults of merged keys."""

from __future__ import annotations

from faults.fault import Fault

EXACT = "attention/exact/"
MERGING, MERGED = "tests/laws/test_merging.py", "tests/laws/test_merged_keys.py"
EVERYWHERE = "tests/laws/test_merged_everywhere.py"

FAULTS = (
    Fault(
        "leave the mean query out of a merged key's bias",
        EXACT + "merging.py",
        "means.weighted(means.log_mass - (means.key @ mean.unsqueeze(-1)).squeeze(-1))",
        "means.weighted(means.log_mass)",
        MERGING,
    ),
    Fault(
        "round the biases of keys that stay alone",
        EXACT + "merging.py",
        "torch.where(self.size == 1, self.own, bias)",
        "bias",
        MERGING,
    ),
    Fault(
        "measure keys without the queries",
        EXACT + "merging.py",
        "(tokens.key - centre) * moments.spread.unsqueeze(2)",
        "tokens.key - centre",
        MERGING,
    ),
    Fault(
        "merge the nearest keys whatever their masses",
        EXACT + "partitioning.py",
        "least * mass * (joining / torch.where(there, mass + joining, 1))",
        "least",
        MERGING,
    ),
    Fault(
        "weigh keys by the mean query of all heads",
        EXACT + "merging.py",
        "logits = moments.means @",
        "logits = moments.mean.unsqueeze(2) @",
        MERGING,
    ),
    Fault(
        "put a cluster's centre at its first key",
        EXACT + "partitioning.py",
        "return joined, centres(clusters.point, clusters.mass, joined, room)",
        "alone = centres(clusters.point, clusters.mass, torch.where(stays, joined, room), room)\n"
        "    return joined, alone._replace(mass=centres(clusters.point, clusters.mass, joined, room).mass)",
        MERGING + "::test_rounds_are_nearly_as_good_as_pairs_one_by_one",
    ),
    Fault(
        "merge absent keys",
        EXACT + "partitioning.py",
        "return torch.where(absent, num_clusters, number), centres",
        "return number.clamp(max=num_clusters - 1), centres",
        MERGING,
    ),
    Fault(
        "let a seed stand for itself alone",
        EXACT + "partitioning.py",
        "standing = root.gather(-1, place) * reach[:, -1:] / number",
        "standing = root.gather(-1, place).square()",
        MERGING,
    ),
    Fault(
        "take the queries' second moment for their variance",
        EXACT + "query_moments.py",
        "rows - mean[:, :, None, None], 0)",
        "rows, 0)",
        MERGING,
    ),
    Fault(
        "keep the mean query's bias for a sample's cluster",
        EXACT + "merged_everywhere.py",
        "means.weighted(means.log_mass - logits.logsumexp(2))",
        "means.weighted(means.log_mass - logits.mean(2))",
        EVERYWHERE,
    ),
    Fault(
        "let padding change the sample",
        EXACT + "merged_everywhere.py",
        "number.clamp(min=size)",
        "number",
        MERGED,
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
        "self.means + share[..., None, None] * (means - self.means)",
        "(self.means + share[..., None, None] * (means - self.means)).detach()",
        MERGED,
    ),
    Fault(
        "count the neighbours twice",
        EXACT + "merged_window.py",
        "near = torch.addcmul(near, given.share, own, value=-1)",
        "",
        EVERYWHERE,
    ),
    Fault(
        "leave what rounding makes of a cluster whose members are all near",
        EXACT + "merged_window.py",
        "return torch.where(faint, -torch.inf, bias.unsqueeze(-1))",
        "return bias.unsqueeze(-1) + 0 * faint",
        EVERYWHERE,
    ),
    Fault(
        "take back the clusters' weights for another block",
        EXACT + "merged_window.py",
        "blocks + torch.arange(blocks, device=rows.device).unsqueeze(-1)",
        "blocks + torch.arange(blocks, device=rows.device).flip(0).unsqueeze(-1)",
        EVERYWHERE,
    ),
    Fault(
        "let a key join one that is lighter",
        EXACT + "partitioning.py",
        "distance[..., start:].masked_fill_(rows.unsqueeze(-1) <= rows, torch.inf)",
        "distance[..., start:].masked_fill_(rows.unsqueeze(-1) == rows, torch.inf)",
        EVERYWHERE,
    ),
    Fault(
        "keep merged keys in the tokens' precision",
        EXACT + "merged_keys.py",
        "dtype = torch.promote_types(key.dtype, torch.float32)",
        "dtype = key.dtype",
        MERGED,
    ),
)
