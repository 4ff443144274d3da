"""Gates and decay: what makes old keys fade, as biases on keys; letters as in positions/__init__.py."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self, final, get_args

import torch
from torch import Tensor, nn

from linattn.attention import State, linear_attention_with_state
from linattn.feature_maps import FeatureMap
from linattn.feature_maps.base import UncastBuffers
from linattn.softmax.checking import DTYPES, as_float, check_bool, check_count, check_dense, check_dtype, check_number
from linattn.softmax.partial import Attended
from linattn.softmax.precision import accumulation_dtype, outside_autocast
from linattn.softmax.tracing import has_values, is_traced

# Exponents lose digits with their size: to 2^10, float32 keeps 6e-5 of a weight and float64 1e-13.
_LONGEST_FALL = 2.0**10
# A forget gate of exactly 0 has logarithm -inf; sums of it would be differences of infinities.
_LOWEST = -(2.0**30)
InputGate = Literal["none", "exponential", "complement"]
# At the start heads forget with time constants of 20 to 400 tokens, whatever the token.
_FASTEST, _SLOWEST = 3.0, 6.0


class Gates(NamedTuple):
    """The logarithms of the gates of some tokens.

    Attributes:
        log_forget: log f_t, (B, Hkv, L) or (1, Hkv, L), floating: what all earlier keys' weights are multiplied by.
        log_input: log i_t, of the same shape: the factor on the token's own weight; None for 1.
    """

    log_forget: Tensor
    log_input: Tensor | None = None

    def cut(self, at: slice) -> Gates:
        """The gates of some of the tokens."""
        return Gates(self.log_forget[..., at], None if self.log_input is None else self.log_input[..., at])


class GateBias(NamedTuple):
    """Gates as attention takes them.

    Attributes:
        key_bias: log i_j + Σ_{s>j} log f_s, (B or 1, Hkv, L), float64: relative to the last token.
        log_decay: Σ_s log f_s, (B or 1, Hkv), float64: for `State.decay` of the state before these tokens.
    """

    key_bias: Tensor
    log_decay: Tensor


class Gate(nn.Module, ABC):
    """A module that computes gates of tokens.

    Attributes:
        num_heads: Hkv.
    """

    num_heads: int

    @abstractmethod
    def forward(self, x: Tensor) -> Gates:
        """The gates of tokens (B, L, E)."""


def gate_bias(gates: Gates, *, key_mask: Tensor | None = None) -> GateBias:
    """Gates as a bias on keys and a decay of the state before them.

        weight of key j for query t: φ(q_t)·φ(k_j)·i_j·Π_{s=j+1..t} f_s
        = e^{-Σ_{s>t} log f_s}·φ(q_t)·φ(k_j)·exp(log i_j + Σ_{s>j} log f_s),   whose first factor cancels

    So a gate is `key_bias`, the exact window shares it, and of a state before nothing is left to do but its decay:
    `linear_attention_with_state(q, k, v, map, state.decay(log_decay), key_bias=key_bias)`. Biases are relative to the
    last token, so that a stream's exponents do not grow with it. Within one call they do; `gated_attention_with_state`
    cuts calls where that would cost digits. O(L), in float64.

    Args:
        gates: of L tokens; log f = -inf counts as -2³⁰.
        key_mask: (B, L) bool, True = attend: masked tokens have log f = 0 and log i = 0, whatever they hold.

    Raises:
        TypeError: gates are not floating tensors, or the mask is not a bool one.
        ValueError: gates are not (B or 1, Hkv, L), differ in shape, do not fit the mask, or are inf or nan.

    Example:
        >>> import torch
        >>> key_bias, log_decay = gate_bias(Gates(torch.full((1, 1, 3), 0.5).double().log()))
        >>> key_bias.exp().tolist(), round(log_decay.exp().item(), 4)
        ([[[0.25, 0.5, 1.0]]], 0.125)

    Source: the gates of Peng et al. 2021 (RFA, arXiv 2103.02143), section 3.2, and Beck et al. 2024 (xLSTM, arXiv
        2405.04517), section 2.3, one number per head, under a normaliser; Lin et al. 2025 (Forgetting Transformer,
        arXiv 2503.02130), section 3, for the same bias under softmax.
    """
    return _bias(checked_gates(gates, key_mask))


def gated_attention_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    gates: Gates,
    state: State | None = None,
    *,
    key_mask: Tensor | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    backend: str = "auto",
) -> Attended[State]:
    """`linear_attention_with_state` with gates: earlier keys fade by each token's forget gate.

        S_t = f_t S_{t-1} + i_t φ(k_t)v_tᵀ,   z_t = f_t z_{t-1} + i_t φ(k_t),   out_t = φ(q_t)ᵀS_t / φ(q_t)ᵀz_t

    Cost as `linear_attention_with_state`. Where log f sums to more than 2¹⁰ the call is cut into spans, each with its
    own reference, so that digits do not depend on how much was forgotten before; a compiled or vmapped call cannot look
    at the gates and is one span, exact while they sum to a few thousand. With f = 1 it is the plain op, to the bit.

    Args:
        query: (B, H, L, D): as many queries as keys.
        key: (B, Hkv, L, D).
        value: (B, Hkv, L, Dv).
        feature_map: the kernel.
        gates: of these tokens, as a `Gate` gives them; differentiable.
        state: what was seen before, as it was returned.
        key_mask: (B, L) bool, True = attend; a masked token neither enters nor makes others fade.
        enable_gqa: as in `linear_attention`.
        window: as in `linear_attention_with_state`; near keys fade by the same gates.
        backend: as in `linear_attention`.

    Returns:
        Attended(out, state): its weights relative to the last token, ready for the next call.

    Raises:
        TypeError, ValueError: as `linear_attention_with_state` and `gate_bias`; queries and keys differ in number.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> x, v = torch.ones(1, 1, 2, 1), torch.tensor([[[[8.0], [2.0]]]])
        >>> gates = Gates(torch.full((1, 1, 2), 0.5).log())
        >>> out, _ = gated_attention_with_state(x, x, v, relu, gates)
        >>> round(out[0, 0, 1, 0].item(), 4)  # (0.5·8 + 2)/(0.5 + 1)
        4.0

    Source: as `gate_bias`.
    """
    check_dense(query=query, key=key, value=value)
    if not (state is None or isinstance(state, State)):
        raise TypeError(f"state must be a linattn.State or None, got {type(state).__name__}")
    gates, outs = checked_gates(gates, key_mask, key), []
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"gated queries stand beside keys, got {query.shape[2]} for {key.shape[2]}; give as many")
    for at in spans(gates.log_forget):
        key_bias, log_decay = _bias(gates.cut(at))
        tokens = query[:, :, at], key[:, :, at], value[:, :, at], feature_map
        bias = key_bias.expand(key.shape[0], -1, -1)
        mask = None if key_mask is None else key_mask[:, at]
        past = None if state is None else state.decay(log_decay)
        out, state = linear_attention_with_state(
            *tokens, past, key_mask=mask, key_bias=bias, enable_gqa=enable_gqa, window=window, backend=backend
        )
        outs.append(out)
    assert state is not None
    return Attended(outs[0] if len(outs) == 1 else torch.cat(outs, 2), state)


def _bias(gates: Gates) -> GateBias:
    """Sums of the forget gates behind each token."""
    falls = gates.log_forget.flip(-1).cumsum(-1).flip(-1)
    behind = torch.cat((falls, falls.new_zeros(*falls.shape[:-1], 1)), -1)
    bias = behind[..., 1:] if gates.log_input is None else behind[..., 1:] + gates.log_input
    return GateBias(bias, behind[..., 0])


def spans(log_forget: Tensor) -> Iterator[slice]:
    """Cuts such that within a span no head's gates, those of its first token apart, sum to more than the limit."""
    length = log_forget.shape[-1]
    is_unread = is_traced(log_forget) or torch._C._functorch.is_functorch_wrapped_tensor(log_forget)
    fallen = log_forget.detach().clamp(min=_LOWEST).abs().cumsum(-1).flatten(0, 1)  # (rows, L)
    if not length or is_unread or log_forget.is_meta or bool((fallen[:, -1] - fallen[:, 0] <= _LONGEST_FALL).all()):
        yield slice(0, length)
        return
    fallen, start = fallen.cpu(), 0
    while start < length:
        end = int(torch.searchsorted(fallen, fallen[:, start : start + 1] + _LONGEST_FALL, right=True).min())
        yield slice(start, end)
        start = end


def checked_gates(gates: Gates, key_mask: Tensor | None, key: Tensor | None = None) -> Gates:
    """The gates in float64, 0 at masked tokens; wrong shapes refused, and others than those of the keys."""
    if not isinstance(gates, Gates):
        raise TypeError(f"gates must be Gates, got {type(gates).__name__}; give what a Gate returns")
    named = {"log_forget": gates.log_forget} | ({} if gates.log_input is None else {"log_input": gates.log_input})
    check_dense(**named, key_mask=key_mask)
    for name, x in named.items():
        check_dtype(name, x, DTYPES, "a floating tensor, the logarithm of a gate", "convert it with .float()")
        if x.ndim != 3 or x.shape != gates.log_forget.shape:
            raise ValueError(
                f"{name} must be (B or 1, Hkv, L), the same for both gates, got {tuple(x.shape)} beside log_forget of "
                f"{tuple(gates.log_forget.shape)}"
            )
    shape = gates.log_forget.shape
    if key is not None and (shape[0] not in (1, key.shape[0]) or shape[1:] != key.shape[1:3]):
        raise ValueError(
            f"gates are those of the keys, (B or 1, Hkv, L), got {tuple(shape)} for keys of {tuple(key.shape[:3])}; "
            "give a gate for each key/value head and token"
        )
    logs = [x.double() for x in named.values()]
    if key_mask is not None:
        check_bool(key_mask)
        batch, _, length = gates.log_forget.shape
        if key_mask.ndim != 2 or key_mask.shape[1] != length or batch not in (1, key_mask.shape[0]):
            raise ValueError(
                f"key_mask must be (B, L) for gates (B or 1, Hkv, L), got {tuple(key_mask.shape)} and "
                f"{tuple(gates.log_forget.shape)}"
            )
        logs = [torch.where(key_mask.unsqueeze(1), x, 0.0) for x in logs]
    for name, x in zip(named, logs, strict=True):
        if has_values(x) and not x.is_meta and not bool((x < math.inf).all()):
            raise ValueError(f"{name} must be numbers below infinity, logarithms of gates, and some are none")
    return Gates(logs[0].clamp(min=_LOWEST), *logs[1:])


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
        dtype = next((weight.dtype for weight in linear.parameters() if weight.is_floating_point()), x.dtype)
        hooks = linear._forward_pre_hooks or linear._forward_hooks or "forward" in vars(linear)
        is_plain = type(linear) is nn.Linear and not hooks
        if is_plain and dtype != x.dtype:
            projected = nn.functional.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))
        else:  # adapters, quantized, pruned and offloaded weights have a way of their own
            projected = linear(x.to(dtype)).to(x.dtype)
        # As compiled graphs take it to be: logsigmoid's gradient follows other strides.
        return projected.mT.contiguous()


@final
class FixedDecay(UncastBuffers, Gate):
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
        numbers = [as_float(rate) for rate in rates] if isinstance(rates, Iterable) else []
        if not numbers or not all(math.isfinite(rate) and rate >= 0 for rate in numbers):
            raise ValueError(f"rates must be finite numbers >= 0, one for each key/value head, got {rates!r}")
        self.num_heads = len(numbers)
        # Rounded decays would add up: they stay float64 when a model is cast.
        self.register_buffer("rates", torch.tensor(numbers, dtype=torch.float64, device="cpu"))

    @classmethod
    def alibi(cls, num_heads: int) -> Self:
        """ALiBi's slopes: 2^(-8h/H), h = 1…H, H a power of two; else the next lower one's and every second of twice."""
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
        return Gates(-self.rates.to(x.device)[None, :, None].expand(-1, -1, x.shape[1]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, rates that were cast refused."""
        saved = state_dict.get(f"{prefix}rates")
        if saved is not None and saved.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{prefix}rates was saved as {saved.dtype}, wanted torch.float64: rounded decays add up; load a "
                "checkpoint whose buffers were not cast"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The rates."""
        return f"{self.rates if self.rates.is_meta else self.rates.tolist()}"
