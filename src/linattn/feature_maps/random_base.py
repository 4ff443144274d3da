"""Draw a random projection W, and the base of maps that live on one; letters as in feature_maps/__init__.py."""

import math
from functools import partial
from threading import get_ident
from typing import Any, Literal, Self, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from linattn.feature_maps.base import FeatureMap, UncastBuffers, has_number, in_both_dtypes
from linattn.feature_maps.powers import squared_length
from linattn.softmax.checking import check_count, check_seed, temperature

Draw = Literal["orthogonal", "iid"]
Lengths = Literal["chi", "fixed"]
# Of products of unit rows that are orthogonal, also where they are kept in float32.
_ROUNDING = 1e-5
# By map that was drawn again: the thread, and how many nodes of graphs it had made by then.
_REDRAWN: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()


def draw_projection(
    seed: int, num_rows: int, head_dim: int, *, draw: Draw, lengths: Lengths, num_heads: int | None
) -> Tensor:
    """Rows of W, (m, D) or (H, m, D), in float64 on the CPU whatever the defaults: a pure function of its arguments."""
    # Normal tensors even when a model is built under inference mode: they are used in training later.
    with torch.inference_mode(False), torch.no_grad():
        generator, heads = torch.Generator(device="cpu").manual_seed(seed), 1 if num_heads is None else num_heads
        gaussian = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
        rows = gaussian((heads, num_rows, head_dim))
        if draw == "orthogonal":
            # Unit rows: each block of D rows is an orthogonal matrix of its own Haar draw, the last one cut.
            q, r = torch.linalg.qr(gaussian((heads, -(-num_rows // head_dim), head_dim, head_dim)))
            # QR fixes the signs of R's diagonal by convention; without this factor Q is not uniform, the kernel biased.
            q = q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)
            rows = rows.norm(dim=-1, keepdim=True) * q.flatten(1, 2)[:, :num_rows]
        if lengths == "fixed":
            rows = rows / rows.norm(dim=-1, keepdim=True) * math.sqrt(head_dim)
        # Rows after rows, as files hold them: another layout in memory may round products differently.
        return (rows.squeeze(0) if num_heads is None else rows).contiguous()


def check_not_redrawn(feature_map: FeatureMap) -> None:
    """Refuse a call that a backward pass repeats, as checkpoints do, for a forward pass that had another draw."""
    if torch.compiler.is_compiling() or not _REDRAWN:
        return
    node: Any = torch._C._current_autograd_node()  # None outside of one
    for part in feature_map.modules():
        thread, number = _REDRAWN.get(part, (0, 0))
        if node is None and thread != get_ident():
            _REDRAWN.pop(part, None)  # Each thread counts its own nodes.
        elif node is not None and node._sequence_nr() < number:
            raise RuntimeError(
                f"{part} was drawn again since the forward pass; redraw or fit after backward(), not before"
            )


class RandomFeatureMap(UncastBuffers, FeatureMap):
    """A map built on a random projection W, drawn once from its seed.

    Abstract: the concrete maps say what they do with W·x. Rows of W are standard Gaussian vectors, or have their
    directions or lengths replaced:

    * draw="iid": directions are independent; "orthogonal": in blocks of D rows they form orthogonal matrices, each
      uniform (Haar) and independent of the others.
    * lengths="chi": lengths are those of independent Gaussian vectors, so that every row is standard Gaussian; "fixed":
      all lengths are √D. Fixed lengths change the kernel (`kernel` says to what) and lower the variance.

    W is float64 whatever dtype the module is cast to, drawn by a CPU generator, hence the same in every process and on
    every device that has float64. `redraw` is the only other source of randomness; evaluation never draws. W and the
    seed live in `state_dict`, `repr` names every setting and `fingerprint` holds a digest of W as well. Change
    W by `redraw` or `load_state_dict`; the next call notices any other write to the buffers, but within a compiled
    graph.

    Attributes:
        projection: W, (m, D) or (H, m, D), float64.
        seed: of the draw, int64.
        features_per_row: how many features each row of W makes.

    Args:
        head_dim: D, the width of a query or key.
        num_features: R.
        draw: "orthogonal" or "iid".
        lengths: "chi" or "fixed".
        scale: factor on q·k, > 0; D**-0.5 if None.
        seed: of the draw, 0 ≤ seed < 2**63, of which torch's generator for CPUs reads the lowest 32 bits.
        num_heads: draw one W per key/value head, (H, m, D), for inputs (..., H, L, D); one W for all if None.

    Raises:
        ValueError: if a size is not a positive integer, or an option is not one of those above.
    """

    features_per_row: int = 1
    _lengths: tuple[Lengths, ...] = get_args(Lengths)  # those that the map takes
    _settings: tuple[str, ...] = ("head_dim", "num_features", "draw", "lengths", "scale", "_seed", "num_heads")
    projection: Tensor
    seed: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        draw: Draw = "orthogonal",
        lengths: Lengths = "chi",
        scale: float | None = None,
        seed: int = 0,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(head_dim, num_features)
        if num_features % self.features_per_row:
            raise ValueError(
                f"{type(self).__name__} makes {self.features_per_row} features of each row of its projection, so "
                f"num_features must be a multiple of {self.features_per_row}, got {num_features}"
            )
        for name, value, options in (("draw", draw, get_args(Draw)), ("lengths", lengths, self._lengths)):
            if value not in options:
                raise ValueError(f"{name} must be one of {options}, got {value!r}")
        self.draw: Draw = draw
        self.lengths: Lengths = lengths
        self.scale = temperature(scale, head_dim)
        self.num_heads = None if num_heads is None else check_count("num_heads", num_heads)
        self._seed = check_seed(seed)
        self.register_buffer("projection", self._draw())
        self.register_buffer("seed", torch.tensor(self._seed, dtype=torch.int64, device="cpu"))
        self._prepare()

    @property
    def num_rows(self) -> int:
        """m, the number of rows of W."""
        return self.num_features // self.features_per_row

    def redraw(self, seed: int) -> Self:
        """Draw W again, in place, from another seed.

        Cost: O(m·D²) time. States built under the old draw are refused by attention afterwards, because `repr` changes.

        Args:
            seed: of the new draw, 0 ≤ seed < 2**63.

        Returns:
            The map itself.

        Raises:
            ValueError: if `seed` is not an integer in that range.

        Example:
            >>> from linattn.feature_maps import FavorPlus
            >>> favor = FavorPlus(4, 8, seed=1)
            >>> bool((favor.redraw(2).projection == FavorPlus(4, 8, seed=2).projection).all())
            True
        """
        self._seed = check_seed(seed)
        with torch.no_grad():
            self.projection.copy_(self._draw())
            self.seed.fill_(self._seed)
        self._prepare()
        # One that a backward pass repeats is a part of the forward pass.
        is_repeated = torch._C._current_autograd_node() is not None
        _REDRAWN[self] = get_ident(), 0 if is_repeated else torch._C._autograd._get_sequence_nr()
        return self

    def draw_digest(self) -> str:
        """A digest of W, which may have been loaded beside another draw's seed."""
        return self._digest_of("projection")

    def _weights(self, projection: Tensor) -> Tensor:
        """W as it multiplies inputs from the right, (D, ·) or (H, D, ·), in float64."""
        return (projection * math.sqrt(self.scale)).mT.contiguous()

    def _prepare(self) -> None:
        """Cast W for the dtypes it is used with, so that a call casts nothing."""
        self._prepared_from, self._derived_from, self._digests = self.projection, self._versions(), {}
        with torch.inference_mode(False), torch.no_grad():
            self._prepared = in_both_dtypes(self._weights(self.projection))

    def _check_written(self) -> None:
        """Refuse a mean of draws, which its seed gives away; what else is written to W alone is its writer's."""
        if not has_number(self.seed) or int(self.seed) == self._seed:
            return
        blocks = (self.projection / self.projection.norm(dim=-1, keepdim=True)).split(self.head_dim, -2)
        slants = [float((block @ block.mT).triu(1).abs().max()) for block in blocks if self.draw == "orthogonal"]
        # The variance of Gaussian numbers, within six standard deviations.
        least = 1 - 6 * math.sqrt(2 / self.projection.numel())
        if max(slants, default=0.0) > _ROUNDING or not float(self.projection.square().mean()) >= least:
            raise ValueError(
                f"the projection of {type(self).__name__} is no {self.draw} draw: a mean of draws, as "
                "AveragedModel(…, use_buffers=True) takes across a redraw, estimates another kernel; copy projection "
                "and seed of one map, and average parameters alone"
            )

    def _derive_from_buffers(self) -> None:
        """The seed and what is made of W."""
        super()._derive_from_buffers()
        self._seed = int(self.seed) if has_number(self.seed) else self._seed
        self._prepare()

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input in float32 or float64, and the weights in its dtype."""
        self._check(x)
        self._follow_buffers()
        if x.dtype not in self._prepared:
            x = x.to(torch.float32)
        if self._prepared_from is not self.projection:  # swapped for one call
            return x, self._weights(self.projection).to(x.dtype)
        return x, self._prepared[x.dtype][0]

    def _half_square(self, x: Tensor, constant: float = 0.0) -> Tensor:
        """scale·|x|²/2 + constant, (..., L, 1)."""
        return torch.add(constant, squared_length(x), alpha=self.scale / 2)

    def _draw(self) -> Tensor:
        """W from the seed, float64 on the CPU."""
        return draw_projection(
            self._seed, self.num_rows, self.head_dim, draw=self.draw, lengths=self.lengths, num_heads=self.num_heads
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, then refresh what is derived from W and the seed; a seed that comes without W is drawn from again."""
        saved, seed = state_dict.get(f"{prefix}projection"), state_dict.get(f"{prefix}seed")
        if saved is not None and (saved.dtype != torch.float64 or seed is None):
            raise ValueError(
                f"{prefix}projection was saved as {saved.dtype} {'without' if seed is None else 'with'} its seed, "
                "wanted torch.float64 with its seed: a rounded projection is another kernel; load a checkpoint whose "
                "buffers were not cast, or one with the seed alone (strict=False), from which it is drawn again"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)
        if seed is not None:
            if saved is not None:
                self._check_written()
            self._seed = int(seed)
            if saved is None:
                self.projection = self._draw().to(self.projection.device)
        self._derive_from_buffers()
