"""Contenders against their definitions, written as loops over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize
from torch.utils import _pytree as pytree

from linattn import MergedKV, merged_attention, merged_attention_with_state
from linattn.kv_cache.budget import Sizes
from linattn.softmax.tokens import Tokens
from linattn_lab.contenders import at_budget
from linattn_lab.contenders.attention_matching import AttentionMatching, compacted
from linattn_lab.contenders.expected_attention import ExpectedAttention
from linattn_lab.contenders.h2o import H2O
from linattn_lab.contenders.keydiff import KeyDiff
from linattn_lab.contenders.kivi import Kivi, rounded
from linattn_lab.contenders.merged import Merged
from linattn_lab.contenders.moment_kv import MomentKV
from linattn_lab.contenders.tova import Tova
from linattn_lab.contenders.uniform_sample import UniformSample
from linattn_lab.contenders.windows import SINKS, SinksAndWindow

L, D, DV, G, SCALE = 60, 5, 3, 2, 0.7
# Float64 sums of 60 terms, twice.
CLOSE = 1e-10
DRAW = torch.Generator().manual_seed(11)
Q = torch.randn(1, G, L, D, generator=DRAW, dtype=torch.float64)
K, V = (torch.randn(1, 1, L, width, generator=DRAW, dtype=torch.float64) for width in (D, DV))


def softmax_of(query, places, bias=0.0):
    """Weights (G, n) of one position's queries over keys by their places."""
    return (SCALE * query @ K[0, 0, places].T + bias).softmax(-1)


def evicting(num_keys, num_recent, num_sinks, worth):
    """A cache that evicts a key after every token: worth(places, masses, latest weights, t) says what each is worth."""
    held, mass, rows = [], torch.zeros(L, dtype=torch.float64), []
    for t in range(L):
        held.append(t)
        weights = softmax_of(Q[0, :, t], held)
        rows.append(weights @ V[0, 0, held])
        mass[held] += weights.mean(0)
        if len(held) > num_keys - 1:
            value = worth(held, mass[held], weights.mean(0), t)
            fair = [n for n, place in enumerate(held) if num_sinks <= place <= t - num_recent]
            held.pop(min(fair, key=lambda n: value[n]))
    return torch.stack(rows, 1)


def anchor_distance(held, mass, latest, t):
    key = normalize(K[0, 0, held], dim=-1)
    return -cosine_similarity(key, key.mean(0, keepdim=True))


def expected_weight(held, mass, latest, t):
    """By moments summed up anew: queries of the last token count 1, of one before it exp(-1/600)."""
    rows = (SCALE * Q[0, :, : t + 1]).transpose(0, 1).reshape(-1, D)
    share = torch.exp(-(t - torch.arange(t + 1, dtype=torch.float64)) / 600).repeat_interleave(G)
    share = share / share.sum()
    mean = share @ rows
    covariance = (rows - mean).T @ (share[:, None] * (rows - mean))
    key = K[0, 0, held]
    weight = (key @ mean + 0.5 * torch.einsum("nd,de,ne->n", key, covariance, key)).softmax(0)
    return (weight + 0.02) * V[0, 0, held].norm(dim=-1)


RULES = {
    "H2O": (H2O(20, num_recent=10, block=1), lambda held, mass, latest, t: mass),
    "TOVA": (Tova(20, block=1), lambda held, mass, latest, t: latest),
    "KeyDiff": (KeyDiff(20, num_recent=8, block=1), anchor_distance),
    "Expected Attention": (ExpectedAttention(20, num_recent=5, num_sinks=2, block=1), expected_weight),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_eviction(name):
    rule, worth = RULES[name]
    wanted = evicting(20, rule.num_recent, rule.num_sinks, worth)
    assert (rule.attend(Q, K, V, SCALE)[0] - wanted).abs().max() < CLOSE


def test_sinks_and_window():
    found = SinksAndWindow(9, num_sinks=2).attend(Q, K, V, SCALE)
    for t in range(L):
        places = [p for p in range(t + 1) if p < 2 or p > t - 7]
        wanted = softmax_of(Q[0, :, t], places) @ V[0, 0, places]
        assert (found[0, :, t] - wanted).abs().max() < CLOSE


def test_far_part_off_is_the_window_of_merged_keys_with_sinks():
    found, merged = (at_budget(100, Sizes(8, 8)).contenders[kind] for kind in ("far part off", "merged keys, 50% near"))
    assert found.num_keys == merged.config.blocks.window + merged.config.blocks.size + SINKS
    assert torch.equal(found.attend(Q, K, V, SCALE), SinksAndWindow(found.num_keys).attend(Q, K, V, SCALE))


def test_uniform_sample_weighs_by_how_many_were_left_out():
    rule = UniformSample(20, num_recent=8, num_sinks=2, block=1)
    found = rule.attend(Q, K, V, SCALE)
    rank, held = torch.rand(L, generator=torch.Generator().manual_seed(0), dtype=torch.float64), []
    for t in range(L):
        held.append(t)
        between = [p for p in held if 2 <= p < t - 8]
        number = max(t - 8 - 2, 1)
        shift = math.log(max(number / max(len(between), 1), 1))
        bias = torch.tensor([shift if p in between else 0.0 for p in held], dtype=torch.float64)
        wanted = softmax_of(Q[0, :, t], held, bias) @ V[0, 0, held]
        assert (found[0, :, t] - wanted).abs().max() < CLOSE
        if len(held) > 19:
            held.remove(min((p for p in held if 2 <= p < t + 1 - 8), key=lambda p: rank[p]))


def test_moments_of_what_is_evicted():
    size = 20
    found = MomentKV(size, block=1).attend(Q, K, V, SCALE)
    held, gone, mass = [], [], torch.zeros(L, dtype=torch.float64)
    for t in range(L):
        held.append(t)
        logits = SCALE * Q[0, :, t] @ K[0, 0, held].T
        value = V[0, 0, held].expand(G, -1, -1)
        if gone:
            key, beyond = K[0, 0, gone], V[0, 0, gone]
            far = SCALE * Q[0, :, t] @ key.mean(0) + math.log(len(gone))
            covariance = (beyond - beyond.mean(0)).T @ (key - key.mean(0)) / len(gone)
            first_order = beyond.mean(0) + SCALE * Q[0, :, t] @ covariance.T
            logits = torch.cat((logits, far[:, None]), -1)
            value = torch.cat((value, first_order[:, None]), 1)
        weights = logits.softmax(-1)
        assert (found[0, :, t] - (weights[:, None] @ value)[:, 0]).abs().max() < CLOSE
        mass[held] += weights[:, : len(held)].mean(0)
        if len(held) > size - 1:
            worth = mass[held].clone()
            if gone:
                worth *= 1 - cosine_similarity(V[0, 0, held], V[0, 0, gone].mean(0, keepdim=True))
            fair = [n for n, p in enumerate(held) if SINKS <= p < t + 1 - size // 2]
            gone.append(held.pop(min(fair, key=lambda n: float(worth[n]))))


def test_compaction_matches_what_its_queries_saw():
    tokens = Tokens(K, V, torch.zeros(1, 1, L, dtype=torch.float64))
    query = Q.unsqueeze(1)[:, :, :, :4]  # 8 rows, fewer than the 30 keys: both fits can be exact
    few = compacted(query, tokens, 30, SCALE)

    def saw(keys):
        logits = SCALE * query[0, 0] @ keys.key[0, 0].T + keys.bias[0, 0]
        return logits.softmax(-1) @ keys.value[0, 0], logits.logsumexp(-1)

    (out, mass), (wanted_out, wanted_mass) = saw(few), saw(tokens)
    assert few.key.shape[2] == 30
    # The ridge leaves a thousandth of what is fitted; the mass's fit ends after 100 steps.
    plain = tokens.pick(few.key.new_zeros(1, 1, 30).long() + torch.arange(30))
    assert (out - wanted_out).norm() < 0.05 * (saw(plain)[0] - wanted_out).norm()
    assert (mass - wanted_mass).abs().max() < 0.1 * (saw(plain)[1] - wanted_mass).abs().max()


def test_compaction_keeps_the_keys_of_largest_mean_square_weight():
    tokens = Tokens(K, V, torch.zeros(1, 1, L, dtype=torch.float64))
    weights = (SCALE * Q[0, :, -9:].reshape(-1, D) @ K[0, 0].T).softmax(-1)
    best = weights.square().mean(0).topk(7).indices.sort().values
    few = compacted(Q.unsqueeze(1)[:, :, :, -9:], tokens, 7, SCALE)
    assert torch.equal(few.key[0, 0], K[0, 0, best])


def test_attention_matching_holds_no_more_than_its_room(monkeypatch):
    rule, most = AttentionMatching(24, block=4), []

    def counting(query, tokens, room, scale):
        most.append(room)
        return compacted(query, tokens, room, scale)

    monkeypatch.setattr("linattn_lab.contenders.attention_matching.compacted", counting)
    rule.attend(Q, K, V, SCALE)
    assert most
    assert set(most) == {24 - 4 - rule.num_recent}


def test_kivi_reads_rounded_groups_and_whole_latest_tokens():
    found = Kivi(4, 32).attend(Q.repeat(1, 1, 3, 1), *(x.repeat(1, 1, 3, 1) for x in (K, V)), SCALE)
    key, value = (x[0, 0].repeat(3, 1) for x in (K, V))
    coarse_key = torch.cat([rounded(part.T, 4).T for part in key.split(32)])
    coarse_value = rounded(value, 4)
    query = Q[0].repeat(1, 3, 1)
    for t in (0, 31, 40, 70, 127, 130, 179):
        near = max(t // 32 * 32 - 32, 0)
        far = list(range(near)) if near <= 32 else list(range(32))  # room for one group: the first stays
        keys = torch.cat((coarse_key[far], key[near : t + 1]))
        values = torch.cat((coarse_value[far], value[near : t + 1]))
        wanted = (SCALE * query[:, t] @ keys.T).softmax(-1) @ values
        assert (found[0, :, t] - wanted).abs().max() < CLOSE


@pytest.mark.parametrize("config", [MergedKV(6, 8, None), MergedKV(6, 20, 4)], ids=str)
def test_merged_is_the_op_with_the_bytes_of_its_state(config):
    rule = Merged(config)
    wanted = merged_attention(Q * (SCALE * D**0.5), K, V, config, is_causal=True, enable_gqa=True)
    assert torch.equal(rule.attend(Q, K, V, SCALE), wanted)
    # Of narrow tokens the window alone is narrow.
    for dtype in (torch.float64, torch.bfloat16):
        given, sizes = (x.to(dtype) for x in (Q, K, V)), Sizes(D, DV, dtype.itemsize, Q.shape[1] // K.shape[1])
        state = merged_attention_with_state(*given, config, enable_gqa=True).state
        held = sum(x.nbytes for x in pytree.tree_leaves(state) if isinstance(x, torch.Tensor))
        assert held == rule.num_bytes(sizes, L)  # 60 tokens are ten whole blocks: two are held


@pytest.mark.parametrize("config", [MergedKV(6, 32, None), MergedKV(6, 40, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_keys_never_take_more_bytes_than_they_say(config, dtype):
    """At every token, while memory fills too, when narrow tokens leave the window for wider merged keys."""
    sizes, state = Sizes(D, DV, dtype.itemsize, Q.shape[1] // K.shape[1]), None
    least, kept = [], Merged(config)
    for t in range(L):
        token = (x[:, :, t : t + 1].to(dtype) for x in (Q, K, V))
        state = merged_attention_with_state(*token, config, state, enable_gqa=True).state
        held = sum(x.nbytes for x in pytree.tree_leaves(state) if isinstance(x, torch.Tensor))
        least.append(kept.num_bytes(sizes, t + 1) - held)
    assert min(least[16:]) == 0
    assert min(least) >= 0


def test_merged_keys_in_few_bits_are_whole_while_they_are_few():
    """Up to as many as the codes' bytes hold, 12 of 96 in 4 bits, the bytes are those of whole keys."""
    sizes, few, whole = Sizes(32, 32), Merged(MergedKV(4, 96, 4)), Merged(MergedKV(4, 96, None))
    for num_tokens in (3, 8, 24):
        assert few.num_bytes(sizes, num_tokens) == whole.num_bytes(sizes, num_tokens)
    assert few.num_bytes(sizes, 25) < whole.num_bytes(sizes, 25)
