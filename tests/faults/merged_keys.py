"""Faults of merged keys."""

from __future__ import annotations

from faults.fault import Fault

ROOM = "kv_cache/"
MERGING, MERGED = "tests/kv_cache/test_merging.py", "tests/kv_cache/test_attention.py"
PADDING = "tests/kv_cache/test_padding.py"
ROW_GROUPS = "softmax/row_groups.py"
LEFT_PADDING_LAWS = "tests/laws/test_left_padding.py"
EVERYWHERE, DISTANCES = "tests/kv_cache/test_bidirectional.py", "tests/kv_cache/test_distances.py"
ROW_GROUPS = "softmax/row_groups.py"
LEFT_PADDING_LAWS = "tests/laws/test_left_padding.py"

FAULTS = (
    Fault(
        "merge keys that every row sees as they are",
        ROOM + "bidirectional.py",
        "max(config.num_merged, 2 * (config.window or 0))",
        "config.num_merged",
        "tests/laws/test_window_cost.py",
    ),
    Fault(
        "leave the sample out of a merged key's bias",
        ROOM + "merging.py",
        "return self.weighted(self.log_mass - attended.log_attended(self.key))",
        "return self.weighted(self.log_mass)",
        MERGING,
    ),
    Fault(
        "round the biases of keys that stay alone",
        ROOM + "merging.py",
        "torch.where(self.size == 1, self.bias_sum, bias)",
        "bias",
        MERGING,
    ),
    Fault(
        "measure keys without the queries",
        ROOM + "partitioning.py",
        "torch.cat((spread.unsqueeze(2), worth",
        "torch.cat((torch.ones_like(spread).unsqueeze(2), worth",
        MERGING,
    ),
    Fault(
        "measure keys without their values",
        ROOM + "partitioning.py",
        "worth = (wide / torch.where(narrow == 0, 1, narrow)).sqrt() * values",
        "worth = 0 * wide",
        MERGING,
    ),
    Fault(
        "take the widest coordinates for axes",
        ROOM + "partitioning.py",
        "range(_TURNS)",
        "range(0)",
        DISTANCES,
    ),
    Fault(
        "have no more axes where heads are wide",
        ROOM + "partitioning.py",
        "max(_AXES, width // _WIDTHS_PER_AXIS)",
        "_AXES",
        DISTANCES,
    ),
    Fault(
        "look along axes from another mean",
        ROOM + "partitioning.py",
        "return cls(turn, metric.mean @ turn)",
        "return cls(turn, 0 * metric.mean @ turn)",
        DISTANCES,
    ),
    Fault(
        "measure by keys that are no numbers",
        ROOM + "bidirectional.py",
        "there = there & (some.abs().amax(-1) < torch.inf)",
        "there = there & True",
        DISTANCES,
    ),
    Fault(
        "measure by masked keys",
        ROOM + "bidirectional.py",
        "evenly(tokens.bias != -torch.inf, _MEASURED,",
        "evenly(tokens.bias == tokens.bias, _MEASURED,",
        DISTANCES,
    ),
    Fault(
        "size a sample by the padded row",
        ROOM + "query_sample.py",
        "live.sum(-1, keepdim=True).clamp(min=num_merged + 1)",
        "(live | True).sum(-1, keepdim=True).clamp(min=num_merged + 1)",
        PADDING,
    ),
    Fault(
        "sample queries of padding",
        ROOM + "query_sample.py",
        "live = live if is_same else",
        "live = torch.ones_like(live) if is_same else",
        PADDING,
    ),
    Fault(
        "make room for fewer queries than a graph's rows may want",
        ROOM + "query_sample.py",
        "math.isqrt(_SAMPLED // groups) if is_same else 0",
        "num_keys",
        PADDING,
    ),
    Fault(
        "count a window's blocks over padding",
        ROOM + "bidirectional.py",
        "config.window is None or bias is None or _begins",
        "True or _begins",
        PADDING,
    ),
    Fault(
        "merge the few keys of a padded row that axes tell not apart",
        ROOM + "bidirectional.py",
        "place[..., -1:] <= num_merged",
        "place[..., -1:] < 0",
        PADDING,
    ),
    Fault(
        "begin with the heaviest of few keys",
        ROOM + "partitioning.py",
        "torch.where(count <= num_seeds, every,",
        "torch.where(count <= num_seeds, most.indices,",
        PADDING,
    ),
    Fault(
        "merge the nearest keys whatever their masses",
        ROOM + "partitioning.py",
        "least * mass * (joining / torch.where(there, mass + joining, 1))",
        "least",
        MERGING,
    ),
    Fault(
        "weigh keys by the mean query of all heads",
        ROOM + "query_sample.py",
        "logits = torch.baddbmm(bias, rows, key.mT)",
        "logits = torch.baddbmm(bias, rows.mean(1, keepdim=True).expand_as(rows), key.mT)",
        MERGING,
    ),
    Fault(
        "add up masses that underflow",
        ROOM + "query_sample.py",
        "logs.append(((logits - log.unsqueeze(-1)).logsumexp(1), log))",
        "logs.append(((logits - log.unsqueeze(-1)).exp().sum(1).clamp(min=1e-38).log(), log))",
        MERGING,
    ),
    Fault(
        "put a cluster's centre at its first key",
        ROOM + "partitioning.py",
        "clusters = centres(clusters.point, clusters.mass, joined, room)",
        "place = torch.arange(joined.shape[1]).expand_as(joined)\n"
        "            least = torch.full_like(joined, 10**6).scatter_reduce(1, joined, place, 'amin')\n"
        "            first = torch.where(least.gather(1, joined) == place, joined, room)\n"
        "            heavy = centres(clusters.point, clusters.mass, first, room)\n"
        "            clusters = heavy._replace(mass=centres(clusters.point, clusters.mass, joined, room).mass)",
        MERGING + "::test_rounds_are_nearly_as_good_as_pairs_one_by_one",
    ),
    Fault(
        "merge absent keys",
        ROOM + "partitioning.py",
        "return torch.where(absent, num_clusters, number)",
        "return number.clamp(max=num_clusters - 1)",
        MERGING,
    ),
    Fault(
        "let a seed stand for itself alone",
        ROOM + "partitioning.py",
        "standing = root.gather(-1, place) * reach[:, -1:] / number",
        "standing = root.gather(-1, place).square()",
        MERGING,
    ),
    Fault(
        "take the queries' second moment for their variance",
        ROOM + "query_sample.py",
        "torch.where(there, self.query - mean, 0)",
        "torch.where(there, self.query, 0)",
        MERGING,
    ),
    Fault(
        "keep the mean query's bias for a sample's cluster",
        ROOM + "merging.py",
        "return self.weighted(self.log_mass - attended.log_attended(self.key))",
        "return self.weighted(self.log_mass - attended.log_attended(self.key.mean(2, keepdim=True)))",
        EVERYWHERE,
    ),
    Fault(
        "let padding change the sample",
        ROOM + "query_sample.py",
        "number.clamp(max=size)",
        "number * 0 + size",
        PADDING,
    ),
    Fault(
        "sample queries by their place in a call",
        ROOM + "stream.py",
        "first=start - begin",
        "first=0",
        MERGED,
    ),
    Fault(
        "keep the oldest queries of a stream",
        ROOM + "query_sample.py",
        "sample = torch.cat((self.query, rows), 2)[:, :, -size:]",
        "sample = torch.cat((self.query, rows), 2)[:, :, :size]",
        MERGING,
    ),
    Fault(
        "let keys leave the window a block early",
        ROOM + "stream.py",
        "return slice(max(begin - blocks.window - blocks.size, 0), max(begin - blocks.window, 0))",
        "return slice(max(begin - blocks.window, 0), max(begin - blocks.window + blocks.size, 0))",
        MERGED,
    ),
    Fault(
        "count the queries of masked tokens",
        ROOM + "stream.py",
        "tokens.bias[..., start:end] != -torch.inf",
        "tokens.bias[..., start:end] < torch.inf",
        MERGED,
    ),
    Fault(
        "cut a stream's gradient at the sampled queries",
        ROOM + "query_sample.py",
        "return QuerySample(sample, torch.cat",
        "return QuerySample(sample.detach(), torch.cat",
        MERGED,
    ),
    Fault(
        "count the neighbours twice",
        ROOM + "window.py",
        "near = torch.addcmul(near, sources.share, near_weight, value=-1)",
        "",
        EVERYWHERE,
    ),
    Fault(
        "leave what rounding makes of a cluster whose members are all near",
        ROOM + "window.py",
        "return torch.where(faint, -torch.inf, bias.unsqueeze(-1))",
        "return bias.unsqueeze(-1) + 0 * faint",
        EVERYWHERE,
    ),
    Fault(
        "take back the clusters' weights for another block",
        ROOM + "window.py",
        "blocks + torch.arange(blocks, device=rows.device).unsqueeze(-1)",
        "blocks + torch.arange(blocks, device=rows.device).flip(0).unsqueeze(-1)",
        EVERYWHERE,
    ),
    Fault(
        "let a key join one that is lighter",
        ROOM + "partitioning.py",
        "distance[..., start:].masked_fill_(rows.unsqueeze(-1) <= rows, torch.inf)",
        "distance[..., start:].masked_fill_(rows.unsqueeze(-1) == rows, torch.inf)",
        EVERYWHERE,
    ),
    Fault(
        "keep merged keys in the tokens' precision",
        ROOM + "keys.py",
        "dtype = torch.promote_types(key.dtype, torch.float32)",
        "dtype = key.dtype",
        MERGED,
    ),
    Fault(
        "count blocks from the first position",
        ROW_GROUPS,
        ".all(1).cumprod(-1).sum(-1)",
        ".all(1).cumprod(-1).sum(-1) * 0",
        LEFT_PADDING_LAWS,
    ),
    Fault(
        "let a row that waits begin with padding",
        ROW_GROUPS,
        "if is_waiting else part",
        "if False else part",
        LEFT_PADDING_LAWS,
    ),
    Fault(
        "let queries before a text see it",
        ROW_GROUPS,
        "[:, None, None, length - num_queries :] & call.is_causal",
        "[:, None, None, length - num_queries :] & False",
        LEFT_PADDING_LAWS,
    ),
    Fault(
        "give rows in the order of their groups",
        ROW_GROUPS,
        "if order == sorted(order):",
        "if True:",
        LEFT_PADDING_LAWS,
    ),
    Fault(
        "select rows of a group by their numbers in the batch",
        ROW_GROUPS,
        "[place[indices[new]] for new in chosen]",
        "[indices[new] % len(rows) for new in chosen]",
        LEFT_PADDING_LAWS,
    ),
    Fault(
        "take free places of shorter groups for keys",
        ROW_GROUPS,
        "value=-torch.inf",
        "value=0.0",
        LEFT_PADDING_LAWS,
    ),
    Fault(
        "take any rows for those of a group",
        ROW_GROUPS,
        "or sorted(numbers) != list(range(batch))",
        "",
        LEFT_PADDING_LAWS,
    ),
)
