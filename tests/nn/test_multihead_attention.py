"""A layer in the place of torch.nn.MultiheadAttention: the call, masks and layouts of torch's own blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from linattn.feature_maps import EluPlusOne, FavorPlus
from linattn.nn import MultiheadAttention

E, H, L = 12, 3, 6
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
PADDING = torch.tensor([[False] * 4 + [True] * 2, [False] * L])


def encoder_layer(*, batch_first: bool = True) -> nn.TransformerEncoderLayer:
    """Torch's block in float64, its numbers drawn."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=batch_first, dtype=torch.float64)


def with_every_key_exact(mha: nn.MultiheadAttention, *, is_causal: bool = False) -> MultiheadAttention:
    """A layer that equals softmax: all keys lie in the window."""
    return MultiheadAttention.in_place_of(mha, FavorPlus(E // H, 8), is_causal=is_causal, window=8)


def tokens(*, batch_first: bool = True, length: int = L) -> Tensor:
    """Two rows of tokens."""
    x = torch.randn(2, length, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x if batch_first else x.transpose(0, 1)


def assert_alike(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", [None, CAUSAL, CAUSAL.isinf()], ids=["no mask", "causal", "causal bool"])
def test_a_block_of_torch_is_the_same_with_every_key_exact(mask, batch_first: bool, train: bool) -> None:
    block, x = encoder_layer(batch_first=batch_first).train(train), tokens(batch_first=batch_first)
    with torch.no_grad():
        expected = block(x, src_mask=mask)
        block.self_attn = with_every_key_exact(block.self_attn, is_causal=mask is not None)
        assert_alike(block(x, src_mask=mask), expected)


@pytest.mark.parametrize(
    "padding", [PADDING, torch.zeros(2, L).masked_fill(PADDING, -torch.inf)], ids=["bool", "float"]
)
def test_padding_is_left_out(padding: Tensor) -> None:
    block, x = encoder_layer(), tokens()
    expected = block(x, src_key_padding_mask=padding)
    block.self_attn = with_every_key_exact(block.self_attn)
    assert_alike(block(x, src_key_padding_mask=padding)[~PADDING], expected[~PADDING])


def test_causality_needs_no_mask() -> None:
    block, x = encoder_layer(), tokens()
    expected = block(x, src_mask=CAUSAL)
    block.self_attn = with_every_key_exact(block.self_attn, is_causal=True)
    assert_alike(block(x, is_causal=True), expected)


def test_arguments_are_in_the_order_of_torchs_own() -> None:
    mha, x = encoder_layer().self_attn, tokens()
    layer = with_every_key_exact(mha)
    for averaged in (True, False):
        assert_alike(layer(x, x, x, None, False, None, averaged)[0], mha(x, x, x, None, False, None, averaged)[0])
        assert_alike(layer(x, x, x, average_attn_weights=averaged)[0], mha(x, x, x, average_attn_weights=averaged)[0])
    causal = with_every_key_exact(mha, is_causal=True)
    with pytest.raises(ValueError, match="is called with is_causal=True or a causal attn_mask"):
        causal(x, x, x, None, False, None, True)


def test_a_decoder_block_attends_to_a_memory() -> None:
    torch.manual_seed(0)
    block = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    x, memory = tokens(), tokens(length=7)
    feature_map = EluPlusOne(E // H)
    block.self_attn = with_every_key_exact(block.self_attn, is_causal=True)
    block.multihead_attn = MultiheadAttention.in_place_of(block.multihead_attn, feature_map)
    out = block(x, memory, tgt_mask=CAUSAL)
    assert out.shape == x.shape
    cross = block.multihead_attn(x, memory, memory)[0]
    assert_alike(cross, block.multihead_attn.layer(x, memory))


def test_a_stack_built_of_such_blocks_takes_padded_texts() -> None:
    block = encoder_layer().eval()
    stack = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    for layer in stack.layers:
        layer.self_attn = with_every_key_exact(layer.self_attn)
    with torch.no_grad():
        padded = stack(tokens(), src_key_padding_mask=PADDING)
        alone = stack(tokens()[:1, :4])
    assert_alike(padded[:1, :4], alone)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tokens_are_refused_with_the_option_to_change() -> None:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True), 1).eval()
    stack.layers[0].self_attn = MultiheadAttention.in_place_of(stack.layers[0].self_attn, EluPlusOne(6))
    with torch.no_grad(), pytest.raises(ValueError, match="enable_nested_tensor=False"):
        stack(tokens().float(), src_key_padding_mask=PADDING)


REFUSED = {
    "attn_mask must be the causal one": {"attn_mask": CAUSAL.T},
    "attn_mask must be the causal one, \\(6, 6\\), got another of shape \\(5, 5\\)": {"attn_mask": CAUSAL[1:, 1:]},
    "got need_weights=True": {"need_weights": True},
    "is called with is_causal=True or a causal attn_mask, got is_causal=False": {},
    "give a bool one": {"is_causal": True, "key_padding_mask": torch.full((2, L), 0.5)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_calls_that_it_has_no_meaning_for_are_refused(message: str) -> None:
    layer, x = with_every_key_exact(encoder_layer().self_attn, is_causal=True), tokens()
    with pytest.raises(ValueError, match=message):
        layer(x, x, x, **REFUSED[message])


def test_a_biased_causal_mask_is_refused() -> None:
    layer, x = with_every_key_exact(encoder_layer().self_attn, is_causal=True), tokens()
    with pytest.raises(ValueError, match="attn_mask must be the causal one"):
        layer(x, x, x, attn_mask=CAUSAL - torch.eye(L))


def test_a_causal_call_of_another_layer_is_refused() -> None:
    layer, x = with_every_key_exact(encoder_layer().self_attn), tokens()
    for call in ({"is_causal": True}, {"attn_mask": CAUSAL}):
        with pytest.raises(ValueError, match="called without a causal mask, got is_causal=True"):
            layer(x, x, x, **call)


def test_values_of_their_own_are_refused() -> None:
    layer, x = with_every_key_exact(encoder_layer().self_attn), tokens()
    with pytest.raises(ValueError, match="one tensor as key and value"):
        layer(x, x, x + 1)


def test_a_compiled_block_takes_its_causality_from_the_call() -> None:
    block, x = encoder_layer(), tokens()
    block.self_attn = with_every_key_exact(block.self_attn, is_causal=True)
    expected = block(x, is_causal=True)
    assert_alike(torch.compile(block, backend="eager")(x, is_causal=True), expected)


def test_a_frozen_layer_stays_so() -> None:
    block = encoder_layer().requires_grad_(False)
    block.self_attn = with_every_key_exact(block.self_attn)
    assert not any(parameter.requires_grad for parameter in block.parameters())
    free = encoder_layer()
    free.self_attn = with_every_key_exact(free.self_attn)
    assert all(parameter.requires_grad for parameter in free.parameters())
    part = encoder_layer()
    part.self_attn.in_proj_weight.requires_grad_(False)
    part.self_attn.out_proj.bias.requires_grad_(False)
    part.self_attn = with_every_key_exact(part.self_attn)
    free = {name for name, parameter in part.self_attn.named_parameters() if parameter.requires_grad}
    assert free == {f"layer.{name}" for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.weight")}
