"""Exact attention through `intercept` is the model's own, and nothing of it stays behind."""

from __future__ import annotations

import pytest
import torch

from linattn.hf import intercept

# Two float32 evaluations of the same sums: 2**-24 a rounding, some hundred roundings in sequence, outputs of order 1.
CLOSE = 1e-5


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "esm", "gpt2", "llama", "mistral"])
def test_exact_handler_reproduces_the_model(build, padded, exact, family, side):
    model, inputs = build(family), padded(side)
    if side == "none":
        inputs = {"input_ids": inputs["input_ids"][:1]}
    own = run(model, inputs)
    with intercept(model, exact):
        ours = run(model, inputs)
    real = inputs.get("attention_mask", torch.ones(1, 7)).bool()
    assert (ours - own)[real].abs().max() <= CLOSE * own[real].abs().max().clamp(min=1)


def test_padding_changes_nothing_for_the_real_tokens(build, padded, exact):
    model, inputs = build("llama"), padded("left")
    ids = inputs["input_ids"][1:2, 3:]
    with intercept(model, exact):
        # Rotary positions are relative: the padded row's own positions differ from the short text's by a shift.
        whole, alone = run(model, inputs)[1, 3:], run(model, {"input_ids": ids})[0]
    assert (whole - alone).abs().max() <= CLOSE * alone.abs().max()


@pytest.mark.parametrize(("family", "causal"), [("bert", False), ("gpt2", True), ("llama", True)])
def test_calls_say_what_the_model_asks_for(build, padded, exact, family, causal):
    model, inputs, seen = build(family), padded("left"), []

    def handler(call):
        seen.append(call)
        return exact(call)

    with intercept(model, handler):
        run(model, inputs)
        run(model, inputs)
    assert [call.layer for call in seen] == [0, 1, 0, 1]
    assert [type(model.get_submodule(call.module_name)).__name__[-9:] for call in seen[:2]] == ["Attention"] * 2
    call = seen[0]
    assert call.is_causal is causal
    assert call.query.shape == (3, 4, 7, 8)
    assert call.key.shape == call.value.shape == (3, 2 if family == "llama" else 4, 7, 8)
    assert call.key_mask.dtype == torch.bool
    assert torch.equal(call.key_mask, inputs["attention_mask"].bool())
    assert call.scale == pytest.approx(8**-0.5)


def test_no_key_mask_where_nothing_is_padded(build, exact):
    masks = []

    def handler(call):
        masks.append(call.key_mask)
        return exact(call)

    model, ids = build("bert"), torch.tensor([[3, 4, 5]])
    with intercept(model, handler):
        run(model, {"input_ids": ids})
        run(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert masks == [None] * 4


def test_scale_is_the_one_the_model_passes(build, exact):
    scales = []

    def handler(call):
        scales.append(call.scale)
        return exact(call)

    with intercept(model := build("esm"), handler):
        run(model, {"input_ids": torch.tensor([[3, 4, 5]])})
    assert scales == [1.0, 1.0]  # ESM scales its queries itself


def test_decoder_made_bidirectional(build, padded, exact):
    model, inputs, causal = build("llama", is_causal=False), padded("right"), []
    own = run(model, inputs)

    def handler(call):
        causal.append(call.is_causal)
        return exact(call)

    with intercept(model, handler):
        ours = run(model, inputs)
    real = inputs["attention_mask"].bool()
    assert causal == [False, False]
    assert (ours - own)[real].abs().max() <= CLOSE * own[real].abs().max()


def test_generation_with_a_cache(build, exact):
    model = build("llama", head="ForCausalLM")
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    own = model.generate(ids, **options)
    with intercept(model, exact):
        ours = model.generate(ids, **options)
    assert torch.equal(ours, own)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_the_model_is_restored(build, padded, exact, family):
    model, inputs = build(family), padded("right")
    own, before = run(model, inputs), model.config._attn_implementation
    with intercept(model, exact):
        run(model, inputs)
    assert model.config._attn_implementation == before
    assert torch.equal(run(model, inputs), own)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_the_model_is_restored_after_an_error(build, padded):
    model, inputs = build("llama"), padded("right")
    own, before = run(model, inputs), model.config._attn_implementation

    def broken(call):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), intercept(model, broken):
        run(model, inputs)
    assert model.config._attn_implementation == before
    assert torch.equal(run(model, inputs), own)


def test_two_models_keep_their_own_handlers(build, padded, exact):
    one, other, inputs = build("bert"), build("llama"), padded("right")
    count = {"one": 0, "other": 0}

    def counting(name):
        def handler(call):
            count[name] += 1
            return exact(call)

        return handler

    with intercept(one, counting("one")), intercept(other, counting("other")):
        run(one, inputs)
        run(other, inputs)
        run(other, inputs)
    assert count == {"one": 2, "other": 4}
