"""The settings of a `LinearLM` as transformers writes them, and the blocks that they stand for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from linattn import positions as encodings
from linattn.methods.method import parse_method
from linattn.nn import Block, LinearAttention, SoftmaxAttention
from linattn.nn.attention import QkNorm
from linattn.positions import FixedDecay, ForgetGate, Gate
from linattn.softmax.checking import check_seed

_POSITIONS = {name: getattr(encodings, name) for name in ("Rotary", "SinusoidalCodes", "LearnedCodes")}
_GATES: dict[str, Callable[..., Gate]] = {
    "ForgetGate": ForgetGate,
    "Alibi": lambda _, num_heads: FixedDecay.alibi(num_heads),
    "RetNet": lambda _, num_heads: FixedDecay.retnet(num_heads),
    "FixedDecay": lambda _, num_heads, *, rates: FixedDecay(rates),
}


class LinearLMConfig(PreTrainedConfig):
    """Configuration of a `LinearLMForCausalLM`.

    Names are transformers' where it has them; maps, positions and gates are written forms, as in "Taylor(order=2)".

    Args:
        vocab_size: V; 256 is every byte.
        hidden_size: E.
        num_hidden_layers: how many blocks.
        num_attention_heads: H.
        num_key_value_heads: Hkv; H if None.
        head_dim: D; E / H if None.
        intermediate_size: width inside the MLPs; 8/3·E if None.
        pattern: one letter for each block, "l" linear and "s" softmax, begun again at its end, as "llls".
        method: the map of linear blocks, and what is exact beside it: "FavorPlus", "LearnedExponential + window 64".
        num_features: R, for maps whose number of features is free.
        positions: "Rotary", or another of `linattn.positions`, with options: "Rotary(base=500000.0)". None for none.
        gate: "ForgetGate", with options, "Alibi", "RetNet" or "FixedDecay(rates=[…])". None for none.
        gated: the kinds of blocks that have the gate: "ls", "l" or "s". A gated softmax block is quadratic in memory
            too: its weights take a bias for every pair.
        qk_norm: "rms", "layer" or None.
        output_gate: as in `linattn.nn.LinearAttention`.
        dropout: as in `linattn.nn.Block`.
        per_head: whether each key/value head has a draw and weights of its own, where the map has such; False: one set
            for all heads of a block.
        seed: of the first block's map; the next has seed + 1, and so on.
        use_cache: whether a call outside training returns the streams after it.

    Raises:
        ValueError: the pattern is not of these letters, or no block has the gate; a written form is none or unfit.

    Example:
        >>> config = LinearLMConfig(num_hidden_layers=4, pattern="llls", gate="ForgetGate")
        >>> [type(block.attention).__name__ for block in blocks_of(config)][2:]
        ['LinearAttention', 'SoftmaxAttention']
    """

    model_type = "linattn_lm"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 256
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    pattern: str = "l"
    method: str = "FavorPlus"
    num_features: int | None = 64
    positions: str | None = "Rotary"
    gate: str | None = None
    gated: str = "ls"
    qk_norm: QkNorm | None = None
    output_gate: bool = False
    dropout: float = 0.0
    per_head: bool = False
    seed: int = 0
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None


def blocks_of(config: LinearLMConfig) -> list[Block]:
    """The blocks that a config stands for, freshly drawn."""
    check_seed(config.seed)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        size = getattr(config, name)
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout must be from 0 to below 1, got {config.dropout}")
    if not config.pattern or set(config.pattern) - set("ls"):
        raise ValueError(f'pattern must be letters "l" (linear) and "s" (softmax), got {config.pattern!r}')
    count = config.num_hidden_layers
    kinds = (config.pattern * count)[:count]
    if not set(config.gated) <= set("ls") or (config.gate is not None and not set(config.gated) & set(kinds)):
        raise ValueError(
            f'gated must be kinds of the pattern\'s blocks, "l", "s" or "ls", got {config.gated!r} with pattern='
            f"{config.pattern!r}; without a gate leave gate out"
        )
    return [
        Block(_attention(config, kind, place), hidden_dim=config.intermediate_size, dropout=config.dropout)
        for place, kind in enumerate(kinds)
    ]


def _attention(config: LinearLMConfig, kind: str, place: int) -> LinearAttention | SoftmaxAttention:
    """The attention of one block."""
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    options: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "is_causal": True}
    options |= {"qk_norm": config.qk_norm, "output_gate": config.output_gate}
    if config.positions is not None:
        options["positions"] = _built("positions", config.positions, _POSITIONS, head_dim)
    if config.gate is not None and kind in config.gated:
        options["gate"] = _built("gate", config.gate, _GATES, config.hidden_size, num_kv_heads)
    if kind == "s":
        return SoftmaxAttention(config.hidden_size, config.num_attention_heads, **options)
    method = parse_method(config.method)
    width = options["positions"].encoded_dim if "positions" in options else head_dim
    num_features = config.num_features if method.takes_features else None
    num_heads = num_kv_heads if config.per_head else None
    drawn = {"scale": head_dim**-0.5, "seed": config.seed + place, "num_heads": num_heads}
    feature_map = method.build_map(width, num_features=num_features, **drawn)
    # Methods are built frozen, to be measured; here a learned map trains with the model.
    feature_map.requires_grad_(True)
    return LinearAttention(config.hidden_size, config.num_attention_heads, feature_map, window=method.window, **options)


def _built(field: str, text: str, known: Mapping[str, Callable[..., Any]], *sizes: int) -> Any:
    """Build what "Name" or "Name(option=literal)" names, for a layer's sizes; nothing is evaluated."""
    forms = f"write one of {', '.join(known)}, with options as in {next(iter(known))}(option=value)"
    try:
        node = ast.parse(text, mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        options = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(f"{field}={text!r} is no written form; {forms}") from None
    is_named = not call.args and all(one.arg is not None for one in call.keywords)
    if not is_named or not isinstance(call.func, ast.Name) or call.func.id not in known:
        raise ValueError(f"{field}={text!r} is no written form; {forms}")
    try:
        return known[call.func.id](*sizes, **options)
    except TypeError as error:
        raise ValueError(f"{field}={text!r}: {error}; {forms}") from error
