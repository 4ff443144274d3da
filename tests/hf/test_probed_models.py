"""A probe leaves a model as it was, and knows what a cache holds, where a forward pass does more than compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BertLMHeadModel,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    NeoMMEConfig,
    NeoMMEForMaskedLM,
    ViTMAEConfig,
    ViTMAEModel,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from architecture_uses import CLOSE, GREEDY, MERGED, METHOD, SMALL, difference, run
from architectures import ARCHITECTURES, DECODER, PICTURE, TEXT, VOCABULARY, inputs_of
from linattn.hf import BoundedCache, linearize_, new_cache
from linattn.hf.linearization import choose_layers

PICTURE_TOKEN = VOCABULARY - 1
SIGHT = {**PICTURE, "image_size": 16, "patch_size": 4}
IDS = torch.randint(3, VOCABULARY - 1, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    """For all of these."""
    with torch.no_grad():
        yield


def drawn(kind: Any, config: Any) -> Any:
    """A model whose gates are open."""
    torch.manual_seed(0)
    model = kind(config).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.normal_(0, weight.shape[-1] ** -0.5)
        elif "gate" in name:
            weight.fill_(0.7)
    if model.can_generate():
        model.generation_config.pad_token_id = 0
    return model


def test_modules_that_a_pass_exchanges_are_as_they_were() -> None:
    """BigBird's encoder goes over to full attention on short texts, for good."""
    model = ARCHITECTURES["BigBird-Pegasus"].build()
    modules = dict(model.named_modules())
    with pytest.raises(ValueError, match="computes with its mask of pairs"):
        linearize_(model, method=METHOD)
    assert dict(model.named_modules()) == modules


def deepseek() -> DeepseekV4ForCausalLM:
    """A model that adds which blocks are seen to a mask that is a tensor, and takes any other for none."""
    sizes = {"q_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kinds = ["heavily_compressed_attention", "compressed_sparse_attention"]
    index = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 4, "qk_rope_head_dim": 4}
    options = {**DECODER, **sizes, **index, "layer_types": kinds, "sliding_window": 8, "partial_rotary_factor": 0.5}
    return drawn(DeepseekV4ForCausalLM, DeepseekV4Config(**options))


@pytest.mark.parametrize("way", [lambda model: linearize_(model, METHOD), lambda model: BoundedCache(model, 64)])
def test_a_model_that_reads_tensors_of_masks_alone_is_refused_as_it_was(way: Callable[[Any], Any]) -> None:
    model = deepseek()
    wanted = run(model, {"input_ids": IDS})
    with pytest.raises(ValueError, match=r"no layer of DeepseekV4ForCausalLM can be replaced: .*its output is another"):
        way(model)
    assert torch.equal(run(model, {"input_ids": IDS}), wanted)


def test_a_model_that_adds_keys_is_refused_where_no_probe_saw_it() -> None:
    """Given its implementation by name, which asks for masks when a layer reads them."""
    model = deepseek()
    model.set_attn_implementation("linattn")
    with pytest.raises(ValueError, match=r"adds \d+ keys to those of its tokens.*set_attn_implementation\('eager'\)"):
        run(model, {"input_ids": IDS})


def test_a_model_that_takes_a_mask_that_is_no_tensor_for_none_is_refused() -> None:
    """Its output is another one as soon as linattn's attention asks for masks."""
    model = drawn(LlamaForCausalLM, LlamaConfig(**DECODER))

    def scaled(module: Any, args: Any, options: Any) -> Any:
        """Twice the states where the mask is no tensor."""
        is_read = options["attention_mask"] is None or isinstance(options["attention_mask"], torch.Tensor)
        return (args if is_read else (2 * args[0],)), options

    model.model.layers[1].register_forward_pre_hook(scaled, with_kwargs=True)
    with pytest.raises(ValueError, match=r"no layer of LlamaForCausalLM can be replaced: .*its output is another one"):
        linearize_(model, method=METHOD)


def test_a_model_that_draws_what_it_sees_is_probed() -> None:
    """ViTMAE hides patches by chance: two passes are alike from the same random numbers, which go on as before."""
    model = ViTMAEModel(ViTMAEConfig(**SIGHT)).eval()
    before = torch.get_rng_state()
    assert len(linearize_(model, MERGED).replaced) == SIGHT["num_hidden_layers"]
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_of_other_widths_are_bounded_and_linearized() -> None:
    """Of whose sizes transformers refuses to name one: Gemma 4's global heads are twice as wide as the others."""
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16}
    config = Gemma4TextConfig(**DECODER, **windows, hidden_size_per_layer_input=0)
    model, softmax = drawn(Gemma4ForCausalLM, config), drawn(Gemma4ForCausalLM, config)
    wanted = softmax.generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY, past_key_values=BoundedCache(model, config=MERGED)), wanted)
    linearize_(model, METHOD)
    assert torch.equal(model.generate(IDS, **GREEDY), wanted)


def test_windows_of_layers_that_differ_are_those_of_their_modules() -> None:
    """NeoMME's layers have windows of their own, and transformers refuses to say the configuration's."""
    kinds = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = NeoMMEConfig(**{**TEXT, **kinds, "pad_token_id": 0, "num_key_value_heads": 2, "head_dim": 16})
    model, inputs = drawn(NeoMMEForMaskedLM, config), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    inputs["attention_mask"][1, -5:] = 0
    wanted = run(model, inputs)
    assert [layer.reason is None for layer in linearize_(model, MERGED).layers] == [False, True]
    assert difference(run(model, inputs), wanted) < CLOSE


def test_outputs_are_captured_once() -> None:
    """Transformers marks a model whose outputs it captures by hooks: with the mark gone they are captured twice."""
    model = ARCHITECTURES["Llama"].build()
    model.config.output_hidden_states = True
    choose_layers(model)
    assert len(model(IDS).hidden_states) == 3


def llava() -> Any:
    """Pictures from the last layer but one."""
    sight = {**SIGHT, "model_type": "clip_vision_model", "num_hidden_layers": 3}
    text = {**DECODER, "model_type": "llama"}
    return drawn(
        LlavaForConditionalGeneration,
        LlavaConfig(vision_config=sight, text_config=text, image_token_index=PICTURE_TOKEN),
    )


def test_pictures_are_read_from_the_layer_they_were() -> None:
    """Whose outputs are captured."""
    softmax, model = llava(), llava()
    ids = torch.cat([IDS[:, :4], torch.full((2, 16), PICTURE_TOKEN), IDS[:, 4:]], 1)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}
    wanted, text = run(softmax, inputs), softmax.generate(**inputs, **GREEDY)
    assert len(linearize_(model, method=METHOD, example=inputs).replaced) == 5
    assert difference(run(model, inputs), wanted) <= CLOSE
    assert torch.equal(model.generate(**inputs, **GREEDY), text)


def mllama() -> Any:
    """A decoder whose second layer reads pictures, and has its place in the cache."""
    sight = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 16,
        "patch_size": 4,
        "max_num_tiles": 1,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }
    text = {**DECODER, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    config = MllamaConfig(vision_config=sight, text_config=text, image_token_index=PICTURE_TOKEN)
    return drawn(MllamaForConditionalGeneration, config)


def test_a_place_of_the_cache_that_holds_pictures_counts_other_tokens() -> None:
    """As many as a picture has, or none."""
    softmax, model = mllama(), mllama()
    ones = torch.ones(2, 1, 1, dtype=torch.long)
    inputs = {
        "input_ids": IDS,
        "pixel_values": torch.randn(2, 1, 1, 3, 16, 16),
        "aspect_ratio_ids": ones[:, 0],
        "aspect_ratio_mask": ones,
        "cross_attention_mask": torch.ones(2, 24, 1, 1, dtype=torch.long),
    }
    wanted = run(softmax, inputs)
    report = linearize_(model, method=METHOD, example=inputs)
    assert [row.layer for row in report.replaced] == [3, 5]
    assert difference(run(model, inputs), wanted) <= CLOSE
    for prompt in (inputs, {"input_ids": IDS}):
        assert torch.equal(model.generate(**prompt, **GREEDY), softmax.generate(**prompt, **GREEDY))


def test_a_call_left_between_a_state_and_keys_is_refused() -> None:
    """Of the text's own layers, by the law that pictures are not counted."""
    model = ARCHITECTURES["Gemma 3"].build()
    linearize_(model, method=METHOD)
    cache = new_cache(model)
    model(IDS, past_key_values=cache)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: {}["broken"])
    with pytest.raises(KeyError):
        model(IDS[:, :1], past_key_values=cache)
    hook.remove()
    with pytest.raises(RuntimeError, match=r"different numbers of tokens \(25, 24\)"):
        model(IDS[:, :1], past_key_values=cache)


def test_an_encoder_that_generates_stays_unless_named() -> None:
    """Named, it encodes as before."""
    architecture = ARCHITECTURES["BERT, not as decoder"]
    softmax, model = architecture.build(), architecture.build()
    assert isinstance(model, BertLMHeadModel)
    with pytest.raises(ValueError, match=r"see later ones, and generate gives it a cache.*is_decoder=True.*`layers`"):
        linearize_(model, method=METHOD)
    linearize_(model, method=METHOD, layers=range(2))
    inputs = inputs_of(architecture, model)
    assert difference(run(model, inputs), run(softmax, inputs)) <= CLOSE


class Hooked(LlamaAttention):
    """Attention of a class that leaves the computing to the one it inherits from."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """As inherited."""
        return super().forward(*args, **options)


def test_attention_that_is_inherited_is_replaced_too() -> None:
    """By small budgets, so that softmax would show."""
    plain, model = ARCHITECTURES["Llama"].build(), ARCHITECTURES["Llama"].build()
    model.model.layers[0].self_attn.__class__ = Hooked
    linearize_(plain, method=SMALL)
    assert len(linearize_(model, method=SMALL).replaced) == 2
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert torch.equal(model.generate(IDS, **GREEDY), plain.generate(IDS, **GREEDY))


def test_a_model_without_numbers_is_refused() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(ARCHITECTURES["Llama"].build().config)
    with pytest.raises(ValueError, match=r"weights on the meta device.*load its weights first"):
        linearize_(model, method=METHOD)
