"""Maps with trainable exponents; letters as in feature_maps/__init__.py, R rows of W."""

import math
from collections.abc import Callable
from typing import Self, final

import torch
from torch import Tensor, nn

from linattn.feature_maps.base import FeatureMap
from linattn.feature_maps.powers import add_multiplied_, squared_length
from linattn.feature_maps.random_base import draw_projection
from linattn.softmax.checking import check_count, check_seed, temperature
from linattn.softmax.precision import LOG2_E


class Exponents(nn.Module):
    """Trainable exponents w_i·x̃ + b_i of x̃ = √scale·x, with a curvature less c_i·|x̃|²/2; W is (m, D) or (H, m, D)."""

    def __init__(self, weight: Tensor, *, scale: float, bias: float = 0.0, curvature: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        # Normal tensors even when a model is built under inference mode: they are to be trained.
        with torch.inference_mode(False):
            self.weight = nn.Parameter(weight.to(torch.float32, copy=True))
            rows = self.weight.detach()[..., 0]
            self.bias = nn.Parameter(torch.full_like(rows, bias))
            self.curvature = None if curvature is None else nn.Parameter(torch.full_like(rows, curvature))

    def forward(self, x: Tensor) -> Tensor:
        """Exponents (..., L, m) of x (..., L, D), in at least float32."""
        x, weights = self._operands(x)
        exponents = torch.matmul(x, weights) + self._rows(self.bias, x)
        if self.curvature is None:
            return exponents
        return torch.addcmul(exponents, self._half_square(x), self._rows(self.curvature, x), value=-1)

    def write_powers(self, x: Tensor, out: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
        """log₂e·`forward` + rows + columns written into `out` (..., L, m), which is contiguous; no gradient."""
        x, weights = self._operands(x, LOG2_E)
        shift = torch.add(columns, self._rows(self.bias, x), alpha=LOG2_E)
        if self.curvature is None:
            out.copy_(shift)
        else:
            torch.addcmul(shift, self._half_square(x, LOG2_E), self._rows(self.curvature, x), value=-1, out=out)
        if rows is not None:
            out.add_(rows)
        return add_multiplied_(out, x, weights)

    def pull(self, x: Tensor, grad: Tensor) -> Tensor:
        """√scale·grad·W - scale·x·(grad·c): from the gradient of `forward`'s output to that of its input."""
        x, weights = self._operands(x)
        gradient = torch.matmul(grad, weights.mT)
        if self.curvature is None:
            return gradient
        curved = torch.matmul(grad, self._rows(self.curvature, x).mT)
        return gradient.addcmul_(x, curved, value=-self.scale)

    def _operands(self, x: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """The input in float32 or float64, and factor·√scale·W in its dtype, (D, m) or (H, D, m)."""
        # Those of pruning and of weight norms make W; attention has other ways than `forward`.
        for number, hook in self._forward_pre_hooks.items():
            if number not in self._forward_pre_hooks_with_kwargs:
                hook(self, (x,))
        if x.dtype not in (torch.float32, torch.float64):
            x = x.to(torch.float32)
        return x, self.weight.to(x.dtype).mT * (factor * self.scale**0.5)

    def _half_square(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """factor·|x̃|²/2, (..., L, 1)."""
        return squared_length(x) * (factor * self.scale / 2)

    def _rows(self, parameter: Tensor, x: Tensor) -> Tensor:
        """A parameter of the rows as a row, (1, m) or (H, 1, m), in the input's dtype."""
        return parameter.to(x.dtype).unsqueeze(-2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the model and follow its casts, but not below float32: a rounded exponent is a factor."""

        def wide(before: Tensor) -> Tensor:
            after = fn(before)
            if not after.is_floating_point() or torch.finfo(after.dtype).bits >= 32:
                return after
            return before.to(device=after.device, dtype=torch.promote_types(before.dtype, torch.float32))

        super()._apply(wide, recurse)
        return self


class SignedExponents(Exponents):
    """Exponents [e, -e], e those of `Exponents` without a curvature."""

    def _operands(self, x: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """The input in float32 or float64, and factor·√scale·[W, -W] in its dtype, (D, 2·m) or (H, D, 2·m)."""
        x, weights = super()._operands(x, factor)
        return x, torch.cat((weights, -weights), -1)

    def _rows(self, parameter: Tensor, x: Tensor) -> Tensor:
        """A parameter of the rows and its negative as a row, (1, 2·m) or (H, 1, 2·m), in the input's dtype."""
        row = super()._rows(parameter, x)
        return torch.cat((row, -row), -1)


class LearnedMap(FeatureMap):
    """An exponential map with trainable parameters, those of queries apart from those of keys.

    Abstract: the concrete maps say what the exponents are. They train by gradient descent like any module, through
    every backend, streams and exact parts included; a loss may compare the rows of `linattn.attention_rows` with exact
    ones. `fingerprint` holds a digest of the parameters, so a state does not outlive a step of the optimiser.

    Attributes:
        of_query: the exponents of queries.
        of_key: the exponents of keys.

    Args:
        head_dim: D.
        num_features: R.
        scale: factor on q·k, > 0; D**-0.5 if None.
        num_heads: one set of parameters per key/value head; one for all if None.
    """

    exponential = True
    _settings = ("head_dim", "num_features", "scale", "num_heads")
    of_query: Exponents
    of_key: Exponents

    def __init__(self, head_dim: int, num_features: int, *, scale: float | None, num_heads: int | None) -> None:
        super().__init__(head_dim, num_features)
        self.scale = temperature(scale, head_dim)
        self.num_heads = None if num_heads is None else check_count("num_heads", num_heads)

    def query(self, x: Tensor) -> Tensor:
        """Exponents of a query's features: (..., L, D) -> (..., L, R)."""
        self._check(x)
        exponents: Tensor = self.of_query(x)
        return exponents

    def key(self, x: Tensor) -> Tensor:
        """Exponents of a key's features: (..., L, D) -> (..., L, R)."""
        self._check(x)
        exponents: Tensor = self.of_key(x)
        return exponents

    def write_query_powers(self, x: Tensor, out: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
        """In one product where the exponents are one, which all terms are added to."""
        self._check(x)
        return self.of_query.write_powers(x, out, rows, columns)

    def write_key_powers(self, x: Tensor, out: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
        """In one product where the exponents are one, which all terms are added to."""
        self._check(x)
        return self.of_key.write_powers(x, out, rows, columns)

    def query_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """By products, where the parameters are frozen."""
        return self.of_query.pull(x, grad)

    def key_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """By products, where the parameters are frozen."""
        return self.of_key.pull(x, grad)


@final
class LearnedExponential(LearnedMap):
    """Positive features with trainable weights, which start as those of FAVOR+.

    φ_i(x) = exp(w_i·x̃ + b_i - c_i·|x̃|²/2), x̃ = √scale·x, with w, b and c of queries apart from those of keys. At the
    start w is the draw of `FavorPlus(head_dim, num_features, seed=seed)`, b_i = -log(R)/2 and c_i = 1 on both sides:
    the same features to rounding, hence an unbiased estimate of exp(scale·q·k).

    Why c: a key's -|x̃|²/2 does not cancel in the output, so exp(W·x̃ + b) alone could not start there; and fixed at 1 it
    would tie how keys' lengths weigh to what is right in the mean over draws, where there is one draw and it is
    trained. With c_i = 1 and b_i = -|w_i|²/2 a feature is the bump exp(-|x̃ - w_i|²/2), with c_i = 0 exp(w_i·x̃ + b_i).

    `softmax_kernel` is true: the map stands for exp(scale·q·k), at the start without bias, later as well as it was
    trained to, and what it makes of some keys combines with exact attention to others. Train it as it will be used:
    without an exact part the output does not depend on a factor common to all weights of a query, so nothing keeps that
    factor where an exact part added later wants it; beside one (`window`, `combine`) the normaliser trains it too.

    Cost: O(L·R·D) time, O(L·R) memory; 2·R·(D + 2) parameters, per head with `num_heads`.

    Args:
        head_dim: D, the width of a query or key.
        num_features: R.
        scale: factor on q·k, > 0; D**-0.5 if None.
        seed: of the draw where training starts, 0 ≤ seed < 2**63; later it says nothing.
        num_heads: one set of parameters per key/value head; one for all if None.

    Raises:
        ValueError: if a size is not a positive integer, `scale` not a positive number, or `seed` out of its range.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import FavorPlus
        >>> x = torch.tensor([[1.0, -2.0]])
        >>> learned, favor = LearnedExponential(2, 4, seed=3), FavorPlus(2, 4, seed=3)
        >>> torch.allclose(learned.key(x), favor.key(x), atol=1e-6)
        True
        >>> sum(weight.numel() for weight in learned.parameters())  # 2·4·(2 + 2)
        32

    Source: the start is Choromanski et al. 2021 (arXiv 2009.14794), lemma 1; trained exponentials of a linear map are
    those of Zhang et al. 2024 (arXiv 2402.04347), the trained coefficient of |x|² is one of Likhosherstov et al. 2022
    (arXiv 2205.15317), set free for each feature.
    """

    softmax_kernel = True

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        scale: float | None = None,
        seed: int = 0,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(head_dim, num_features, scale=scale, num_heads=num_heads)
        self.seed = check_seed(seed)
        sizes = self.seed, num_features, head_dim
        weight = draw_projection(*sizes, draw="orthogonal", lengths="chi", num_heads=self.num_heads)
        start = {"bias": -math.log(num_features) / 2, "curvature": 1.0}
        self.of_query, self.of_key = (Exponents(weight, scale=self.scale, **start) for _ in range(2))


@final
class Hedgehog(LearnedMap):
    """Features that learn to mimic softmax attention: exponentials of a trained linear map and of its negative.

    φ(x) = [exp(W·x̃ + b), exp(-W·x̃ - b)], x̃ = √scale·x, with W and b of queries apart from those of keys; at the start
    W = I and b = 0, so that the kernel is Σ_l 2·cosh(x̃_l + ỹ_l).

    This is the map as the paper writes it. Published code divides each vector's features by their sum, a softmax over
    them, so that they do not overflow. Attention here keeps exponents, which do not, and the division makes another
    kernel: a query's cancels, a key's takes away what the key's length says. The start W = I on x itself, as published,
    is scale=1.

    The kernel is not on the scale of exp(scale·q·k) (`softmax_kernel` is false), so it takes no exact part beside it;
    `LearnedExponential` does.

    Cost: O(L·D²) time, O(L·D) memory; R = 2·D, 2·D·(D + 1) parameters, per head with `num_heads`.

    Args:
        head_dim: D, the width of a query or key.
        scale: the square of the factor on queries and keys, > 0; D**-0.5 if None.
        num_heads: one set of parameters per key/value head; one for all if None.

    Raises:
        ValueError: if a size is not a positive integer, or `scale` not a positive number.

    Example:
        >>> import torch
        >>> Hedgehog(2, scale=1.0).query(torch.tensor([[3.0, -1.0]])).tolist()  # exponents [x, -x]
        [[3.0, -1.0, -3.0, 1.0]]

    Source: Zhang et al. 2024 (arXiv 2402.04347), the trainable feature map with negation.
    """

    def __init__(self, head_dim: int, *, scale: float | None = None, num_heads: int | None = None) -> None:
        super().__init__(head_dim, 2 * head_dim, scale=scale, num_heads=num_heads)
        weight = torch.eye(head_dim, device="cpu").expand(*([] if num_heads is None else [num_heads]), -1, -1)
        self.of_query, self.of_key = (SignedExponents(weight, scale=self.scale) for _ in range(2))
