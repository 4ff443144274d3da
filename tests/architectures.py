"""Tiny random models of many architectures, from transformers' own configurations, and what each is called with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCABULARY = 97
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
DECODER = {**TEXT, **TOKENS, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BOTH_STACKS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
BOTH_SIDES = {**BOTH_STACKS, **TOKENS, "vocab_size": VOCABULARY, "forced_eos_token_id": None}
T5_SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
    **TOKENS,
}
PICTURE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 4,
}
SOUND = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
GPT_SIZES = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, **TOKENS}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, **ROUTED}
LATENT["moe_intermediate_size"] = 16
HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}


@dataclass(frozen=True)
class Architecture:
    """One architecture: the name of its model, its configuration's, and how small it is made."""

    model: str
    kind: str  # "decoder", "encoder", "vision", "audio" or "both sides"
    sizes: dict[str, Any]
    config: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> PreTrainedModel:
        """The model, in evaluation mode, its weights large enough for a mistake in scale or mask to show."""
        torch.manual_seed(0)
        sizes = {name: value for name, value in {**self.sizes, **self.options}.items() if value != "default"}
        config = getattr(transformers, f"{self.config_name}Config")(**sizes)
        model: PreTrainedModel = getattr(transformers, self.model)(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 2 and weight.requires_grad and "norm" not in name:
                    weight.normal_(0, weight.shape[-1] ** -0.5)
        if model.can_generate():
            model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
            model.generation_config.pad_token_id = 0
        return model.eval()

    @property
    def config_name(self) -> str:
        """The name of the configuration without its last word."""
        if self.config:
            return self.config
        for ending in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model"):
            if self.model.endswith(ending):
                return self.model.removesuffix(ending)
        return self.model


def decoder(model: str, config: str = "", **options: Any) -> Architecture:
    """A decoder."""
    return Architecture(model, "decoder", DECODER, config, options)


def encoder(model: str, config: str = "", **options: Any) -> Architecture:
    """An encoder of text."""
    return Architecture(model, "encoder", TEXT, config, options)


def picture(model: str, config: str = "", **options: Any) -> Architecture:
    """An encoder of pictures."""
    return Architecture(model, "vision", PICTURE, config, options)


def sound(model: str, config: str = "", **options: Any) -> Architecture:
    """An encoder of sound."""
    return Architecture(model, "audio", SOUND, config, options)


ARCHITECTURES: dict[str, Architecture] = {
    # Decoders.
    "Llama": decoder("LlamaForCausalLM"),
    "Mistral": decoder("MistralForCausalLM", sliding_window=None),
    "Mistral, windows": decoder("MistralForCausalLM", sliding_window=8),
    "Mixtral": decoder("MixtralForCausalLM", sliding_window=None, **EXPERTS),
    "Ministral": decoder("MinistralForCausalLM", layer_types=["full_attention", "sliding_attention"], sliding_window=8),
    "Qwen 2": decoder("Qwen2ForCausalLM"),
    "Qwen 2 MoE": decoder("Qwen2MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "Qwen 3": decoder("Qwen3ForCausalLM"),
    "Qwen 3 MoE": decoder("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "Qwen 3 Next": decoder(
        "Qwen3NextForCausalLM",
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "Gemma": decoder("GemmaForCausalLM"),
    "Gemma 2": decoder("Gemma2ForCausalLM", sliding_window=8, attn_logit_softcapping=0.2),
    "Gemma 2 without caps": decoder("Gemma2ForCausalLM", sliding_window=8, attn_logit_softcapping=None),
    "Gemma 3": decoder(
        "Gemma3ForCausalLM", "Gemma3Text", sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "Gemma 3n": decoder(
        "Gemma3nForCausalLM",
        "Gemma3nText",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        sliding_window=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=4,
        intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "Gemma 4, shared keys": decoder(
        "Gemma4ForCausalLM",
        "Gemma4Text",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        sliding_window=8,
        global_head_dim=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "VaultGemma": decoder("VaultGemmaForCausalLM", sliding_window=8, attn_logit_softcapping=0.2),
    "gpt-oss": decoder("GptOssForCausalLM", **EXPERTS),
    "DiffLlama": decoder("DiffLlamaForCausalLM"),
    "Llama 4, chunks": decoder(
        "Llama4ForCausalLM",
        "Llama4Text",
        num_hidden_layers=4,
        intermediate_size_mlp=48,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=8,
    ),
    "Doge": decoder("DogeForCausalLM"),
    "JetMoE": decoder(
        "JetMoeForCausalLM", kv_channels=8, num_local_experts=4, num_experts_per_tok=2, head_dim="default"
    ),
    "Phi": decoder("PhiForCausalLM", head_dim="default"),
    "Phi 3": decoder("Phi3ForCausalLM"),
    "PhiMoE": decoder("PhimoeForCausalLM", sliding_window=8, **EXPERTS),
    "OLMo": decoder("OlmoForCausalLM"),
    "OLMo 2": decoder("Olmo2ForCausalLM"),
    "OLMo 3": decoder("Olmo3ForCausalLM", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "GPT-2": Architecture("GPT2LMHeadModel", "decoder", GPT_SIZES),
    "GPT-NeoX": decoder("GPTNeoXForCausalLM", head_dim="default", num_key_value_heads="default"),
    "GPT BigCode": Architecture("GPTBigCodeForCausalLM", "decoder", GPT_SIZES),
    "BERT as decoder": Architecture("BertLMHeadModel", "decoder", {**TEXT, **TOKENS, "is_decoder": True}, "Bert"),
    "OPT": Architecture(
        "OPTForCausalLM",
        "decoder",
        {**TEXT, **TOKENS, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 256},
    ),
    "BioGPT": Architecture("BioGptForCausalLM", "decoder", {**TEXT, **TOKENS, "max_position_embeddings": 256}),
    "StableLM": decoder("StableLmForCausalLM"),
    "StarCoder 2": decoder("Starcoder2ForCausalLM"),
    "Cohere": decoder("CohereForCausalLM"),
    "Cohere 2": decoder("Cohere2ForCausalLM", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "GLM": decoder("GlmForCausalLM"),
    "GLM 4": decoder("Glm4ForCausalLM"),
    "Granite": decoder("GraniteForCausalLM"),
    "Granite MoE": decoder("GraniteMoeForCausalLM", **EXPERTS),
    "DeepSeek V2": decoder("DeepseekV2ForCausalLM", num_key_value_heads=4, head_dim="default", **LATENT),
    "DeepSeek V3": decoder("DeepseekV3ForCausalLM", num_key_value_heads=4, head_dim="default", **LATENT),
    "EXAONE 4": decoder("Exaone4ForCausalLM", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "SmolLM 3": decoder("SmolLM3ForCausalLM"),
    "Helium": decoder("HeliumForCausalLM"),
    "Nemotron": decoder("NemotronForCausalLM"),
    "ERNIE 4.5": decoder("Ernie4_5ForCausalLM"),
    "Arcee": decoder("ArceeForCausalLM"),
    "Seed-OSS": decoder("SeedOssForCausalLM"),
    "Apertus": decoder("ApertusForCausalLM"),
    "LFM 2": decoder("Lfm2ForCausalLM", layer_types=["conv", "full_attention"], block_multiple_of=8),
    "Granite hybrid": decoder(
        "GraniteMoeHybridForCausalLM",
        layer_types=["mamba", "attention"],
        shared_intermediate_size=48,
        num_local_experts=0,
        **HYBRID,
    ),
    "Nemotron H": decoder(
        "NemotronHForCausalLM",
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
    ),
    "CTRL": Architecture("CTRLLMHeadModel", "decoder", {**GPT_SIZES, "dff": 48}),
    "OLMoE": decoder("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2),
    "Persimmon": decoder("PersimmonForCausalLM", num_key_value_heads=4),
    "ModernBERT as decoder": decoder(
        "ModernBertDecoderForCausalLM",
        head_dim="default",
        num_key_value_heads="default",
        cls_token_id=1,
        sep_token_id=2,
        local_attention=8,
        global_attn_every_n_layers=2,
    ),
    "Llama 3.2, pictures": decoder(
        "MllamaForCausalLM",
        "MllamaText",
        num_hidden_layers=3,
        cross_attention_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "MiniMax": decoder(
        "MiniMaxForCausalLM", layer_types=["linear_attention", "full_attention"], block_size=8, **EXPERTS
    ),
    "BERT, not as decoder": Architecture("BertLMHeadModel", "decoder", {**TEXT, **TOKENS}, "Bert"),
    "BigBird-Pegasus, the decoder": Architecture("BigBirdPegasusForCausalLM", "decoder", BOTH_SIDES, "BigBirdPegasus"),
    "Falcon": decoder("FalconForCausalLM", head_dim="default"),
    "BLOOM": decoder("BloomForCausalLM", n_layer=2, n_head=4),
    # Encoders of text.
    "BERT": encoder("BertModel"),
    "RoBERTa": encoder("RobertaModel"),
    "XLM-RoBERTa": encoder("XLMRobertaModel"),
    "CamemBERT": encoder("CamembertModel"),
    "Longformer": encoder("LongformerModel", attention_window=8),
    "ELECTRA": encoder("ElectraModel", embedding_size=32),
    "ALBERT": encoder("AlbertModel", embedding_size=16),
    "DistilBERT": Architecture(
        "DistilBertModel",
        "encoder",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    ),
    "ModernBERT": encoder(
        "ModernBertModel", **TOKENS, cls_token_id=1, sep_token_id=2, local_attention=8, global_attn_every_n_layers=2
    ),
    "ESM": encoder("EsmModel", pad_token_id=1, mask_token_id=2, position_embedding_type="rotary"),
    "EuroBERT": encoder("EuroBertModel", **TOKENS, num_key_value_heads=2),
    "MPNet": encoder("MPNetModel"),
    "T5Gemma, the encoder": Architecture(
        "T5GemmaEncoderModel",
        "encoder",
        {"encoder": {**DECODER, "sliding_window": 8, "attn_logit_softcapping": 0.2}, "is_encoder_decoder": False},
        "T5Gemma",
    ),
    "DeBERTa v2": encoder("DebertaV2Model"),
    # Encoders of pictures and sound.
    "ViT": picture("ViTModel"),
    "DeiT": picture("DeiTModel"),
    "DINOv2": picture("Dinov2Model"),
    "DINOv3": picture("DINOv3ViTModel"),
    "SigLIP": picture("SiglipVisionModel", "SiglipVision"),
    "CLIP, pictures": picture("CLIPVisionModel", "CLIPVision"),
    "BEiT, biases": picture("BeitModel", use_relative_position_bias=True, vocab_size=50),
    "Swin": Architecture(
        "SwinModel",
        "vision",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "SegFormer": picture(
        "SegformerModel",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        num_hidden_layers="default",
        hidden_size="default",
        intermediate_size="default",
        patch_size="default",
    ),
    "Wav2Vec 2": sound("Wav2Vec2Model"),
    "HuBERT": sound("HubertModel"),
    "Audio spectrogram": Architecture(
        "ASTModel",
        "audio",
        {**PICTURE, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4},
    ),
    # Both sides.
    "BART": Architecture("BartForConditionalGeneration", "both sides", BOTH_SIDES),
    "mBART": Architecture("MBartForConditionalGeneration", "both sides", BOTH_SIDES),
    "Pegasus": Architecture("PegasusForConditionalGeneration", "both sides", BOTH_SIDES),
    "M2M-100": Architecture("M2M100ForConditionalGeneration", "both sides", BOTH_SIDES),
    "BigBird-Pegasus": Architecture(
        "BigBirdPegasusForConditionalGeneration",
        "both sides",
        {**BOTH_SIDES, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    ),
    "Two BERTs": Architecture(
        "EncoderDecoderModel",
        "both sides",
        {
            "encoder": {**TEXT, **TOKENS, "model_type": "bert"},
            "decoder": {**TEXT, **TOKENS, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
        },
        "EncoderDecoder",
    ),
    "Marian": Architecture("MarianMTModel", "both sides", BOTH_SIDES, "Marian"),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        "both sides",
        {
            **BOTH_SIDES,
            "max_source_positions": 20,
            "num_mel_bins": 8,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "T5": Architecture("T5ForConditionalGeneration", "both sides", T5_SIZES),
    "T5Gemma": Architecture(
        "T5GemmaForConditionalGeneration",
        "both sides",
        {
            "encoder": {**DECODER, "sliding_window": 8},
            "decoder": {**DECODER, "sliding_window": 8},
            "vocab_size": VOCABULARY,
        },
    ),
}


def inputs_of(architecture: Architecture, model: PreTrainedModel, batch: int = 2) -> dict[str, Tensor]:
    """Arguments of a forward pass without padding, longer than the windows."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (batch, 24), generator=draw)
    if architecture.kind == "vision":
        return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=draw)}
    if architecture.kind == "audio":
        if model.main_input_name == "input_values" and architecture.model == "ASTModel":
            return {"input_values": torch.randn(batch, 32, 16, generator=draw)}
        return {"input_values": torch.randn(batch, 400, generator=draw)}
    if architecture.kind == "both sides":
        target = torch.randint(3, VOCABULARY, (batch, 12), generator=draw)
        if model.main_input_name == "input_features":
            return {"input_features": torch.randn(batch, 8, 40, generator=draw), "decoder_input_ids": target}
        return {"input_ids": ids, "decoder_input_ids": target}
    return {"input_ids": ids}
