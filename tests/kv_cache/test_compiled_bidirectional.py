"""Merged keys with every key in view, in compiled code: the rows of plain torch, in float32."""

from __future__ import annotations

import pytest
import torch

import linattn
from grid import qkv
from linattn import MergedKV
from linattn.methods.measures import relative_error
from merged_rows import LENGTH, TOLERANCE, biases, everywhere, given

pytest.importorskip("linattn_compiled")

EVERYWHERE = (
    MergedKV(None, 6, bits=None),
    MergedKV(7, 6, bits=None),
    MergedKV(1, 20, bits=None),
    MergedKV(64, 100, bits=None),
)


@pytest.mark.parametrize("bias", ["none", "masks", "biases", "heads"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("config", EVERYWHERE, ids=str)
def test_it_is_what_plain_torch_is(config: MergedKV, groups: int, bias: str) -> None:
    tokens, weights = given(groups), biases(bias)
    ours, theirs = (everywhere(tokens, config, backend, key_bias=weights) for backend in ("compiled", "torch"))
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("masked", [0.0, 0.3, 0.9])
@pytest.mark.parametrize(
    "config", [MergedKV(None, 40, bits=None), MergedKV(32, 40, bits=None), MergedKV(32, 200, bits=None)], ids=str
)
def test_of_many_keys_the_same_are_seeds(config: MergedKV, masked: float) -> None:
    """More of them than seeds, 512 or four times the clusters; or fewer, where the others are masked.

    In about one of a hundred key/value heads rounding decides which key is a seed or which of two pairs is merged, and
    a key is in another cluster then: that of two query heads here.
    """
    tokens = qkv(num_queries=2000, num_keys=2000, head_dim=24, value_dim=24, dtype=torch.float32)
    mask = torch.rand(2, 2000, generator=torch.Generator().manual_seed(1)) >= masked
    ours, theirs = (everywhere(tokens, config, backend, key_mask=mask) for backend in ("compiled", "torch"))
    truth = linattn.softmax_attention(*tokens, key_mask=mask, enable_gqa=True)
    ours, theirs, truth = (x.flatten(0, 1).unsqueeze(0) for x in (ours, theirs, truth))
    assert (relative_error(ours, theirs).sort().values[:-2] < 3 * TOLERANCE).all()
    assert (relative_error(ours, truth) < 1.2 * relative_error(theirs, truth) + TOLERANCE).all()


@pytest.mark.parametrize("window", [2000, 1000])
def test_a_window_that_holds_all_keys_is_softmax_attention(window: int) -> None:
    """What a cluster leaves of itself is rounding then, and left out, however much it weighs: to queries of length 0,
    which are not among the sampled ones, one that stands for what long ones see weighs far more than its members.
    """
    query, key, value = qkv(heads=2, num_queries=2000, num_keys=2000, dtype=torch.float32)
    for scale in (1.0, 30.0):
        given = (scale * query).index_fill(2, torch.tensor([5, 6, 7]), 0), key, value
        truth = linattn.softmax_attention(*(x.double() for x in given))
        found = everywhere(given, MergedKV(window, 1, bits=None))
        torch.testing.assert_close(found.double(), truth, rtol=scale * TOLERANCE, atol=scale * TOLERANCE)


def test_few_keys_are_refused_for_what_many_are() -> None:
    """Where none are merged too: a call that runs on a short text runs on a long one."""
    for length in (5, LENGTH):
        tokens = (x[:, :, :length].double() for x in given())
        with pytest.raises(ValueError, match="takes float32, bfloat16 and float16, and the tensors are"):
            everywhere(tuple(tokens), MergedKV(None, 20, bits=None), "compiled")


def test_queries_may_be_others_than_keys() -> None:
    tokens = qkv(num_queries=70, num_keys=LENGTH, dtype=torch.float32)
    options = {"enable_gqa": True, "config": MergedKV(None, 20, bits=None), "key_bias": biases("heads")}
    rows = [linattn.merged_partial(*tokens, backend=backend, **options) for backend in ("compiled", "torch")]
    torch.testing.assert_close(*rows, rtol=TOLERANCE, atol=TOLERANCE)
    assert (rows[0].log_normalizer[1, 2:] == -torch.inf).all()


@pytest.mark.parametrize("config", EVERYWHERE, ids=str)
def test_masked_tokens_are_inert(config: MergedKV) -> None:
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[0, :9], results = False, []
    for filling in (0.0, torch.nan, torch.inf):
        tokens = tuple(x.masked_fill(~mask[:, None, :, None], filling) for x in given())
        results.append(everywhere(tokens, config, key_mask=mask).masked_fill(~mask[:, None, :, None], 0))
    assert all(torch.equal(x, results[0]) for x in results[1:])


@pytest.mark.parametrize("config", [MergedKV(None, 6, bits=None), MergedKV(7, 100, bits=None)], ids=str)
def test_an_infinite_value_is_merged_last(config: MergedKV) -> None:
    """All other keys are weighed as in plain torch."""
    query, key, value = given()
    value[0, 1, 150, 0], value[1, 0, 90, 3] = torch.inf, -torch.inf
    rows = [linattn.merged_partial(query, key, value, config, backend=backend) for backend in ("compiled", "torch")]
    torch.testing.assert_close(*(each.log_normalizer for each in rows), rtol=TOLERANCE, atol=TOLERANCE)
    assert (rows[0].out == torch.inf).any()


def test_nan_stays_in_its_head() -> None:
    config, (query, key, value) = MergedKV(16, 40, bits=None), given()
    clean = everywhere((query, key, value), config)
    key[0, 1, 150, 0] = torch.nan
    query[1, 0, 90, 0] = torch.nan
    found = everywhere((query, key, value), config)
    assert found[0, 1].isnan().any()
    assert found[1, 0, 90].isnan().all()
    assert torch.equal(found[0, 0], clean[0, 0])
    assert torch.equal(found[1, 1], clean[1, 1])


@pytest.mark.parametrize("config", EVERYWHERE, ids=str)
def test_outputs_lie_in_the_hull_of_the_values(config: MergedKV) -> None:
    query, key, value = given()
    for scale in (0.7, 30.0):
        out = everywhere((query, scale * key, value), config)
        slack = 30 * TOLERANCE * value.abs().max()
        assert (out <= value.amax(2, keepdim=True) + slack).all()
        assert (out >= value.amin(2, keepdim=True) - slack).all()
