"""What a bounded cache cannot serve is refused before anything is computed, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MiniMaxConfig, MiniMaxForCausalLM, UnlimitedOcrTextConfig, UnlimitedOcrTextModel

from linattn import MergedKV
from linattn.hf import BoundedCache, LinearLMConfig, LinearLMForCausalLM, intercept, linearize_, restore_
from linattn.hf._dispatch import attend
from linattn.kv_cache.layer_plans import MemoryPlan, write_memory_plans
from model_inputs import LANGUAGE_HEADS

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
FEW = MergedKV(4, 6, None)


@pytest.fixture
def model(build):
    return build("llama", head=LANGUAGE_HEADS["llama"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 0}, "budget must be from 1 to 1048576 keys, got 0"),
        ({"budget": True}, "budget must be from 1 to"),
        ({"budget": 3}, "give a budget of"),
        ({"budget": "512"}, "got '512'"),
        ({"bits": 9}, "bits must be from 2 to 8 in halves, .* got 9"),
        ({"bits": 2.25}, "bits must be from 2 to 8 in halves, .* got 2.25"),
        ({"bits": math.nan}, "bits must be from 2 to 8 in halves, .* got nan"),
        ({"bits": "4"}, "bits must be from 2 to 8 in halves, .* got '4'"),
        ({"bits": [3, 4]}, r"bits must be from 2 to 8 in halves, .* got \[3, 4\]"),
        ({"bits": (4,)}, "bits must be from 2 to 8 in halves"),
        ({"bits": (None, 4)}, "bits must be from 2 to 8 in halves"),
        ({"bits": -4}, "bits must be from 2 to 8 in halves"),
        ({"config": MergedKV(None, 4)}, "config must have a window"),
        ({"recall": "all"}, "recall must be one of 'near', 'middle', 'far', got 'all'"),
        ({"config": FEW, "budget": 64}, "leave those out"),
        ({"config": FEW, "recall": "far"}, "leave those out"),
        ({"plan": "plan.json", "recall": "far"}, "got bits=4, recall='far'; leave them out"),
        ({"config": FEW, "plan": "plan.json"}, "leave those out"),
    ],
)
def test_options(model, options, words):
    with pytest.raises(ValueError, match=words):
        BoundedCache(model, **options)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_does_not_run_is_not_asked_for_an_example(build):
    with pytest.raises(ValueError, match=r"Cannot handle batch sizes > 1.*generate without one$"):
        BoundedCache(build("llama", head="ForSequenceClassification", pad_token_id=None))


def test_what_is_no_config_or_model(model):
    with pytest.raises(TypeError, match=r"config must be a linattn\.MergedKV or None, got 'window 4'"):
        BoundedCache(model, config="window 4")
    with pytest.raises(TypeError, match="a transformers model is wanted, got Linear"):
        BoundedCache(nn.Linear(1, 1))
    with pytest.raises(FileNotFoundError):
        BoundedCache(model, plan="nowhere.json")


def test_a_plan_of_keys_that_take_more_bytes(model, tmp_path):
    config = MergedKV.within(40, head_dim=8, bits=8)
    names, labels, budgets = (["merged keys in 8 bits"] * 2, [config.label] * 2, [40] * 2)
    plan = MemoryPlan("m", 40, 99, "t", "0", [0, 1], names, budgets, labels, 0.1, 0.2, [])
    write_memory_plans(tmp_path / "plan.json", [plan])
    assert [layer.config for layer in BoundedCache(model, 40, plan=tmp_path / "plan.json").report] == [config] * 2
    with pytest.raises(ValueError, match="takes more bytes in layer 0 than 40 keys in bfloat16: the plan is of"):
        BoundedCache(model.bfloat16(), 40, plan=tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("bert", "keeps keys and values of a causal text"),
        ("bloom", "does not take its attention from"),
        ("falcon", "does not take its attention from"),
    ],
)
def test_models_without_a_layer_that_can_be_bounded(build, family, words):
    with pytest.raises(ValueError, match=words):
        BoundedCache(build(family))


@pytest.mark.parametrize("window", [8, 512])
def test_windows_that_are_not_all_of_a_layer(window):
    """A prompt, or sums of recurrent layers, in caches of the models' own: a layer is not just left exact."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    few = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": window}
    prompts = UnlimitedOcrTextModel(UnlimitedOcrTextConfig(**sizes, **few, vocab_size=64))
    with pytest.raises(ValueError, match=r"no layer of Unlimited.* holds more than keys and values.*generate without"):
        BoundedCache(prompts.eval(), config=FEW)
    kinds = {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "num_hidden_layers": 2}
    sums = MiniMaxForCausalLM(MiniMaxConfig(**sizes, **few, **kinds, vocab_size=64))
    with pytest.raises(ValueError, match=r"no layer of MiniMax.*does not run with a DynamicCache.*generate without"):
        BoundedCache(sums.eval(), config=FEW)


def test_models_with_caches_of_their_own(model):
    with pytest.raises(ValueError, match="LinearLMForCausalLM keeps a StreamCache, whose streams"):
        BoundedCache(LinearLMForCausalLM(LinearLMConfig(num_hidden_layers=1)))
    linearize_(model, method="EluPlusOne")
    with pytest.raises(ValueError, match="is linearized, and keeps states in a StateCache; leave the budget out"):
        BoundedCache(model)


def test_weights_that_are_asked_for(model):
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="asked for the attention weights"):
        BoundedCache(model)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_that_a_call_asks_for(build, family):
    """Of families that tell their attention function, and of those that record what it returns."""
    model = build(family, head=LANGUAGE_HEADS[family])
    with pytest.raises(ValueError, match="asks for the weights themselves"):
        model(IDS, output_attentions=True, past_key_values=BoundedCache(model, config=FEW))


def test_a_model_that_was_linearized_since(model):
    cache = BoundedCache(model, config=FEW)
    linearize_(model, method="EluPlusOne")
    with pytest.raises(RuntimeError, match="attends by a feature map since linearize_"):
        model(IDS, past_key_values=cache)


def test_keys_that_another_function_reads(model, build):
    """Set since, of another model, or intercepted: no call attends to the new tokens alone."""
    cache, other = BoundedCache(model, config=FEW), build("llama", head=LANGUAGE_HEADS["llama"])
    words = "were read before linattn's attention function had them"
    for implementation in ("sdpa", "eager"):
        other.set_attn_implementation(implementation)
        with pytest.raises(RuntimeError, match=words):
            other(IDS, past_key_values=cache)
    with intercept(model, lambda call: call.softmax()), pytest.raises(RuntimeError, match=words):
        model(IDS, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model.set_attn_implementation("linattn")
    model(IDS, past_key_values=cache)


@pytest.mark.parametrize("change", [lambda key: key + 0, lambda key: key.repeat(1, 1, 1, 1), lambda key: key[:, :, :]])
def test_a_module_that_changes_its_keys(model, change):
    """In the last layer too, after which no other would notice."""
    cache, layer = BoundedCache(model, config=FEW), None
    layer = cache.layers[-1]
    update = layer.update

    def changed(*tensors: Any, **options: Any) -> Any:
        key, value = update(*tensors, **options)
        return change(key), value

    layer.update = changed
    with pytest.raises(RuntimeError, match="it changes its keys after its cache has them"):
        model(IDS, past_key_values=cache)
    with pytest.raises(RuntimeError, match="have seen different numbers of tokens"):
        model(IDS, past_key_values=cache)


def test_keys_that_are_attended_to_twice(model):
    cache = BoundedCache(model, config=FEW)
    module, layer, query = model.model.layers[0].self_attn, cache.layers[0], torch.randn(2, 4, 1, 8)
    key, value = layer.update(*torch.randn(2, 2, 2, 1, 8))
    attend(module, query, key, value, None, scaling=1.0, is_causal=True)
    with pytest.raises(RuntimeError, match="attends twice to the keys"):
        attend(module, query, key, value, None, scaling=1.0, is_causal=True)
    assert cache.get_seq_length() == 1


def test_training_with_checkpoints(model):
    """transformers fills no cache there."""
    cache = BoundedCache(model, config=FEW)
    model.train()
    model.activation_checkpointing_enable()
    with pytest.raises(RuntimeError, match=r"has not used it, as in training with gradient checkpointing.*eval"):
        model(IDS, past_key_values=cache)
    model.eval()
    model(IDS, past_key_values=cache)


def test_dropout_and_masks_of_pairs(build):
    model = build("llama", head=LANGUAGE_HEADS["llama"], attention_dropout=0.1)
    cache = BoundedCache(model, config=FEW)
    model.train()
    with pytest.raises(ValueError, match=r"dropout of 0\.1 on the weights"):
        model(IDS, past_key_values=cache)
    model.eval()
    with pytest.raises(ValueError, match="was given a 4-D mask"):
        model(IDS, past_key_values=cache, attention_mask=torch.ones(2, 1, 12, 12))
    assert cache.get_seq_length() == 0


def test_a_call_that_broke_off_between_two_layers(model):
    cache = BoundedCache(model, config=FEW)
    model(IDS, past_key_values=cache)
    fork = cache.fork()
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(IDS[:, :1], past_key_values=cache)
    handle.remove()
    with pytest.raises(RuntimeError, match=r"have seen different numbers of tokens \(13, 12\)"):
        model(IDS[:, :1], past_key_values=cache)
    model(IDS[:, :1], past_key_values=fork)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_that_are_not_those_of_the_text(language_model, family, masked):
    """Whichever layer is first, and whatever the masks are; rows that are chosen go on."""
    model = language_model(family)
    mask = (torch.arange(13) > torch.tensor([[-1], [4]])).long() if masked else None
    for rows in (slice(0, 1), [0, 1, 1]):
        cache, counts = BoundedCache(model, config=FEW), torch.empty(2)[rows].shape[0]
        model(IDS, past_key_values=cache, attention_mask=None if mask is None else mask[:, :12])
        chosen = {"attention_mask": None if mask is None else mask[rows]}
        with pytest.raises(ValueError, match=f"the cache holds 2 rows, the call has {counts}; choose"):
            model(IDS[rows, :1], past_key_values=cache, **chosen)
        assert {layer.get_seq_length() for layer in cache.layers} == {12}
        cache.batch_select_indices(torch.arange(2)[rows])
        model(IDS[rows, :1], past_key_values=cache, **chosen)


@pytest.mark.parametrize(
    "enter", [lambda model: BoundedCache(model, config=FEW), lambda model: linearize_(model, "Taylor")]
)
def test_eager_attention_that_asks_for_its_own_name(build, enter):
    """GPT-2's casts to float32 under the name of eager attention alone."""
    model = build("gpt2", head=LANGUAGE_HEADS["gpt2"], reorder_and_upcast_attn=True, attn_implementation="eager")
    before = model(IDS).logits
    with pytest.raises(ValueError, match=r"reorder_and_upcast_attn.*attn_implementation=\"sdpa\""):
        enter(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(IDS).logits, before)
    model.set_attn_implementation("sdpa")
    enter(model)


@pytest.mark.parametrize("former", ["eager", "sdpa"])
def test_a_linearization_that_is_refused_leaves_caches_and_the_former_attention(build, former):
    model = build("llama", head=LANGUAGE_HEADS["llama"])
    model.set_attn_implementation(former)
    cache = BoundedCache(model, config=FEW)
    wanted = model(IDS[:, :7]).logits
    model(IDS[:, :5], past_key_values=cache)
    held = cache.fork()
    with pytest.raises(ValueError, match="calibrate=batches fits it"):
        linearize_(model, "Expansion(num_centres=4)")
    assert torch.equal(model(IDS[:, :7]).logits, wanted)
    model(IDS[:, 5:7], past_key_values=held)
    assert held.get_seq_length() == 7
    linearize_(model, "EluPlusOne")
    restore_(model)
    assert model.config._attn_implementation == former
