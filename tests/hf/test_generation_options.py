"""What else `generate` can be asked for: the same with states as without any cache, or refused by name."""

from __future__ import annotations

import pytest
import torch

from linattn.hf import StateCache, linearize_
from model_inputs import LANGUAGE_HEADS

TEXT = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(5))
LENGTH = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
# Float64 sums of some hundred terms of order 1 in another order: 2**-53 a rounding, and three layers that magnify it.
CLOSE = 1e-12


@pytest.fixture(params=[(family, layers) for family in ("llama", "gpt2") for layers in (None, (0, 2))], ids=str)
def model(request, build):
    """Linearized language models in float64; hybrids keep their middle layer."""
    return linearized(build, *request.param, depth=3)


def linearized(build, family, layers, depth):
    """A model of so many layers, of which all are linearized, or some."""
    model = build(
        family, head=LANGUAGE_HEADS[family], **{"n_layer" if family == "gpt2" else "num_hidden_layers": depth}
    ).double()
    model.generation_config.pad_token_id = 0
    linearize_(model, method="FavorPlus(num_features=32)", layers=layers)
    return model


def differ(ours, wanted) -> float:
    """Largest difference relative to the largest value."""
    return float((ours - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("beams", [1, 3])
def test_embeddings_for_a_prompt(model, beams):
    wanted = model.generate(TEXT, **LENGTH, num_beams=beams, use_cache=False)[:, 9:]
    made = model.generate(inputs_embeds=model.get_input_embeddings()(TEXT), **LENGTH, num_beams=beams)
    assert torch.equal(made, wanted)


def test_no_prompt(model):
    assert torch.equal(
        model.generate(bos_token_id=1, **LENGTH), model.generate(bos_token_id=1, **LENGTH, use_cache=False)
    )


def test_guidance_by_a_second_pass(model):
    made = model.generate(TEXT, **LENGTH, guidance_scale=2.0)
    assert torch.equal(made, model.generate(TEXT, **LENGTH, guidance_scale=2.0, use_cache=False))
    assert not torch.equal(made, model.generate(TEXT, **LENGTH))


def test_prompt_lookup_takes_a_cache_that_can_be_cropped(model):
    options = {**LENGTH, "prompt_lookup_num_tokens": 2}
    repeated = TEXT[:1, :3].repeat(1, 4)
    assert torch.equal(model.generate(repeated, **options), model.generate(repeated, **LENGTH, use_cache=False))
    states = StateCache(model)
    made = model.generate(repeated, **options, past_key_values=states)
    assert torch.equal(made, model.generate(repeated, **LENGTH, use_cache=False))


def test_logits_and_hidden_states(model):
    """Step by step, those of one pass over the finished text."""
    asked = {"output_logits": True, "output_hidden_states": True, "return_dict_in_generate": True}
    made = model.generate(TEXT, **LENGTH, **asked)
    with torch.no_grad():
        whole = model(made.sequences[:, :-1], output_hidden_states=True, use_cache=False)
    # generate keeps logits in float32.
    assert differ(torch.stack(made.logits, 1), whole.logits[:, 8:]) <= 1e-6
    for layer, wanted in enumerate(whole.hidden_states):
        steps = torch.cat([step[layer] for step in made.hidden_states], 1)
        assert differ(steps, wanted) <= CLOSE


@pytest.mark.parametrize(("family", "layers", "depth"), [("llama", None, 1), ("gpt2", (0,), 2)], ids=str)
def test_one_compiled_graph_for_a_step(build, family, layers, depth):
    """Of states alone, and beside keys of softmax."""
    torch.compiler.reset()
    model = linearized(build, family, layers, depth)
    cache, compiled = StateCache(model), torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        model(TEXT[:, :7], past_key_values=cache)
        fork = cache.fork()
        for place in (7, 8):
            step = {"input_ids": TEXT[:, place : place + 1]}
            own = model(**step, past_key_values=cache).logits
            assert differ(compiled(**step, past_key_values=fork).logits, own) <= CLOSE
