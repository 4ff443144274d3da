"""What merged keys are where every key is in view: a sample's attention is kept, and no key counts twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linattn
from grid import qkv, relative_error
from linattn import MergedKV
from linattn.kv_cache import bidirectional as everywhere
from linattn.kv_cache import partitioning
from linattn.kv_cache import window as beside
from linattn.kv_cache.merging import ClusterMeans
from linattn.kv_cache.query_sample import SampleAttention
from linattn.softmax.attention import Scoring
from linattn.softmax.tokens import Tokens

LENGTH = 61


def attend(query: Tensor, key: Tensor, value: Tensor, config: MergedKV, **options: object) -> Tensor:
    """Merged attention, heads grouped."""
    return linattn.merged_attention(query, key, value, config, enable_gqa=True, **options)


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("window", [1, 4, 16])
def test_no_key_counts_twice(window: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block reads its neighbours as they are, and of the clusters the shares of all other keys."""
    found: list[tuple[Tensor, ClusterMeans, Tensor]] = []
    conserving = ClusterMeans.conserving

    def noted(means: ClusterMeans, attended: SampleAttention) -> object:
        """What the call made of its keys."""
        few = conserving(means, attended)
        found.append((means.share, means, few.bias))
        return few

    monkeypatch.setattr(ClusterMeans, "conserving", noted)
    clusters, numbers = everywhere._clusters, []
    monkeypatch.setattr(everywhere, "_clusters", lambda *given: numbers.append(clusters(*given)) or numbers[-1])
    query, key, value = qkv(num_queries=LENGTH, num_keys=LENGTH, scale=scale)
    out = attend(query, key, value, MergedKV(window, 9, bits=None)).unflatten(1, (2, 2))
    (share, means, bias), (number,) = found[-1], numbers
    place = torch.arange(LENGTH) // window
    near = (place.unsqueeze(-1) - place).abs() <= 1
    grouped = query.unflatten(1, (2, 2)) * key.shape[-1] ** -0.5
    cluster = grouped @ means.key.mT.unsqueeze(2) + bias[:, :, None, None]
    own = torch.take_along_dim(cluster, number[:, :, None, None], -1) + share[:, :, None, None].log()
    logits = torch.where(near, grouped @ key.mT.unsqueeze(2), own)
    truth = torch.softmax(logits, -1) @ value.unsqueeze(2)
    torch.testing.assert_close(out, truth, rtol=1e-7, atol=1e-7)


def test_long_calls_draw_the_keys_that_clusters_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is of the same size, and enough clusters still lose nothing."""
    query, key, value = qkv(num_queries=LENGTH, num_keys=LENGTH)
    truth = linattn.softmax_attention(query, key, value, enable_gqa=True)
    error = relative_error(attend(query, key, value, MergedKV(None, 12, bits=None)), truth)
    monkeypatch.setattr(everywhere, "_SEEDS", 20)
    monkeypatch.setattr(everywhere, "_SEEDS_PER_CLUSTER", 2)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 13:] = False
    assert relative_error(attend(query, key, value, MergedKV(None, 12, bits=None)), truth) < 1.5 * error
    found = attend(query, key, value, MergedKV(None, 13, bits=None), key_mask=mask)[1]
    wanted = linattn.softmax_attention(query, key, value, enable_gqa=True, key_mask=mask)[1]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_no_choice_hangs_on_the_default_dtype(dtype: torch.dtype) -> None:
    """A model may run under that of its weights; of so many keys some are drawn, in even steps."""
    tokens, config, before = qkv(num_queries=700, num_keys=700), MergedKV(None, 9, bits=None), torch.get_default_dtype()
    wanted = attend(*tokens, config)
    try:
        torch.set_default_dtype(dtype)
        out = attend(*tokens, config)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_a_sample_attends_to_a_cluster_what_it_attends_to_the_members(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On average, by the exact normalisers; and the values' sum by these weights is kept."""
    query, key, value = qkv(num_queries=LENGTH, num_keys=LENGTH, scale=1.5)
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.3 if masked else None
    few = []
    monkeypatch.setattr(
        everywhere, "read", lambda query, tokens, *_, **__: few.append(tokens) or everywhere.Reading(query, None)
    )
    attend(query, key, value, MergedKV(None, 9, bits=None), key_mask=mask)
    merged, grouped = few[0], query.unflatten(1, (2, 2)) * key.shape[-1] ** -0.5
    bias = torch.zeros(2, 1, LENGTH) if mask is None else torch.where(mask, 0, -torch.inf).unsqueeze(1)
    logits = grouped @ key.mT.unsqueeze(2) + bias[:, :, None, None]
    weights = (grouped @ merged.key.mT.unsqueeze(2) + merged.bias[:, :, None, None]) - logits.logsumexp(-1, True)
    live = torch.ones(2, LENGTH) if mask is None else mask.double()
    count = live[:, None, None, :, None]
    ours = (weights.exp() * count).sum((2, 3)).unsqueeze(-2) @ merged.value
    exact = (torch.softmax(logits, -1) * count).sum((2, 3)).unsqueeze(-2)
    torch.testing.assert_close((weights.exp() * count).sum((2, 3, 4)), exact.sum((-1, -2)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, exact @ value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 100, 1000])
@pytest.mark.parametrize(
    "config", [MergedKV(None, 9, bits=None), MergedKV(4, 9, bits=None), MergedKV(16, 9, bits=None)], ids=str
)
def test_how_much_is_held_at_once_changes_nothing(
    config: MergedKV, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a block, blocks of a head, heads: outputs and gradients, of rows that are padded too."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 50:] = False
    found = []
    for held in (None, chunk):
        for room in (everywhere, beside, partitioning) if held else ():
            monkeypatch.setattr(room, "_CHUNK", held)
        leaves = [x.requires_grad_() for x in qkv(num_queries=LENGTH, num_keys=LENGTH)]
        out = attend(*leaves, config, key_mask=mask)
        with torch.no_grad():
            torch.testing.assert_close(attend(*leaves, config, key_mask=mask), out, rtol=1e-12, atol=1e-12)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for ours, whole in zip(*found, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_taken_back_leaves_weights_of_a_mean(dtype: torch.dtype) -> None:
    """Where nearly all of a cluster is near too: a remainder has lost half of the digits at most."""
    query, key, value = (x.to(dtype) for x in qkv(num_queries=LENGTH, num_keys=LENGTH, scale=30.0))
    grouped = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    lowest, highest = (grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True))
    room = 8 * torch.finfo(dtype).eps ** 0.5 * grouped.abs().max()
    for window in (1, 4, 16):
        out = attend(query, key, value, MergedKV(window, 9, bits=None))
        assert ((out >= lowest - room) & (out <= highest + room)).all()


def test_a_cluster_whose_members_are_all_near_is_left_out() -> None:
    """However large its weight: what rounding leaves of it would be larger than all others."""
    length, window = 20, 4
    query, key, value = qkv(num_queries=length, num_keys=length, heads=2, value_dim=5)
    number = torch.arange(length).div(window, rounding_mode="floor").clamp(max=1).expand(2, 2, -1)
    weight = torch.rand(2, 2, length, generator=torch.Generator().manual_seed(2)) + 0.1
    members = torch.nn.functional.one_hot(number, 2).double() * weight.unsqueeze(-1)
    members = members / members.sum(2, keepdim=True)
    share, means = members.sum(-1), [members.mT @ x for x in (key, value)]
    bias = torch.tensor([60.0, 0.0], dtype=torch.float64).expand(2, 2, -1)
    clusters, tokens = Tokens(*means, bias), Tokens(key, value, torch.zeros(2, 2, length, dtype=torch.float64))
    found = beside.read_beside_neighbours(
        query.unsqueeze(2), tokens, clusters, number, share, window, Scoring(1.0), with_log=False
    ).out.squeeze(2)
    place = torch.arange(length) // window
    near = (place.unsqueeze(-1) - place).abs() <= 1
    cluster = query @ clusters.key.mT + bias.unsqueeze(2)
    own = torch.take_along_dim(cluster, number.unsqueeze(2), -1) + share.unsqueeze(2).log()
    truth = torch.softmax(torch.where(near, query @ key.mT, own), -1) @ value
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9)
