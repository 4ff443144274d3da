"""Predictions made piece by piece are those of all logits at once, in value, in gradient and in what is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import BertConfig, BertForMaskedLM

from linattn.convert import predictions
from linattn.convert.predictions import (
    NONE,
    Predictions,
    next_token_losses,
    sampled_divergence,
    spread_divergence,
    token_divergence,
)
from linattn.convert.running import run

TOKENS, WIDTH, VOCABULARY = 11, 5, 7


@pytest.fixture(autouse=True)
def pieces_of_three(monkeypatch):
    """Few enough logits at once for several pieces, the last of them shorter; samples of two pieces."""
    monkeypatch.setattr(predictions, "_MOST", 3 * VOCABULARY + 2)
    monkeypatch.setattr(predictions, "_SAMPLED", 2)


def states(seed):
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def head(seed):
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)


def test_divergence_and_its_gradients_are_torchs():
    ours, theirs, student, teacher = states(0).requires_grad_(), states(1), head(2), head(3)
    inputs = (ours, student.weight, student.bias)
    found = token_divergence(Predictions(ours, student), Predictions(theirs, teacher), torch.float64)
    logs = [x.log_softmax(-1) for x in (student(ours), teacher(theirs))]
    expected = kl_div(*logs, log_target=True, reduction="none").sum(-1).mean()
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(a, b)
    # The exact model's head is no part of what is trained.
    assert teacher.weight.grad is None
    # A constant added to all logits is no other prediction; logits that are given need no head.
    given = Predictions(student(ours) + 3, None), Predictions(teacher(theirs) - 7, None)
    torch.testing.assert_close(token_divergence(*given, torch.float64), found)
    assert torch.autograd.gradcheck(
        lambda x: token_divergence(Predictions(x, student), Predictions(theirs, teacher), torch.float64), ours
    )


def test_wide_predictions_are_compared_as_they_are():
    """The default dtype is the narrowest, not the one: float32 would leave 1e-7 here."""
    pair = Predictions(states(0), head(2)), Predictions(states(1), head(3))
    found, wide = token_divergence(*pair), token_divergence(*pair, torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wide, rtol=1e-14, atol=0)


def test_nothing_is_kept_for_the_gradient_but_states():
    kept: list[int] = []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    ours, student = states(0).requires_grad_(), head(2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_divergence(Predictions(ours, student), Predictions(states(1), student))
    # A piece's logits would be three rows of the vocabulary.
    assert max(kept) <= 3 * WIDTH < 3 * VOCABULARY


def test_a_sample_gives_divergence_and_gradient_on_average():
    """Within five standard errors of two thousand draws; tokens that are predicted from alike are never drawn."""
    ours, theirs = states(0), states(1)
    ours[3:6] = theirs[3:6]
    # Far more of the divergence in one token than in another.
    ours[7:] += 3 * (ours[7:] - theirs[7:])
    ours, student, draw = ours.requires_grad_(), head(2), torch.Generator().manual_seed(0)
    pair = Predictions(ours, student), Predictions(theirs, student)
    wanted = token_divergence(*pair)
    (expected,) = torch.autograd.grad(wanted, ours)
    found, gradients = [], []
    for _ in range(2000):
        one = sampled_divergence(*pair, draw)
        found.append(one.detach())
        gradients.append(torch.autograd.grad(one, ours)[0])
        assert (gradients[-1].abs().amax(1) > 0).sum() <= 6
    for draws, mean in ((torch.stack(found), wanted.detach()), (torch.stack(gradients), expected)):
        errors = draws.std(0) / 2000**0.5
        assert ((draws.mean(0) - mean).abs() <= 5 * errors + 1e-15).all()
        assert (errors > 0).any()
    assert not torch.stack(gradients)[:, 3:6].any()


def test_looks_compare_six_of_eleven_tokens_evenly_spread():
    pair = Predictions(states(0), head(2)), Predictions(states(1), head(3))
    wanted = token_divergence(*(one.at(torch.tensor([0, 1, 3, 5, 7, 9])) for one in pair))
    assert torch.equal(spread_divergence(*pair), wanted)


def test_a_sample_of_few_tokens_is_all_of_them(monkeypatch):
    monkeypatch.setattr(predictions, "_MOST", TOKENS * VOCABULARY)
    pair = Predictions(states(0), head(2)), Predictions(states(1), head(3))
    for found in (sampled_divergence(*pair, torch.Generator()), spread_divergence(*pair)):
        assert torch.equal(found, token_divergence(*pair))


def test_a_sample_counts_the_tokens_of_all_processes():
    """Twice as many in the mean: half the share."""
    pair, draw = (Predictions(states(0), head(2)), Predictions(states(1), head(3))), torch.Generator()
    own = sampled_divergence(*pair, draw.manual_seed(3))
    assert torch.equal(sampled_divergence(*pair, draw.manual_seed(3), mean=lambda x: 2 * x), own / 2)


def test_a_sample_of_equals_is_nothing_and_of_no_number_is_none():
    pair = [Predictions(states(0), head(2))] * 2
    assert sampled_divergence(*pair, torch.Generator()).item() == 0
    broken = states(0)
    broken[:] = torch.nan
    assert sampled_divergence(Predictions(broken, head(2)), pair[0], torch.Generator()).isnan()


def test_losses_of_the_next_tokens_are_torchs():
    last, following = states(0), torch.tensor([*range(VOCABULARY), NONE, 1, NONE, 2])
    made = head(1)
    found = next_token_losses(Predictions(last, made, following))
    expected = cross_entropy(made(last), following, ignore_index=NONE)
    assert found is not None
    assert len(found) == TOKENS - 2
    torch.testing.assert_close(found.mean(), expected.detach())
    assert next_token_losses(Predictions(last, made)) is None


def doubled(model, inputs, outputs):
    """Forward hook of a model that does more with its logits than its head."""
    outputs.logits = 2 * outputs.logits
    return outputs


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_models_own_predictions(build, padded, is_plain):
    """Made of states by its head where that is all the model does, else all logits as given; none of padding."""
    batch = padded[0]
    mask, model = batch["attention_mask"].bool(), build("llama")
    if not is_plain:
        model.register_forward_hook(doubled)
    with torch.no_grad():
        own, whole = run(model, batch).predictions, model(**batch).logits[mask]
        logs = torch.cat([own.log_probabilities(own.states[piece], torch.float32) for piece in own.pieces()])
    torch.testing.assert_close(logs, whole.log_softmax(-1), atol=1e-5, rtol=1e-5)
    assert own.head is (model.lm_head if is_plain else None)
    assert own.states.shape == (int(mask.sum()), 32 if is_plain else 64)
    # Of a text's last token there is no next one.
    lengths = mask.sum(1).tolist()
    assert own.following.tolist().count(NONE) == len(lengths)
    assert own.following[: lengths[0] - 1].tolist() == batch["input_ids"][0, 1 : lengths[0]].tolist()


def test_models_of_masked_tokens_predict_no_next_one(padded):
    sizes = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = BertForMaskedLM(BertConfig(**sizes, intermediate_size=8)).eval()
    found = run(model, padded[0]).predictions
    assert found.head is None
    assert found.states.shape[-1] == 64
    assert next_token_losses(found) is None
