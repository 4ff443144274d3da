"""What a benchmark is to measure: shapes, method, dtype and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from linattn.methods.method import Method, parse_method
from linattn.softmax.checking import check_seed
from linattn_lab.built_methods import BuiltMethod, build

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")

_FEATURES = 256
# Rounding inside the op, which computes in float32 whatever it is given: 2^-24 a step, with room for 1,600 in a row.
_FLOAT32_BOUND = 1e-4


@dataclass(frozen=True)
class Settings:
    """The shapes to measure and how."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)  # numbers of tokens, ascending
    map: str = "FavorPlus"  # the method's written form: a map, with a window or without, or merged keys
    features: int | None = None  # width of a map whose width is free, 256 if None; must be None for other methods
    heads: int = 8  # H
    head_dim: int = 64  # D, of queries, keys and values
    batch: int = 1  # B
    dtype: str = "float32"  # one of `DTYPES`
    is_causal: bool = False  # whether later keys are hidden
    backward: bool = False  # whether the gradients of queries, keys and values are measured too
    repeats: int = 5  # timed calls of each contender at each length
    seed: int = 0  # the map's draw and the inputs follow from it
    device: str = "cpu"  # one of `DEVICES`
    memory: bool = True  # whether peak memory is measured

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        ascending = all(a < b for a, b in zip(self.lengths, self.lengths[1:], strict=False))
        if not self.lengths or min(self.lengths) < 1 or not ascending:
            raise ValueError(
                f"lengths must be different positive integers in ascending order, got {list(self.lengths)}; write them "
                "as in 512,1024,2048"
            )
        check_seed(self.seed)
        for name in ("heads", "head_dim", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, chosen, known in (("dtype", self.dtype, DTYPES), ("device", self.device, DEVICES)):
            if chosen not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {chosen!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda was asked for, and torch finds no CUDA device here; leave it out to use cpu")
        if self.features is not None and not self.method.takes_features:
            raise ValueError(
                f"{self.method.label} has a width of its own, got features={self.features}; leave the features out, or "
                "choose a map whose width is free, such as FavorPlus"
            )

    @property
    def method(self) -> Method:
        """The method's written form, read."""
        return parse_method(self.map)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of queries, keys and values."""
        return DTYPES[self.dtype]

    def build(self) -> BuiltMethod:
        """The method, its map not yet fitted, on its device.

        Returns:
            A method at the softmax temperature D**-0.5, unless its written form says otherwise.
        """
        method = self.method
        width = (_FEATURES if self.features is None else self.features) if method.takes_features else None
        built = build(method, self.head_dim, num_features=width, scale=self.head_dim**-0.5, seed=self.seed)
        built.check_call(self.lengths[-1], is_causal=self.is_causal)
        return built.to(self.device)

    def error_bound(self, built: BuiltMethod) -> float | None:
        """The largest relative error at which a result counts as correct.

        1e-4 for what happens in float32, plus eps / 2 where the result is rounded to a dtype of 16 bits.

        Returns:
            The bound; None for a signed map, whose normaliser may cross zero and magnify any rounding, and for causal
            keys in few bits, which float64 rounds otherwise.
        """
        merged = self.method.merged if self.is_causal else None
        in_few_bits = merged is not None and (merged.bits is not None or bool(merged.coded))
        if in_few_bits or not built.nonnegative:
            return None
        rounded = self.torch_dtype != torch.float32
        return _FLOAT32_BOUND + (torch.finfo(self.torch_dtype).eps / 2 if rounded else 0.0)
