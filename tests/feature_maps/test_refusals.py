"""Every refusal says what was got, what was wanted and what to do.

Letters: B batch, H heads, L tokens, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from linattn import linear_attention_with_state
from linattn.feature_maps import (
    FEATURE_MAPS,
    Balanced,
    Centred,
    Dpfp,
    ElementwisePolynomial,
    EluPlusOne,
    Expansion,
    FavorPlus,
    FeatureMap,
    Hedgehog,
    Hyperbolic,
    LearnedExponential,
    Oprf,
    RandomRelu,
    Relu,
    Sderf,
    Taylor,
    TensorPolynomial,
    Trigonometric,
    features,
)

X = torch.zeros(1, 1, 3, 4)
ONE_MEAN = {"query_mean": torch.zeros(1, 4)}

REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: EluPlusOne(0), ValueError, "head_dim must be an integer of at least 1, got 0"),
    (lambda: EluPlusOne(True), ValueError, "head_dim must be an integer of at least 1, got True"),
    (lambda: Relu(4, floor=-1.0), ValueError, "floor must be a finite number >= 0, got -1.0"),
    (lambda: Relu(4, floor=math.nan), ValueError, "floor must be a finite number"),
    (lambda: ElementwisePolynomial(4, degree=0), ValueError, "degree must be an integer of at least 1, got 0"),
    (lambda: Dpfp(1), ValueError, "head_dim must be an integer of at least 2, got 1"),
    (lambda: Dpfp(4, nu=8), ValueError, "nu must be below 2\\*head_dim=8"),
    (lambda: TensorPolynomial(4, degree=1.5), ValueError, "degree must be an integer"),
    (lambda: TensorPolynomial(4, constant=-1.0), ValueError, "constant must be a finite number >= 0"),
    (lambda: TensorPolynomial(4, scale=0.0), ValueError, "scale must be a finite number > 0, got 0.0"),
    (lambda: TensorPolynomial(0), ValueError, "head_dim must be an integer of at least 1, got 0"),
    (lambda: Taylor(4, order=1.0), ValueError, "order must be 1 or 2, got 1.0"),
    (lambda: Expansion(4, 2, order=1.0), ValueError, "order must be 0, 1 or 2, got 1.0"),
    (lambda: Taylor(4, order=3), ValueError, "order must be 1 or 2, got 3; for higher powers use TensorPolynomial"),
    (lambda: Taylor(4, scale=math.inf), ValueError, "scale must be a finite number > 0, got inf"),
    (lambda: Taylor(4, scale=10**400), ValueError, "scale must be a finite number > 0, got 1000"),
    (lambda: FavorPlus(4, 0), ValueError, "num_features must be an integer of at least 1, got 0"),
    (lambda: FavorPlus(4, 8, draw="qmc"), ValueError, r"draw must be one of \('orthogonal', 'iid'\), got 'qmc'"),
    (lambda: FavorPlus(4, 8, lengths="unit"), ValueError, r"lengths must be one of \('chi', 'fixed'\), got 'unit'"),
    (lambda: FavorPlus(4, 8, scale=-1.0), ValueError, "scale must be a finite number > 0, got -1.0"),
    (lambda: FavorPlus(4, 8, seed=-1), ValueError, "seed must be an integer of at least 0, got -1"),
    (lambda: FavorPlus(4, 8, seed=2**63), ValueError, "seed must be below 2\\*\\*63"),
    (lambda: FavorPlus(4, 8, num_heads=0), ValueError, "num_heads must be an integer of at least 1, got 0"),
    (lambda: FavorPlus(4, 8).redraw(1.0), ValueError, "seed must be an integer"),
    (lambda: FavorPlus(4, 8, num_heads=2).query(torch.zeros(1, 3, 5, 4)), ValueError, "num_heads=2, got .* 3 heads"),
    (lambda: Hyperbolic(4, 7), ValueError, "num_features must be a multiple of 2, got 7"),
    (lambda: Trigonometric(4, 7), ValueError, "num_features must be a multiple of 2, got 7"),
    (lambda: Trigonometric(4, 8, lengths="fixed"), ValueError, r"lengths must be one of \('chi',\), got 'fixed'"),
    (lambda: Oprf(4, 8).query(X), ValueError, r"call fit\(query, key\) on sample inputs, or give mean_square"),
    (lambda: Oprf(4, 8, mean_square=-1.0), ValueError, "mean_square must be a finite number >= 0"),
    (lambda: Oprf(4, 8).fit(X, X[0]), ValueError, r"fit wants query \(B, H, Lq, 4\)"),
    (lambda: Oprf(4, 8).fit(X.expand(1, 3, 3, 4), X.expand(1, 2, 3, 4)), ValueError, "H a multiple of Hkv"),
    (lambda: Oprf(4, 8).fit(X[:, :, :0], X), ValueError, "not empty"),
    (lambda: Oprf(4, 8).fit(X, X / 0), ValueError, "not finite; remove padded positions"),
    (lambda: RandomRelu(4, 8, floor=-1.0), ValueError, "floor must be a finite number >= 0"),
    (lambda: Centred(EluPlusOne(4)), TypeError, "wants a map for the softmax kernel, got EluPlusOne"),
    (lambda: Centred(FavorPlus), TypeError, "wants a map for the softmax kernel"),
    (lambda: Centred(Centred(Taylor(4))), TypeError, "centred already"),
    (lambda: Centred(Taylor(4), **ONE_MEAN), ValueError, "both query_mean and key_mean, or neither"),
    (lambda: Centred(Taylor(4), **ONE_MEAN, key_mean=torch.zeros(4)), ValueError, "beside query_mean, got"),
    (lambda: Centred(Taylor(4)).query(X), ValueError, "Centred has no query_mean and key_mean: call fit"),
    (lambda: Centred(Taylor(4)).key_log_weight(X), ValueError, "not causal, which takes these from the call"),
    (lambda: Centred(Taylor(4)).fit(X, X[0]), ValueError, r"fit wants query \(B, H, Lq, 4\)"),
    (
        lambda: Centred(Taylor(4)).fit(X.expand(1, 2, 3, 4), X.expand(1, 2, 3, 4)).query(X),
        ValueError,
        "2 key/value heads",
    ),
    (
        lambda: Centred(Taylor(4)).call_tensors(X, X, key_mask=None, is_causal=True),
        ValueError,
        r"leak the future into causal attention; call fit\(query, key\)",
    ),
    (lambda: Centred(Oprf(4, 8), **ONE_MEAN, key_mean=torch.zeros(1, 4)).query(X), ValueError, "Oprf does not know"),
    (
        lambda: Centred(Balanced(Taylor(4))).call_tensors(X, X, key_mask=None, is_causal=True),
        ValueError,
        "leak the future",
    ),
    (lambda: Balanced(EluPlusOne(4)), TypeError, "Balanced wants a map for the softmax kernel, got EluPlusOne"),
    (lambda: Balanced(Balanced(Taylor(4))), TypeError, "without a wrapper, got Balanced"),
    (lambda: Balanced(Centred(Taylor(4))), TypeError, r"without a wrapper, got Centred.*Centred\(Balanced\(inner\)\)"),
    (lambda: Balanced(Taylor(4), ridge=0.0), ValueError, "ridge must be a finite number > 0, got 0.0"),
    (lambda: Balanced(Taylor(4), ridge=2.0), ValueError, "at most 1, got 2.0"),
    (lambda: Balanced(Taylor(4), transform=torch.eye(3)), ValueError, r"transform must be \(Hkv, 4, 4\) or \(4, 4\)"),
    (lambda: Balanced(Taylor(4), transform=torch.ones(4, 4)), ValueError, "transform must be invertible"),
    (lambda: Balanced(Taylor(4), transform=torch.eye(4) / 0), ValueError, "transform must be finite"),
    (lambda: Balanced(Taylor(4), transform=[[1.0]]), TypeError, "transform must be a floating tensor, got list"),
    (lambda: Balanced(Taylor(4)).query(X), ValueError, r"Balanced has no transform: call fit\(query, key\)"),
    (lambda: Balanced(Taylor(4)).key_log_weight(X), ValueError, "Balanced has no transform"),
    (lambda: Balanced(Taylor(4)).fit(X, X / 0), ValueError, "not finite; remove padded positions"),
    (
        lambda: Balanced(Taylor(4)).fit(X.expand(1, 2, 3, 4), X.expand(1, 2, 3, 4)).key(X),
        ValueError,
        "2 key/value heads",
    ),
    (lambda: Sderf(4, 8).query(X), ValueError, r"Sderf has no second_moment: call fit\(query, key\) on sample"),
    (lambda: Sderf(4, 8).fit(X, X[0]), ValueError, r"fit wants query \(B, H, Lq, 4\)"),
    (lambda: Sderf(4, 8, second_moment=torch.eye(3)), ValueError, r"must be \(Hkv, 4, 4\) or \(4, 4\), got \(3, 3\)"),
    (lambda: Sderf(4, 8, second_moment=torch.ones(4, 4).triu()), ValueError, "must be symmetric"),
    (lambda: Sderf(4, 8, second_moment=torch.eye(4) / 0), ValueError, "second_moment must be finite"),
    (
        lambda: Sderf(4, 8, second_moment=torch.eye(4).cfloat()),
        TypeError,
        "second_moment must be a floating tensor, got torch.complex64",
    ),
    (lambda: Expansion(4, 1, centres=torch.zeros(1, 4) / 0), ValueError, "centres must be finite"),
    (lambda: Expansion(4, 1, centres=[[1.0] * 4]), TypeError, "centres must be a floating tensor, got list"),
    (lambda: Expansion(4, 1, centres=torch.ones(1, 4).cfloat()), TypeError, "got torch.complex64"),
    (lambda: Centred(Taylor(4), **ONE_MEAN, key_mean=torch.ones(1, 4) / 0), ValueError, "key_mean must be finite"),
    (lambda: Centred(Taylor(4), **ONE_MEAN, key_mean=1.0), TypeError, "key_mean must be a floating tensor, got float"),
    (lambda: Sderf(4, 8, second_moment=-torch.eye(4)), ValueError, "must be positive semidefinite"),
    (
        lambda: Sderf(4, 8, num_heads=3).fit(X.expand(1, 2, 3, 4), X.expand(1, 2, 3, 4)),
        ValueError,
        "drawn for num_heads=3, got second moments of 2 heads",
    ),
    (lambda: Sderf(4, 8).fit(X.expand(1, 2, 3, 4), X.expand(1, 2, 3, 4)).query(X), ValueError, "2 key/value heads"),
    (lambda: LearnedExponential(4, 0), ValueError, "num_features must be an integer of at least 1, got 0"),
    (lambda: LearnedExponential(4, 8, scale=0.0), ValueError, "scale must be a finite number > 0, got 0.0"),
    (lambda: LearnedExponential(4, 8, seed=-1), ValueError, "seed must be an integer of at least 0, got -1"),
    (lambda: LearnedExponential(4, 8, num_heads=0), ValueError, "num_heads must be an integer of at least 1, got 0"),
    (lambda: Hedgehog(4, num_heads=1.5), ValueError, "num_heads must be an integer of at least 1, got 1.5"),
    (lambda: Hedgehog(0), ValueError, "head_dim must be an integer of at least 1, got 0"),
    (lambda: Hedgehog(4, num_heads=2).key(X.expand(1, 3, 3, 4)), ValueError, "built for num_heads=2, got .* 3 heads"),
    (lambda: Centred(Hedgehog(4)), TypeError, "wants a map for the softmax kernel, got Hedgehog"),
    (lambda: features(Taylor(4), X, "value"), ValueError, 'side must be "query" or "key", got \'value\''),
]


@pytest.mark.parametrize(("action", "kind", "message"), REFUSED, ids=[message[:50] for *_, message in REFUSED])
def test_refusal(action: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        action()


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_another_head_width_is_refused(build: Callable[..., FeatureMap], name: str) -> None:
    feature_map, wrong = build(name), torch.zeros(2, 7)
    for action in (feature_map.query, feature_map.key, lambda x: feature_map.kernel(x, x)):
        with pytest.raises(ValueError, match=f"{name} was built for head_dim=6, got vectors of width 7"):
            action(wrong)


def test_a_wrapper_has_its_inner_map_s_heads() -> None:
    """One key/value head would be broadcast over those of the map."""
    zero = torch.zeros(1, 4)
    wrapped = Centred(FavorPlus(4, 8, num_heads=2), query_mean=zero, key_mean=zero)
    with pytest.raises(ValueError, match="holds one set of parameters for each of 2 key/value heads, got 1 heads"):
        linear_attention_with_state(torch.ones(1, 2, 1, 4), *(torch.ones(1, 1, 1, 4),) * 2, wrapped, enable_gqa=True)
