"""How much work the parts of an audit are, one against the other: for an estimate of the time left, and nothing else.

Letters: L tokens, n rows, D head width, Dv value width, R features.
"""

from __future__ import annotations

from dataclasses import dataclass

from linattn_lab.built_methods import BuiltMethod
from linattn_lab.costs import exact_flops_per_token, flops_per_token

# Singular values take this many times the operations of a product of the same size.
_DECOMPOSITION = 20
# A model that is timed goes through the text so often, and so do the passes that it is compared with.
_TIMED_PASSES = 5


@dataclass(frozen=True)
class Work:
    """Operations per head and token, roughly.

    Attributes:
        num_layers: of the model.
        num_tokens: L.
        num_measured: queries that are measured.
        num_rows: n, attention rows that are compared.
        head_dim: D.
        value_dim: Dv.
        is_causal: whether later keys are hidden.
    """

    num_layers: int
    num_tokens: int
    num_measured: int
    num_rows: int
    head_dim: int
    value_dim: int
    is_causal: bool

    @property
    def exact(self) -> float:
        """Exact attention in one layer."""
        return exact_flops_per_token(
            self.num_tokens, head_dim=self.head_dim, value_dim=self.value_dim, is_causal=self.is_causal
        )

    @property
    def baseline(self) -> float:
        """A whole model under exact attention."""
        return self.num_layers * self.exact

    @property
    def ranks(self) -> float:
        """One layer's decompositions."""
        return _DECOMPOSITION * self.num_measured * self.num_tokens

    def heads(self, built: BuiltMethod) -> float:
        """One layer's heads: the output, and rows of the implied matrix in float64, where one operation counts two."""
        one = self._one(built)
        if built.feature_map is None or built.method.window is not None:
            return one + 2 * one * self.num_tokens / self.value_dim + self.exact
        rows = 4 * built.num_features * (self.head_dim + self.num_rows)
        return one + rows + self.exact

    def model(self, built: BuiltMethod) -> float:
        """A whole model, once."""
        return self.num_layers * self._one(built)

    def timing(self, built: BuiltMethod) -> float:
        """A whole model, as often as its time takes."""
        return (_TIMED_PASSES - 1) * self.model(built)

    def _one(self, built: BuiltMethod) -> float:
        """One layer's output."""
        return flops_per_token(built, value_dim=self.value_dim, is_causal=self.is_causal)
