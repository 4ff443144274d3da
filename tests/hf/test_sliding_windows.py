"""Layers with a sliding window stay as they are, beside replaced ones, in `linearize_`, caches, files and captures."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from linattn import MergedKV
from linattn.hf import (
    BoundedCache,
    StateCache,
    capture,
    from_pretrained,
    intercept,
    linearize_,
    restore_,
    save_pretrained,
)

WINDOW, LENGTH = 4, 13
# Three kinds of layer types: Gemma 3 repeats a pattern, Qwen 2 slides from a layer on, Mistral slides everywhere.
HYBRIDS = {
    "gemma3": {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "qwen2": {
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 2,
    },
}
REPLACED = {"gemma3": [1, 3], "qwen2": [0, 1]}
MAPS = ("FavorPlus(num_features=32)", "Taylor(order=2)", "EluPlusOne")
# Float64 sums of some hundred terms of order 1 in another order: 2**-53 a rounding, and four layers that magnify it.
CLOSE = 1e-12
IDS = torch.randint(3, 64, (3, LENGTH), generator=torch.Generator().manual_seed(5))
MASK = torch.arange(LENGTH) >= torch.tensor([0, 4, 9])[:, None]
INPUTS = {"input_ids": torch.where(MASK, IDS, 0), "attention_mask": MASK.long()}


@pytest.fixture
def hybrid(build):
    """A function giving a family's language model in float64, some of whose layers have a window of four tokens."""

    def of(family, **options):
        model = build(family, head="ForCausalLM", **{**HYBRIDS[family], **options}).double()
        model.generation_config.pad_token_id = 0
        return model

    return of


def run(model, **inputs):
    with torch.no_grad():
        return model(**inputs)


def whole(model):
    return run(model, **INPUTS, use_cache=False).logits[MASK]


def in_parts(model, sizes, cache):
    """Logits of the same batch given in parts."""
    parts, seen = [], 0
    for size in sizes:
        part = slice(seen, seen := seen + size)
        given = {"input_ids": INPUTS["input_ids"][:, part], "attention_mask": INPUTS["attention_mask"][:, : part.stop]}
        parts.append(run(model, **given, past_key_values=cache).logits)
    return torch.cat(parts, 1)[MASK]


def differ(ours, wanted) -> float:
    return float((ours - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_report_says_what_stays(hybrid, family):
    report = linearize_(hybrid(family), method="EluPlusOne")
    assert [row.layer for row in report.replaced] == REPLACED[family]
    assert {row.reason for row in report.kept} == {
        "a sliding window of 4 tokens, already linear in length; name it in `layers` if need be"
    }


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [1, 5, 1, 1, 4, 1], [7, 6], [LENGTH]], ids=len)
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_stepwise_and_in_chunks_is_at_once(hybrid, family, feature_map, sizes):
    model = hybrid(family)
    linearize_(model, method=feature_map)
    wanted = whole(model)
    for cache in (StateCache(model), DynamicCache(config=model.config), DynamicCache()):
        assert differ(in_parts(model, sizes, cache), wanted) <= CLOSE


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_keep_the_models_own_attention(hybrid, family):
    """An exact window that covers the text makes the replaced layers exact: the whole is the model itself."""
    model = hybrid(family)
    own = whole(model)
    linearize_(model, method="FavorPlus(num_features=32) + window 16")
    assert differ(whole(model), own) <= CLOSE
    assert differ(in_parts(model, [1, 6, 1, 1, 4], StateCache(model)), own) <= CLOSE
    restore_(model)
    assert torch.equal(whole(model), own)
    linearize_(model, method="EluPlusOne", layers=REPLACED[family][:1])
    assert differ(in_parts(model, [1, 6, 1, 1, 4], StateCache(model)), whole(model)) <= CLOSE
    assert differ(whole(model), own) > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": False, "prefill_chunk_size": 5},
    ],
    ids=["greedy", "samples", "beams", "chunks"],
)
@pytest.mark.parametrize("family", HYBRIDS)
def test_generate_mixes_states_and_windows(hybrid, family, options):
    model = hybrid(family)
    linearize_(model, method="FavorPlus(num_features=32)")

    def tokens(**more):
        torch.manual_seed(11)
        return model.generate(**INPUTS, max_new_tokens=12, min_new_tokens=12, **more)

    made = tokens(**options, return_dict_in_generate=True)
    kinds = ["StateLayer" if n in REPLACED[family] else "DynamicSlidingWindowLayer" for n in range(4)]
    assert [type(layer).__name__ for layer in made.past_key_values.layers] == kinds
    plain = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    assert torch.equal(made.sequences, tokens(**plain, use_cache=False))


@pytest.mark.parametrize("family", HYBRIDS)
def test_memory_is_constant(hybrid, family):
    """Bytes of the cache, the storage behind them, and the masks that layers are given."""
    model, sizes, storages = hybrid(family), [], []
    report = linearize_(model, method="EluPlusOne")
    sliding, widths = model.get_submodule(report.kept[0].module_name), []

    def note(module, args, given):
        widths.append(given["attention_mask"].built)

    cache, ids = StateCache(model), torch.randint(3, 64, (1, 40))
    with sliding.register_forward_pre_hook(note, with_kwargs=True):
        for token in ids.split(1, 1):
            run(model, input_ids=token, past_key_values=cache)
            sizes.append(cache.num_bytes)
            layers = [layer for layer in cache.layers if layer.is_sliding]
            storages.append(sum(layer.keys.untyped_storage().nbytes() for layer in layers))
        run(model, input_ids=ids[:, :7], past_key_values=cache)
    assert len(set(sizes[WINDOW:])) == 1
    assert len(set(storages[WINDOW:])) == 1
    assert [mask.shape[-2:] for mask in widths[-1].values()] == [(7, WINDOW - 1 + 7)]


def test_a_fork_goes_on_by_itself(hybrid):
    model = hybrid("gemma3")
    linearize_(model, method="EluPlusOne")
    cache, ids = StateCache(model), IDS[:1]
    run(model, input_ids=ids[:, :8], past_key_values=cache)
    first = run(model, input_ids=ids[:, 8:], past_key_values=cache.fork()).logits
    second = run(model, input_ids=ids[:, 8:], past_key_values=cache).logits
    assert torch.equal(first, second)


def test_saved_and_read_again(hybrid, tmp_path):
    model = hybrid("gemma3")
    own = whole(model)
    linearize_(model, method="FavorPlus(num_features=32)")
    save_pretrained(model, tmp_path / "linear")
    again = from_pretrained(tmp_path / "linear")
    assert torch.equal(whole(again), whole(model))
    restore_(again)
    assert torch.equal(whole(again), own)


@pytest.mark.parametrize("family", HYBRIDS)
def test_capture_has_the_layers_that_see_everything(hybrid, family):
    recorded = capture(hybrid(family), INPUTS)
    assert [call.layer for call in recorded.calls] == REPLACED[family]
    names = {f"model.layers.{number}.self_attn" for number in range(4)}
    assert set(recorded.windowed) == names - {call.module_name for call in recorded.calls}
    short = capture(hybrid(family), {"input_ids": IDS[:, :WINDOW]})
    assert ([call.layer for call in short.calls], short.windowed) == ([0, 1, 2, 3], ())


def test_a_model_of_windows_alone(build, exact):
    """Mistral: every layer slides, and nothing is left to replace."""
    model = build("mistral", head="ForCausalLM", sliding_window=WINDOW).double()
    own = whole(model)
    with pytest.raises(ValueError, match=r"no layer of MistralForCausalLM would be replaced: a sliding window of 4"):
        linearize_(model, method="EluPlusOne")
    with pytest.raises(
        ValueError, match=r"every attention layer .* has a sliding window that this text is longer than"
    ):
        capture(model, INPUTS)
    with pytest.raises(ValueError, match="fits in the window"), intercept(model, exact):
        run(model, **INPUTS)
    linearize_(model, method="EluPlusOne", layers=[0])
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn asks for a sliding window of 4 over 13 keys"):
        whole(model)
    restore_(model)
    assert torch.equal(whole(model), own)


@pytest.mark.parametrize("kind", [StateCache, BoundedCache])
def test_a_window_takes_tokens_back_once_between_two_calls(hybrid, kind):
    """As it holds no tokens before itself then; what is refused leaves every layer as it is."""
    model = hybrid("gemma3")
    if kind is StateCache:
        linearize_(model, method="Taylor(order=2)")
    options = {"config": MergedKV(LENGTH, LENGTH, bits=None)} if kind is BoundedCache else {}
    wanted = run(model, input_ids=IDS, use_cache=False).logits
    for crops in ([2], [0, 2], [2, 1], [1, 1]):
        cache, seen = kind(model, **options), 12
        cache.activate_past_recording()
        for part in IDS[:, :seen].split([9, 3], 1):
            run(model, input_ids=part, past_key_values=cache)
        cache.crop(-crops[0])
        seen -= crops[0]
        for count in crops[1:]:
            with pytest.raises(
                ValueError, match=f"window of 4 tokens cannot forget {count} .*crop once between two calls"
            ):
                cache.crop(-count)
        assert [layer.get_seq_length() for layer in cache.layers] == [seen] * 4
        rows = run(model, input_ids=IDS[:, seen:], past_key_values=cache).logits
        assert differ(rows, wanted[:, seen:]) <= CLOSE


def test_a_recording_cache_is_bounded_without_a_crop(hybrid):
    """Prompt lookup makes a cache record, which a later turn without it goes on doing; guesses are still taken back."""
    model = hybrid("gemma3")
    cache = BoundedCache(model, config=MergedKV(4, 800, None))
    cache.activate_past_recording()
    text = torch.randint(3, 64, (1, 700), generator=torch.Generator().manual_seed(6))
    for part in (text[:, :400], *text[:, 400:690].split(10, 1), text[:, 690:]):
        run(model, input_ids=part, past_key_values=cache)
    held = {layer.keys.shape[2] for layer in cache.layers if layer.is_sliding}
    assert max(held) <= WINDOW - 1 + 256 + 10
    cache.crop(-10)
    found = run(model, input_ids=text[:, 690:], past_key_values=cache).logits
    wanted = run(model, input_ids=text, past_key_values=DynamicCache(config=model.config)).logits[:, 690:]
    torch.testing.assert_close(found, wanted, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("given", [{}, INPUTS])
def test_a_window_that_holds_the_text_is_no_window(hybrid, given, monkeypatch):
    """No mask of all pairs is made for it."""
    model = hybrid("gemma3", sliding_window=4096, layer_types=["sliding_attention"] * 4)
    wanted = run(model, **(given or {"input_ids": IDS})).logits
    monkeypatch.setattr("linattn.hf._calls.AskedMask._shown", None)
    cache = BoundedCache(model, config=MergedKV(4, 64, None))
    assert all(type(layer).__name__ == "BoundedLayer" for layer in cache.layers)
    found = run(model, **(given or {"input_ids": IDS}), past_key_values=cache).logits
    live = MASK if given else torch.ones_like(MASK)
    torch.testing.assert_close(found[live], wanted[live], rtol=CLOSE, atol=CLOSE)


def test_rows_are_chosen_where_every_layer_keeps_its_own_window(hybrid):
    model = hybrid("gemma3", sliding_window=30, layer_types=["sliding_attention"] * 4)
    caches = BoundedCache(model, 64), DynamicCache(config=model.config)
    for cache in caches:
        run(model, input_ids=IDS[:, :9], past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 2]))
    found, wanted = (run(model, input_ids=IDS[:, 9:], past_key_values=cache).logits for cache in caches)
    assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match="the cache holds 3 rows, the call has 2"):
        run(model, input_ids=IDS[:2], past_key_values=caches[0])
