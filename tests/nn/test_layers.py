"""Attention layers of every kind: what they compute, streams cut anywhere, padding, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import linattn
from layers import BIDIRECTIONAL, HEAD_DIM, HEADS, LAYERS, PADDABLE, WIDTH, WITHOUT_ORDER, linear, softmax, tokens
from linattn.feature_maps import EluPlusOne, FavorPlus, Taylor
from linattn.nn import Attention, KeptTokens, LinearAttention
from linattn.positions import FixedDecay, ForgetGate, Gate, Gates, LearnedCodes, Rotary

# float64: some tens of roundings of numbers around 1.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def wake(layer):
    """Weights under which gates depend on the tokens."""
    draw = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    return layer


def test_a_linear_layer_is_the_op_between_projections() -> None:
    layer, x = LAYERS["random"](is_causal=True), tokens(2, 7)
    q, k, v = (
        torch.stack(torch.split(x @ of.weight.T + of.bias, HEAD_DIM, -1), 1)
        for of in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    heads = linattn.linear_attention(q, k, v, layer.feature_map, is_causal=True, enable_gqa=True)
    expected = torch.cat(heads.unbind(1), -1) @ layer.o_proj.weight.T + layer.o_proj.bias
    torch.testing.assert_close(layer(x), expected, **CLOSE)


def test_a_softmax_layer_is_sdpa_between_projections() -> None:
    layer, x = LAYERS["softmax"](), tokens(2, 7)
    q, k, v = (
        torch.stack(torch.split(x @ of.weight.T, HEAD_DIM, -1), 1) for of in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    heads = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(layer(x), torch.cat(heads.unbind(1), -1) @ layer.o_proj.weight.T, **CLOSE)


def test_norms_positions_and_the_output_gate_stand_where_they_belong() -> None:
    layer, x = LAYERS["rotary"](is_causal=True), tokens(1, 5)
    torch.nn.init.normal_(layer.q_norm.weight)
    q, k, v = (torch.stack(torch.split(of(x), HEAD_DIM, -1), 1) for of in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = linattn.positions.rotary(layer.q_norm(q), layer.k_norm(k), torch.arange(5))
    heads = linattn.linear_attention(q, k, v, layer.feature_map, is_causal=True, enable_gqa=True)
    expected = layer.o_proj(torch.cat(heads.unbind(1), -1) * torch.sigmoid(layer.g_proj(x)))
    torch.testing.assert_close(layer(x), expected, **CLOSE)


@pytest.mark.parametrize("kind", ["gated", "softmax-gated"])
def test_a_gate_makes_old_tokens_fade(kind: str) -> None:
    """The weights, written out, for queries and keys all alike."""
    layer, x = wake(LAYERS[kind](is_causal=True)), tokens(1, 6)
    torch.nn.init.zeros_(layer.k_proj.weight)
    log_forget, log_input = layer.gate(x)
    log_input = torch.zeros_like(log_forget) if log_input is None else log_input
    rows = []
    for t in range(6):
        bias = torch.stack([log_input[0, :, j] + log_forget[0, :, j + 1 : t + 1].sum(-1) for j in range(t + 1)], -1)
        value = torch.stack(torch.split(layer.v_proj(x[0, : t + 1]), HEAD_DIM, -1))
        rows.append((bias.softmax(-1).unsqueeze(-1) * value).sum(1).repeat_interleave(2, 0).flatten())
    torch.testing.assert_close(layer(x)[0], layer.o_proj(torch.stack(rows)), **CLOSE)


def test_with_every_key_exact_a_gated_layer_is_the_gated_softmax_layer() -> None:
    gate = ForgetGate(WIDTH, 2)
    layer, x = wake(linear(FavorPlus(HEAD_DIM, 8), window=8, gate=gate, is_causal=True)), tokens(2, 7)
    twin = softmax(gate=gate, is_causal=True)
    twin.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x), twin(x), **CLOSE)


@pytest.mark.parametrize("kind", WITHOUT_ORDER)
def test_a_memory_takes_the_place_of_the_tokens(kind: str) -> None:
    layer, x, memory = LAYERS[kind](), tokens(2, 3), tokens(2, 5, seed=1)
    both = torch.cat([x, memory], 1)
    mask = (torch.arange(8) >= 3).expand(2, -1)
    torch.testing.assert_close(layer(x, memory), layer(both, memory)[:, :3], **CLOSE)
    blind = layer(x, both, key_mask=mask)
    torch.testing.assert_close(layer(x, memory), blind, **CLOSE)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("cuts", [(9,), (4, 5), (1, 3, 5), (1,) * 9])
def test_a_stream_cut_anywhere_is_the_whole(kind: str, cuts: tuple[int, ...]) -> None:
    layer, x = wake(LAYERS[kind](is_causal=True)), tokens(2, 9)
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(4)) < 0.7
    for key_mask in (None, mask):
        state, outs = None, []
        masks = [None] * len(cuts) if key_mask is None else key_mask.split(cuts, 1)
        for part, part_mask in zip(x.split(cuts, 1), masks, strict=True):
            out, state = layer.forward_with_state(part, state, key_mask=part_mask)
            outs.append(out)
        live = slice(None) if key_mask is None else key_mask
        torch.testing.assert_close(torch.cat(outs, 1)[live], layer(x, key_mask=key_mask)[live], **CLOSE)
        assert state.num_tokens.tolist() == ([9, 9] if key_mask is None else key_mask.sum(1).tolist())


def test_masks_come_and_go_within_a_stream() -> None:
    """A softmax layer keeps masks from the first one on."""
    for kind in ("softmax", "softmax-gated", "rotary"):
        layer, x = LAYERS[kind](is_causal=True), tokens(2, 6)
        some = torch.tensor([[True, False], [True, True]])
        first = layer.forward_with_state(x[:, :2])
        second = layer.forward_with_state(x[:, 2:4], first.state, key_mask=some)
        third = layer.forward_with_state(x[:, 4:], second.state)
        mask = torch.ones(2, 6, dtype=torch.bool)
        mask[:, 2:4] = some
        torch.testing.assert_close(third.out, layer(x, key_mask=mask)[:, 4:], **CLOSE)


def test_tokens_behind_a_full_text_take_no_position() -> None:
    """Masked ones, beside a row that goes on, where every position that there is was given away."""
    layer = linear(EluPlusOne(HEAD_DIM + 2), is_causal=True, positions=LearnedCodes(HEAD_DIM, 2, max_length=4))
    x, mask = tokens(2, 5), torch.tensor([[True] * 4 + [False], [True] * 3 + [False] * 2])
    out = layer(x, key_mask=mask)
    torch.testing.assert_close(out[:1, :4], layer(x[:1, :4]), **CLOSE)
    mask[1, 4] = True
    _, state = layer.forward_with_state(x[:, :4], key_mask=mask[:, :4])
    last = layer.forward_with_state(x[:, 4:], state, key_mask=mask[:, 4:]).out
    torch.testing.assert_close(last[1], layer(x, key_mask=mask)[1, 4:], **CLOSE)


class Reset(Gate):
    """Forget everything before every fourth token, by gates of exactly 0."""

    num_heads = 2

    def forward(self, x: Tensor) -> Gates:
        """Of whole sequences."""
        begins = torch.arange(x.shape[1]) % 4 == 0
        return Gates(torch.where(begins, -torch.inf, 0.0).expand(len(x), 2, -1))


@pytest.mark.parametrize("make", [lambda **o: linear(EluPlusOne(HEAD_DIM), **o), softmax], ids=["linear", "softmax"])
def test_a_gate_of_0_begins_a_sequence(make: Callable[..., Attention]) -> None:
    torch.manual_seed(0)
    layer, x = make(gate=Reset(), is_causal=True), tokens(2, 12)
    plain = make(is_causal=True)
    plain.load_state_dict(layer.state_dict())
    wanted = torch.cat([plain(part) for part in x.split(4, 1)], 1)
    torch.testing.assert_close(layer(x), wanted, **CLOSE)
    first = layer.forward_with_state(x[:, :4])
    torch.testing.assert_close(layer.forward_with_state(x[:, 4:], first.state).out, wanted[:, 4:], **CLOSE)


@pytest.mark.parametrize("kind", ["gated", "gated-window", "softmax-gated"])
def test_a_gate_of_any_depth_keeps_its_digits(kind: str) -> None:
    """Forgetting by e⁻¹⁰⁰⁰⁰ per token leaves a token alone, in a stream and in one call."""
    layer, x = LAYERS[kind](is_causal=True), tokens(1, 9)
    with torch.no_grad():
        layer.gate.forget.bias.fill_(-10_000.0)
    value = torch.stack(torch.split(layer.v_proj(x), HEAD_DIM, -1), 2).repeat_interleave(2, 2).flatten(-2)
    torch.testing.assert_close(layer(x), layer.o_proj(value), **CLOSE)
    first = layer.forward_with_state(x[:, :4])
    torch.testing.assert_close(layer.forward_with_state(x[:, 4:], first.state).out, layer.o_proj(value)[:, 4:], **CLOSE)


@pytest.mark.parametrize(
    ("kind", "is_causal"), [(kind, now) for now in (True, False) for kind in PADDABLE if now or kind in BIDIRECTIONAL]
)
def test_padding_anywhere_changes_nothing(kind: str, is_causal: bool) -> None:
    """Left, right and inside, whatever it holds, and a batch of one row."""
    layer, x = wake(LAYERS[kind](is_causal=is_causal)), tokens(3, 5)
    places = torch.tensor([[3, 4, 5, 6, 7], [0, 1, 2, 3, 4], [0, 2, 3, 6, 7]])
    padded = torch.full((3, 8, WIDTH), torch.nan, dtype=torch.float64)
    mask = torch.zeros(3, 8, dtype=torch.bool)
    for row, at in enumerate(places):
        padded[row, at], mask[row, at] = x[row], True
    out = layer(padded, key_mask=mask)
    for row in range(3):
        torch.testing.assert_close(out[row, mask[row]], layer(x[row : row + 1])[0], **CLOSE)
    out[mask].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_state_forks_selects_and_detaches(kind: str, tmp_path) -> None:
    layer, x = LAYERS[kind](is_causal=True), tokens(3, 6)
    state = layer.forward_with_state(x[:, :4]).state
    rows = torch.tensor([2, 0])
    picked = layer.forward_with_state(x[rows, 4:], state.select(rows)).out
    whole = layer(x)
    torch.testing.assert_close(picked, whole[rows, 4:], **CLOSE)
    torch.save(state.detach(), tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt")
    again = layer.forward_with_state(x[:, 4:], read.to("cpu")).out
    torch.testing.assert_close(again, whole[:, 4:], **CLOSE)


@pytest.mark.parametrize("kind", LAYERS)
def test_state_dicts_round_trip(kind: str) -> None:
    layer, x = wake(LAYERS[kind](is_causal=True)), tokens(1, 4)
    other = LAYERS[kind](is_causal=True)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_the_softmax_twin_has_the_same_weights() -> None:
    """One's weights load into the other, the map's apart."""
    layer, twin = LAYERS["plain"](), LAYERS["softmax"]()
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.v_proj.weight, layer.v_proj.weight)


def test_positions_of_another_width_widen_the_map() -> None:
    codes = LearnedCodes(HEAD_DIM, 2, max_length=32)
    layer, x = linear(FavorPlus(HEAD_DIM + 2, 8), positions=codes, is_causal=True), tokens(1, 5)
    first = layer.forward_with_state(x[:, :2])
    torch.testing.assert_close(layer.forward_with_state(x[:, 2:], first.state).out, layer(x)[:, 2:], **CLOSE)


def test_precision_follows_the_parameters() -> None:
    layer = LinearAttention(WIDTH, HEADS, FavorPlus(3, 8), dtype=torch.bfloat16)
    assert layer(torch.randn(1, 4, WIDTH, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert layer.feature_map.projection.dtype == torch.float64


REFUSED = {
    "embed_dim must be an integer of at least 1": lambda: LinearAttention(0, 1, EluPlusOne(4)),
    "head_dim must be an integer of at least 1": lambda: linear(EluPlusOne(4), head_dim=0),
    "num_heads must be a multiple of num_kv_heads": lambda: linear(EluPlusOne(4), num_kv_heads=3),
    "embed_dim must be a multiple of num_heads": lambda: LinearAttention(10, 4, EluPlusOne(4)),
    "built for head_dim=5": lambda: linear(EluPlusOne(5)),
    "each of 3 key/value heads": lambda: linear(FavorPlus(4, 8, num_heads=3)),
    "qk_norm must be one of": lambda: linear(EluPlusOne(4), qk_norm="max"),
    "positions were built for head_dim=6": lambda: linear(EluPlusOne(4), positions=Rotary(6)),
    "not relative": lambda: linear(EluPlusOne(4), positions=Rotary(4)),
    "the gate is one of 4 heads": lambda: linear(EluPlusOne(4), gate=FixedDecay.alibi(4), is_causal=True),
    "a gate makes earlier tokens fade": lambda: linear(EluPlusOne(4), gate=FixedDecay.alibi(2)),
    "needs a map whose weights share": lambda: linear(EluPlusOne(4), window=2),
    "the window must be a power of two": lambda: linear(FavorPlus(4, 8), window=3),
    "widens queries and keys": lambda: softmax(positions=LearnedCodes(4, 2, max_length=8)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_layers_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_wrong_parts_are_refused() -> None:
    with pytest.raises(TypeError, match="must be an instance, got the class EluPlusOne"):
        linear(EluPlusOne)
    with pytest.raises(TypeError, match=r"positions must be a linattn.positions.Position or None, got str"):
        linear(EluPlusOne(4), positions="rotary")
    with pytest.raises(TypeError, match=r"gate must be a linattn.positions.Gate or None, got float"):
        softmax(gate=0.5, is_causal=True)


@pytest.mark.parametrize("build", [LAYERS["plain"], LAYERS["softmax"]])
def test_wrong_calls_are_refused(build) -> None:
    layer, x = build(), tokens(2, 3)
    for wrong in (x[0], x[..., 1:], "x"):
        with pytest.raises(ValueError, match=r"x must be \(B, L, 12\), the batch first, got"):
            layer(wrong)
    with pytest.raises(ValueError, match=r"memory must be \(B, L, 12\)"):
        layer(x, x[..., 1:])
    with pytest.raises(ValueError, match="share the batch size, got 2 and 1"):
        layer(x, x[:1])
    with pytest.raises(TypeError, match="key_mask must be a bool tensor"):
        layer(x, key_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"key_mask must be \(B, Lk\) = \(2, 4\), got \(2, 3\)"):
        layer(x, tokens(2, 4), key_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="key_mask is on meta, the keys on cpu; move it with"):
        layer(x, key_mask=torch.ones(2, 3, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match="a stream needs a causal layer"):
        layer.forward_with_state(x)
    for options in ({"is_causal": True}, {"positions": Rotary(4)}, {"gate": FixedDecay.alibi(2), "is_causal": True}):
        kind = {"feature_map": Taylor(4)} if build is LAYERS["plain"] else {}
        ordered = (linear if kind else softmax)(*kind.values(), **options)
        with pytest.raises(ValueError, match=f"got a layer with .*{next(iter(options))}"):
            ordered(x, x)


def test_states_of_other_layers_are_refused() -> None:
    x = tokens(1, 2)
    layer, twin = LAYERS["plain"](is_causal=True), LAYERS["softmax"](is_causal=True)
    state, kept = layer.forward_with_state(x).state, twin.forward_with_state(x).state
    assert isinstance(state.kept, linattn.State)
    assert isinstance(kept.kept, KeptTokens)
    with pytest.raises(TypeError, match="got a Stream of KeptTokens"):
        layer.forward_with_state(x, kept)
    with pytest.raises(TypeError, match="got State"):
        layer.forward_with_state(x, state.kept)
    with pytest.raises(TypeError, match="got a Stream of State"):
        twin.forward_with_state(x, state)
    with pytest.raises(ValueError, match="the state was built with"):
        LAYERS["random"](is_causal=True).forward_with_state(x, state)
    for one, other in ((layer, state), (twin, kept)):
        with pytest.raises(ValueError, match=r"num_tokens must be torch.int64 of shape \(2,\) .*, got .* shape \(1,\)"):
            one.forward_with_state(tokens(2, 2), other)
    with pytest.raises(ValueError, match=r"key must be .* of shape \(1, 2, 2, 4\) .*, got .* shape \(1, 2, 2, 2\)"):
        twin.forward_with_state(x, kept._replace(kept=kept.kept._replace(key=kept.kept.key[..., :2])))
    with pytest.raises(ValueError, match="got one without a gate's biases"):
        LAYERS["softmax-gated"](is_causal=True).forward_with_state(x, kept)
    with pytest.raises(ValueError, match="got one with a gate's biases"):
        twin.forward_with_state(x, LAYERS["softmax-gated"](is_causal=True).forward_with_state(x).state)
