"""A bounded cache: softmax with enough of a budget, the same text however it is cut; the model stays as it was."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from bounded_texts import ENOUGH, FEW, GREEDY, IDS, logits
from linattn import MergedKV
from linattn.hf import AttentionCall, BoundedCache, intercept, linearize_, restore_
from linattn.kv_cache import merged_attention
from programs import TRANSFORMERS
from snippets import ROOT, python_blocks

# PEFT uses names that newer transformers warns of.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

FAMILIES = ("llama", "qwen3", "mistral", "gpt2", "gemma3", "qwen2", "gpt_neox", "phi", "opt", "bert_decoder")


def merged(call: AttentionCall) -> torch.Tensor:
    """The answer of few merged keys, at the call's temperature."""
    query, own = call.query, call.query.shape[-1] ** -0.5
    query = query if call.scale == own else query * (call.scale / own)
    masks = {"key_mask": call.key_mask, "is_causal": call.is_causal}
    return merged_attention(query, call.key, call.value, FEW, **masks, enable_gqa=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_two_lines_of_the_readme(language_model, family):
    """The text of the full cache, whose tokens all fit into the budget."""
    model = language_model(family, **({} if family == "gpt2" else {"hidden_size": 64}))
    model.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0)
    (lines,) = (block for block in python_blocks(ROOT / "README.md") if "BoundedCache" in block)
    assert len(lines.splitlines()) == 2
    names = {"model": model, "inputs": {"input_ids": IDS[:1]}}
    exec(lines, names)
    assert torch.equal(names["tokens"], model.generate(IDS[:1], max_new_tokens=64))


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_within_the_budget(language_model, family):
    """Whole, cut anywhere and generated; the same text as from transformers' own cache, without a warning."""
    model = language_model(family)
    wanted, text = logits(model), model.generate(IDS, **GREEDY)
    for cuts in ((24,), (7, 1, 1, 15)):
        made = logits(model, BoundedCache(model, config=ENOUGH), cuts)
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = BoundedCache(model, config=ENOUGH)
        assert torch.equal(model.generate(IDS, past_key_values=cache, **GREEDY), text)
    assert cache.get_seq_length() == text.shape[1] - 1


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_calls_are_as_before(language_model, family, implementation):
    """To the bit, by the implementation that the model had; of a copy and a pickle too."""
    model = language_model(family)
    model.set_attn_implementation(implementation)
    wanted, text, names = logits(model), model.generate(IDS, **GREEDY), list(model.state_dict())
    bounded = logits(model, BoundedCache(model, config=FEW))
    assert not torch.equal(bounded, wanted)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(each), wanted)
        assert torch.equal(each.generate(IDS, **GREEDY), text)
        assert torch.equal(logits(each, BoundedCache(each, config=FEW)), bounded)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_with_a_static_cache_are_as_before(language_model, family):
    """Its masks are made before its layers have the tokens, and it counts these in place meanwhile."""
    model, mask = language_model(family), torch.arange(24) > torch.tensor([[-1], [6]])
    options = {"attention_mask": mask, "cache_implementation": "static", **GREEDY}

    def read():
        """Logits of a prompt, and of later tokens; slots are left, which a query that sees too far would see."""
        cache = StaticCache(config=model.config, max_cache_len=IDS.shape[1] + 8)
        return [model(tokens, past_key_values=cache).logits for tokens in (IDS, IDS[:, :3], IDS[:, :1])]

    wanted, text = read(), model.generate(IDS, **options)
    BoundedCache(model, config=FEW)
    assert all(torch.equal(x, y) for x, y in zip(read(), wanted, strict=True))
    assert torch.equal(model.generate(IDS, **options), text)


GOES_ON = """
import sys, torch, linattn.hf
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation=sys.argv[2])
if sys.argv[3] == "prepared":
    linattn.hf.BoundedCache(model)
cache = torch.load(sys.argv[1] + ".cache", weights_only=False)
with torch.no_grad():
    torch.save(model(torch.arange(2, 9).expand(2, -1), past_key_values=cache).logits, sys.argv[1] + ".logits")
"""


# Beside other programs that are forked after transformers has been imported.
@pytest.mark.xdist_group("transformers")
@torch.no_grad()
@pytest.mark.parametrize(("implementation", "way"), [("sdpa", "prepared"), ("linattn", "named")])
def test_a_saved_cache_goes_on_in_another_process(run_program, language_model, tmp_path, implementation, way):
    """To the bit; a model that looks at none of its calls is refused, with what to call."""
    model, folder = language_model("llama"), str(tmp_path / "model")
    model.save_pretrained(folder)
    cache = BoundedCache(model, config=MergedKV(4, 8, bits=4, coded=((4, 6),)))
    model(IDS, past_key_values=cache)
    torch.save(cache.fork(), folder + ".cache")
    done = run_program(GOES_ON, folder, implementation, way, after=TRANSFORMERS)
    if way == "prepared":
        assert done.returncode == 0, done.stderr
        wanted = model(torch.arange(2, 9).expand(2, -1), past_key_values=cache).logits
        assert torch.equal(torch.load(folder + ".logits"), wanted)
    else:
        assert "call BoundedCache(model, …) once before, with the options of the cache" in done.stderr


def test_weights_of_other_calls_are_as_before(language_model):
    model = language_model("llama")
    model.set_attn_implementation("eager")
    wanted = model(IDS, output_attentions=True).attentions
    BoundedCache(model)
    made = model(IDS, output_attentions=True).attentions
    assert all(torch.equal(x, y) for x, y in zip(made, wanted, strict=True))


def test_a_saved_model_names_no_attention(language_model, tmp_path):
    model = language_model("llama")
    BoundedCache(model)
    model.save_pretrained(tmp_path)
    assert "linattn" not in (tmp_path / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3"])
def test_loaded_with_our_implementation(language_model, tmp_path, family):
    """Softmax as transformers attends by itself; bounded where a cache is."""
    model = language_model(family)
    model.save_pretrained(tmp_path)
    wanted, bounded = logits(model), logits(model, BoundedCache(model, config=FEW))
    again = type(model).from_pretrained(tmp_path, attn_implementation="linattn")
    assert torch.equal(logits(again), wanted)
    assert torch.equal(logits(again, BoundedCache(again, config=FEW)), bounded)
    linearize_(again, method="EluPlusOne")
    restore_(again)
    assert again.config._attn_implementation == "sdpa"
    assert torch.equal(logits(again), wanted)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_text_is_attended_to_by_merged_attention(language_model, family):
    """To the bit, in every layer that is bounded."""
    model = language_model(family)
    bounded = logits(model, BoundedCache(model, config=FEW))
    with intercept(model, merged):
        wanted = logits(model)
    assert torch.equal(bounded, wanted)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_the_same_text_however_it_is_cut(language_model, family):
    model = language_model(family)
    whole = logits(model, BoundedCache(model, config=FEW))
    scale = whole.abs().max().item()
    for cuts in ((7, 1, 1, 15), (1,) * 24):
        made = logits(model, BoundedCache(model, config=FEW), cuts)
        torch.testing.assert_close(made, whole, rtol=1e-4, atol=1e-4 * scale)
    text = model.generate(IDS, past_key_values=BoundedCache(model, config=FEW), **GREEDY)
    chunked = model.generate(IDS, past_key_values=BoundedCache(model, config=FEW), prefill_chunk_size=5, **GREEDY)
    assert torch.equal(chunked, text)
    cache = BoundedCache(model, config=FEW)
    first = model.generate(IDS, past_key_values=cache, **{**GREEDY, "max_new_tokens": 4, "min_new_tokens": 4})
    assert torch.equal(
        model.generate(first, past_key_values=cache, **{**GREEDY, "max_new_tokens": 6, "min_new_tokens": 6}), text
    )


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True}, {"num_beams": 2, "num_return_sequences": 2}]
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams_and_samples(language_model, family, options):
    """Those of the full cache within the budget, and beyond it those of the whole text at every step."""
    model = language_model(family)

    def text(**cache: Any) -> torch.Tensor:
        """Generated."""
        torch.manual_seed(3)
        return model.generate(IDS, **{**GREEDY, **options}, **cache)

    assert torch.equal(text(past_key_values=BoundedCache(model, config=ENOUGH)), text())
    bounded = text(past_key_values=BoundedCache(model, config=FEW))
    with intercept(model, merged):
        assert torch.equal(bounded, text(use_cache=False))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_left_padding_changes_nothing(language_model, family):
    """A row beside a longer one is the row alone."""
    model = language_model(family).double()
    mask = torch.ones_like(IDS)
    mask[1, :9] = 0
    ids = torch.where(mask.bool(), IDS, 0)
    both = model.generate(ids, attention_mask=mask, past_key_values=BoundedCache(model, config=ENOUGH), **GREEDY)
    alone = model.generate(IDS[1:, 9:], past_key_values=BoundedCache(model, config=ENOUGH), **GREEDY)
    assert torch.equal(both[1:, 24:], alone[:, 15:])
    cache = BoundedCache(model, config=FEW)
    model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    for after in (None, torch.ones(2, 34)):
        with pytest.raises(ValueError, match="changes which of the 33 tokens"):
            model(IDS[:, :1], past_key_values=cache, attention_mask=after)
    assert {layer.get_seq_length() for layer in cache.layers} == {33}


@pytest.mark.parametrize("config", [ENOUGH, FEW])
def test_prompt_lookup_and_assistants_leave_the_greedy_text(language_model, config):
    model, assistant = language_model("llama"), language_model("llama", num_hidden_layers=1)
    ids = IDS[:1, :6].repeat(1, 4)
    wanted = model.generate(ids, past_key_values=BoundedCache(model, config=config), **GREEDY)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        cache = BoundedCache(model, config=config)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY, **options), wanted)


def test_two_budgets_at_a_time(language_model):
    """Requests that take turns are those that run alone."""
    model = language_model("llama")
    configs = (FEW, MergedKV(2, 3, None), ENOUGH)
    alone = [logits(model, BoundedCache(model, config=config), (12, *[1] * 12)) for config in configs]
    caches, parts = [BoundedCache(model, config=config) for config in configs], [[], [], []]
    for part in IDS.split((12, *[1] * 12), 1):
        for cache, made in zip(caches, parts, strict=True):
            with torch.no_grad():
                made.append(model(part, past_key_values=cache).logits)
    for made, wanted in zip(parts, alone, strict=True):
        assert torch.equal(torch.cat(made, 1), wanted)


def test_forks_rows_and_resets(language_model):
    model = language_model("llama")
    cache, whole = BoundedCache(model, config=FEW), logits(model, BoundedCache(model, config=FEW))
    with torch.no_grad():
        model(IDS[:, :20], past_key_values=cache)
        fork, rows, repeated = cache.fork(), cache.fork(), cache.fork()
        rows.batch_select_indices(torch.tensor([-1]))
        repeated.batch_repeat_interleave(2)
        for each, chosen in ((fork, [0, 1]), (rows, [1]), (repeated, [0, 0, 1, 1])):
            made = model(IDS[chosen, 20:], past_key_values=each).logits
            torch.testing.assert_close(made, whole[chosen, 20:], rtol=1e-4, atol=1e-4 * whole.abs().max().item())
        assert cache.get_seq_length() == 20
        with pytest.raises(ValueError, match="activate_past_recording"):
            cache.crop(-1)
        cache.reset()
        assert (cache.get_seq_length(), cache.num_bytes) == (0, 0)
        assert torch.equal(logits(model, cache), whole)


def test_rows_keep_their_padding(language_model):
    """Chosen, repeated and reordered, where rows began at different tokens."""
    model = language_model("llama")
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    whole = logits(model, BoundedCache(model, config=FEW), attention_mask=mask)
    for change, rows in (
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    ):
        cache = BoundedCache(model, config=FEW)
        with torch.no_grad():
            model(IDS[:, :20], past_key_values=cache, attention_mask=mask[:, :20])
            change(cache)
            made = model(IDS[rows, 20:], past_key_values=cache, attention_mask=mask[rows]).logits
        torch.testing.assert_close(made, whole[rows, 20:], rtol=1e-4, atol=1e-4 * whole.abs().max().item())


def test_attention_sinks(language_model):
    """Learned logits of one more key: beside merged keys too, in layers without a window."""
    options = {"num_experts_per_tok": 1, "num_hidden_layers": 2, "sliding_window": 8}
    model = language_model("gpt_oss", **options)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    wanted = logits(model)
    cache = BoundedCache(model, config=ENOUGH)
    assert [row.config for row in cache.report] == [None, ENOUGH]
    scale = wanted.abs().max().item()
    torch.testing.assert_close(logits(model, cache, (7, 1, 1, 15)), wanted, rtol=1e-5, atol=1e-5 * scale)
    with torch.no_grad():
        model.model.layers[1].self_attn.sinks.add_(3)
    made = logits(model, BoundedCache(model, config=ENOUGH), (7, 1, 1, 15))
    assert (made - wanted).abs().max() > 1e-3 * scale
    torch.testing.assert_close(made, logits(model), rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("bits", [2, 4, 8, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_is_in_bytes_of_the_models_keys(language_model, bits, dtype):
    """Everything that a bounded layer holds, however long the text."""
    model = language_model("llama", num_hidden_layers=1, head_dim=32).to(dtype)
    cache, budget = BoundedCache(model, 64, bits=bits), 64
    ids = torch.randint(3, 64, (1, 500), generator=torch.Generator().manual_seed(2))
    most = 0
    with torch.no_grad():
        for part in ids.split(37, 1):
            model(part, past_key_values=cache)
            most = max(most, cache.num_bytes)
    # Two key/value heads.
    assert 0.9 < most / (2 * budget * 2 * 32 * dtype.itemsize) <= 1


def test_layers_with_a_window_keep_it(language_model):
    model = language_model("gemma3")
    cache = BoundedCache(model)
    assert [row.reason for row in cache.report] == [
        "a sliding window of 8 tokens",
        None,
        "a sliding window of 8 tokens",
    ]
    assert str(cache.report[1]).startswith("  1 model.layers.1.self_attn: sinks 4 + window ")
    assert str(cache.report[0]) == "  0 model.layers.0.self_attn: exact (a sliding window of 8 tokens)"
    own = DynamicCache(config=model.config.get_text_config()).layers
    assert [type(layer) for layer in cache.layers[::2]] == [type(layer) for layer in own[::2]]


def test_windows_in_all_layers(language_model):
    """Wider than the budget they are bounded, for texts that fit in; narrower ones are bounded already."""
    model = language_model("mistral", sliding_window=30)
    cache = BoundedCache(model, config=FEW)
    text = model.generate(IDS[:, :20], past_key_values=cache, **GREEDY)
    assert [row.config for row in cache.report] == [FEW, FEW]
    with pytest.raises(ValueError, match="a sliding window of 30 over 31 keys"):
        model(text[:, -2:], past_key_values=cache)
    assert cache.get_seq_length() == 29
    for narrow in (BoundedCache(model, 64), BoundedCache(model, config=ENOUGH)):
        assert [row.reason for row in narrow.report] == ["a sliding window of 30 tokens"] * 2
        assert torch.equal(model.generate(IDS, past_key_values=narrow, **GREEDY), model.generate(IDS, **GREEDY))


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_decoders_beside_an_encoder(build, family):
    """The decoder's own text is bounded; the encoder's, and cross attention to it, stay exact."""
    model = build(family, head="ForConditionalGeneration")
    inputs = {"input_ids": IDS} if family == "bart" else {"input_features": torch.randn(2, 4, 16)}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    wanted = model.generate(**inputs, **options)
    for beams in (1, 3):
        cache = EncoderDecoderCache(BoundedCache(model, config=ENOUGH), DynamicCache())
        made = model.generate(**inputs, **options, past_key_values=cache, num_beams=beams)
        if beams == 1:
            assert torch.equal(made, wanted)
    with pytest.raises(ValueError, match=r"EncoderDecoderStates\(BoundedCache\(model\), DynamicCache\(\)\)"):
        model.generate(**inputs, **options, past_key_values=BoundedCache(model, config=ENOUGH))
