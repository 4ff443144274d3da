"""Blocks, and the language model that is a list of them; letters as in nn/__init__.py."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from linattn.nn.attention import Attention
from linattn.nn.streams import Stream
from linattn.softmax.checking import check_count, check_number
from linattn.softmax.partial import Attended


class GatedMLP(nn.Module):
    """W_down(silu(x W_gate) * x W_up), (B, L, E) -> (B, L, E): Shazeer 2020 (arXiv 2002.05202), equation 6."""

    def __init__(
        self, embed_dim: int, hidden_dim: int, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(embed_dim, hidden_dim, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Token by token."""
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A pre-norm layer of a transformer: attention, then an MLP, each added to what it was given.

        x ← x + attention(norm(x));   x ← x + mlp(norm(x))

    Cost: that of the attention, and O(L·E·hidden_dim).

    Args:
        attention: a `LinearAttention` or a `SoftmaxAttention`; a hybrid is a list of blocks of both kinds.
        hidden_dim: width inside the MLP; 8/3·E, rounded up to a multiple of 8, if None.
        dropout: probability with which numbers of what is added are dropped in training.

    Raises:
        TypeError: `attention` is no such layer.
        ValueError: `hidden_dim` is no positive integer, `dropout` no number from 0 to 1.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import EluPlusOne
        >>> from linattn.nn import LinearAttention
        >>> block = Block(LinearAttention(8, 2, EluPlusOne(4), is_causal=True))
        >>> block(torch.randn(1, 5, 8)).shape, block.mlp.up_proj.out_features
        (torch.Size([1, 5, 8]), 24)

    Source: Xiong et al. 2020 (arXiv 2002.04745); Zhang and Sennrich 2019 (arXiv 1910.07467) for the norm.
    """

    def __init__(self, attention: Attention, *, hidden_dim: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        if not isinstance(attention, Attention):
            raise TypeError(f"attention must be a LinearAttention or SoftmaxAttention, got {type(attention).__name__}")
        width, weight = attention.embed_dim, attention.q_proj.weight
        hidden_dim = 8 * -(-width // 3) if hidden_dim is None else check_count("hidden_dim", hidden_dim)
        self.attention_norm = nn.RMSNorm(width, device=weight.device, dtype=weight.dtype)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(width, device=weight.device, dtype=weight.dtype)
        self.mlp = GatedMLP(width, hidden_dim, device=weight.device, dtype=weight.dtype)
        self.dropout = nn.Dropout(check_number("dropout", dropout))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Tokens (B, L, E) -> (B, L, E); `key_mask` (B, L) bool, True = attend."""
        x = x + self.dropout(self.attention(self.attention_norm(x), key_mask=key_mask))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out

    def forward_with_state(
        self, x: Tensor, state: Stream | None = None, *, key_mask: Tensor | None = None
    ) -> Attended[Stream]:
        """The next tokens (B, L, E) of a stream, and the stream after them."""
        attended, state = self.attention.forward_with_state(self.attention_norm(x), state, key_mask=key_mask)
        x = x + self.dropout(attended)
        return Attended(x + self.dropout(self.mlp(self.mlp_norm(x))), state)


class Predicted(NamedTuple):
    """Result of `LinearLM.forward_with_state`.

    Attributes:
        logits: (B, L, V).
        state: each block's stream after the last token.
    """

    logits: Tensor
    state: tuple[Stream, ...]


class LinearLM(nn.Module):
    """A language model: the next token's logits from all tokens before it.

        logits = norm(blocks(embedding(tokens))) · embeddingᵀ

    Where every block is linear, a text of any length is read in constant memory (`forward_with_state`); softmax blocks
    keep their keys and values.

    Cost: that of its blocks, and O(L·E·V) for the logits.

    Attributes:
        gradient_checkpointing: recompute each block in the backward pass instead of storing what is inside it; False.

    Args:
        vocab_size: V.
        blocks: at least one, of one width, all of them causal.
        initialize: give the blocks' products new weights too; False keeps those of blocks that are trained or adopted.

    Raises:
        ValueError: V is no positive integer; no block; blocks of different widths, or some that are not causal.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import EluPlusOne
        >>> from linattn.nn import LinearAttention, SoftmaxAttention
        >>> linear = [Block(LinearAttention(8, 2, EluPlusOne(4), is_causal=True)) for _ in range(3)]
        >>> model = LinearLM(256, [*linear, Block(SoftmaxAttention(8, 2, is_causal=True))])
        >>> text = torch.tensor([list(b"linear")])
        >>> first = model.forward_with_state(text[:, :4])
        >>> rest = model.forward_with_state(text[:, 4:], first.state)
        >>> torch.allclose(rest.logits, model(text)[:, 4:], atol=1e-6)
        True

    Source: Radford et al. 2019 (GPT-2), section 2.3, for the initial weights; Press and Wolf 2017 (arXiv 1608.05859)
        for the shared embedding.
    """

    def __init__(self, vocab_size: int, blocks: Iterable[Block], *, initialize: bool = True) -> None:
        super().__init__()
        held = list(blocks)
        if others := sorted({type(block).__name__ for block in held if not isinstance(block, Block)}):
            raise TypeError(f"blocks must be of Block, got {', '.join(others)}; write Block(attention)")
        widths = sorted({block.attention.embed_dim for block in held})
        if len(widths) != 1:
            raise ValueError(f"blocks must be at least one, and of one width, got {len(held)} of widths {widths}")
        if wrong := [place for place, block in enumerate(held) if not block.attention.is_causal]:
            raise ValueError(f"every block must have is_causal=True, got others at {wrong}")
        # A ModuleList is no Sequence in its annotations.
        self.blocks = cast("Sequence[Block]", nn.ModuleList(held))
        width, weight = self.blocks[0].attention.embed_dim, self.blocks[0].attention.q_proj.weight
        self.embedding = nn.Embedding(
            check_count("vocab_size", vocab_size), width, device=weight.device, dtype=weight.dtype
        )
        self.norm = nn.RMSNorm(width, device=weight.device, dtype=weight.dtype)
        self.gradient_checkpointing = False
        initialize_(self, embedding_alone=not initialize)

    def forward(self, tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Numbers of tokens (B, L) -> logits (B, L, V); `key_mask` (B, L) bool, True = attend."""
        return self.logits(self.vectors(tokens, key_mask=key_mask))

    def forward_with_state(
        self, tokens: Tensor, state: Sequence[Stream] | None = None, *, key_mask: Tensor | None = None
    ) -> Predicted:
        """The logits of a text's next tokens (B, L), and each block's stream after them; None begins a text."""
        x, streams = self.vectors_with_state(tokens, state, key_mask=key_mask)
        return Predicted(self.logits(x), streams)

    def vectors(self, tokens: Tensor, *, key_mask: Tensor | None = None, inputs: list[Tensor] | None = None) -> Tensor:
        """Outputs of the last block, (B, L, E), of which `logits` takes any; `inputs` gets that of each block."""
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            if inputs is not None:
                inputs.append(x)
            x = self._run(block, x, key_mask=key_mask)
        return x

    def vectors_with_state(
        self,
        tokens: Tensor,
        state: Sequence[Stream] | None = None,
        *,
        key_mask: Tensor | None = None,
        inputs: list[Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Stream, ...]]:
        """Outputs of the last block for a text's next tokens, as `vectors`, and each block's stream after them."""
        if state is not None and len(state) != len(self.blocks):
            raise ValueError(f"state must hold a stream for each of {len(self.blocks)} blocks, got {len(state)}")
        x, streams = self.embedding(tokens), []
        for place, block in enumerate(self.blocks):
            if inputs is not None:
                inputs.append(x)
            x, after = self._run(block.forward_with_state, x, state[place] if state else None, key_mask=key_mask)
            streams.append(after)
        return x, tuple(streams)

    def _run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """A block's result, of which the backward pass computes again what is inside where that is asked for."""
        if self.gradient_checkpointing and self.training:
            return checkpoint(function, *arguments, use_reentrant=False, **options)
        return function(*arguments, **options)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the last block's outputs, (B, L, E) -> (B, L, V)."""
        if self.embedding.weight.is_meta and not x.is_meta:
            raise ValueError("the embedding's weights, the head's too, are offloaded; keep them on the device")
        return nn.functional.linear(self.norm(x), self.embedding.weight)


@torch.no_grad()
def initialize_(model: LinearLM, *, embedding_alone: bool = False) -> None:
    """GPT-2's initial weights: deviation 0.02, less for what is added to its input; maps and gates keep their own."""
    nn.init.normal_(model.embedding.weight, std=0.02)
    for block in () if embedding_alone else model.blocks:
        for name, part in (*block.attention.named_children(), *block.mlp.named_children()):
            if isinstance(part, nn.Linear):
                is_added = name in ("o_proj", "down_proj")
                nn.init.normal_(part.weight, std=0.02 * (2 * len(model.blocks)) ** (-0.5 * is_added))
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
