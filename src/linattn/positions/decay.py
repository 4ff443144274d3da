"""Gates that are fixed, and gates computed from the tokens; letters as in positions/__init__.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Self, final, get_args

import torch
from torch import Tensor, nn

from linattn.feature_maps._arguments import check_count, check_number
from linattn.positions.gates import Gate, Gates
from linattn.softmax.precision import accumulation_dtype, outside_autocast

InputGate = Literal["none", "exponential", "complement"]
# At the start heads forget with time constants of 20 to 400 tokens, whatever the token.
_FASTEST, _SLOWEST = 3.0, 6.0


@final
class ForgetGate(Gate):
    """Gates from the input, one number per key/value head and token.

        log f_t = log σ(a_t),   a = W x + b;   log i_t = 0, or c·tanh(a'_t/c), or log(1 - f_t)

    Weights start at 0 and biases between 3 and 6, so that a fresh gate is a fixed decay. Cost O(L·E·Hkv). In at least
    float32, outside autocast: rounded logarithms would add up.

    Attributes:
        forget: the projection to a.
        input: the projection to a', for `input_gate="exponential"`; else None.

    Args:
        embed_dim: E.
        num_heads: Hkv.
        input_gate: "none": i = 1; "exponential": xLSTM's, its logarithm capped softly at ±c; "complement": i = 1 - f,
            RFA's, under which a state is a moving average.
        soft_cap: c, > 0.

    Raises:
        ValueError: a size is not a positive integer, `input_gate` is unknown, or `soft_cap` is not positive.

    Example:
        >>> import torch
        >>> ForgetGate(4, 2)(torch.zeros(1, 3, 4)).log_forget.exp()[0, :, 0]
        tensor([0.9526, 0.9975], grad_fn=<SelectBackward0>)

    Source: Lin et al. 2025 (Forgetting Transformer, arXiv 2503.02130), section 3; Beck et al. 2024 (xLSTM, arXiv
        2405.04517), section 2.3; Peng et al. 2021 (RFA, arXiv 2103.02143), section 3.2.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, input_gate: InputGate = "none", soft_cap: float = 15.0
    ) -> None:
        super().__init__()
        if input_gate not in get_args(InputGate):
            raise ValueError(f"input_gate must be one of {get_args(InputGate)}, got {input_gate!r}")
        self.num_heads, self.input_gate = check_count("num_heads", num_heads), input_gate
        self.soft_cap = check_number("soft_cap", soft_cap, positive=True)
        self.forget = nn.Linear(check_count("embed_dim", embed_dim), num_heads)
        self.input = nn.Linear(embed_dim, num_heads) if input_gate == "exponential" else None
        with torch.no_grad():
            self.forget.weight.zero_()
            self.forget.bias.copy_(torch.linspace(_FASTEST, _SLOWEST, num_heads))
            if self.input is not None:
                self.input.weight.zero_()
                self.input.bias.zero_()

    def forward(self, x: Tensor) -> Gates:
        """The gates of tokens (B, L, E): (B, Hkv, L), in at least float32."""
        logit = _projected(self.forget, x)
        log_forget = nn.functional.logsigmoid(logit)
        if self.input_gate == "complement":
            return Gates(log_forget, nn.functional.logsigmoid(-logit))
        if self.input is None:
            return Gates(log_forget)
        return Gates(log_forget, self.soft_cap * torch.tanh(_projected(self.input, x) / self.soft_cap))

    def extra_repr(self) -> str:
        """The kind of input gate."""
        return f"input_gate={self.input_gate!r}, soft_cap={self.soft_cap}"


def _projected(linear: nn.Linear, x: Tensor) -> Tensor:
    """W x + b, (B, L, E) -> (B, Hkv, L), in at least float32."""
    with outside_autocast(x.device):
        x = x.to(accumulation_dtype(x.dtype))
        projected = nn.functional.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))
        # As compiled graphs take it to be: logsigmoid's gradient follows other strides.
        return projected.mT.contiguous()


@final
class FixedDecay(Gate):
    """Weights φ(q_i)·φ(k_j)·e^{-λ(i - j)}, λ fixed for each key/value head.

    A gate with log f = -λ: causal, O(1) memory in a stream, O(L) time.

    Args:
        rates: λ ≥ 0 of each key/value head, in nats per token.

    Raises:
        ValueError: no rate is given, or one is negative or not finite.

    Example:
        >>> import torch
        >>> FixedDecay.alibi(2)(torch.zeros(1, 3, 4)).log_forget[0, :, 0].tolist()
        [-0.0625, -0.00390625]

    Source: Press et al. 2022 (ALiBi, arXiv 2108.12409), section 3; Sun et al. 2023 (RetNet, arXiv 2307.08621),
        equation 8.
    """

    rates: Tensor

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        if not rates or not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ValueError(f"rates must be finite numbers >= 0, one for each key/value head, got {list(rates)}")
        self.num_heads = len(rates)
        self.register_buffer("rates", torch.tensor(list(rates), dtype=torch.float64))

    @classmethod
    def alibi(cls, num_heads: int) -> Self:
        """ALiBi's slopes: 2^(-8h/H) for h = 1…H, H a power of two; else those of the next lower one and every second
        of its double's.
        """
        lower = 2 ** int(math.log2(check_count("num_heads", num_heads)))
        slopes = [2.0 ** (-8 * h / lower) for h in range(1, lower + 1)]
        between = [2.0 ** (-4 * h / lower) for h in range(1, 2 * (num_heads - lower), 2)]
        return cls(slopes + between)

    @classmethod
    def retnet(cls, num_heads: int) -> Self:
        """RetNet's decays: γ = 1 - 2^(-5-h) for h = 0…H-1."""
        return cls([-math.log1p(-(2.0 ** (-5 - h))) for h in range(check_count("num_heads", num_heads))])

    def forward(self, x: Tensor) -> Gates:
        """log f = -λ at every token of (B, L, E); (1, Hkv, L)."""
        return Gates(-self.rates[None, :, None].expand(-1, -1, x.shape[1]))

    def extra_repr(self) -> str:
        """The rates."""
        return f"{self.rates.tolist()}"
