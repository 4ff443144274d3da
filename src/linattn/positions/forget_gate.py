"""Forget and input gates computed from the tokens; letters as in positions/__init__.py."""

from __future__ import annotations

from typing import Literal, final, get_args

import torch
from torch import Tensor, nn

from linattn.feature_maps._arguments import check_count, check_number
from linattn.positions._base import wide
from linattn.positions.gates import Gate, Gates
from linattn.softmax.precision import outside_autocast

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
        x = wide(x)
        projected = nn.functional.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))
        # As compiled graphs take it to be: logsigmoid's gradient follows other strides.
        return projected.mT.contiguous()
