"""Layers with attention sinks (gpt-oss): bounded caches and maps for the softmax kernel take them; others do not."""

from __future__ import annotations

import pytest
import torch

from linattn import MergedKV, feature_maps
from linattn.hf import BoundedCache, LayerAttention, StateCache, linearize_
from linattn.hf.linearization import choose_layers
from model_inputs import differ, run

IDS = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(5))
MASK = torch.arange(24) >= torch.tensor([0, 5])[:, None]
# More keys than the text has, and fewer.
ENOUGH, FEW = MergedKV(4, 64, None), MergedKV(4, 6, None)
WIDE = "FavorPlus(num_features=16) + window 32"
# float32 sums of some hundred terms in another order.
CLOSE = 1e-5
# Logits that take most of a row's weight, and little of it.
SINKS = torch.tensor([-1.0, 1.0, 3.0, 5.0])


@pytest.fixture
def model(build):
    """A gpt-oss whose layers both see all keys."""
    # All experts for each token: none is chosen, which rounding could change.
    options = {"num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
    built = build("gpt_oss", head="ForCausalLM", **options)
    with torch.no_grad():
        for layer in built.model.layers:
            layer.self_attn.sinks.copy_(SINKS)
    return built


@pytest.mark.parametrize("pieces", [[24], [7, 1, 1, 9, 6], [1] * 24], ids=["whole", "chunks", "tokens"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "left padding"])
@pytest.mark.parametrize("is_linear", [False, True], ids=["bounded", "linear"])
def test_enough_exact_keys_are_the_model_itself(model, mask, pieces, is_linear):
    options = {} if mask is None else {"attention_mask": mask.long()}
    live = slice(None) if mask is None else mask
    wanted = run(model, input_ids=IDS, **options)[live]
    if is_linear:
        linearize_(model, method=WIDE)
        assert differ(run(model, input_ids=IDS, use_cache=False, **options)[live], wanted) <= CLOSE
    cache, outs, start = StateCache(model) if is_linear else BoundedCache(model, config=ENOUGH), [], 0
    for piece in pieces:
        shown = {} if mask is None else {"attention_mask": mask[:, : start + piece].long()}
        outs.append(run(model, input_ids=IDS[:, start : start + piece], past_key_values=cache, **shown))
        start += piece
    assert differ(torch.cat(outs, 1)[live], wanted) <= CLOSE


def test_a_bounded_cache_is_one_model_however_cut_or_taken_back(model):
    softmax = run(model, input_ids=IDS)
    wanted = run(model, input_ids=IDS, past_key_values=BoundedCache(model, config=FEW))
    assert differ(wanted, softmax) > 1e-3
    cache = BoundedCache(model, config=FEW)
    outs = [run(model, input_ids=part, past_key_values=cache) for part in IDS.split([5, 1, 18], 1)]
    assert differ(torch.cat(outs, 1), wanted) <= CLOSE
    greedy = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    text = model.generate(IDS[:1], **greedy, past_key_values=BoundedCache(model, config=FEW))
    cache = BoundedCache(model, config=FEW)
    assert torch.equal(model.generate(IDS[:1], **greedy, prompt_lookup_num_tokens=3, past_key_values=cache), text)


@pytest.mark.parametrize("method", ["FavorPlus(num_features=16)", "Expansion(num_centres=3) + window 4"])
def test_what_takes_sinks_gives_them_their_share_whole_and_token_by_token(model, method):
    """Beside sinks of no weight outputs are those without; of much weight nothing is left of a layer."""
    report = linearize_(model, method=method, calibrate=[IDS] if "Expansion" in method else None)
    assert len(report.replaced) == 2
    attention = model.model.layers[0].self_attn.linear_attention
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, heads, 24, 8, generator=generator) for heads in (4, 2, 2))
    options = {"scale": 8**-0.5, "key_mask": MASK}
    plain = attention(query, key, value, is_causal=True, **options)
    none, all_of_it = torch.full((4,), -1e4), torch.full((4,), 1e4)
    none, all_of_it = (attention(query, key, value, is_causal=True, sinks=x, **options) for x in (none, all_of_it))
    torch.testing.assert_close(none, plain, rtol=2**-18, atol=2**-18)
    assert float(all_of_it.abs().max()) == 0
    beside = attention(query, key, value, is_causal=True, sinks=SINKS, **options)
    state, outs = None, []
    for t in range(24):
        some, shown = (x[:, :, t : t + 1] for x in (query, key, value)), MASK[:, t : t + 1]
        out, state = attention.advance(*some, state, scale=8**-0.5, key_mask=shown, sinks=SINKS)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), beside, rtol=2**-16, atol=2**-16)
    share = beside[:, :, -1] / plain[:, :, -1]
    assert ((share > 0) & (share < 1)).all()


def test_sinks_learn(model):
    """As those of the model itself do."""
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    wanted = torch.autograd.grad(model(IDS).logits.square().sum(), sinks)
    linearize_(model, method=WIDE)
    found = torch.autograd.grad(model(IDS, use_cache=False).logits.square().sum(), sinks)
    assert all(differ(ours, own) <= 1e-4 for ours, own in zip(found, wanted, strict=True))


WORDS = "it asks for attention sinks, which linearize_ gives to written forms of maps for the softmax kernel"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "Relu"}, WORDS),
        ({"method": lambda head_dim: feature_maps.FavorPlus(head_dim, 16)}, WORDS),
        ({"method": ["Relu", "FavorPlus(num_features=16)"]}, WORDS),
        ({"method": "Taylor(order=1)"}, "no positive normaliser that they could share"),
    ],
    ids=["a map of another kernel", "a function", "one of two", "a signed map"],
)
@pytest.mark.parametrize("layers", [None, [0, 1]])
def test_the_rest_is_refused_at_once(model, options, layers, words):
    before = run(model, input_ids=IDS)
    with pytest.raises(ValueError, match=words):
        linearize_(model, layers=layers, **options)
    assert torch.equal(run(model, input_ids=IDS), before)
    with pytest.raises(ValueError, match="attention sinks"):
        choose_layers(model)


def test_sinks_that_depend_on_the_query_are_refused(model):
    """Of a shape that no model in the table has."""
    parameters = [layer.self_attn.__dict__["_parameters"] for layer in model.model.layers]
    for held in parameters:
        held["sinks"] = torch.nn.Parameter(torch.zeros(1, 4, 1, 1))
    with pytest.raises(ValueError, match="it asks for attention sinks, which neither"):
        linearize_(model, method=WIDE)


def test_sinks_that_a_layer_cannot_take_are_refused_by_name():
    attention = LayerAttention(feature_maps.Relu(8), "layer.0")
    token = torch.zeros(1, 4, 1, 8)
    for call in (attention, lambda *x, **options: attention.advance(*x, None, **options)):
        with pytest.raises(ValueError, match=r"layer\.0 attends by Relu.*beside which sinks have no scale"):
            call(token, token, token, scale=1.0, sinks=SINKS)
    attention = LayerAttention(feature_maps.FavorPlus(8, 16), "layer.0")
    attention.attend_to_parts = lambda *_, **__: token
    with pytest.raises(ValueError, match=r"layer\.0 has a part of each sequence"):
        attention(token, token, token, scale=1.0, sinks=SINKS)


def test_merged_keys_have_no_state_in_a_layer():
    token = torch.zeros(1, 4, 1, 8)
    with pytest.raises(
        ValueError, match=r"layer\.0 attends by sinks 4 \+ window 4 \+ merged 6, which has no state here"
    ):
        LayerAttention(FEW, "layer.0").advance(token, token, token, None, scale=1.0)
