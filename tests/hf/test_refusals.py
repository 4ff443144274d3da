"""What a kernel cannot express is refused by name, never computed without it."""

from __future__ import annotations

import pytest
import torch

from linattn.hf import intercept

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])


@pytest.mark.parametrize(
    ("family", "options", "inputs", "words"),
    [
        ("t5", {}, {"decoder_input_ids": IDS}, "position bias"),
        ("gemma2", {}, {}, "soft-capped logits"),
        ("gpt_oss", {}, {}, "attention sinks"),
        ("mistral", {"sliding_window": 3}, {}, "every attention layer of MistralModel has a sliding window"),
        ("llama", {}, {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "use_cache": False}, "packed"),
        ("llama", {}, {"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}, "4-D mask"),
    ],
)
def test_inexpressible_calls(build, exact, family, options, inputs, words):
    model = build(family, **options)
    with pytest.raises(ValueError, match=words), torch.no_grad(), intercept(model, exact):
        model(input_ids=IDS, **inputs)
    assert model.config._attn_implementation != "linattn_intercept"


def test_dropout(build, exact):
    model = build("bert").train()
    with pytest.raises(ValueError, match=r"dropout of 0\.1"), intercept(model, exact):
        model(input_ids=IDS)


@pytest.mark.parametrize("family", ["bloom", "mpnet"])
def test_architectures_that_ignore_the_interface(build, exact, family):
    model = build(family)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"does not take its attention.*choose a model that does"):
        intercept(model, exact).__enter__()
    assert model.config._attn_implementation == before


def test_a_forward_pass_without_calls(build, exact):
    model = build("bert", num_hidden_layers=0)
    with pytest.raises(RuntimeError, match="without one call"), torch.no_grad(), intercept(model, exact):
        model(input_ids=IDS)


def test_intercepting_twice(build, exact):
    model = build("bert")
    with intercept(model, exact), pytest.raises(ValueError, match="already intercepted"), intercept(model, exact):
        pass


@pytest.mark.parametrize(
    ("handler", "words"), [(lambda call: call.value[..., :3], r"\(1, 4, 6, 3\)"), (lambda call: None, "NoneType")]
)
def test_output_of_another_shape_or_none(build, handler, words):
    model = build("bert")
    with (
        pytest.raises(ValueError, match=rf"returned {words}.*must return .*\(1, 4, 6, 8\)"),
        torch.no_grad(),
        intercept(model, handler),
    ):
        model(input_ids=IDS)


def test_a_window_wider_than_the_text_is_no_window(build, exact):
    model = build("mistral", sliding_window=6)
    with torch.no_grad():
        own = model(input_ids=IDS)[0]
        with intercept(model, exact):
            ours = model(input_ids=IDS)[0]
    assert (ours - own).abs().max() <= 1e-5 * own.abs().max()
