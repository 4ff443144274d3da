"""combine over random trees of parts with disjoint keys: maps, exact softmax, states, each part with its own kernel.

Letters: B batch, H query heads, Hkv key/value heads, N queries, M keys of all parts, m keys of one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import linattn
from fuzzing.dice import Dice
from fuzzing.kinds.attention import BACKENDS, draw_given, draw_window
from fuzzing.limits import Limit, map_limits, window_limits
from fuzzing.machine import draw_machine, sums_dtype
from fuzzing.maps import DrawnMap, draw_map
from fuzzing.oracle import Part, Rows
from fuzzing.task import Result, Task
from fuzzing.tokens import DTYPES, draw_sizes
from fuzzing.truth import Parts, Tokens, parts_of
from fuzzing.weights import Noise, Weigher, in_call

# A leaf's number, or branches.
Tree = int | list["Tree"]


class Leaf(NamedTuple):
    """One part.

    Attributes:
        keys: the places of its keys among all, (m,).
        kind: "map", "softmax" or "state".
        drawn: its map, None for softmax.
        scale: softmax's.
        window: beside its map.
        masked: whether its mask is given.
        backend: of a map.
    """

    keys: Tensor
    kind: str
    drawn: DrawnMap | None
    scale: float | None
    window: int | None
    masked: bool
    backend: str

    def call(self, query: Tensor, key: Tensor, value: Tensor, live: Tensor) -> linattn.Partial:
        """The product's partial result over its keys."""
        mask = live[:, self.keys] if self.masked else None
        key, value = key[:, :, self.keys], value[:, :, self.keys]
        if self.drawn is None:
            return linattn.softmax_partial(query, key, value, key_mask=mask, scale=self.scale, enable_gqa=True)
        if self.kind == "state":
            empty = linattn.State.empty(
                self.drawn.map,
                batch_size=key.shape[0],
                num_heads=key.shape[1],
                value_dim=value.shape[-1],
                dtype=key.dtype,
            )
            return empty.absorb(self.drawn.map, key, value, key_mask=mask).read(self.drawn.map, query)
        options = {"key_mask": mask, "enable_gqa": True, "window": self.window, "backend": self.backend}
        return linattn.linear_partial(query, key, value, self.drawn.map, **options)

    def parts(self, tokens: Tokens, dtype: torch.dtype) -> Parts:
        """Its parts among all keys."""
        own = tokens._replace(
            key=tokens.key[:, :, self.keys], value=tokens.value[:, :, self.keys], live=tokens.live[:, self.keys]
        )
        rounding = sums_dtype(dtype)
        if self.drawn is None:
            scale = tokens.query.shape[-1] ** -0.5 if self.scale is None else self.scale
            found = Parts([Part(Weigher(None, rounding, scale), own.live[:, None, None, None])])
        else:
            mask = own.live if self.masked else None
            used = self.drawn.map
            used = used if self.kind == "state" else in_call(used, tokens.query, own.key, mask, dtype)
            found = parts_of(Weigher(used, rounding), own, self.window, is_causal=False)
        return found._replace(parts=[part._replace(visible=self._spread(part.visible, tokens)) for part in found.parts])

    def _spread(self, visible: Tensor, tokens: Tokens) -> Tensor:
        """From its own keys to all, (B, Hkv, 1, N, M)."""
        shape = *tokens.key.shape[:2], 1, tokens.query.shape[2]
        whole = torch.zeros(*shape, tokens.key.shape[2], dtype=torch.bool)
        whole[..., self.keys] = visible.expand(*shape, -1)
        return whole

    @property
    def limits(self) -> list[Limit]:
        """What it is refused for, whatever the queries."""
        if self.drawn is None:
            return []
        return map_limits(self.drawn, is_causal=self.kind == "state", has_tokens=False)

    def __str__(self) -> str:
        what = f"softmax(scale={self.scale})" if self.drawn is None else f"{self.kind} {self.drawn}"
        mask = " masked" if self.masked else ""
        window = f" {self.window}" if self.window else ""
        return f"{what} on {len(self.keys)} keys{mask}{window} {self.backend}"


def draw(
    dice: Dice, *, most: int = 30, dtypes: dict[torch.dtype, float] = DTYPES, fitted: bool = False, share: float = 0.15
) -> Task:
    """Parts over the keys, and a tree over the parts."""
    sizes, dtype = draw_sizes(dice), dice.weighted(dtypes)
    num_keys, num_queries = dice.length(most), dice.length(12)
    given = draw_given(dice, sizes, num_queries, num_keys, dtype)
    owners = torch.tensor([dice.integer(0, 5) for _ in range(num_keys)], dtype=torch.int64)
    owners = owners % dice.integer(1, 6)
    maps = [draw_map(dice, sizes, dtype, positive=True, fitted=fitted) for _ in range(dice.pick(1, 1, 2))]
    leaves = []
    for number in range(dice.integer(1, 5)):
        keys = (owners == number).nonzero().flatten()
        drawn = dice.pick(None, *maps)
        window = draw_window(dice, share=share) if drawn is not None and drawn.positive_softmax else None
        window = window if len(keys) == num_queries else None
        kind = "softmax" if drawn is None else dice.pick("map", "map", "state")
        window = window if kind == "map" else None
        # A part may be given without a mask where no key of it is masked.
        masked = bool(not given.live[:, keys].all()) or dice.chance(0.2)
        scale = dice.pick(None, 0.3)
        leaves.append(Leaf(keys, kind, drawn, scale, window, masked, dice.weighted(BACKENDS)))
    tree = _tree(dice, list(range(len(leaves))))
    used = [leaf.drawn for leaf in leaves if leaf.drawn is not None]
    limits = [limit for leaf in leaves for limit in leaf.limits]
    for leaf in leaves:
        if leaf.drawn is not None:
            limits += window_limits(leaf.drawn, num_queries, len(leaf.keys), leaf.window, is_causal=False)

    def call(query: Tensor, key: Tensor, value: Tensor) -> list[Result]:
        partials = [leaf.call(query, key, value, given.live) for leaf in leaves]
        return [Result("combination", *_combined(tree, partials), roundings=2 * len(leaves) + 4)]

    def truth(query: Tensor, key: Tensor, value: Tensor, noise: Noise | None) -> list[Rows]:
        tokens = Tokens(query, key, value, given.live, torch.arange(num_queries))
        found = [leaf.parts(tokens, dtype) for leaf in leaves]
        return [Parts([part for parts in found for part in parts.parts]).rows(tokens, noise=noise)]

    text = f"combine {tree} of [{'; '.join(str(leaf) for leaf in leaves)}]"
    return Task(text, used, given[:3], given.live, call, truth, limits, draw_machine(dice), is_exact=True)


def _tree(dice: Dice, leaves: list[Tree]) -> Tree:
    """A random tree: neighbours become one, one to four at a time."""
    leaves = dice.shuffled(leaves)
    for _ in range(dice.integer(0, 5)):
        start = dice.integer(0, len(leaves) - 1)
        stop = min(start + dice.integer(1, 4), len(leaves))
        leaves[start:stop] = [leaves[start:stop]]
    return leaves


def _combined(tree: Tree, partials: list[linattn.Partial]) -> linattn.Partial:
    """The partial result of a tree."""
    if isinstance(tree, int):
        return partials[tree]
    return linattn.combine(*(_combined(branch, partials) for branch in tree))
