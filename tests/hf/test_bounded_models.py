"""Bounded caches of models of other kinds: shared keys, recurrent layers, pictures, named implementations, adapters."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from architectures import ARCHITECTURES
from bounded_texts import ENOUGH, GREEDY, IDS, logits
from linattn.hf import BoundedCache, EncoderDecoderStates, StateCache, linearize_

# PEFT uses names that newer transformers warns of.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def difference(x: Tensor, y: Tensor) -> float:
    """The largest difference, over the largest number."""
    return ((x - y).abs().max() / y.abs().max()).item()


def test_layers_that_get_the_last_queries_alone_get_their_part_of_the_mask():
    """Gemma 4's layers of shared keys; by their former attention, where several logits are asked for or slots empty."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    options = {"num_kv_shared_layers": 1, "sliding_window": 64, "global_head_dim": 8, "layer_types": kinds}
    words = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(
        transformers.Gemma4TextConfig(**SIZES, **options, **words, initializer_range=0.5)
    ).eval()
    repeated = IDS[:, :5].repeat(1, 4)
    wanted, text = model(IDS, logits_to_keep=4).logits, model.generate(repeated[:1], **GREEDY)
    static = {"cache_implementation": "static", **GREEDY}
    by_slots = model.generate(IDS, **static)
    BoundedCache(model, config=ENOUGH)
    assert torch.equal(model(IDS, logits_to_keep=4).logits, wanted)
    assert torch.equal(model.generate(IDS, **static), by_slots)
    cache = BoundedCache(model, config=ENOUGH)
    looked_up = {"past_key_values": cache, "prompt_lookup_num_tokens": 3, **GREEDY}
    assert torch.equal(model.generate(repeated[:1], **looked_up), text)


@pytest.mark.parametrize("name", ["Qwen 3 Next", "LFM 2", "Granite hybrid", "Nemotron H"])
def test_a_fork_leaves_recurrent_layers_alone(name):
    """These write their states in place; `reset` too."""
    model, ids = ARCHITECTURES[name].build(), IDS[:1] % 60 + 3
    cache = BoundedCache(model, config=ENOUGH)
    # Of tensors that gradients follow too, which copy.deepcopy does not take.
    with torch.enable_grad():
        model(ids[:, :10], past_key_values=cache)
        again = cache.fork()
    wanted = model(ids[:, 10:], past_key_values=again).logits
    fork = cache.fork()
    model(ids[:, 3:9], past_key_values=fork)
    fork.reset()
    assert torch.equal(model(ids[:, 10:], past_key_values=cache).logits, wanted)


def by_its_name(module, *args, **options):
    """As FlashAttention's function, which looks up by what name it was called."""
    if module.config._attn_implementation != "by_its_name":
        raise ValueError(f"there is no implementation {module.config._attn_implementation}")
    return sdpa_attention_forward(module, *args, **options)


@pytest.mark.parametrize("way", ["bounded", "linearized"])
def test_a_function_that_asks_for_its_name_is_told_it(language_model, monkeypatch, way):
    # Registered, and not left there.
    monkeypatch.setitem(AttentionInterface._global_mapping, "by_its_name", by_its_name)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "by_its_name", sdpa_mask)
    model = language_model("llama")
    model.set_attn_implementation("by_its_name")
    wanted = logits(model)
    if way == "linearized":
        # The other layer keeps its softmax.
        linearize_(model, method="FavorPlus(num_features=16)", layers=[0])
        assert logits(model).isfinite().all()
        return
    cache = BoundedCache(model, config=ENOUGH)
    assert difference(logits(model, cache), wanted) <= 1e-5
    assert torch.equal(logits(model), wanted)


def test_masks_move_with_what_a_layer_is_given_on_another_device(language_model):
    """accelerate's hooks move whatever has a `to`."""
    utils = pytest.importorskip("accelerate.utils")
    model, seen = language_model("llama"), []
    BoundedCache(model)
    hook = model.model.layers[1].register_forward_pre_hook(
        lambda _, args, options: seen.append(options["attention_mask"]), with_kwargs=True
    )
    model(IDS, attention_mask=(torch.arange(24) > 2).long().expand(2, -1))
    hook.remove()
    moved = utils.send_to_device({"mask": seen[0]}, "meta")["mask"]
    assert (moved.options["attention_mask"].device.type, moved.options["device"].type) == ("meta", "meta")
    here = seen[0].to("cpu")
    assert torch.equal(here.build("sdpa", 24), seen[0].build("sdpa", 24))


def test_a_model_that_chooses_keys_by_its_implementation_s_name_is_refused():
    """MiniMax M3: its sparse layers would attend to all keys, in any call."""
    kinds, sparse = ["full_attention", "minimax_m3_sparse"] * 2, {"index_block_size": 4, "index_topk_blocks": 2}
    options = {"dense_intermediate_size": 48, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 8, **sparse}
    config = transformers.MiniMaxM3VLTextConfig(**SIZES, layer_types=kinds, mlp_layer_types=["dense"] * 4, **options)
    model = transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLForCausalLM(config).eval()
    wanted = model(IDS).logits
    with pytest.raises(ValueError, match="chooses keys by its attention implementation's name"):
        BoundedCache(model, config=ENOUGH)
    assert torch.equal(model(IDS).logits, wanted)


def test_texts_of_a_model_that_reads_pictures_too_are_bounded():
    """Gemma 3 from 4B on, as it is loaded; a call with a picture, whose tokens see later ones, is refused."""
    text = {**SIZES, "sliding_window": 64, "layer_types": ["full_attention"] * 4}
    sight = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    vision = {**sight, "image_size": 16, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    wanted, made = model(IDS).logits, model.generate(IDS, **GREEDY)
    for kinds in ({}, {"token_type_ids": torch.zeros_like(IDS)}):
        cache = BoundedCache(model, config=ENOUGH)
        assert difference(model(IDS, past_key_values=cache, **kinds).logits, wanted) <= 1e-5
        cache = BoundedCache(model, config=ENOUGH)
        assert torch.equal(model.generate(IDS, past_key_values=cache, **kinds, **GREEDY), made)
    with pytest.raises(ValueError, match="neither causal nor full"):
        model(IDS, token_type_ids=(IDS % 3 == 0).long(), past_key_values=BoundedCache(model, config=ENOUGH))
    # The text's own model is given a mask of another kind, and positions that count no padding.
    ids, mask = torch.nn.functional.pad(IDS, (3, 0)), torch.ones_like(IDS)
    mask = torch.nn.functional.pad(mask, (3, 0))
    cache = BoundedCache(model, config=ENOUGH)
    padded = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert torch.equal(padded[:, 3:], made)


def test_an_encoder_decoder_looks_its_text_up():
    model, ids = ARCHITECTURES["BART"].build(), IDS[:1] % 60 + 3
    wanted = model.generate(input_ids=ids, **GREEDY)
    for options in ({"prompt_lookup_num_tokens": 3}, {"num_beams": 2, "num_return_sequences": 1}, {}):
        pair = EncoderDecoderStates(BoundedCache(model, config=ENOUGH), DynamicCache())
        found = model.generate(input_ids=ids, past_key_values=pair, **options, **GREEDY)
        alone = model.generate(input_ids=ids, **options, **GREEDY) if "num_beams" in options else wanted
        assert torch.equal(found, alone)


@pytest.mark.parametrize("way", ["bounded", "linearized"])
@pytest.mark.parametrize("name", ["BART", "Two BERTs"])
def test_an_encoder_decoder_that_is_given_its_text_again_is_refused(name, way):
    """These tell attention no positions; without a cache they generate as ever."""
    model, ids = ARCHITECTURES[name].build(), IDS % 60 + 3
    if way == "linearized":
        linearize_(model, "FavorPlus(num_features=16)")
    wanted = model.generate(input_ids=ids, use_cache=False, **GREEDY)
    for _ in range(2):
        own = StateCache(model) if way == "linearized" else BoundedCache(model, config=ENOUGH)
        pair = EncoderDecoderStates(own, DynamicCache())
        with pytest.raises(ValueError, match=r"the whole text again with use_cache=False \(pass use_cache=True"):
            model.generate(input_ids=ids, past_key_values=pair, use_cache=False, **GREEDY)
        assert pair.get_seq_length() == 0
    assert torch.equal(model.generate(input_ids=ids, past_key_values=pair, **GREEDY), wanted)
    assert torch.equal(model.generate(input_ids=ids, use_cache=False, **GREEDY), wanted)
    assert len(model._forward_pre_hooks) == (3 if way == "linearized" else 1)


def test_adapters_with_a_cache_of_their_own_are_refused(language_model):
    peft = pytest.importorskip("peft")
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    model = peft.get_peft_model(language_model("llama"), settings).eval()
    words = r"tuned by a prefix of keys.*the cache of model\.get_base_model\(\) and generate with that"
    with pytest.raises(ValueError, match=words):
        BoundedCache(model)
    # The cure, followed by half, would leave the cache empty.
    cache = BoundedCache(model.get_base_model())
    assert not hasattr(cache, "max_cache_len")
    with pytest.raises(AttributeError, match=words):
        model.generate(input_ids=IDS, past_key_values=cache, **GREEDY)


def test_calls_that_were_not_recorded_are_not_taken_back(language_model):
    """transformers stops recording by itself, and begins again."""
    model = language_model("llama")
    wanted, cache = logits(model), BoundedCache(model, config=ENOUGH)
    cache.activate_past_recording()
    model(IDS[:, :10], past_key_values=cache)
    for layer in cache.layers:
        layer.record_past = False
    model(IDS[:, 10:14], past_key_values=cache)
    with pytest.raises(ValueError, match="0 are recorded"):
        cache.crop(-1)
    cache.activate_past_recording()
    model(IDS[:, 14:15], past_key_values=cache)
    with pytest.raises(ValueError, match="negative integer"):
        cache.crop(10)
    cache.crop(-1)
    assert difference(model(IDS[:, 14:], past_key_values=cache).logits, wanted[:, 14:]) <= 1e-5


def test_a_mask_that_its_caller_changes_is_noticed(language_model):
    model = language_model("llama")
    cache, mask = BoundedCache(model, config=ENOUGH), torch.ones(2, 24, dtype=torch.bool)
    model(IDS[:, :12], attention_mask=mask, past_key_values=cache)
    mask[0, :5] = False
    with pytest.raises(ValueError, match="changes which of the 12 tokens"):
        model(IDS[:, 12:], attention_mask=mask, past_key_values=cache)


def test_a_decoder_is_bounded_beside_a_linearized_encoder():
    """As the report of linearize_ says of its layers."""
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, init_std=0.4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=200,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    assert "a BoundedCache merges the keys of such layers" in str(linearize_(model, "window 2 + merged 4"))
    text = model.generate(IDS, **GREEDY)
    bounded = EncoderDecoderStates(BoundedCache(model, config=ENOUGH), DynamicCache())
    assert torch.equal(model.generate(IDS, past_key_values=bounded, **GREEDY), text)
    decoder = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4))
    linearize_(decoder, "EluPlusOne")
    with pytest.raises(ValueError, match="is linearized, and keeps states in a StateCache"):
        BoundedCache(decoder, config=ENOUGH)


def test_a_graph_of_sizes_that_change_is_refused_in_our_words(language_model):
    """With dynamic=True a compiler looks into the keys that are handed on."""
    torch.compiler.reset()
    model = language_model("llama")
    cache, compiled = BoundedCache(model, config=ENOUGH), torch.compile(model.forward, backend="eager", dynamic=True)
    with torch.no_grad(), pytest.raises(Exception, match=r"the model is compiled with dynamic=True \(leave that out\)"):
        compiled(torch.arange(3, 12)[None], past_key_values=cache)
    torch.compiler.reset()


def test_a_compiled_model_of_other_numbers_of_tokens_in_each_call(language_model):
    """From the second number on a compiler takes them for symbols, which become no numbers of a class of ours.

    One token is never a symbol.
    """
    torch.compiler.reset()
    model, tokens = language_model("llama", num_hidden_layers=1), torch.arange(3, 23)[None]
    cache, compiled = BoundedCache(model, config=ENOUGH), torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        wanted = model(tokens).logits
        outs = [compiled(part, past_key_values=cache).logits for part in tokens.split([9, 4, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(outs, 1), wanted, rtol=1e-4, atol=1e-5)
