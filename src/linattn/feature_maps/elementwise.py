"""Feature maps that act on each coordinate (or on pairs of them): cheap, and kernels of their own.

None of them is the softmax kernel or an approximation of it, the exponential included: Σ_l exp((q_l + k_l)/√D) is not
exp(q·k/√D). Letters as in feature_maps/__init__.py.
"""

from typing import final

import torch
from torch import Tensor

from linattn.feature_maps.base import FeatureMap
from linattn.softmax.checking import check_count, check_number


class ElementwiseMap(FeatureMap):
    """A deterministic map of D features, built from the head width alone."""

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim)


@final
class Exponential(ElementwiseMap):
    """The exponential of each coordinate.

    φ(x) = exp(x/√D), so that the kernel is Σ_l exp((q_l + k_l)/√D): a sum over coordinates of products, which does not
    depend on the angle between q and k as softmax attention does.

    Cost: O(L·D) time and memory; R = D.

    Args:
        head_dim: D, the width of a query or key.

    Raises:
        ValueError: if `head_dim` is not a positive integer.

    Example:
        >>> import torch
        >>> Exponential(4).query(torch.tensor([[2.0, 0.0, -4.0, 6.0]])).tolist()  # exponents, x/√4
        [[1.0, 0.0, -2.0, 3.0]]

    Source: elementary; the kernel is the sum of the rank-one kernels exp(q_l/√D)·exp(k_l/√D).
    """

    exponential = True

    def query(self, x: Tensor) -> Tensor:
        """Exponents x/√D: (..., L, D) -> (..., L, D)."""
        self._check_width(x)
        return torch.mul(x, self.head_dim**-0.5)

    def write_query(self, x: Tensor, out: Tensor) -> Tensor:
        """`query` written into `out`."""
        self._check_width(x)
        return torch.mul(x, self.head_dim**-0.5, out=out)

    def query_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """grad/√D."""
        return grad.mul_(self.head_dim**-0.5)


@final
class EluPlusOne(ElementwiseMap):
    """The first linear attention's map: elu plus one.

    φ(x) = elu(x) + 1 = x + 1 for x > 0 and exp(x) for x ≤ 0; strictly positive.

    Cost: O(L·D) time and memory; R = D.

    Args:
        head_dim: D, the width of a query or key.

    Raises:
        ValueError: if `head_dim` is not a positive integer.

    Example:
        >>> import torch
        >>> EluPlusOne(2).query(torch.tensor([[0.0, 3.0]])).tolist()
        [[1.0, 4.0]]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equation 7.
    """

    def query(self, x: Tensor) -> Tensor:
        """Features: (..., L, D) -> (..., L, D)."""
        self._check_width(x)
        # Not elu(x) + 1, which rounds exp(x) against 1 and is exactly 0 in float32 from x = -17 on.
        return torch.exp(x.clamp(max=0)) + torch.relu(x)


@final
class Relu(ElementwiseMap):
    """The rectifier of each coordinate, raised by a floor.

    φ(x) = max(x, 0) + floor. The floor keeps a query without positive coordinates alive; it also mixes uniform
    averaging into the kernel: φ(q)·φ(k) = r(q)·r(k) + floor·(Σ r(q) + Σ r(k)) + D·floor², r the rectifier.

    Cost: O(L·D) time and memory; R = D.

    Args:
        head_dim: D, the width of a query or key.
        floor: what is added to every feature, ≥ 0; with 0 a query without positive coordinates gives no weight to any
            key, and its output is 0.

    Raises:
        ValueError: if `head_dim` is not a positive integer, or `floor` is negative or not finite.

    Example:
        >>> import torch
        >>> Relu(2, floor=0.5).key(torch.tensor([[2.0, -1.0]])).tolist()
        [[2.5, 0.5]]

    Source: Choromanski et al. 2021 (arXiv 2009.14794), generalised attention, appendix A.4.
    """

    _settings = ("head_dim", "floor")

    def __init__(self, head_dim: int, *, floor: float = 1e-3) -> None:
        super().__init__(head_dim)
        self.floor = check_number("floor", floor)

    def query(self, x: Tensor) -> Tensor:
        """Features: (..., L, D) -> (..., L, D)."""
        self._check_width(x)
        return torch.relu(x) + self.floor

    def write_query(self, x: Tensor, out: Tensor) -> Tensor:
        """`query` written into `out`."""
        self._check_width(x)
        return torch.clamp(x, min=0, out=out).add_(self.floor)


@final
class ElementwisePolynomial(ElementwiseMap):
    """A power of each shifted coordinate.

    φ(x) = (x/√D + 1)^degree; the kernel is Σ_l (q_l k_l/D + (q_l + k_l)/√D + 1)^degree, not a power of q·k.

    Cost: O(L·D) time and memory; R = D.

    Args:
        head_dim: D, the width of a query or key.
        degree: the power; an odd one gives negative features where x_l < -√D, so `nonnegative` is true for even only.

    Raises:
        ValueError: if `head_dim` or `degree` is not a positive integer.

    Example:
        >>> import torch
        >>> ElementwisePolynomial(4, degree=2).query(torch.tensor([[2.0, 0.0, -2.0, -6.0]])).tolist()
        [[4.0, 1.0, 0.0, 4.0]]

    Source: elementary; `TensorPolynomial` has the power of q·k itself.
    """

    _settings = ("head_dim", "degree")

    def __init__(self, head_dim: int, *, degree: int = 2) -> None:
        super().__init__(head_dim)
        self.degree = check_count("degree", degree)
        self.nonnegative = degree % 2 == 0

    def query(self, x: Tensor) -> Tensor:
        """Features: (..., L, D) -> (..., L, D)."""
        self._check_width(x)
        return torch.pow(x * self.head_dim**-0.5 + 1, self.degree)

    def write_query(self, x: Tensor, out: Tensor) -> Tensor:
        """`query` written into `out`."""
        self._check_width(x)
        return torch.mul(x, self.head_dim**-0.5, out=out).add_(1).pow_(self.degree)


@final
class Identity(ElementwiseMap):
    """No map at all: the kernel is the inner product, of either sign.

    φ(x) = x. Weights may be negative and their sum may cross zero; it is here to show that.

    Cost: O(L·D) time and memory; R = D.

    Args:
        head_dim: D, the width of a query or key.

    Raises:
        ValueError: if `head_dim` is not a positive integer.

    Example:
        >>> import torch
        >>> Identity(2).kernel(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -4.0]])).tolist()
        [[-5.0]]

    Source: elementary.
    """

    nonnegative = False

    def query(self, x: Tensor) -> Tensor:
        """The input itself: (..., L, D) -> (..., L, D)."""
        self._check_width(x)
        return x

    def write_query(self, x: Tensor, out: Tensor) -> Tensor:
        """The input itself, not written anywhere."""
        return self.query(x)

    def query_vjp(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient itself."""
        return grad


@final
class Dpfp(ElementwiseMap):
    """Deterministic parameter-free projection: products of neighbouring rectified coordinates.

    φ(x) = concat over j = 1..nu of r · roll(r, j) with r = [max(x, 0), max(-x, 0)]; sparse, homogeneous of degree 2.

    Cost: O(L·D·nu) time and memory; R = 2·D·nu.

    Args:
        head_dim: D, the width of a query or key; at least 2.
        nu: how many rolls, 1 ≤ nu < 2·D; a vector has features only where two of its rectified coordinates lie within
            nu places of each other, hence none if it has a single nonzero coordinate and nu < D.

    Raises:
        ValueError: if `head_dim` is below 2 (every feature would be zero), or `nu` is out of its range.

    Example:
        >>> import torch
        >>> Dpfp(2).query(torch.tensor([[2.0, 3.0], [-2.0, -3.0]])).tolist()
        [[0.0, 6.0, 0.0, 0.0], [0.0, 0.0, 0.0, 6.0]]

    Source: Schlag, Irie and Schmidhuber 2021 (arXiv 2102.11174), section 5.3.
    """

    _settings = ("head_dim", "nu")

    def __init__(self, head_dim: int, *, nu: int = 1) -> None:
        check_count("head_dim", head_dim, at_least=2)
        if check_count("nu", nu) >= 2 * head_dim:
            raise ValueError(f"nu must be below 2*head_dim={2 * head_dim}, where the rolls start over, got {nu}")
        super().__init__(head_dim)
        self.nu, self.num_features = nu, 2 * head_dim * nu

    def query(self, x: Tensor) -> Tensor:
        """Features: (..., L, D) -> (..., L, 2·D·nu)."""
        self._check_width(x)
        r = torch.relu(torch.cat((x, -x), dim=-1))
        return torch.cat([r * r.roll(j, dims=-1) for j in range(1, self.nu + 1)], dim=-1)
