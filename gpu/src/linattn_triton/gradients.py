"""The launches of the kernels that go back, and what follows them through a map. Letters as in linattn_triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.blocked.records import KeyGradients, Saved
from linattn.feature_maps.map_gradients import MapGradients
from linattn_triton.kernels import blocks
from linattn_triton.kernels.key_gradients import key_gradients
from linattn_triton.kernels.query_gradients import query_gradients
from linattn_triton.kernels.row_gradients import row_gradients
from linattn_triton.kernels.state_gradients import state_gradients
from linattn_triton.launching import FoldedKeys, Work, key_weight, rows
from linattn_triton.segments import States, run_segments


class Queries(NamedTuple):
    """Queries as the kernels take them, and what goes back to each row."""

    query: blocks.Rows
    grad_out: blocks.Rows
    rows: blocks.RowGradients


class Back:
    """A backward pass: what its kernels share, and the gradients through the map.

    `folded` is the keys, None where queries read sums alone; `peaks` (B·H, J + 1) those between groups; `sides` of
    queries and keys.
    """

    def __init__(
        self,
        work: Work,
        saved: Saved,
        folded: FoldedKeys | None,
        peaks: Tensor,
        sides: tuple[blocks.Side, blocks.Side],
    ) -> None:
        self.work, self.saved, self.folded, self.peaks, self.sides = work, saved, folded, peaks, sides
        self.of_map = MapGradients(work.feature_map, saved.tensors)

    def rows(self) -> Queries:
        """The rows of the forward pass, with their gradients."""
        work, (outputs, grads) = self.work, (self.saved.outputs, self.saved.grads)
        grad_out, den = rows(work.as_operand(grads.out.flatten(1, 2))), outputs.den
        gradients = blocks.RowGradients(*(torch.empty_like(den) for _ in blocks.RowGradients._fields))
        arguments = grad_out, work.as_operand(outputs.out), den, outputs.shift, grads.den.contiguous(), self._keys()
        self._run(row_gradients, den, *arguments, self.peaks, gradients, is_causal=self.folded is not None)
        return Queries(work.queries(self.saved.inputs.query), grad_out, gradients)

    def states(self, queries: Queries, start: States | None, *, is_kept: bool) -> tuple[States, States]:
        """Gradients of the states after each group, and of the one before all."""
        arguments = queries.query, self.sides[0], queries.grad_out, queries.rows
        return run_segments(self.work, state_gradients, arguments, self.peaks, start, is_kept=is_kept)

    def queries(self, queries: Queries, states: States) -> Tensor:
        """The gradient of the queries (B, H, G, L, D), which read these states before each group."""
        x, work = self.saved.inputs.query, self.work
        gradient = torch.empty(*x.shape[:-1], self._width(x), dtype=self._dtype(x), device=x.device)
        key, value = (queries.query, queries.query) if self.folded is None else self.folded[:2]
        arguments = queries.query, key, value, *self.sides, self._keys(), self.peaks, tuple(states), queries.grad_out
        rows_of = gradient[..., 0]
        self._run(query_gradients, rows_of, *arguments, queries.rows, gradient, is_causal=self.folded is not None)
        if not work.is_given:
            return gradient.to(x.dtype)
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        vectors, gradient = x.flatten(2, 3).float(), gradient.flatten(2, 3)
        self.of_map.query(vectors, gradient, lambda grad: store(total, grad))
        return total

    def keys(self, queries: Queries | None, states: States) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of keys, values and biases; `states` are those after each group, `queries` of causal rows."""
        assert self.folded is not None, "only keys that were folded have gradients"
        x, value, cut = self.saved.inputs.key, self.saved.inputs.value, self.work.cut
        # What is given for keys has one gradient for each query head: a program cannot sum them.
        parts = cut.members if self.work.is_given and queries is not None else 1
        shape = *x.shape[:2], parts, x.shape[2]
        # Features have logarithmic weights beside them, whose gradient is the biases'.
        has_bias = self.saved.bias_grad or self.work.shape.kind == "features"
        gradients = blocks.KeyGradients(
            torch.empty(*shape, self._width(x), dtype=self._dtype(x), device=x.device),
            torch.empty(*shape, value.shape[-1], dtype=torch.float32 if parts > 1 else value.dtype, device=x.device),
            torch.empty(shape, dtype=torch.float32, device=x.device),
        )
        key, values, keys, _ = self.folded
        nothing = Queries(key, values, blocks.RowGradients(*[self.peaks] * 4))
        query, grad_out, of_rows = queries or nothing
        arguments = query, key, values, *self.sides, keys, self.peaks, tuple(states), grad_out, of_rows, gradients
        programs = x[..., 0, 0].numel() * parts * cut.num_blocks if x.numel() else 0
        self.work.run(key_gradients, programs, (*arguments, cut, cut.members // parts), (queries is not None, has_bias))
        of_key, of_value, of_bias = (y.sum(2) if parts > 1 else y.squeeze(2) for y in gradients)
        of_key = self._through_map(of_key, of_bias) if self.work.is_given else of_key.to(x.dtype)
        return of_key, of_value.to(value.dtype), self._of_bias(of_bias)

    def finish(self) -> list[Tensor]:
        """The gradients of the map's followed tensors."""
        return self.of_map.finish()

    def _through_map(self, of_given: Tensor, of_weight: Tensor) -> Tensor:
        """The gradient of keys (B, H, L, D) from that of what was given for them; masked ones get 0."""
        x, bias = self.saved.inputs.key, self.saved.inputs.bias
        masked = None if bias is None else (bias == -torch.inf).unsqueeze(-1)
        vectors = x.float() if masked is None else x.float().masked_fill(masked, 0)
        weight = None if key_weight(self.work, vectors) is None else of_weight
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.of_map.key(vectors, KeyGradients(of_given, weight), lambda grad: store(total, grad))
        self.of_map.finish()
        return total if masked is None else total.masked_fill_(masked, 0)

    def _of_bias(self, gradient: Tensor) -> Tensor | None:
        """The gradient of the biases (B, H or 1, L), where it is wanted."""
        if not self.saved.bias_grad:
            return None
        bias = self.saved.inputs.bias
        gradient = gradient.sum(1, keepdim=True) if bias.shape[1] == 1 < gradient.shape[1] else gradient
        return gradient.to(bias.dtype)

    def _keys(self) -> blocks.Keys:
        """The keys' offsets; of no use where queries read sums alone."""
        return blocks.Keys(self.peaks, self.peaks) if self.folded is None else self.folded.keys

    def _run(self, kernel: object, like: Tensor, *arguments: object, is_causal: bool) -> None:
        """Launch a program for each block of rows (B, H, G, L)."""
        programs = like[..., 0].numel() * self.work.cut.num_blocks if like.numel() else 0
        self.work.run(kernel, programs, (*arguments, self.work.cut), (is_causal,))

    def _width(self, x: Tensor) -> int:
        """Numbers of a token's gradient that a kernel writes."""
        return self.work.shape.num_features if self.work.is_given else x.shape[-1]

    def _dtype(self, x: Tensor) -> torch.dtype:
        """Dtype of a token's gradient that a kernel writes."""
        return torch.float32 if self.work.is_given or self.work.shape.emulated else x.dtype


def store(target: Tensor, grad: Tensor) -> None:
    """Write a gradient whose heads may be flattened."""
    target.copy_(grad.view(target.shape))
