"""Methods that are built for heads of a width attend as their ops do."""

from __future__ import annotations

import pytest
import torch

from linattn import MergedKV
from linattn.attention import linear_attention
from linattn.kv_cache import merged_attention
from linattn.methods.method import parse_method
from linattn_lab.built_methods import build


def test_merged_keys_attend_at_the_scale_they_are_built_for():
    method = parse_method("merged 3")
    q, k, v = torch.randn(1, 4, 9, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 3)
    for scale in (0.5, 1.3):
        built = build(method, 4, num_features=None, scale=scale, seed=0)
        assert (built.feature_map, built.num_features, built.scale) == (None, 0, scale)
        found = built.attend(q, k, v, is_causal=False)
        wanted = merged_attention(2 * scale * q, k, v, MergedKV(None, 3, None), enable_gqa=True)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 2])
def test_a_method_with_a_map_is_the_op(window):
    method = parse_method("FavorPlus" if window is None else f"FavorPlus + window {window}")
    built = build(method, 4, num_features=8, scale=0.5, seed=1)
    q, k, v = torch.randn(1, 4, 9, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 3)
    for is_causal in (False, True):
        expected = linear_attention(q, k, v, built.feature_map, is_causal=is_causal, enable_gqa=True, window=window)
        assert torch.equal(built.attend(q, k, v, is_causal=is_causal), expected)


@pytest.mark.parametrize(
    ("written", "num_features", "is_causal", "words"),
    [
        ("merged 8", None, True, "causal merged keys are those that leave a window"),
        ("Relu", None, True, None),
        ("merged 8", None, False, None),
        ("FavorPlus + window 4", 8, True, None),
    ],
)
def test_a_call_that_a_method_cannot_have_is_refused(written, num_features, is_causal, words):
    built = build(parse_method(written), 4, num_features=num_features, scale=0.5, seed=0)
    if words is None:
        built.check_call(9, is_causal=is_causal)
        return
    with pytest.raises(ValueError, match=words):
        built.check_call(9, is_causal=is_causal)
