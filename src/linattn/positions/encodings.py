"""Encodings that act before the map, (q, k, positions) -> (q', k'); letters as in positions/__init__.py."""

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor, nn

from linattn.attention.bound_map import bind
from linattn.attention.checking import check_map
from linattn.feature_maps import FeatureMap
from linattn.softmax.checking import check_count, check_dense, check_number, check_seed
from linattn.softmax.precision import accumulation_dtype
from linattn.softmax.tracing import has_values, is_fake, outside_inference

# A map's own kernel is a float64 oracle: rotating both sides moves it by roundings, or by far more.
_ROUNDING = 1e-8


class Position(nn.Module, ABC):
    """A position encoding of queries and keys, applied before the map.

    Abstract. `bind` is called once, with the map, and gives the map to call attention with; then every call of
    attention takes q and k from `encoding(query, key, positions)`. A stream goes on by going on with the positions.

    Attributes:
        head_dim: D, the width of the queries and keys it takes.
        encoded_dim: the width of those it gives, which the map must have as its `head_dim`.
    """

    _settings: tuple[str, ...] = ("head_dim",)  # attributes that `repr` names

    def __init__(self, head_dim: int, encoded_dim: int) -> None:
        super().__init__()
        self.head_dim, self.encoded_dim = head_dim, encoded_dim

    def bind(self, feature_map: FeatureMap) -> FeatureMap:
        """The map to attend with in the given one's place: the same, unless the encoding changes features.

        Raises:
            TypeError: it is no FeatureMap.
            ValueError: the map is of another width, or the encoding does not admit it.
        """
        check_map(feature_map)
        if feature_map.head_dim != self.encoded_dim:
            raise ValueError(
                f"{type(self).__name__} gives queries and keys of width {self.encoded_dim}, got a map built for "
                f"head_dim={feature_map.head_dim}; build it with head_dim={self.encoded_dim}"
            )
        return feature_map

    def forward(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Encoded queries (B, H, Lq, ·) and keys (B, Hkv, Lk, ·), in their dtypes.

        Args:
            query: (B, H, Lq, D); the last Lq of the positions are theirs, as bottom-right alignment has it.
            key: (B, Hkv, Lk, D), Lk ≥ Lq.
            positions: (Lk,) or (B, Lk), integer or floating: from any start, as `token_positions` counts them.

        Raises:
            TypeError: `positions` is no tensor of numbers.
            ValueError: shapes do not fit, or a position is beyond what the encoding has.
        """
        at = checked_positions(query, key, positions, self.head_dim)
        self.check_positions(at)
        return self.encode_query(query, at[..., at.shape[-1] - query.shape[2] :]), self.encode_key(key, at)

    @abstractmethod
    def encode_query(self, x: Tensor, at: Tensor) -> Tensor:
        """Queries (B, H, L, D) at positions (B or 1, 1, L), float64."""

    def encode_key(self, x: Tensor, at: Tensor) -> Tensor:
        """Keys (B, Hkv, L, D); as queries unless overridden."""
        return self.encode_query(x, at)

    def check_positions(self, at: Tensor) -> None:
        """Refuse positions that the encoding does not have."""

    def extra_repr(self) -> str:
        """The settings."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._settings)


def token_positions(key_mask: Tensor, start: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """Positions that count attended tokens alone, and where the stream goes on.

        p_t = start + #{s < t: token s is attended to}

    Padding on either side or inside moves no token. O(B·L).

    Args:
        key_mask: (B, L) bool, True = attend; a masked token has the position of the next attended one.
        start: the first position, one for all or (B,): the second result of the call before.

    Returns:
        (B, L) int64, and (B,) int64.

    Raises:
        TypeError: `key_mask` is not a bool tensor.

    Example:
        >>> import torch
        >>> positions, end = token_positions(torch.tensor([[False, True, False, True]]), start=5)
        >>> positions.tolist(), end.tolist()
        ([[5, 5, 6, 6]], [7])
    """
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool or key_mask.ndim != 2:
        raise TypeError(f"key_mask must be a bool tensor (B, L), True = attend, got {key_mask!r}")
    seen = key_mask.long().cumsum(1)
    first = torch.as_tensor(start, device=key_mask.device)
    if first.shape not in ((), key_mask.shape[:1]):
        raise ValueError(f"start must be a number, or of shape ({key_mask.shape[0]},), got {tuple(first.shape)}")
    first = first.expand(key_mask.shape[0])
    return first.unsqueeze(1) + seen - key_mask.long(), first + key_mask.sum(1)


def checked_positions(query: Tensor, key: Tensor, positions: Tensor, head_dim: int | None = None) -> Tensor:
    """Positions of the keys as (B or 1, 1, Lk), float64; what does not fit is refused."""
    check_dense(query=query, key=key, positions=positions)
    for name, x in (("query", query), ("key", key)):
        if x.ndim != 4 or x.shape[-1] != (head_dim or query.shape[-1]):
            raise ValueError(f"{name} must be (B, H, L, D={head_dim or query.shape[-1]}), got {tuple(x.shape)}")
    if query.shape[2] > key.shape[2]:
        raise ValueError(
            f"positions are those of the keys, and of as many queries at their end, got {query.shape[2]} queries and "
            f"{key.shape[2]} keys; encode queries and keys of different tokens in two calls"
        )
    if not isinstance(positions, Tensor) or positions.dtype == torch.bool or positions.dtype.is_complex:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions must be a tensor of integers or floating numbers, got {got}")
    batch, _, length, _ = key.shape
    if tuple(positions.shape) not in ((length,), (1, length), (batch, length)):
        raise ValueError(f"positions must be ({length},) or ({batch}, {length}), got {tuple(positions.shape)}")
    return torch.unsqueeze(torch.atleast_2d(positions).to(key.device, torch.float64), 1)


def rotary(query: Tensor, key: Tensor, positions: Tensor, *, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated by their positions, to be given to any map.

        q'_i = R_i q_i,   k'_j = R_j k_j,   (R_i q)·(R_j k) = q·R_{j-i} k

    R_p turns the plane of coordinates l and l + D/2 by the angle p·base^(-2l/D): transformers' layout, halves rather
    than neighbours. Lengths stay, so positive maps stay positive and their variance factors are unchanged. Attention is
    relative only for maps whose kernel is a function of q·k, as far as they equal or estimate it; `Rotary.bind` refuses
    others. Cost O(L·D); angles are float64, so that positions of millions keep their digits.

    Args:
        query: (B, H, Lq, D), D even; the last Lq of the positions are theirs.
        key: (B, Hkv, Lk, D), Lk ≥ Lq.
        positions: (Lk,) or (B, Lk), integer or floating, from any start.
        base: of the angles, > 0; a larger one turns more slowly.

    Returns:
        Rotated queries and keys, in their dtypes.

    Raises:
        TypeError: `positions` is no tensor of numbers.
        ValueError: shapes do not fit, D is odd, or `base` is not positive.

    Example:
        >>> import math, torch
        >>> q, k = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[0.0, 2.0]]]])
        >>> [x.round(decimals=4).flatten().tolist() for x in rotary(q, k, torch.tensor([math.pi / 2]))]
        [[-0.0, 1.0], [-2.0, -0.0]]

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2; the layout of transformers' `apply_rotary_pos_emb`.
    """
    at = checked_positions(query, key, positions)
    rates = _rates(query.shape[-1], base).to(query.device)
    return _rotated(query, at[..., at.shape[-1] - query.shape[2] :], rates), _rotated(key, at, rates)


@final
class Rotary(Position):
    """`rotary` as a module, and what it asks of a map.

    Args:
        head_dim: D, even.
        base: of the angles, > 0.
        require_relative: refuse maps under which attention is not relative. False takes any map.

    Raises:
        ValueError: an odd or non-positive `head_dim`; `base` is not positive.

    Example:
        >>> import linattn
        >>> Rotary(4).bind(linattn.feature_maps.TensorPolynomial(4)).num_features
        15
    """

    _settings = ("head_dim", "base", "require_relative")

    def __init__(self, head_dim: int, *, base: float = 10_000.0, require_relative: bool = True) -> None:
        super().__init__(head_dim, head_dim)
        self.base, self.require_relative = base, require_relative
        self._rates = _rates(head_dim, base)

    def bind(self, feature_map: FeatureMap) -> FeatureMap:
        """The map itself, if attention is relative with it.

        Raises:
            ValueError: rotating q and k alike changes the map's kernel, and `require_relative` is true; another width.
        """
        bound = super().bind(feature_map)
        if self.require_relative and not _keeps_rotations(feature_map):
            raise ValueError(
                f"{type(feature_map).__name__} with rotary positions is not relative: rotating q and k alike changes "
                "its kernel, so outputs depend on where the text starts; use a map of a kernel of q·k (FavorPlus, "
                "Hyperbolic, Oprf, Sderf, Trigonometric, Taylor, TensorPolynomial, RandomRelu), or say that this is "
                "meant with Rotary(…, require_relative=False)"
            )
        return bound

    def encode_query(self, x: Tensor, at: Tensor) -> Tensor:
        """R_p x."""
        return _rotated(x, at, self._rates.to(x.device))


def _keeps_rotations(feature_map: FeatureMap) -> bool:
    """Whether the kernel that the map equals or estimates is the same for rotated q and k, by the map's own oracle."""
    generator = torch.Generator().manual_seed(0)
    tensors = [*feature_map.buffers(), *feature_map.parameters()]
    heads = max((x.shape[-3] for x in tensors if x.ndim > 2), default=1)  # Of maps with tensors of each head.
    shape, device = (2, 1, heads, 5, feature_map.head_dim), tensors[0].device if tensors else torch.device("cpu")
    drawn: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    q, k = torch.randn(shape, **drawn).to(device)
    turn = torch.linalg.qr(torch.randn(feature_map.head_dim, feature_map.head_dim, **drawn))[0].to(device)
    with torch.no_grad():
        # What a map takes from each call turns with the call.
        calls = (q, k), (q @ turn, k @ turn)
        kernel, turned = (bind(feature_map, *call, is_causal=False)[0].swapped.kernel(*call) for call in calls)
    return is_fake(turned) or turned.is_meta or bool((turned - kernel).norm() <= _ROUNDING * kernel.norm())


def _rates(head_dim: int, base: float) -> Tensor:
    """Radians per token of each plane, (D/2,), float64."""
    if check_count("head_dim", head_dim, at_least=2) % 2:
        raise ValueError(f"rotary positions turn pairs of coordinates, got an odd head_dim={head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    return outside_inference(check_number("base", base, positive=True) ** -exponents, even_within=True)


def _rotated(x: Tensor, at: Tensor, rates: Tensor) -> Tensor:
    """Tokens (B, H, L, D) at positions (B or 1, 1, L), in their dtype."""
    angle, dtype = at.unsqueeze(-1) * rates, accumulation_dtype(x.dtype)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    first, second = x.to(dtype).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class ConcatenatedCodes(Position):
    """[x; p]: a code beside each query and key. It multiplies exp(scale·q·k) by exp(scale·p_i·p_j), exactly."""

    def __init__(self, head_dim: int, code_dim: int) -> None:
        check_count("head_dim", head_dim)
        super().__init__(head_dim, head_dim + check_count("code_dim", code_dim))
        self.code_dim = code_dim

    @abstractmethod
    def code(self, at: Tensor) -> Tensor:
        """Codes of positions: (…,) -> (…, P)."""

    def encode_query(self, x: Tensor, at: Tensor) -> Tensor:
        """[x; p] in the dtype of x."""
        return torch.cat((x, self.code(at).to(x.dtype).expand(*x.shape[:2], -1, -1)), -1)


@final
class SinusoidalCodes(ConcatenatedCodes):
    """Sines and cosines of the position beside each query and key.

        φ([q; p_i])·φ([k; p_j]),   p_i·p_j = amplitude²·Σ_l cos(ω_l (i - j)),   ω_l = base^(-2l/P)

    With a map of the softmax kernel this is a relative bias scale·p_i·p_j on the logits; |p_i|² is amplitude²·P/2 at
    every position. Cost O(L·P) and a map P wider; no longest position.

    Args:
        head_dim: D.
        code_dim: P, even.
        base: of the frequencies, > 0.
        amplitude: of each wave, ≥ 0.

    Raises:
        ValueError: a width is not a positive integer, P is odd, or a number is out of range.

    Example:
        >>> import torch
        >>> SinusoidalCodes(3, 2, amplitude=2.0).code(torch.tensor([0.0])).tolist()
        [[2.0, 0.0]]

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5, concatenated instead of added.
    """

    _settings = ("head_dim", "code_dim", "base", "amplitude")

    def __init__(self, head_dim: int, code_dim: int, *, base: float = 10_000.0, amplitude: float = 1.0) -> None:
        super().__init__(head_dim, code_dim)
        if code_dim % 2:
            raise ValueError(f"code_dim must be even, a cosine and a sine for each frequency, got {code_dim}")
        self.base, self.amplitude = base, check_number("amplitude", amplitude)
        self._rates = _rates(code_dim, base)

    def code(self, at: Tensor) -> Tensor:
        """[cos, sin] of all frequencies, float64: (…,) -> (…, P)."""
        angle = at.double().unsqueeze(-1) * self._rates.to(at.device)
        return self.amplitude * torch.cat((angle.cos(), angle.sin()), -1)


@final
class LearnedCodes(ConcatenatedCodes):
    """A trained code of each position beside queries and keys.

        φ([q; p_i])·φ([k; p_j])

    Absolute: nothing ties p_i·p_j to i - j. Cost O(L·P) and a map P wider; memory max_length·P numbers.

    Attributes:
        codes: the parameter, (max_length, P), in torch's default dtype, from N(0, amplitude²) by its own generator.

    Args:
        head_dim: D.
        code_dim: P.
        max_length: how many positions there are; one beyond is refused.
        amplitude: deviation of the start, ≥ 0.
        seed: of the start.

    Raises:
        ValueError: a size is not a positive integer, or `amplitude` or `seed` is out of range.

    Example:
        >>> import torch
        >>> LearnedCodes(3, 2, max_length=4).code(torch.tensor([0, 3])).shape
        torch.Size([2, 2])

    Source: Gehring et al. 2017 (arXiv 1705.03122), section 3.1, concatenated instead of added.
    """

    _settings = ("head_dim", "code_dim", "max_length")

    def __init__(
        self, head_dim: int, code_dim: int, *, max_length: int, amplitude: float = 0.02, seed: int = 0
    ) -> None:
        super().__init__(head_dim, code_dim)
        self.max_length = check_count("max_length", max_length)
        generator = torch.Generator().manual_seed(check_seed(seed))
        start = torch.randn(max_length, code_dim, generator=generator, device="cpu")
        # On torch's default device, as all parameters of modules.
        self.codes = nn.Parameter(torch.empty(max_length, code_dim).copy_(start * check_number("amplitude", amplitude)))

    def code(self, at: Tensor) -> Tensor:
        """Rows of the table: (…,) -> (…, P)."""
        return self.codes[at.long()]

    def check_positions(self, at: Tensor) -> None:
        """Refuse positions beyond the table; a traced or mapped call cannot look at them."""
        if not has_values(at) or at.is_meta or not at.numel():
            return
        low, high = at.min().item(), at.max().item()
        if low < 0 or high >= self.max_length or not bool((at == at.long()).all()):
            raise ValueError(
                f"LearnedCodes was built for whole positions from 0 to {self.max_length - 1}, got {low:g} to "
                f"{high:g}; build it with a larger max_length, or round the positions"
            )
