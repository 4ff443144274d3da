"""A method per head: each head is the op it was planned to be, inside a model as outside."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import linattn
from linattn.hf import (
    LayerAttention,
    LayerState,
    StateCache,
    capture,
    from_pretrained,
    linearize_,
    restore_,
    save_pretrained,
)
from linattn.planning import HeadPlan, Plan
from linattn.planning.methods import parse_method
from model_inputs import LANGUAGE_HEADS, alone, batch, real
from programs import TRANSFORMERS

D, LENGTH = 8, 24
CENTRES, WINDOW = "Expansion(num_centres=2)", "Expansion(num_centres=3) + window 4"
FAVOR = "FavorPlus(num_features=16)"
METHODS = (CENTRES, "exact", WINDOW, CENTRES)
# Two evaluations in float64 of the same sums; queries multiplied by c/s are rounded once more.
EXACT = 1e-12
# Two float32 evaluations of the same sums: 2**-24 a rounding, some hundred roundings in sequence, outputs of order 1.
CLOSE = 1e-5


def planned(methods=METHODS, *, is_causal=False, width=D, scale=None, value_dim=None):
    heads = tuple(HeadPlan(method, 0.0, None, 0.5, 10, 20) for method in methods)
    return Plan(heads, width, value_dim or width, scale or width**-0.5, is_causal, LENGTH)


def tensors(kv_heads=4, value_dim=D, batch_size=2):
    draw = torch.Generator().manual_seed(3)
    sizes = ((4, D), (kv_heads, D), (kv_heads, value_dim))
    return [torch.randn(batch_size, h, LENGTH, d, generator=draw, dtype=torch.float64) for h, d in sizes]


def head_by_head(plan, fitted, query, key, value, *, scale, key_mask, is_causal):
    """Every head alone: the op on one head, its map holding that head's row of the group's tensors."""
    shared, out = query.shape[1] // key.shape[1], []
    for head, label in enumerate(entry.method for entry in plan.heads):
        q, k, v = query[:, [head]], key[:, [head // shared]], value[:, [head // shared]]
        if label == "exact":
            out.append(linattn.softmax_attention(q, k, v, key_mask=key_mask, is_causal=is_causal, scale=scale))
            continue
        method, place = parse_method(label), plan.groups[label].index(head)
        feature_map = method.build(D, num_features=None, scale=plan.scale, seed=0)
        held = {name: x[place] if x.ndim == 3 and len(x) > 1 else x for name, x in fitted.get(label, {}).items()}
        feature_map.load_state_dict(held, strict=bool(held))
        out.append(
            linattn.linear_attention(
                q * (scale / plan.scale),
                k,
                v,
                feature_map,
                key_mask=key_mask,
                is_causal=is_causal,
                exact=method.exact,
            )
        )
    return torch.cat(out, 1)


@pytest.mark.parametrize(
    ("is_causal", "fixed"), [(False, False), (False, True), (True, True)], ids=["per call", "fitted", "causal"]
)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("padded", [False, True])
def test_every_head_is_the_op_it_was_planned_to_be(kv_heads, is_causal, padded, fixed):
    query, key, value = tensors(kv_heads, value_dim=5)
    plan = planned(is_causal=is_causal, scale=0.3, value_dim=5)
    plan = plan.fit(*tensors(kv_heads)[:2]) if fixed else plan
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, 15:] = not padded
    options = {"scale": 0.7, "key_mask": mask, "is_causal": is_causal}
    out = LayerAttention(plan, "layer").double()(query, key, value, **options)
    wanted = head_by_head(plan, plan.fitted, query, key, value, **options)
    assert (out - wanted).abs().max() <= EXACT * wanted.abs().max()
    # The methods differ, so that a head answered by another's would be seen.
    assert len({entry.sum().item() for entry in wanted.transpose(0, 1)}) == 4


@pytest.mark.parametrize("masked", [slice(0, 5), slice(12, 13)])
def test_the_state_and_the_whole_are_one_fold(masked):
    query, key, value = tensors(kv_heads=2)
    kernel = LayerAttention(planned(is_causal=True).fit(query, key), "layer").double()
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, masked] = False
    whole = kernel(query, key, value, scale=0.7, key_mask=mask, is_causal=True)
    state, outs = None, []
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, LENGTH)):
        parts = (x[:, :, start:stop] for x in (query, key, value))
        some = mask[:, start:stop]
        # What no key is masked in may come without a mask.
        some = None if some.all() else some
        out, state = kernel.advance(*parts, state, scale=0.7, key_mask=some)
        outs.append(out)
    assert (torch.cat(outs, 2) - whole).abs().max() <= EXACT * whole.abs().max()
    assert tuple(state.parts["exact"].key.shape) == (2, 1, LENGTH, D)
    turned = state.select(torch.tensor([1, 0]))
    last = [x[:, :, -1:] for x in (query, key, value)]
    ours = kernel.advance(*(x.flip(0) for x in last), turned, scale=0.7).out
    assert torch.equal(ours.flip(0), kernel.advance(*last, state, scale=0.7).out)


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def plans_of(model, inputs, methods=METHODS):
    """The same methods in every layer, fitted to what the model attends to."""
    return [
        planned(methods, is_causal=call.is_causal, width=call.query.shape[-1], scale=call.scale).fit(
            call.query, call.key
        )
        for call in capture(model, inputs).calls
    ]


@pytest.mark.parametrize("family", ["bert", "distilbert", "esm", "llama", "gpt2"])
def test_a_plan_of_exact_heads_is_the_softmax_model(build, family):
    model, inputs = build(family), batch(family)
    own = run(model, inputs)[real(inputs)]
    linearize_(model, plans=plans_of(model, inputs, ["exact"] * 4))
    assert (run(model, inputs)[real(inputs)] - own).abs().max() <= CLOSE * own.abs().max()


def test_report(build):
    model = build("bert", num_hidden_layers=3)
    plans = plans_of(model, {"input_ids": batch("bert")["input_ids"][:1]})
    report = linearize_(model, plans=plans[1:], layers=[1, 2])
    assert str(report).splitlines() == [
        "  0 encoder.layer.0.attention.self: softmax (not among `layers`)",
        f"  1 encoder.layer.1.attention.self: 4 heads: 1 exact, 2 {CENTRES}, 1 {WINDOW}",
        f"  2 encoder.layer.2.attention.self: 4 heads: 1 exact, 2 {CENTRES}, 1 {WINDOW}",
    ]
    kernel = model.encoder.layer[2].attention.self.linear_attention
    assert isinstance(kernel, LayerAttention)
    assert torch.equal(kernel.maps[0].centres, plans[2].fitted[CENTRES]["centres"])
    assert "1 exact" in repr(kernel)


@pytest.mark.parametrize("family", ["bert", "modernbert", "esm"])
def test_padding_changes_nothing(build, family):
    model, inputs = build(family).double(), batch(family)
    layers = [0] if family == "modernbert" else None
    plans = plans_of(model, {"input_ids": inputs["input_ids"][:1]})
    linearize_(model, plans=plans[:1] if layers else plans, layers=layers)
    together = run(model, inputs)
    for row in range(3):
        found = run(model, alone(inputs, row))[0]
        wanted = together[row][inputs["attention_mask"][row].bool()]
        assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_restored_to_the_bit(build, family):
    model, inputs = build(family), batch(family)
    own, names = run(model, inputs), set(model.state_dict())
    linearize_(model, plans=plans_of(model, inputs))
    assert not torch.equal(run(model, inputs), own)
    assert any(name.endswith("linear_attention.maps.0.centres") for name in set(model.state_dict()) - names)
    restore_(model)
    assert torch.equal(run(model, inputs), own)
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_gradients_reach_the_model_and_learned_maps(build, family):
    model, inputs = build(family), batch(family)
    learned = "LearnedExponential(num_features=8)"
    linearize_(model, plans=plans_of(model, inputs, ["exact", learned, CENTRES, learned]))
    model(**inputs)[0].square().sum().backward()
    assert any("maps" in name for name, _ in model.named_parameters())
    for name, weight in model.named_parameters():
        pooled = "pooler" in name
        assert pooled or (weight.grad is not None and weight.grad.isfinite().all()), name


@pytest.mark.parametrize("family", LANGUAGE_HEADS)
def test_generated_with_states_as_without_a_cache(build, family):
    options = {"sliding_window": None} if family == "mistral" else {}
    model = build(family, head=LANGUAGE_HEADS[family], **options).double()
    model.generation_config.pad_token_id = 0
    text = {"input_ids": torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(5))}
    linearize_(model, plans=plans_of(model, text))
    text["attention_mask"] = torch.ones_like(text["input_ids"])
    text["attention_mask"][1, :4] = 0
    some = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "num_beams": 2}
    made = model.generate(**text, **some, return_dict_in_generate=True)
    assert isinstance(made.past_key_values, StateCache)
    assert all(isinstance(layer.state, LayerState) for layer in made.past_key_values.layers)
    # Three windows later, what has grown is one exact head's: per token 16 numbers of 8 bytes, and a mask.
    longer = model.generate(
        **text, **{**some, "max_new_tokens": 21, "min_new_tokens": 21}, return_dict_in_generate=True
    )
    grown = longer.past_key_values.num_bytes - made.past_key_values.num_bytes
    assert grown == 2 * 4 * 12 * (16 * 8 + 1)
    assert torch.equal(made.sequences, model.generate(**text, **some, use_cache=False))
    assert torch.equal(made.sequences, model.generate(**text, **some, past_key_values=DynamicCache()))
    assert len(made.sequences.unique()) > 3


def test_rows_of_the_cache_are_repeated_and_chosen(build):
    model = build("llama", head="ForCausalLM").double()
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(5))
    linearize_(model, plans=plans_of(model, {"input_ids": ids}))
    cache, order = StateCache(model), torch.tensor([1, 1, 0])
    run(model, {"input_ids": ids[:, :8], "past_key_values": cache})
    whole = run(model, {"input_ids": ids})[:, 8:]
    repeated = cache.fork()
    repeated.batch_repeat_interleave(2)
    twice = run(model, {"input_ids": ids[:, 8:].repeat_interleave(2, 0), "past_key_values": repeated})
    assert (twice - whole.repeat_interleave(2, 0)).abs().max() <= EXACT * whole.abs().max()
    cache.batch_select_indices(order)
    chosen = run(model, {"input_ids": ids[order, 8:], "past_key_values": cache})
    assert (chosen - whole[order]).abs().max() <= EXACT * whole.abs().max()


PROGRAM = """
import sys, torch
from linattn.hf import from_pretrained
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model, inputs = from_pretrained(folder), torch.load(folder + ".inputs")
    with torch.no_grad():
        torch.save(model(**inputs)[0], folder + ".found")
"""


def test_another_process_gives_the_same_bits(run_program, build, tmp_path):
    wanted = {}
    for family, dtype in (("bert", torch.float32), ("llama", torch.float32), ("esm", torch.bfloat16)):
        model, inputs = build(family), batch(family)
        linearize_(model, plans=plans_of(model, inputs, (CENTRES, "exact", f"{FAVOR} + window 4", CENTRES)))
        wanted[family] = run(model.to(dtype), inputs)
        save_pretrained(model, tmp_path / family)
        torch.save(inputs, tmp_path / f"{family}.inputs")
        twin = from_pretrained(tmp_path / family)
        assert [part.plan.heads for part in twin.modules() if isinstance(part, LayerAttention)] == [
            part.plan.heads for part in model.modules() if isinstance(part, LayerAttention)
        ]
        restore_(twin)
        restore_(model)
        assert torch.equal(run(twin, inputs), run(model, inputs))
    folders = [str(tmp_path / family) for family in wanted]
    done = run_program(PROGRAM, *folders, after=TRANSFORMERS, warned="error")
    assert done.returncode == 0, done.stderr
    for family, out in wanted.items():
        assert torch.equal(torch.load(tmp_path / f"{family}.found"), out), family


def test_a_broken_record_is_refused(build, tmp_path):
    model = build("bert")
    linearize_(model, plans=[planned()] * 2)
    save_pretrained(model, tmp_path / "new")
    path = tmp_path / "new" / "linattn.json"
    text = path.read_text()
    for old, new, words in (
        ('"head_dim": 8', '"head_dim": "8"', r"layer 0, plan: head_dim must be a finite int, got '8'; save the model"),
        (CENTRES, "Performer", "layer 0: 'Performer': there is no feature map"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=words):
            from_pretrained(tmp_path / "new")
    path.write_text(text)
    from_pretrained(tmp_path / "new")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give one of feature_map and plans"),
        ({"exact": linattn.Exact(32, num_merged=96)}, r"in its place, as feature_map='window 32 \+ merged 96'"),
        ({"plans": [planned()] * 2, "feature_map": "Taylor"}, "give one of feature_map and plans"),
        ({"plans": [planned()] * 2, "exact": linattn.Exact(4)}, "have their own window, heavy keys and width"),
        ({"plans": [planned()] * 2, "num_features": 4}, "have their own window, heavy keys and width"),
        ({"plans": [planned()]}, "got 1 plans for the 2 layers to be replaced"),
        ({"plans": [planned(width=4)] * 2}, r"\(layer 0\) has heads of width 8 and is bidirectional, its plan is for"),
        ({"plans": [planned(is_causal=True)] * 2}, "its plan is for heads of width 8 and causal"),
    ],
)
def test_refusals(build, options, words):
    model, inputs = build("bert"), batch("bert")
    own = run(model, inputs)
    with pytest.raises(ValueError, match=words):
        linearize_(model, **options)
    assert torch.equal(run(model, inputs), own)


def test_causal_layers_refuse_maps_that_would_learn_from_the_call(build):
    with pytest.raises(
        ValueError, match=r"\(layer 0\) cannot attend by 4 heads: .*Expansion would take centres of all"
    ):
        linearize_(build("llama"), plans=[planned(is_causal=True)] * 2)


def test_another_number_of_heads_is_refused_by_the_layer(build):
    model = build("bert")
    linearize_(model, plans=[planned(METHODS[:3])] * 2)
    with pytest.raises(ValueError, match="the plan is for 3 query heads of width 8"):
        run(model, batch("bert"))
