"""Attention weights, which no kernel forms, are refused by every family, whichever way they are asked for."""

from __future__ import annotations

import pytest
import torch

from linattn.hf import intercept, linearize_, restore_
from model_inputs import DECODERS, ENCODERS, OPTIONS, batch

FAMILIES = (*ENCODERS, "vit", *DECODERS, "whisper", "bart")
REFUSED = r"asked for the weights themselves \(output_attentions=True, in the call or in its config\).*without them"


@pytest.fixture
def asking(build):
    """A function giving a family's model, and the arguments of a call, one of which asks for weights."""

    def of(family, how):
        model = build(family, attn_implementation="eager", **OPTIONS.get(family, {})).double()
        if how == "config":
            model.config.output_attentions = True
            return model, batch(family)
        return model, {**batch(family), "output_attentions": True}

    return of


def weights(model, inputs):
    """What a model returns as weights, layer by layer; padding that sees nothing has none."""
    with torch.no_grad():
        out = model(**inputs)
    return [x.nan_to_num() for x in out.get("attentions", out.get("decoder_attentions"))]


@pytest.mark.parametrize("how", ["call", "config"])
@pytest.mark.parametrize("family", FAMILIES)
def test_refused_until_restored(asking, exact, family, how):
    model, inputs = asking(family, how)
    own = weights(model, inputs)
    assert len(own) == 2
    with intercept(model, exact), pytest.raises(ValueError, match=REFUSED):
        weights(model, inputs)
    linearize_(model, method="EluPlusOne")
    with pytest.raises(ValueError, match=REFUSED):
        weights(model, inputs)
    restore_(model)
    assert all(torch.equal(x, y) for x, y in zip(weights(model, inputs), own, strict=True))


def test_a_hybrid_and_a_part_of_a_model_refuse_too(build):
    model = build("gpt2", head="LMHeadModel")
    linearize_(model, method="EluPlusOne", layers=[1])
    text = torch.tensor([[3, 4, 5]])
    for part in (model, model.transformer):
        with pytest.raises(ValueError, match=REFUSED):
            part(input_ids=text, output_attentions=True)
    with pytest.raises(ValueError, match=REFUSED):
        model.generate(text, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    model.config.output_attentions = False
    assert model(input_ids=text, output_attentions=False).logits.isfinite().all()
