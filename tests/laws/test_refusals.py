"""Wrong input is refused in words: what was got, what was wanted, what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import linattn
from grid import build, qkv
from linattn.feature_maps import Centred, EluPlusOne, FavorPlus

Q, K, V = qkv(heads=2)
MAP = FavorPlus(8, 12)
PART = linattn.softmax_partial(Q, K, V)


def attend(query=Q, key=K, value=V, feature_map=MAP, **options):
    return linattn.linear_attention(query, key, value, feature_map, **options)


def step(state, feature_map=MAP, value=V):
    return linattn.linear_attention_with_state(Q, K, value, feature_map, state)


def state_of(feature_map=MAP, **changes):
    options = {"batch_size": 2, "num_heads": 2, "value_dim": 5, "dtype": torch.float64} | changes
    return linattn.State.empty(feature_map, **options)


TABLE: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "map-class": (lambda: attend(feature_map=EluPlusOne), TypeError, "instance, got the class EluPlusOne; build it"),
    "map-other": (lambda: attend(feature_map=torch.relu), TypeError, "FeatureMap, got builtin_function.*FEATURE_MAPS"),
    "not-a-tensor": (lambda: attend(query=[1.0]), TypeError, "query must be a torch.Tensor, got list"),
    "three-dimensions": (lambda: attend(key=K[0]), ValueError, r"key must be \(B, H, L, width\).*got 3 dim.*unsqueeze"),
    "integers": (
        lambda: attend(value=V.long()),
        TypeError,
        r"value must be float16, bfloat16, float32 or float64, got torch.int64.*float\(\)",
    ),
    "float8": (
        lambda: attend(*(x.to(torch.float8_e4m3fn) for x in (Q, K, V))),
        TypeError,
        r"query must be float16, bfloat16, float32 or float64, got torch.float8_e4m3fn; call query.float",
    ),
    "meta": (
        lambda: attend(*(x.to("meta") for x in (Q, K, V))),
        ValueError,
        "value are on the meta device.*attention needs values.*FakeTensorMode",
    ),
    "no-heads": (
        lambda: attend(*(x[:, :0] for x in (Q, K, V))),
        ValueError,
        "query heads must be one or more, a multiple of the key/value heads, got 0 and 0; give",
    ),
    "no-query-heads": (
        lambda: attend(query=Q[:, :0], enable_gqa=True),
        ValueError,
        "key/value heads, got 0 and 2; give",
    ),
    **{
        f"state-of-{dtype}": (
            lambda dtype=dtype: state_of(dtype=dtype),
            TypeError,
            f"dtype must be that of tokens, float16, bfloat16, float32 or float64, got {dtype!r}",
        )
        for dtype in (torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn, "float32", None)
    },
    **{
        f"state-{name}-{size}": (
            lambda name=name, size=size: state_of(**{name: size}),
            ValueError,
            f"{name} must be an integer of at least 0, got {size!r}; give that of the tokens",
        )
        for name in ("batch_size", "num_heads", "value_dim")
        for size in (-1, 1.5, True, "3")
    },
    "state-to-a-dtype": (
        lambda: state_of().to(torch.float32),
        TypeError,
        "State.to takes a device, got torch.float32; to go on in tokens of another dtype, begin a new state",
    ),
    "dtypes": (
        lambda: attend(query=Q.float()),
        TypeError,
        "one dtype, got torch.float32, torch.float64, torch.float64",
    ),
    "devices": (lambda: attend(query=Q.to("meta")), ValueError, "one device, got meta, cpu, cpu"),
    "batch": (lambda: attend(query=Q[:1]), ValueError, "share the batch size, got 1 and 2"),
    "width": (lambda: attend(query=Q[..., :4]), ValueError, "share the head width, got 4 and 8"),
    "lengths": (lambda: attend(value=V[:, :, :5]), ValueError, "key and value must share"),
    "heads": (
        lambda: attend(query=Q.repeat(1, 2, 1, 1)),
        ValueError,
        "4 heads, key and value have 2; pass enable_gqa=True",
    ),
    "groups": (
        lambda: attend(query=torch.cat((Q, Q[:, :1]), 1), enable_gqa=True),
        ValueError,
        "multiple of the key/value heads, got 3 and 2",
    ),
    **{
        f"no-width-{call.__name__}": (
            lambda call=call, how=how: call(Q[..., :0], K[..., :0], V, *how),
            ValueError,
            "query must have a head width, got .*; give one number a head or more",
        )
        for call, how in (
            (linattn.linear_attention, [MAP]),
            (linattn.softmax_attention, []),
            (linattn.softmax_partial, []),
            (linattn.merged_attention, [linattn.MergedKV(None, 4)]),
        )
    },
    "head-dim": (
        lambda: attend(feature_map=FavorPlus(4, 12)),
        ValueError,
        "head_dim=4, got .* width 8; build it with head_dim=8",
    ),
    "num-heads": (
        lambda: attend(feature_map=FavorPlus(8, 12, num_heads=3)),
        ValueError,
        "each of 3 key/value heads, got 2 heads; build it with num_heads=2",
    ),
    "map-device": (
        lambda: attend(feature_map=FavorPlus(8, 12).to("meta")),
        ValueError,
        "map is on meta, the tensors on cpu",
    ),
    "mask-dtype": (
        lambda: attend(key_mask=torch.ones(2, 37)),
        TypeError,
        r"bool tensor.*got torch.float32.*mask.bool\(\), one of 0 and -inf with mask == 0",
    ),
    "mask-kind": (lambda: attend(key_mask=[True]), TypeError, "bool tensor.*got list"),
    "mask-shape": (
        lambda: attend(key_mask=torch.ones(2, 1, 37, 37, dtype=torch.bool)),
        ValueError,
        r"\(B, Lk\) = \(2, 37\), got \(2, 1, 37, 37\); it masks keys.*mask\[:, 0, 0\] .*is_causal=True",
    ),
    "mask-device": (
        lambda: attend(key_mask=torch.ones(2, 37, dtype=torch.bool, device="meta")),
        ValueError,
        "key_mask is on meta",
    ),
    "backend": (lambda: attend(backend="cuda"), ValueError, "'triton', 'compiled', got 'cuda'"),
    "call-means-causal": (
        lambda: attend(feature_map=Centred(FavorPlus(8, 12)), is_causal=True),
        ValueError,
        "fit",
    ),
    "state-kind": (lambda: step((1, 2)), TypeError, "linattn.State or None, got tuple"),
    "state-map": (
        lambda: step(state_of(EluPlusOne(8))),
        ValueError,
        "built with EluPlusOne.*got FavorPlus.*do not mix",
    ),
    "state-shape": (
        lambda: step(state_of(num_heads=4)),
        ValueError,
        r"= \(2, 4, 5\), got keys and values of \(2, 2, 5\)",
    ),
    "state-value-width": (lambda: step(state_of(value_dim=3)), ValueError, r"= \(2, 2, 3\), got"),
    "state-dtype": (lambda: step(state_of(dtype=torch.float32)), ValueError, "kept in torch.float32.*torch.float64"),
    "state-device": (lambda: step(state_of().to("meta")), ValueError, "state is on meta, the keys on cpu"),
    "merge-shape": (lambda: state_of().merge(state_of(value_dim=2)), ValueError, "cannot merge states of shapes"),
    "select": (
        lambda: state_of().select(torch.ones(2, dtype=torch.bool)),
        ValueError,
        "1-D integer tensor, got torch.bool",
    ),
    "select-list": (lambda: state_of().select([0]), TypeError, "1-D integer tensor, got list"),
    "merge-kind": (lambda: state_of().merge(None), TypeError, "takes another State, got NoneType"),
    "read-dtype": (lambda: state_of().read(MAP, Q.long()), TypeError, r"a floating tensor, got torch\.int64"),
    "read-shape": (lambda: state_of().read(MAP, Q[:1]), ValueError, r"query must be \(B=2, a multiple of 2 heads"),
    "combine-nothing": (lambda: linattn.combine(), ValueError, "at least one Partial"),
    "combine-shapes": (
        lambda: linattn.combine(linattn.softmax_partial(Q, K, V), linattn.softmax_partial(Q[:, :, :2], K, V)),
        ValueError,
        "partials of one shape",
    ),
    "combine-nones": (
        lambda: linattn.combine(PART, None),
        TypeError,
        r"one by one, got NoneType; give combine\(first, ",
    ),
    "combine-tensor": (lambda: linattn.combine(PART.out, PART), TypeError, "takes Partials one by one, got Tensor"),
    "combine-list": (lambda: linattn.combine([PART, PART]), TypeError, "takes Partials one by one, got list"),
    "combine-pair": (lambda: linattn.combine(PART, tuple(PART)), TypeError, "takes Partials one by one, got tuple"),
    "sparse-query": (
        lambda: attend(query=Q.to_sparse()),
        ValueError,
        r"query must be a dense tensor, got one of layout torch.sparse_coo; give query.to_dense\(\)",
    ),
    "sparse-key": (lambda: attend(key=K.to_sparse()), ValueError, "key must be a dense tensor"),
    "sparse-value": (
        lambda: linattn.softmax_attention(Q, K, V.to_sparse()),
        ValueError,
        r"value must be a dense tensor.*value.to_dense\(\)",
    ),
    "sparse-merged": (
        lambda: linattn.merged_attention(Q, K.to_sparse(), V, linattn.MergedKV(4, 8), is_causal=True),
        ValueError,
        "key must be a dense tensor",
    ),
    "sparse-mask": (
        lambda: attend(key_mask=torch.ones(2, 37, dtype=torch.bool).to_sparse()),
        ValueError,
        "key_mask must be a dense tensor",
    ),
    "sparse-bias": (
        lambda: attend(key_bias=torch.ones(2, 2, 37).to_sparse()),
        ValueError,
        "key_bias must be a dense tensor",
    ),
    "sparse-read": (lambda: state_of().read(MAP, Q.to_sparse()), ValueError, "tokens must be a dense tensor"),
    "sparse-features": (lambda: MAP.query(Q[0, 0].to_sparse()), ValueError, "x must be a dense tensor"),
    "rows-index": (
        lambda: linattn.attention_rows(Q, K, MAP, torch.tensor([0.0])),
        ValueError,
        "1-D integer tensor, got torch.float32",
    ),
    "rows-list": (lambda: linattn.attention_rows(Q, K, MAP, [0]), TypeError, "1-D integer tensor, got list"),
    "rows-range": (lambda: linattn.attention_rows(Q, K, MAP, torch.tensor([40])), ValueError, r"\[-37, 37\), got 40"),
    "softmax-scale": (
        lambda: linattn.softmax_attention(Q, K, V, scale=torch.nan),
        ValueError,
        "scale must be .* got nan",
    ),
    "softmax-integer": (
        lambda: linattn.softmax_attention(Q, K, V, scale=10**400),
        ValueError,
        "scale must be a finite number, or None",
    ),
    "softmax-numbers": (
        lambda: linattn.softmax_attention(Q, K, V, scale=torch.ones(2)),
        ValueError,
        "scale must be a finite number, or None",
    ),
    "softmax-words": (lambda: linattn.softmax_partial(Q, K, V, scale="1"), ValueError, "scale must be .* got '1'"),
    "softmax-heads": (lambda: linattn.softmax_attention(Q.repeat(1, 2, 1, 1), K, V), ValueError, "enable_gqa=True"),
}


@pytest.mark.parametrize("name", TABLE)
def test_refused_with_words(name: str) -> None:
    call, error, words = TABLE[name]
    with pytest.raises(error, match=words):
        call()


def test_every_option_is_a_keyword() -> None:
    for call in (linattn.linear_attention, linattn.linear_partial, linattn.softmax_attention):
        with pytest.raises(TypeError, match="positional"):
            call(Q, K, V, build("FavorPlus"), None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_rows_are_asked_for_by_integers_of_any_width(dtype: torch.dtype) -> None:
    """Of uint8 too, which torch's own indices read as a mask."""
    wanted = linattn.attention_rows(Q, K, MAP, torch.arange(37))
    assert torch.equal(linattn.attention_rows(Q, K, MAP, torch.arange(37, dtype=dtype)), wanted)
