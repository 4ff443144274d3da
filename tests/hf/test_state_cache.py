"""A state in place of a cache: every way to cut a text gives the same, and the cache does not grow."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from grid import in_turns
from linattn.hf import StateCache, StateLayer, capture, intercept, linearize_, new_cache, restore_
from model_inputs import LANGUAGE_HEADS, OPTIONS, alone, batch, positions

FAVOR = "FavorPlus(num_features=32)"
MAPS = (FAVOR, "Taylor(order=2)", "EluPlusOne", f"{FAVOR} + window 2")
# Float64 sums of some hundred terms of order 1 in another order: 2**-53 a rounding, and three layers that magnify it.
CLOSE = 1e-12


@pytest.fixture
def linear(build):
    """A function giving a family's linearized language model in float64; by default its middle layer stays softmax."""

    def of(family, feature_map=FAVOR, layers=(0, 2)):
        depth = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
        model = build(family, head=LANGUAGE_HEADS[family], **depth, **OPTIONS.get(family, {})).double()
        linearize_(model, method=feature_map, layers=layers)
        return model

    return of


def ids(length: int = 9) -> torch.Tensor:
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(5))


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def differ(ours, wanted) -> float:
    """Largest difference relative to the largest value."""
    return float((ours - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    ("family", "feature_map", "layers"), in_turns(list(LANGUAGE_HEADS), MAPS, [None, (0, 2), (1,)])
)
def test_cut_anywhere(linear, family, layers, feature_map):
    model = linear(family, feature_map, layers)
    whole = logits(model, input_ids=ids(), use_cache=False)
    for sizes in ([1] * 9, [4, 1, 3, 1], [9]):
        cache = StateCache(model)
        parts = [logits(model, input_ids=part, past_key_values=cache) for part in ids().split(sizes, 1)]
        assert differ(torch.cat(parts, 1), whole) <= CLOSE, sizes
        assert cache.get_seq_length() == 9


@pytest.mark.parametrize("layers", [None, (1,)])
@pytest.mark.parametrize("family", LANGUAGE_HEADS)
def test_left_padding_changes_nothing(linear, family, layers):
    model, inputs = linear(family, layers=layers), batch(family)
    more, cache = ids(3)[:1].expand(3, -1), StateCache(model)
    logits(model, **inputs, past_key_values=cache)
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(more)), 1)
    place = {"attention_mask": mask, "position_ids": positions(mask)[:, -3:]}
    whole = logits(model, input_ids=more, **place, past_key_values=cache)
    for row in range(3):
        single = StateCache(model)
        logits(model, **alone(inputs, row), past_key_values=single)
        start = single.get_seq_length()
        where = {"position_ids": torch.arange(start, start + 3)[None]}
        ours = logits(model, input_ids=more[:1], **where, past_key_values=single)
        assert differ(whole[row : row + 1], ours) <= CLOSE


@pytest.mark.parametrize("sizes", [[1] * 7, [3, 1, 2, 1], [7]])
def test_beside_layers_with_a_window(build, sizes):
    """A state, and softmax layers that keep the keys of their window alone: one mask serves both."""
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "num_hidden_layers": 3}
    model, inputs = build("qwen2", head="ForCausalLM", **windows).double(), batch("qwen2")
    assert [row.layer for row in linearize_(model, method=FAVOR).replaced] == [0]
    whole, cache, parts, end = logits(model, **inputs, use_cache=False), StateCache(model), [], 0
    for size in sizes:
        start, end = end, end + size
        place = {
            "attention_mask": inputs["attention_mask"][:, :end],
            "position_ids": inputs["position_ids"][:, start:end],
        }
        parts.append(logits(model, input_ids=inputs["input_ids"][:, start:end], **place, past_key_values=cache))
    real = inputs["attention_mask"].bool()
    assert differ(torch.cat(parts, 1)[real], whole[real]) <= CLOSE


def sizes(model) -> list[int]:
    """Bytes of a cache after 1, 2, 10 and 40 tokens."""
    cache, found = StateCache(model), []
    assert cache.num_bytes == 0
    for part in ids(40).split([1, 1, 8, 30], 1):
        logits(model, input_ids=part, past_key_values=cache)
        found.append(cache.num_bytes)
    return found


# 2 rows, 2 key/value heads, 32 features of 8 values, a sum and an exponent each, in float64.
STATE = 2 * 2 * 32 * (8 + 2) * 8
# The same heads, a key and a value of 8.
TOKEN = 2 * 2 * (8 + 8) * 8


def test_constant_size(linear):
    assert sizes(linear("llama", layers=None)) == [3 * STATE] * 4


def test_softmax_layers_grow(linear):
    assert sizes(linear("llama", layers=(0, 2))) == [2 * STATE + length * TOKEN for length in (1, 2, 10, 40)]


def test_exact_keys_count_and_stay_few(linear):
    """Two blocks of 2 keys at the most, each with its bias, a float64, beside it."""
    few = [size - 3 * STATE for size in sizes(linear("llama", f"{FAVOR} + window 2", None))]
    keys = [size // (3 * (TOKEN + 2 * 2 * 8)) for size in few]
    assert few == [count * 3 * (TOKEN + 2 * 2 * 8) for count in keys]
    assert keys[0] == 1
    assert max(keys) <= 4


def test_forks_go_their_own_ways(linear):
    model = linear("llama")
    cache = StateCache(model)
    start, one, other = ids(9)[:, :5], ids(9)[:, 5:], ids(9)[:, 5:].flip(1)
    logits(model, input_ids=start, past_key_values=cache)
    fork = cache.fork()
    for branch, text in ((cache, one), (fork, other)):
        ours = logits(model, input_ids=text, past_key_values=branch)
        whole = logits(model, input_ids=torch.cat((start, text), 1), use_cache=False)
        assert differ(ours, whole[:, 5:]) <= CLOSE
        assert branch.get_seq_length() == 9


@pytest.mark.parametrize("layers", [None, (0, 2)])
def test_rows_of_the_batch(linear, layers):
    """Selecting, repeating and resetting act on every layer of the cache alike."""
    model, more = linear("llama", layers=layers), ids(12)[:, 9:]

    def after(change, text):
        cache = StateCache(model)
        logits(model, input_ids=ids(), past_key_values=cache)
        change(cache)
        return logits(model, input_ids=text, past_key_values=cache)

    whole = after(lambda cache: None, more)
    swap = torch.tensor([1, 0])
    assert differ(after(lambda cache: cache.reorder_cache(swap), more[swap]), whole[swap]) <= CLOSE
    assert differ(after(lambda cache: cache.batch_select_indices(torch.tensor([1])), more[1:]), whole[1:]) <= CLOSE
    assert differ(after(lambda cache: cache.batch_select_indices(torch.tensor([-1])), more[1:]), whole[1:]) <= CLOSE
    mask = torch.tensor([False, True])
    assert differ(after(lambda cache: cache.batch_select_indices(mask), more[1:]), whole[1:]) <= CLOSE
    twice = after(lambda cache: cache.batch_repeat_interleave(2), more.repeat_interleave(2, 0))
    assert differ(twice, whole.repeat_interleave(2, 0)) <= CLOSE
    assert differ(after(lambda cache: cache.reset(), ids()), logits(model, input_ids=ids(), use_cache=False)) <= CLOSE


def test_states_are_not_cropped(linear):
    model = linear("llama")
    cache = StateCache(model)
    assert not cache.is_croppable
    assert not cache.is_compileable
    with torch.no_grad():
        model(ids(7), past_key_values=cache)
    with pytest.raises(ValueError, match=r"cannot forget its last 1 tokens.*activate_past_recording\(\).*keep a fork"):
        cache.crop(-1)


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_encoder_decoder(build, family):
    model = build(family).double()
    linearize_(model, method=FAVOR)
    inputs = {name: x for name, x in batch(family).items() if not name.startswith("decoder")}
    text = ids(7)[:1].expand(3, -1)
    with torch.no_grad():
        whole = model(**inputs, decoder_input_ids=text)[0]
        cache = EncoderDecoderCache(StateCache(model), DynamicCache())
        parts = [
            model(**inputs, decoder_input_ids=part, past_key_values=cache)[0] for part in text.split([3, 1, 2, 1], 1)
        ]
    assert differ(torch.cat(parts, 1), whole) <= CLOSE
    assert all(isinstance(layer, StateLayer) for layer in cache.self_attention_cache.layers)
    assert cache.get_seq_length() == 7


def test_caches_of_two_texts_are_forked_and_counted(build):
    """Each continuation of a text alone; one cache in the place of two is refused with the words to write."""
    model = build("bart", head="ForConditionalGeneration").double()
    linearize_(model, method=FAVOR)
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(7)}
    with torch.no_grad():
        whole, pair = model(**inputs).logits, new_cache(model)
        model(**{**inputs, "decoder_input_ids": ids(7)[:, :4]}, past_key_values=pair)
        held, forks = pair.num_bytes, [pair.fork(), pair.fork()]
        forks[1].batch_select_indices(torch.tensor([1]))
        for rows, fork in ((slice(None), forks[0]), (slice(1, 2), forks[1]), (slice(None), pair)):
            rest = {"input_ids": ids()[rows], "decoder_input_ids": ids(7)[rows, 4:]}
            assert differ(model(**rest, past_key_values=fork).logits, whole[rows, 4:]) <= CLOSE
    # A value, a sum and an exponent of each feature, and both layers' keys and values of the encoder's tokens.
    assert held == 2 * 2 * 4 * (32 * (8 + 2) + 9 * (8 + 8)) * 8 == forks[0].num_bytes
    with pytest.raises(ValueError, match=r"reads two texts.*write EncoderDecoderStates\(StateCache\(model\)"):
        model(**inputs, past_key_values=StateCache(model))


def test_a_missed_hand_over(linear, exact):
    model = linear("llama")
    with (
        pytest.raises(RuntimeError, match=r"layers.0.self_attn gave its keys .* another attention function"),
        intercept(model, exact),
    ):
        logits(model, input_ids=ids(), past_key_values=StateCache(model))
    cache = StateCache(model)
    logits(model, input_ids=ids(), past_key_values=cache)
    restore_(model)
    with pytest.raises(RuntimeError, match="or the same after restore_, called it; give that model a cache of its own"):
        logits(model, input_ids=ids(), past_key_values=cache)
    with pytest.raises(ValueError, match="no causal layer of LlamaForCausalLM attends by a feature map"):
        StateCache(model)


def test_a_call_that_broke_off(linear):
    model = linear("mistral")
    model.config.sliding_window = 10
    cache = StateCache(model)
    logits(model, input_ids=ids(), past_key_values=cache)
    kept = cache.fork()
    # The window counts all tokens the state has seen, not only those of the call.
    with pytest.raises(ValueError, match="a sliding window of 10 over 11 keys"):
        logits(model, input_ids=ids(2), past_key_values=cache)
    with pytest.raises(RuntimeError, match="left in the middle of a call, by an error; reset the cache or go on from"):
        logits(model, input_ids=ids(1), past_key_values=cache)
    logits(model, input_ids=ids(1), past_key_values=kept)
    cache.reset()
    logits(model, input_ids=ids(), past_key_values=cache)


@pytest.mark.parametrize("layers", [None, (0, 2), (1,)])
@pytest.mark.parametrize("broken", [1, 2])
def test_a_call_that_ended_between_two_layers(linear, layers, broken):
    """The layers before the error have its tokens and the others do not: no call goes on from there."""
    model, more = linear("llama", layers=layers), ids(12)[:, 9:]
    cache = StateCache(model)
    logits(model, input_ids=ids(), past_key_values=cache)
    kept = cache.fork()

    def stop(*_):
        raise MemoryError

    with model.model.layers[broken].register_forward_pre_hook(stop), pytest.raises(MemoryError):
        logits(model, input_ids=more, past_key_values=cache)
    counts = ", ".join(["12"] * broken + ["9"] * (3 - broken))
    for call in (model, model.model):
        with pytest.raises(RuntimeError, match=rf"different numbers of tokens \({counts}\).*go on from a fork taken"):
            call(input_ids=more, past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"left between two layers, by an error.*call reset\(\)"):
        model.generate(ids(13), past_key_values=cache, max_new_tokens=1)
    whole = logits(model, input_ids=torch.cat((ids(), more), 1), use_cache=False)[:, 9:]
    assert differ(logits(model, input_ids=more, past_key_values=kept), whole) <= CLOSE
    cache.reset()
    assert differ(logits(model, input_ids=torch.cat((ids(), more), 1), past_key_values=cache)[:, 9:], whole) <= CLOSE


def test_a_decoders_call_that_ended_between_two_layers(build):
    model = build("bart").double()
    linearize_(model, method=FAVOR)
    cache = EncoderDecoderCache(StateCache(model), DynamicCache())
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(), "past_key_values": cache}

    def stop(*_):
        raise MemoryError

    with model.decoder.layers[1].register_forward_pre_hook(stop), pytest.raises(MemoryError):
        model(**inputs)
    with pytest.raises(RuntimeError, match=r"different numbers of tokens \(9, 0\)"):
        model(**inputs)


def test_a_static_cache_is_refused(linear):
    """Its empty slots would be attended to as keys."""
    model = linear("llama")
    with pytest.raises(ValueError, match=r"keys beyond the last query \(the empty slots of a static cache\)"):
        logits(model, input_ids=ids(), past_key_values=StaticCache(model.config, max_cache_len=16))


def test_a_model_made_bidirectional(build):
    model = build("llama")
    linearize_(model, method=FAVOR)
    cache = StateCache(model)
    model.config.is_causal = False
    with pytest.raises(ValueError, match="lets queries see later keys, which a cache of states does not hold"):
        model(input_ids=ids(), past_key_values=cache)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_states_of_their_own(linear, duplicate):
    model = linear("llama")
    twin = duplicate(model)
    restore_(model)
    made = twin.generate(ids(), max_new_tokens=2, return_dict_in_generate=True).past_key_values
    assert isinstance(made, StateCache)
    assert twin._prepare_cache_for_generation.args == (twin,)
    restore_(twin)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in twin.modules())
    assert "_prepare_cache_for_generation" not in vars(twin)
    capture(twin.model, {"input_ids": ids()})
