"""A tiny model with its tokenizer, written as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM

# The bytes, two merges and the end of a text.
TOKENS = [*sorted(ByteLevel.alphabet()), "th", "the", "<|endoftext|>"]
MERGES = ["t h", "th e"]
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny() -> Qwen2ForCausalLM:
    """A Qwen 2 of two layers with random weights, large enough for attention that is not uniform."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        eos_token_id=len(TOKENS) - 1,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(10.0)
    return model


def write_gguf(path: Path, model: Qwen2ForCausalLM, *, quantised: bool = False) -> None:
    """The model and a byte-level tokenizer as one file, matrices in blocks of 8-bit numbers if so asked."""
    # Here, not above: an extra.
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config, writer = model.config, GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(config.eos_token_id)
    for name, x in model.state_dict().items():
        numbers = x.numpy()
        if quantised and x.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(_name(name), quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    """The file's name of a tensor."""
    place, kind = name.rsplit(".", 1)
    if place in _OUTSIDE:
        return f"{_OUTSIDE[place]}.{kind}"
    _, _, number, part = place.split(".", 3)
    return f"blk.{number}.{_NAMES[part]}.{kind}"
