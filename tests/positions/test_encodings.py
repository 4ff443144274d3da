"""Laws of every encoding before the map × every map: shift, fold, gradient, padding, batch, refusal, table."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import linattn
from grid import CAUSAL_MAPS, MAPS, build, qkv, tokens
from linattn.feature_maps import FavorPlus, FeatureMap, features
from linattn.nn import LinearAttention
from linattn.positions import (
    LearnedCodes,
    Position,
    Rotary,
    SinusoidalCodes,
    token_positions,
)
from linattn_lab.variance import variance

LENGTH, LONGEST = 19, 64
# All of them give queries and keys to a map of width 8.
ENCODINGS: dict[str, Callable[[], Position]] = {
    "Rotary": lambda: Rotary(8),
    "Rotary-of-any-map": lambda: Rotary(8, require_relative=False),
    "SinusoidalCodes": lambda: SinusoidalCodes(4, 4, amplitude=0.7, base=50.0),
    "LearnedCodes": lambda: LearnedCodes(5, 3, max_length=LONGEST, amplitude=0.5),
}
# Kernels of q·k by the definition of their maps; what softmax_kernel only stands for is left out.
OF_THE_PRODUCT = {
    "Identity",
    "TensorPolynomial",
    "Taylor",
    "Taylor-1",
}
IN_EXPECTATION = {
    *("FavorPlus", "FavorPlus-iid-fixed", "FavorPlus-per-head", "Hyperbolic", "Hyperbolic-fixed", "Trigonometric"),
    *("Oprf", "Sderf", "Sderf-iid-per-head", "RandomRelu", "Centred-FavorPlus", "Centred-Trigonometric"),
    *("Balanced-FavorPlus", "Balanced-Oprf", "Centred-Balanced-FavorPlus", "Centred-Balanced-Sderf"),
}
# What these take from a call turns with the queries and keys it is taken from.
OF_THE_CALL = {"Centred-call-FavorPlus", "Centred-call-Taylor", "Expansion-call"}


def admitted(name: str) -> tuple[str, ...]:
    """The maps that an encoding goes with."""
    if name == "Rotary":
        return tuple(x for x in MAPS if x in OF_THE_PRODUCT | IN_EXPECTATION | OF_THE_CALL)
    return MAPS


PAIRS = [(name, map_name) for name in ENCODINGS for map_name in admitted(name)]
CAUSAL_PAIRS = [pair for pair in PAIRS if pair[1] in CAUSAL_MAPS]


def inputs(position: Position, length: int = LENGTH, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of grouped heads, of the width that the encoding takes."""
    return qkv(num_queries=length, num_keys=length, head_dim=position.head_dim, **sizes)


def attend(
    position: Position, feature_map: FeatureMap, q: Tensor, k: Tensor, v: Tensor, at: Tensor, **options
) -> Tensor:
    """Attention of encoded tokens."""
    return linattn.linear_attention(*position(q, k, at), v, position.bind(feature_map), enable_gqa=True, **options)


@pytest.mark.parametrize("map_name", MAPS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_map_is_admitted_or_refused(name: str, map_name: str) -> None:
    position = ENCODINGS[name]()
    if map_name in admitted(name):
        position.bind(build(map_name))
        return
    with pytest.raises(ValueError, match=r"is not relative.*require_relative=False|has no"):
        position.bind(build(map_name))


EXACTLY_RELATIVE = [
    *(("Rotary", name) for name in MAPS if name in OF_THE_PRODUCT | {"Centred-call-Taylor", "Expansion-call"}),
    *(("SinusoidalCodes", name) for name in MAPS if name in OF_THE_PRODUCT),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("name", "map_name"), EXACTLY_RELATIVE)
def test_a_shift_of_all_positions_changes_nothing(name: str, map_name: str, is_causal: bool) -> None:
    if is_causal and map_name not in CAUSAL_MAPS:
        return
    position, feature_map = ENCODINGS[name](), build(map_name)
    q, k, v = inputs(position)
    at = torch.arange(LENGTH)
    found, moved = (attend(position, feature_map, q, k, v, p, is_causal=is_causal) for p in (at, at + 1_000_000))
    # Angles of a million radians have lost six digits; weights of signed maps cancel.
    torch.testing.assert_close(moved, found, rtol=1e-6, atol=1e-6 if map_name in {"Identity", "Taylor-1"} else 1e-8)


@pytest.mark.parametrize("map_name", ["FavorPlus", "Hyperbolic"])
def test_a_shift_changes_nothing_in_expectation(map_name: str) -> None:
    """Kernels at two starts, averaged over draws, differ by their standard error; the same draw differs by more."""
    position, at = Rotary(8), torch.arange(4)
    q, k, _ = inputs(position, length=4, batch=1, heads=2)
    differences = []
    for seed in range(400):
        feature_map = build(map_name)
        feature_map.redraw(seed)
        products = []
        for p in (at, at + 777):
            phi_q, phi_k = map(features, (feature_map,) * 2, position(q, k, p), ("query", "key"))
            products.append(phi_q @ phi_k.mT)
        differences.append(products[1] - products[0])
    found = torch.stack(differences)
    score = found.mean(0) / (found.std(0) / 20)
    assert float(found.std(0).min()) > 1e-3
    assert float(score.abs().max()) < 4.5


@pytest.mark.parametrize("map_name", ["EluPlusOne", "Relu", "Exponential", "Hedgehog", "Centred-Taylor"])
def test_rotary_shifts_other_maps(map_name: str) -> None:
    """What the refusal is about: outputs depend on where the text starts."""
    position, at = Rotary(8, require_relative=False), torch.arange(LENGTH)
    q, k, v = inputs(position)
    with torch.no_grad():
        found, moved = (attend(position, build(map_name), q, k, v, p) for p in (at, at + 777))
    assert float((moved - found).abs().max()) > 1e-5


@pytest.mark.parametrize(("name", "map_name"), CAUSAL_PAIRS)
def test_any_cut_gives_the_same(name: str, map_name: str) -> None:
    """Prefill, chunks and steps, with padding on the left and inside."""
    position = ENCODINGS[name]()
    feature_map = position.bind(build(map_name))
    q, k, v = inputs(position)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :4], mask[1, 9:12] = False, False
    at, _ = token_positions(mask)
    whole = linattn.linear_attention(
        *position(q, k, at), v, feature_map, key_mask=mask, is_causal=True, enable_gqa=True
    )
    for cuts in ((0, 7, 8, 9, LENGTH), (0, 3, 11, 11, 15, LENGTH)):
        state, start, outs = None, 0, []
        for a, b in itertools.pairwise(cuts):
            part, start = token_positions(mask[:, a:b], start)
            encoded = position(q[:, :, a:b], k[:, :, a:b], part)
            out, state = linattn.linear_attention_with_state(
                *encoded, v[:, :, a:b], feature_map, state, key_mask=mask[:, a:b], enable_gqa=True
            )
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "map_name"), PAIRS)
def test_padding_and_batch_change_nothing(name: str, map_name: str) -> None:
    """A row among padding equals the row alone, whatever the padding holds."""
    position = ENCODINGS[name]()
    feature_map = build(map_name)
    q, k, v = inputs(position, batch=1)
    live = torch.tensor([3, 4, 5, 8, 9, 13, 14, 15, 16])
    mask = torch.zeros(1, LENGTH, dtype=torch.bool)
    mask[0, live] = True
    alone = attend(position, feature_map, q[:, :, live], k[:, :, live], v[:, :, live], torch.arange(len(live)))
    mask, (q, k, v) = mask.repeat(2, 1), (x.repeat(2, 1, 1, 1) for x in (q, k, v))
    mask[1] = True
    k[0, :, ~mask[0]], v[0, :, ~mask[0]] = torch.nan, torch.inf
    padded = attend(position, feature_map, q, k, v, token_positions(mask)[0], key_mask=mask)
    torch.testing.assert_close(padded[:1, :, live], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "map_name"), PAIRS)
def test_gradients(name: str, map_name: str) -> None:
    """Of tokens and of the encoding's own parameters; each encoding, and each map, in both directions."""
    is_causal = (list(ENCODINGS).index(name) + MAPS.index(map_name)) % 2 == 1 and map_name in CAUSAL_MAPS
    position, feature_map = ENCODINGS[name]().double(), build(map_name).requires_grad_(False)
    at = torch.arange(4) + 3
    leaves = [x.requires_grad_() for x in inputs(position, length=4, batch=1, heads=2, value_dim=2)]
    parameters = list(position.parameters())

    def loss(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return attend(position, feature_map, q, k, v, at, is_causal=is_causal)

    torch.autograd.gradcheck(loss, (*leaves, *parameters), atol=1e-5, rtol=1e-4, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ENCODINGS)
def test_the_dtype_stays(name: str, dtype: torch.dtype) -> None:
    """Angles are float64 whatever the tokens are: a late position is as precise as an early one."""
    position = ENCODINGS[name]()
    q, k, _ = inputs(position)
    at = torch.arange(LENGTH) + (LONGEST - LENGTH if name == "LearnedCodes" else 1_000_000)
    for found, exact in zip(
        position(q.to(dtype), k.to(dtype), at), position(q.to(dtype).double(), k.to(dtype).double(), at), strict=True
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ENCODINGS)
def test_fewer_queries_are_the_last(name: str) -> None:
    position, at = ENCODINGS[name](), torch.arange(LENGTH) + 2
    q, k, _ = inputs(position)
    whole, part = position(q, k, at), position(q[:, :, -3:], k, at)
    assert torch.equal(part[0], whole[0][:, :, -3:])
    assert torch.equal(part[1], whole[1])


def test_positions_count_attended_tokens() -> None:
    mask = torch.tensor([[False, False, True, True], [True, False, True, True]])
    at, end = token_positions(mask)
    assert at[mask].tolist() == [0, 1, 0, 1, 2]
    more, last = token_positions(mask, end)
    assert more[mask].tolist() == [2, 3, 3, 4, 5]
    assert last.tolist() == [4, 6]


def test_the_extra_variance_is_what_the_map_reports() -> None:
    """(exp(s) - 1)/R is a map's relative variance; s of content and code is the sum of both."""
    for codes in (SinusoidalCodes(4, 4, amplitude=0.7), LearnedCodes(4, 4, max_length=16, amplitude=0.7)):
        wide, narrow = FavorPlus(8, 16, draw="iid", scale=0.4), FavorPlus(4, 16, draw="iid", scale=0.4)
        q, k = tokens(1, 1, 5, 4, seed=1), tokens(1, 1, 5, 4, seed=2)
        at = torch.arange(5)
        s = [
            torch.log1p(16 * variance(feature_map, x, y) / feature_map.kernel(x, y).square())
            for feature_map, (x, y) in ((wide, codes(q, k, at)), (narrow, (q, k)))
        ]
        code = codes.code(at.double()).double()
        extra = 0.4 * (code.unsqueeze(1) + code).square().sum(-1)
        torch.testing.assert_close(s[0] - s[1], extra[None, None], rtol=1e-9, atol=1e-9)


def test_sinusoidal_codes_are_a_relative_bias() -> None:
    codes = SinusoidalCodes(4, 6, amplitude=1.3, base=100.0)
    code = codes.code(torch.arange(9))
    wave = 100.0 ** (-torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    distance = torch.arange(9).unsqueeze(1) - torch.arange(9)
    expected = 1.3**2 * (distance.unsqueeze(-1) * wave).cos().sum(-1)
    torch.testing.assert_close(code @ code.mT, expected, rtol=1e-12, atol=1e-12)


def test_the_table_has_every_encoding() -> None:
    """The docstring's rows are public names, and those of the encodings above among them."""
    assert linattn.positions.__doc__ is not None
    rows = [line.split(" | ") for line in linattn.positions.__doc__.splitlines() if line.startswith("| `")]
    names = {row[0].strip("|` ") for row in rows}
    assert all(len(row) == 6 for row in rows)
    assert all(hasattr(linattn.positions, name) for name in names)
    assert {type(build_one()).__name__ for build_one in ENCODINGS.values()} <= names


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "three dimensions": (lambda: call(tokens(2, 5, 8)), ValueError, r"query must be \(B, H, L, D=8\)"),
    "another width": (
        lambda: call(tokens(1, 1, 5, 6)),
        ValueError,
        r"query must be \(B, H, L, D=8\), got \(1, 1, 5, 6\)",
    ),
    "more queries": (lambda: call(tokens(1, 1, 9, 8)), ValueError, "9 queries and 5 keys; encode"),
    "a list": (lambda: call(at=[0, 1, 2, 3, 4]), TypeError, "positions must be a tensor.*got list"),
    "a mask": (lambda: call(at=torch.ones(5, dtype=torch.bool)), TypeError, "positions must be a tensor.*bool"),
    "another length": (
        lambda: call(at=torch.arange(4)),
        ValueError,
        r"positions must be \(5,\) or \(1, 5\), got \(4,\)",
    ),
    "a mask of integers": (lambda: token_positions(torch.ones(1, 3)), TypeError, "key_mask must be a bool tensor"),
    "an odd width": (lambda: Rotary(7), ValueError, "pairs of coordinates, got an odd head_dim=7"),
    "a base of 0": (lambda: Rotary(8, base=0.0), ValueError, "base must be a finite number > 0"),
    "another map's width": (
        lambda: Rotary(8).bind(build("Taylor", 6)),
        ValueError,
        "gives queries and keys of width 8",
    ),
    "a class of maps": (lambda: Rotary(8).bind(FavorPlus), TypeError, "must be an instance, got the class FavorPlus"),
    "a map for content": (
        lambda: SinusoidalCodes(8, 4).bind(build("Taylor", 8)),
        ValueError,
        "width 12, got a map built for head_dim=8; build it with head_dim=12",
    ),
    "an odd code": (lambda: SinusoidalCodes(8, 3), ValueError, "code_dim must be even"),
    "a negative amplitude": (lambda: SinusoidalCodes(8, 4, amplitude=-1.0), ValueError, "amplitude must be"),
    "no codes": (lambda: LearnedCodes(8, 0, max_length=3), ValueError, "code_dim must be an integer"),
    "a late learned position": (
        lambda: LearnedCodes(8, 2, max_length=4)(*[tokens(1, 1, 5, 8)] * 2, torch.arange(5)),
        ValueError,
        "LearnedCodes was built for whole positions from 0 to 3, got 0 to 4",
    ),
    "a learned position between two": (
        lambda: LearnedCodes(8, 2, max_length=4)(*[tokens(1, 1, 2, 8)] * 2, torch.tensor([0.0, 1.5])),
        ValueError,
        "whole positions from 0 to 3, got 0 to 1.5",
    ),
}


def call(query: Tensor | None = None, at: object = None) -> object:
    """Rotary positions of five keys."""
    key = tokens(1, 1, 5, 8)
    return Rotary(8)(key if query is None else query, key, torch.arange(5) if at is None else at)


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_words(name: str) -> None:
    refused, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message):
        refused()


# Two heads of the queries that an encoding takes.
WIDTHS = {"SinusoidalCodes": 8, "LearnedCodes": 10}


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_layer_made_on_the_meta_device_takes_its_weights_later(name: str) -> None:
    def layer() -> LinearAttention:
        return LinearAttention(WIDTHS.get(name, 16), 2, build("FavorPlus"), positions=ENCODINGS[name](), is_causal=True)

    given, x = layer(), torch.randn(1, 4, WIDTHS.get(name, 16))
    with torch.device("meta"):
        empty = layer()
    empty.to_empty(device="cpu").load_state_dict(given.state_dict())
    assert torch.equal(empty(x), given(x))


def test_a_map_is_bound_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer = LinearAttention(16, 2, build("FavorPlus"), positions=Rotary(8))
    assert layer.positions.head_dim == 8
