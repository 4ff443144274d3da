"""Blocks and the language model."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from layers import BIDIRECTIONAL, LAYERS, PADDABLE, VOCABULARY, WIDTH, hybrid, linear, text, tokens
from linattn.feature_maps import EluPlusOne
from linattn.nn import Block, LinearLM
from linattn.positions import ForgetGate

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def test_a_block_adds_what_attention_and_mlp_make_of_the_normed_input() -> None:
    block, x = Block(LAYERS["plain"](), hidden_dim=5), tokens(2, 4)
    torch.nn.init.normal_(block.attention_norm.weight)
    torch.nn.init.normal_(block.mlp_norm.weight)

    def normed(y, weight):
        return y / (y.square().mean(-1, keepdim=True) + torch.finfo(y.dtype).eps).sqrt() * weight

    middle = x + block.attention(normed(x, block.attention_norm.weight))
    y = normed(middle, block.mlp_norm.weight)
    gate, up, down = (of.weight.T for of in (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj))
    gated = y @ gate
    torch.testing.assert_close(block(x), middle + (gated * gated.sigmoid() * (y @ up)) @ down, **CLOSE)


def test_dropout_is_for_training() -> None:
    block, x = Block(LAYERS["plain"](), dropout=0.5), tokens(1, 4)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_a_hybrid_streams_in_any_cut() -> None:
    model, words = hybrid(), text(2, 9)
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(2)) < 0.7
    whole = model(words, key_mask=mask)
    for cuts in ((4, 5), (1,) * 9):
        state, parts = None, []
        for part, part_mask in zip(words.split(cuts, 1), mask.split(cuts, 1), strict=True):
            logits, state = model.forward_with_state(part, state, key_mask=part_mask)
            parts.append(logits)
        torch.testing.assert_close(torch.cat(parts, 1)[mask], whole[mask], **CLOSE)


def test_later_tokens_reach_no_earlier_logits() -> None:
    model, words = hybrid(), text(1, 8)
    other = words.clone()
    other[:, 5:] = (other[:, 5:] + 1) % VOCABULARY
    torch.testing.assert_close(model(other)[:, :5], model(words)[:, :5], **CLOSE)
    assert not torch.allclose(model(other)[:, 5:], model(words)[:, 5:])


def test_padding_changes_nothing() -> None:
    model, words = LinearLM(VOCABULARY, [Block(LAYERS[kind](is_causal=True)) for kind in PADDABLE]), text(2, 5)
    padded, mask = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.bool)
    for row, at in enumerate(torch.tensor([[3, 4, 5, 6, 7], [0, 2, 3, 6, 7]])):
        padded[row, at], mask[row, at] = words[row], True
    out = model(padded, key_mask=mask)
    for row in range(2):
        torch.testing.assert_close(out[row, mask[row]], model(words[row : row + 1])[0], **CLOSE)


@pytest.mark.parametrize("kind", [kind for kind in BIDIRECTIONAL if kind in PADDABLE])
def test_padding_changes_no_bidirectional_block(kind: str) -> None:
    block, x = Block(LAYERS[kind]()), tokens(2, 5)
    padded, mask = torch.randn(2, 8, WIDTH, dtype=x.dtype), torch.zeros(2, 8, dtype=torch.bool)
    for row, at in enumerate(torch.tensor([[3, 4, 5, 6, 7], [0, 2, 3, 6, 7]])):
        padded[row, at], mask[row, at] = x[row], True
    out = block(padded, key_mask=mask)
    for row in range(2):
        torch.testing.assert_close(out[row, mask[row]], block(x[row : row + 1])[0], **CLOSE)


def test_initial_weights_are_those_said() -> None:
    wide = [Block(linear(EluPlusOne(4), gate=ForgetGate(WIDTH, 2), is_causal=True, bias=True)) for _ in range(8)]
    model = LinearLM(4096, wide)
    q, o = (torch.stack([getattr(block.attention, name).weight for block in wide]) for name in ("q_proj", "o_proj"))
    down = torch.stack([block.mlp.down_proj.weight for block in wide])
    # Standard error of a deviation from n numbers: 1/√(2n), n ≥ 1,536; five of them.
    for found, deviation in ((model.embedding.weight, 0.02), (q, 0.02), (o, 0.005), (down, 0.005)):
        assert abs(found.std().item() / deviation - 1) < 5 / (2 * found.numel()) ** 0.5
    assert not wide[0].attention.o_proj.bias.any()
    assert wide[0].attention.gate.forget.bias.tolist() == [3, 6]


def test_a_fresh_model_is_as_surprised_as_chance() -> None:
    model, words = hybrid(), text(4, 16)
    loss = cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    assert abs(loss.item() - torch.tensor(float(VOCABULARY)).log().item()) < 0.05


def test_a_hybrid_learns_a_text_by_heart() -> None:
    model, words = hybrid(), text(2, 12)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-2), []
    for _ in range(60):
        loss = cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # At this rate single steps go up again: which of them do is a matter of rounding.
    assert min(losses) < 0.5


def test_what_does_not_fit_is_refused() -> None:
    causal, bidirectional = Block(LAYERS["plain"](is_causal=True)), Block(LAYERS["plain"]())
    with pytest.raises(TypeError, match="attention must be a LinearAttention or SoftmaxAttention, got Linear"):
        Block(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"got 0 of widths \[\]"):
        LinearLM(5, [])
    other = Block(type(causal.attention)(8, 2, EluPlusOne(4), is_causal=True))
    with pytest.raises(ValueError, match=r"of one width, got 2 of widths \[8, 12\]"):
        LinearLM(5, [causal, other])
    with pytest.raises(ValueError, match=r"must have is_causal=True, got others at \[1\]"):
        LinearLM(5, [causal, bidirectional])
    model = LinearLM(5, [causal])
    with pytest.raises(ValueError, match="a stream for each of 1 blocks, got 0"):
        model.forward_with_state(torch.tensor([[1]]), [])
    with pytest.raises(TypeError, match=r"blocks must be of Block, got LinearAttention; write Block\(attention\)"):
        LinearLM(5, [LAYERS["plain"](is_causal=True), causal])
    with pytest.raises(TypeError, match="blocks must be of Block, got LinearAttention, SoftmaxAttention; write"):
        LinearLM(5, [LAYERS[kind](is_causal=True) for kind in ("softmax", "plain", "random")])
    for width in (0, -8, 2.5, True):
        with pytest.raises(ValueError, match="hidden_dim must be an integer of at least 1, got"):
            Block(LAYERS["plain"](), hidden_dim=width)
        with pytest.raises(ValueError, match="vocab_size must be an integer of at least 1, got"):
            LinearLM(width, [causal])
    for dropout in (float("nan"), -0.5, "half", True):
        with pytest.raises(ValueError, match="dropout must be a finite number >= 0, got"):
            Block(LAYERS["plain"](), dropout=dropout)


def test_logits_without_the_weights_of_the_head_are_refused() -> None:
    """Offloading leaves those of the embedding on meta by the time they are the head's: torch would give no numbers."""
    model, x = LinearLM(5, [Block(LAYERS["plain"](is_causal=True))]), tokens(1, 3)
    wanted = model.logits(x)
    model.embedding.to("meta")
    with pytest.raises(ValueError, match="embedding's weights, the head's too, are offloaded; keep them on"):
        model.logits(x)
    model.norm.to("meta")
    assert model.logits(x.to("meta")).shape == wanted.shape


def test_blocks_that_are_adopted_may_keep_their_weights() -> None:
    """Those of a model that is trained, or of torch's attention."""
    blocks = [Block(LAYERS["plain"](is_causal=True)) for _ in range(2)]
    before = [{name: x.clone() for name, x in block.state_dict().items()} for block in blocks]
    LinearLM(11, blocks, initialize=False)
    for block, was in zip(blocks, before, strict=True):
        assert all(torch.equal(x, was[name]) for name, x in block.state_dict().items())
    LinearLM(11, blocks)
    assert not torch.equal(blocks[0].attention.q_proj.weight, before[0]["attention.q_proj.weight"])
