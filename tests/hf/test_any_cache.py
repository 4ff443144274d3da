"""The same tokens are the same model, whatever the cache, the mode or the attention setting; else they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from architectures import ARCHITECTURES
from linattn import MergedKV
from linattn.hf import BoundedCache, StateCache, linearize_, new_cache, restore_

# PEFT, and older transformers, use names that newer transformers warns of.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))
MAP, NEAR = "FavorPlus(num_features=16)", "FavorPlus(num_features=16) + window 4"
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    """For all of these."""
    with torch.no_grad():
        yield


def llama(method: str) -> LlamaForCausalLM:
    """Two layers whose attention matters."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.mul_(4)
    linearize_(model, method=method)
    return model


@pytest.mark.parametrize("method", [MAP, NEAR])
def test_calls_from_states_are_the_whole_text(method: str) -> None:
    model = llama(method)
    whole, cache = model(IDS).logits, new_cache(model)
    parts = [model(part, past_key_values=cache).logits for part in IDS.split([9, 1, 2, 12], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("method", [MAP, NEAR])
def test_a_growing_cache_is_the_same_model_and_empty_slots_are_refused(method: str) -> None:
    """A sum over all keys is that over parts."""
    model = llama(method)
    made = model.generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY, past_key_values=DynamicCache(config=model.config)), made)
    assert torch.equal(model.generate(IDS, **GREEDY, cache_implementation="dynamic"), made)
    for options in (
        {"cache_implementation": "static"},
        {"past_key_values": StaticCache(config=model.config, max_cache_len=64)},
    ):
        with pytest.raises(ValueError, match="leave the cache out"):
            model.generate(IDS, **GREEDY, **options)


def test_a_cache_that_the_generation_config_names_is_said_to_be_there() -> None:
    model = llama(MAP)
    model.generation_config.cache_implementation = "static"
    with pytest.raises(ValueError, match=r"model\.generation_config\.cache_implementation = None"):
        model.generate(IDS, **GREEDY)


@pytest.mark.parametrize("method", [MAP, NEAR])
@pytest.mark.parametrize("given", [False, True])
def test_guessed_tokens_leave_the_greedy_text(method: str, given: bool) -> None:
    """By prompt lookup, another model or the first layers of this one, from our cache or from generate's own."""
    model = llama(method)
    # A text that repeats itself, so that guesses are right and wrong.
    ids = IDS[:1, :6].repeat(1, 5)
    made = model.generate(ids, **GREEDY)
    # Which never stops early, and is wrong as often.
    confident = llama(NEAR if method == MAP else MAP)
    confident.generation_config.assistant_confidence_threshold = 0.0
    for options in (
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": confident},
        {"assistant_model": llama(method)},
        {"assistant_model": llama(MAP)},
        {"assistant_early_exit": 1},
    ):
        cache = {"past_key_values": new_cache(model)} if given else {}
        assert torch.equal(model.generate(ids, **GREEDY, **options, **cache), made), options


@pytest.mark.parametrize("kind", ["bounded", "states"])
@pytest.mark.parametrize("name", ["Qwen 3 Next", "LFM 2", "Granite hybrid", "Nemotron H"])
def test_rows_are_chosen_in_recurrent_layers_too(name: str, kind: str) -> None:
    """Which have no method of their own for that."""
    model, rows = ARCHITECTURES[name].build().eval(), torch.tensor([[5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 5, 4]])
    if kind == "states":
        linearize_(model, method=MAP)
    cache: Any = new_cache(model) if kind == "states" else BoundedCache(model, config=MergedKV(8, 8, bits=None))
    empty = cache.fork()
    model(rows[:, :5], past_key_values=cache)
    wanted = model(rows[:, 5:], past_key_values=cache.fork()).logits
    for choose, chosen in (
        (lambda cache: cache.batch_select_indices(torch.tensor([-1, 0])), [1, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ):
        fork = cache.fork()
        choose(fork)
        logits = model(rows[chosen, 5:], past_key_values=fork).logits
        torch.testing.assert_close(logits, wanted[chosen], rtol=1e-4, atol=1e-4)
        choose(empty)
    model(rows, past_key_values=empty)


def test_a_cache_of_fewer_layers_is_refused() -> None:
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    small = LlamaForCausalLM(config).eval()
    linearize_(small, method=MAP)
    with pytest.raises(ValueError, match="made for a model of num_hidden_layers 1, this one's is 2"):
        llama(MAP)(IDS, past_key_values=new_cache(small))


@pytest.mark.parametrize("method", [MAP, NEAR])
def test_the_last_call_is_taken_back(method: str) -> None:
    """And those since the last crop, where calls are recorded; what came before is refused with the cure."""
    model = llama(method)
    whole = model(IDS).logits
    for cuts, count in (([10, 5], 1), ([10, 5], 3), ([10, 5], 5), ([15], 15), ([12, 1, 1, 1], 3), ([8, 4, 1, 1, 1], 4)):
        cache = StateCache(model)
        cache.activate_past_recording()
        for part in IDS[:, :15].split(cuts, dim=1):
            model(part, past_key_values=cache)
        cache.crop(-count)
        assert cache.get_seq_length() == 15 - count
        rows = model(IDS[:, 15 - count :], past_key_values=cache).logits
        torch.testing.assert_close(rows, whole[:, 15 - count :], rtol=1e-4, atol=1e-3)
    cache = StateCache(model)
    cache.activate_past_recording()
    model(IDS[:, :10], past_key_values=cache)
    cache.crop(0)
    model(IDS[:, 10:15], past_key_values=cache)
    before = [(layer.state, layer.num_tokens) for layer in cache.layers]
    with pytest.raises(ValueError, match="keep a fork"):
        cache.crop(-6)
    with pytest.raises(ValueError, match=r"tokens_to_remove must be a negative integer, or 0, got -2\.0"):
        cache.crop(-2.0)
    assert [(layer.state, layer.num_tokens) for layer in cache.layers] == before


@pytest.mark.parametrize("method", [MAP, NEAR])
def test_a_mask_that_changes_tokens_of_a_state_is_refused(method: str) -> None:
    """Hidden afterwards, shown afterwards, or forgotten; the mask of before with more columns goes on."""
    model = llama(method)
    ones, padded = torch.ones_like(IDS), torch.ones_like(IDS)
    padded[0, :5] = 0
    for before, after in ((ones, padded), (None, padded), (padded, ones), (padded, None)):
        cache = new_cache(model)
        model(IDS[:, :12], past_key_values=cache, attention_mask=None if before is None else before[:, :12])
        state = cache.layers[0].state
        with pytest.raises(ValueError, match="changes which of the 12 tokens"):
            model(IDS[:, 12:], past_key_values=cache, attention_mask=after)
        assert cache.layers[0].state is state
    cache, whole = new_cache(model), model(IDS, attention_mask=padded).logits
    first = model(IDS[:, :12], past_key_values=cache, attention_mask=padded[:, :12]).logits
    rest = model(IDS[:, 12:], past_key_values=cache, attention_mask=padded).logits
    torch.testing.assert_close(torch.cat((first, rest), 1)[:, 5:], whole[:, 5:], rtol=1e-4, atol=1e-3)


def test_rows_keep_their_mask() -> None:
    """Chosen, repeated and reordered with the state."""
    model = llama(NEAR)
    padded = torch.ones_like(IDS)
    padded[0, :4] = 0
    for change, rows in (
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    ):
        cache = new_cache(model)
        model(IDS[:, :12], past_key_values=cache, attention_mask=padded[:, :12])
        change(cache)
        model(IDS[rows, 12:], past_key_values=cache, attention_mask=padded[rows])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_attention_set_later_is_refused_until_it_is_set_back(implementation: str) -> None:
    model = llama(MAP)
    logits = model(IDS).logits
    model.set_attn_implementation(implementation)
    with pytest.raises(RuntimeError, match=r"restore_\(model\)"):
        model(IDS)
    with pytest.raises(RuntimeError, match=r"restore_\(model\)"):
        model.generate(IDS, **GREEDY)
    model.set_attn_implementation("linattn")
    assert torch.equal(model(IDS).logits, logits)
    model.set_attn_implementation(implementation)
    restore_(model)
    model(IDS)


def test_a_name_is_no_linearized_model() -> None:
    """Naming the implementation at loading is softmax, until linearize_ has the model."""
    named, own = (
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation=name).eval()
        for name in ("linattn", "sdpa")
    )
    named.load_state_dict(own.state_dict())
    wanted = own(IDS).logits
    assert torch.equal(named(IDS).logits, wanted)
    for model in (named, own):
        linearize_(model, method=MAP)
    assert torch.equal(named(IDS).logits, own(IDS).logits)
    assert not torch.equal(named(IDS).logits, wanted)
    restore_(named)
    assert torch.equal(named(IDS).logits, wanted)


def test_a_cache_that_training_would_not_fill_is_refused() -> None:
    """Transformers leaves caches empty where it computes layers anew for gradients."""
    model = llama(MAP)
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(IDS, past_key_values=new_cache(model))
    model(IDS)
    model.gradient_checkpointing_disable()
    cache = new_cache(model)
    model(IDS, past_key_values=cache)
    assert cache.get_seq_length() == IDS.shape[1]
