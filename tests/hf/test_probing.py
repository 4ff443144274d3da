"""`linearize_` knows each layer's calls before it replaces any: the rest attends as before, or is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from linattn.hf import StateCache, capture, from_pretrained, linearize_, restore_, save_pretrained
from linattn.hf.linearization import choose_layers

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DECODER = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHARED = {
    **DECODER,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 1,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 8,
    "head_dim": 8,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
PICTURE = {"image_size": 16, "patch_size": 4, "vocab_size": 50}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CHUNKS = {**DECODER, **EXPERTS, "num_hidden_layers": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 8}
# The window has room for every key of these texts: exact attention, whatever the cut.
EXACT = "FavorPlus(num_features=16) + window 64"
# Two float32 evaluations of the same sums: 2**-24 a rounding, some hundred roundings in sequence, outputs of order 1.
CLOSE = 1e-5
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(24) >= torch.tensor([0, 5])[:, None]


def model_of(name: str, *config: str, **options):
    """A model whose weights make a mistake in scale or mask visible."""
    torch.manual_seed(0)
    stem = config[0] if config else next(name.removesuffix(end) for end in ENDS if name.endswith(end))
    model = getattr(transformers, name)(getattr(transformers, f"{stem}Config")(**options))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, weight.shape[-1] ** -0.5)
    return model.eval()


ENDS = ("ForCausalLM", "ForConditionalGeneration", "Model")


def run(model, *args, **inputs):
    with torch.no_grad():
        return model(*args, **inputs)[0]


def differ(ours, wanted) -> float:
    return float((ours - wanted).abs().max() / wanted.abs().max())


def greedy(model, **options):
    inputs = {"input_ids": torch.where(MASK, IDS, 0), "attention_mask": MASK.long()}
    return model.generate(**inputs, max_new_tokens=10, min_new_tokens=10, do_sample=False, **options)


REFUSED = {
    "caps": (("Gemma2ForCausalLM",), {**DECODER, "head_dim": 8}, "soft-capped logits"),
    "own masks": (("DogeForCausalLM",), DECODER, "computes with its mask of pairs"),
    "twice": (("DiffLlamaForCausalLM",), DECODER, "attends 2 times in a pass"),
    "biases of pairs": (
        ("BeitModel",),
        {**SIZES, **PICTURE, "use_relative_position_bias": True},
        "computes with its mask of pairs",
    ),
    "windows of pictures": (
        ("SwinModel",),
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        "a mask of pairs, or a bias on them",
    ),
    "recurrent layers beside": (
        ("Zamba2ForCausalLM",),
        {
            **DECODER,
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "chunk_size": 8,
        },
        r"place in a cache holds more than keys and values \(LinearAttentionAndFullAttentionLayer\)",
    ),
    "prompts beside windows": (
        ("UnlimitedOcrTextModel",),
        {**DECODER, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        r"place in a cache holds more than keys and values \(UnlimitedOcrDynamicReferenceSlidingWindowLayer\)",
    ),
    "position biases": (
        ("T5Model",),
        {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "a position bias added to the logits",
    ),
}


@pytest.mark.parametrize("layers", [None, [0]])
@pytest.mark.parametrize("case", REFUSED)
def test_a_model_without_a_layer_to_replace_is_refused_at_once(case, layers):
    (name, *_), options, words = REFUSED[case]
    model = model_of(name, **options)
    state, before = copy.deepcopy(model.state_dict()), vars(model.config).copy()
    with pytest.raises(ValueError, match=words):
        linearize_(model, method=EXACT, layers=layers)
    assert vars(model.config) == before
    assert not [key for module in model.modules() for key in vars(module) if "linattn" in key]
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    with pytest.raises(ValueError, match=words):
        choose_layers(model, layers)


def test_a_named_layer_that_cannot_be_replaced_names_those_that_can():
    model = model_of("Gemma4ForCausalLM", "Gemma4Text", **SHARED)
    with pytest.raises(
        ValueError, match=r"layers\.3\.self_attn \(layer 3\) .* keys.*name others in `layers`: \[0, 1\]"
    ):
        linearize_(model, method=EXACT, layers=[0, 3])
    linearize_(model, method=EXACT, layers=[0])


WORKING = {
    "shared keys": (("Gemma4ForCausalLM", "Gemma4Text"), SHARED, [0]),
    "chunks": (("Llama4ForCausalLM", "Llama4Text"), {**CHUNKS, "head_dim": 8}, [3]),
    "a window of some layers": (
        ("Exaone4ForCausalLM",),
        {**DECODER, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        [1],
    ),
    "latent keys": (
        ("DeepseekV3ForCausalLM",),
        {**DECODER, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 2},
        [0, 1],
    ),
    "contiguous outputs": (
        ("JetMoeForCausalLM",),
        {**DECODER, **EXPERTS, "num_attention_heads": 2, "kv_channels": 8},
        [0, 1],
    ),
    "no window, written 0": (
        ("Qwen2MoeForCausalLM",),
        {**DECODER, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
        [0, 1],
    ),
}


@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("case", WORKING)
def test_the_rest_is_replaced_and_the_model_stays_itself(case, own, tmp_path):
    """The kernels are exact, and the other layers attend by the function they had: the same logits and texts."""
    names, options, replaced = WORKING[case]
    model = model_of(*names, **options)
    model.set_attn_implementation(own)
    plain, padded, text = run(model, IDS), run(model, IDS, attention_mask=MASK.long())[MASK], greedy(model)
    report = linearize_(model, method=EXACT)
    assert [row.layer for row in report.replaced] == replaced
    assert differ(run(model, IDS), plain) <= CLOSE
    assert differ(run(model, IDS, attention_mask=MASK.long())[MASK], padded) <= CLOSE
    assert torch.equal(greedy(model), text)
    assert type(greedy(model, return_dict_in_generate=True).past_key_values) is StateCache
    save_pretrained(model, tmp_path / "folder")
    again = from_pretrained(tmp_path / "folder")
    assert differ(run(again, IDS), plain) <= CLOSE
    restore_(model)
    assert torch.equal(run(model, IDS), plain)


def test_layers_that_stay_attend_by_the_models_own_function():
    """Of two layers one has caps, which SDPA refuses, and a window."""
    model = model_of("Gemma2ForCausalLM", **DECODER, head_dim=8, sliding_window=8)
    model.set_attn_implementation("eager")
    model.model.layers[1].self_attn.attn_logit_softcapping = None
    wanted, text = run(model, IDS, attention_mask=MASK.long())[MASK], greedy(model)
    report = linearize_(model, method=EXACT)
    assert [(row.layer, row.reason) for row in report.kept] == [
        (
            0,
            "it asks for soft-capped logits, which no feature map can express; a BoundedCache takes them, and "
            "linearize_ in encoders, for merged keys alone",
        )
    ]
    assert differ(run(model, IDS, attention_mask=MASK.long())[MASK], wanted) <= CLOSE
    assert torch.equal(greedy(model), text)


LOCAL = {
    "chunks": (("Llama4ForCausalLM", "Llama4Text"), {**CHUNKS, "head_dim": 8}, "windows or chunks of 8"),
    "a window in the mask alone": (
        ("PhimoeForCausalLM",),
        {**DECODER, **EXPERTS, "sliding_window": 8},
        "a sliding window of 8",
    ),
}


@pytest.mark.parametrize("case", LOCAL)
def test_named_local_layers_serve_texts_that_fit_and_refuse_others(case):
    """Token by token too: a cache's new key alone does not show that older ones are hidden."""
    names, options, words = LOCAL[case]
    model = model_of(*names, **options)
    wanted = run(model, IDS[:, :8])
    assert words in _reason(model)
    linearize_(model, method=EXACT, layers=[0])
    assert differ(run(model, IDS[:, :8]), wanted) <= CLOSE
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn asks for a mask that is neither"):
        run(model, IDS)
    cache = StateCache(model)
    run(model, IDS[:, :8], past_key_values=cache)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn asks for a mask that is neither"):
        run(model, IDS[:, 8:9], past_key_values=cache)


def _reason(model) -> str:
    """Why the first layer of a model stays."""
    try:
        return str(choose_layers(model).kept[0].reason)
    except ValueError as error:
        return str(error)


def test_capture_leaves_out_layers_whose_chunks_the_text_is_longer_than():
    model = model_of("Llama4ForCausalLM", "Llama4Text", **CHUNKS, head_dim=8)
    recorded = capture(model, {"input_ids": IDS})
    assert [call.layer for call in recorded.calls] == [3]
    assert len(capture(model, {"input_ids": IDS[:, :8]}).calls) == 4


def pictures():
    text = {**DECODER, "head_dim": 8, "sliding_window": 64, "layer_types": ["full_attention"] * 2}
    sight = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**sight, "image_size": 16, "patch_size": 4}, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def test_masks_by_which_pictures_see_later_tokens_stay_unless_named():
    model = pictures()
    with pytest.raises(ValueError, match="tokens of a picture see later ones; name it in `layers`"):
        linearize_(model, method=EXACT)
    wanted = run(model, IDS)
    names = {row.layer: row.module_name for row in linearize_(model, method=EXACT, layers=[1, 2]).replaced}
    assert set(names.values()) == {f"model.language_model.layers.{n}.self_attn" for n in range(2)}
    assert differ(run(model, IDS), wanted) <= CLOSE
    with pytest.raises(ValueError, match="neither causal nor full"):
        run(model, IDS, token_type_ids=(IDS % 3 == 0).long())


def test_masks_that_are_asked_for_by_a_structure_and_have_none():
    """EmbeddingGemma's: every token sees every other, by a union of two functions."""
    options = {"head_dim": 8, "sliding_window": 64, "layer_types": ["full_attention"] * 2}
    model = model_of("Gemma3TextModel", "Gemma3Text", **DECODER, **options, use_bidirectional_attention=True)
    wanted = run(model, IDS, attention_mask=MASK.long())[MASK]
    assert len(linearize_(model, method="merged 256").replaced) == 2
    assert differ(run(model, IDS, attention_mask=MASK.long())[MASK], wanted) <= CLOSE


def test_masks_that_a_model_makes_and_the_one_within_is_given():
    """PaliGemma's own mask reaches its language model, which asks for one again."""
    sight = {**SIZES, "image_size": 16, "patch_size": 4, "model_type": "siglip_vision_model"}
    text = {**DECODER, "head_dim": 8, "model_type": "gemma"}
    config = {"vision_config": sight, "text_config": text, "image_token_index": 96, "projection_dim": 32}
    model = model_of("PaliGemmaForConditionalGeneration", **config)
    wanted = run(model, IDS, attention_mask=MASK.long())[MASK]
    with pytest.raises(ValueError, match="tokens of a picture see later ones"):
        linearize_(model, method=EXACT)
    assert {row.layer for row in linearize_(model, method=EXACT, layers=[2, 3]).replaced} == {2, 3}
    assert differ(run(model, IDS, attention_mask=MASK.long())[MASK], wanted) <= CLOSE


def test_one_place_in_a_cache_holds_one_state(build):
    model = build("llama")
    model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn \(layer 1\) .* in common with layers\.0\.self_attn"):
        linearize_(model, method="EluPlusOne", layers=[0, 1])


def test_masks_wider_than_an_encoders_text_are_refused(build):
    model, ids = build("bert"), IDS % 64
    linearize_(model, method="EluPlusOne", layers=[1])
    with pytest.raises((ValueError, RuntimeError), match=r"columns over 24 keys|must match"):
        run(model, ids, attention_mask=torch.ones(2, 30, dtype=torch.long))


def test_cross_attention_stays_unless_named(build):
    model = build("bart")
    assert {row.module_name for row in choose_layers(model).kept} == {
        f"decoder.layers.{n}.encoder_attn" for n in range(2)
    }
    assert len(choose_layers(model, range(6)).replaced) == 6


def test_layers_that_no_input_reaches_ask_for_an_example():
    model = pictures()
    assert choose_layers(model, [1]).kept[0].module_name.startswith("model.vision_tower")
    with pytest.raises(ValueError, match=r"a pass over input_ids, .* does not call it; give example="):
        linearize_(model, method=EXACT, layers=[0])
    image = int(model.config.image_token_id)
    ids = torch.cat([IDS[:1], torch.full((1, 4), image)], 1)
    example = {"input_ids": ids, "pixel_values": torch.zeros(1, 3, 16, 16)}
    assert linearize_(model, method=EXACT, layers=[0], example=example).replaced[0].layer == 0


def test_a_model_that_runs_on_no_made_input_takes_an_example(build):
    model = build("bert")
    forward = model.forward

    def choosy(input_ids=None, *, tag=None, **rest):
        if tag is None:
            raise TypeError("tag is missing")
        return forward(input_ids, **rest)

    model.forward = choosy
    with pytest.raises(ValueError, match=r"does not run on inputs made for it .*tag is missing.*give example="):
        linearize_(model, method="EluPlusOne")
    with pytest.raises(ValueError, match=r"does not run on the example .*tag is missing"):
        linearize_(model, method="EluPlusOne", example={"input_ids": IDS % 64})
    sample = {"input_ids": IDS % 64, "tag": 1}
    assert len(choose_layers(model, example=sample).replaced) == 2
    assert len(linearize_(model, method="Expansion(num_centres=3)", calibrate=[sample]).replaced) == 2


def test_a_probe_leaves_nothing_behind(build):
    """Neither a module's mode, nor what it holds, nor the next random number; by whichever way it ends."""
    model = build("llama").train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    model.layers[1].register_forward_hook(lambda module, *_: setattr(module, "note", 1))
    torch.manual_seed(3)
    wanted = torch.rand(3)
    for broken in (False, True):
        handle = None
        if broken:
            handle = model.layers[1].register_forward_pre_hook(lambda *_: {float(torch.rand(1)): 1}["none"])
        torch.manual_seed(3)
        if broken:
            with pytest.raises(ValueError, match="does not run on inputs made for it"):
                choose_layers(model)
            handle.remove()
        else:
            choose_layers(model)
        assert torch.equal(torch.rand(3), wanted)
        assert [module.training for module in model.modules()] == modes
        assert not hasattr(model.layers[1], "note")
