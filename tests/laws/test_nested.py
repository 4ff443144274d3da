"""Nested tensors are refused everywhere, in one place's words, and what those advise is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import linattn
from grid import HEAD_DIM, MAPS, build, tokens
from linattn import MergedKV, nn, positions
from linattn.feature_maps import FavorPlus, FittedMap
from linattn.feature_maps.base import features

# Once in a process, by whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

LENGTHS = (9, 5)
STARTS = torch.tensor([0, 9, 14])
MAP = FavorPlus(HEAD_DIM, 12)


def jagged(*shape: int, seed: int = 0) -> Tensor:
    """Tokens (B, H, L, ·) of two texts."""
    values = tokens(sum(LENGTHS), *shape, seed=seed, dtype=torch.float32)
    return torch.nested.nested_tensor_from_jagged(values, offsets=STARTS)


def heads(layout: torch.layout = torch.jagged) -> list[Tensor]:
    """Query, key and value (B, H, L, D) of two texts."""
    found = [jagged(2, HEAD_DIM, seed=seed).transpose(1, 2) for seed in range(3)]
    if layout == torch.jagged:
        return found
    return [torch.nested.nested_tensor([x.contiguous() for x in each.unbind()], layout=layout) for each in found]


def in_place(place: int, kind: Callable[..., object]) -> Callable[[list[Tensor]], object]:
    """A call in which one of query, key and value is nested, and the others are not."""
    dense = [tokens(2, 2, 9, HEAD_DIM, seed=seed, dtype=torch.float32) for seed in range(3)]
    return lambda x: kind(*dense[:place], x[place], *dense[place + 1 :])


def empty() -> linattn.State:
    return linattn.State.empty(MAP, batch_size=2, num_heads=2, value_dim=HEAD_DIM)


def layer(is_causal: bool = False, **options: object) -> nn.LinearAttention:
    return nn.LinearAttention(2 * HEAD_DIM, 2, MAP, is_causal=is_causal, **options)


GATES = positions.Gates(torch.zeros(2, 2, 9))
CALLS: dict[str, Callable[[list[Tensor]], object]] = {
    "linear_attention": lambda x: linattn.linear_attention(*x, MAP),
    "causal": lambda x: linattn.linear_attention(*x, MAP, is_causal=True, window=4),
    **{f"alone-{place}": in_place(place, lambda *x: linattn.linear_attention(*x, MAP)) for place in range(3)},
    **{f"softmax-alone-{place}": in_place(place, linattn.softmax_attention) for place in range(3)},
    "merged": lambda x: linattn.merged_attention(*x, MergedKV(4, 4)),
    "merged_partial": lambda x: linattn.merged_partial(*x, MergedKV(4, 4)),
    "merged_with_state": lambda x: linattn.merged_attention_with_state(*x, MergedKV(4, 4)),
    "merged_read": lambda x: linattn.merged_attention_with_state(*dense(), MergedKV(4, 4)).state.read(x[0]),
    "linear_partial": lambda x: linattn.linear_partial(*x, MAP),
    "with_state": lambda x: linattn.linear_attention_with_state(*x, MAP),
    "packed": lambda x: linattn.linear_attention_packed(*x, MAP, STARTS),
    "packed_with_state": lambda x: linattn.linear_attention_packed_with_state(*x, MAP, STARTS),
    "causal-softmax": lambda x: linattn.softmax_attention(*x, is_causal=True),
    "softmax_partial": lambda x: linattn.softmax_partial(*x),
    "attention_rows": lambda x: linattn.attention_rows(*x[:2], MAP, torch.arange(2)),
    "read": lambda x: empty().read(MAP, x[0]),
    "absorb": lambda x: empty().absorb(MAP, *x[:2]),
    "gated": lambda x: positions.gated_attention_with_state(*x, MAP, GATES),
    "gates": lambda x: positions.gate_bias(positions.Gates(x[0])),
    "relative_bias": lambda x: positions.relative_bias_attention(*x, MAP, torch.zeros(1, 2, 99)),
    "rotary": lambda x: positions.rotary(*x[:2], torch.arange(9)),
    "key_mask": lambda x: linattn.linear_attention(*dense(), MAP, key_mask=x[0]),
    "key_bias": lambda x: linattn.linear_attention(*dense(), MAP, key_bias=x[0]),
}
LAYERS: dict[str, Callable[[Tensor], object]] = {
    "layer": lambda x: layer()(x),
    "memory": lambda x: layer()(tokens(2, 9, 16, dtype=torch.float32), x),
    "positions": lambda x: layer(positions=positions.Rotary(HEAD_DIM))(x),
    "stream": lambda x: layer(is_causal=True).forward_with_state(x),
    "softmax": lambda x: nn.SoftmaxAttention(16, 2)(x),
    "block": lambda x: nn.Block(layer())(x),
}


def dense() -> list[Tensor]:
    return [tokens(2, 2, 9, HEAD_DIM, seed=seed, dtype=torch.float32) for seed in range(3)]


WORDS = "must be a dense tensor, got a nested one, {}; .*linear_attention_packed"


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_refuses_nested_tensors(name: str, layout: torch.layout) -> None:
    nested = heads(layout)
    with pytest.raises(ValueError, match=WORDS.format(str(layout).removeprefix("torch."))):
        CALLS[name](nested)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_refuses_nested_tensors(name: str) -> None:
    with pytest.raises(ValueError, match=WORDS.format("jagged")):
        LAYERS[name](jagged(2 * HEAD_DIM))


@pytest.mark.parametrize("name", MAPS)
def test_every_map_refuses_nested_tensors(name: str) -> None:
    """Computed with, and fitted to."""
    feature_map, (query, key, value) = build(name), heads()
    with pytest.raises(ValueError, match=WORDS.format("jagged")):
        linattn.linear_attention(query, key, value, feature_map)
    if name != "Learned":
        with pytest.raises(ValueError, match=WORDS.format("jagged")):
            features(feature_map, query, "query")
    if isinstance(feature_map, FittedMap):
        with pytest.raises(ValueError, match=WORDS.format("jagged")):
            feature_map.fit(query, key)


def test_what_the_refusal_advises_is_right() -> None:
    nested = heads()
    query, key, value = (x.values().unsqueeze(0) for x in nested)
    packed = linattn.linear_attention_packed(query, key, value, MAP, nested[0].offsets())
    texts = zip(*(x.unbind() for x in nested), strict=True)
    alone = [linattn.linear_attention(*(x.unsqueeze(0) for x in text), MAP) for text in texts]
    torch.testing.assert_close(packed, torch.cat(alone, 2), rtol=1e-5, atol=1e-6)
    padded = [
        pad_sequence([x.transpose(0, 1) for x in each.unbind()], batch_first=True).transpose(1, 2) for each in nested
    ]
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(-1)
    masked = linattn.linear_attention(*padded, MAP, key_mask=mask)
    for row, length, wanted in zip(masked, LENGTHS, alone, strict=True):
        torch.testing.assert_close(row[:, :length], wanted[0], rtol=1e-5, atol=1e-6)


def test_exact_attention_takes_jagged_tensors() -> None:
    """By torch's own function, where nothing is masked."""
    nested = heads()
    for found, *one in zip(linattn.softmax_attention(*nested).unbind(), *(x.unbind() for x in nested), strict=True):
        wanted = linattn.softmax_attention(*(x.unsqueeze(0) for x in one))[0]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
