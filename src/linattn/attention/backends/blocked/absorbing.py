"""One pass over keys, S += φ(k)vᵀ and z += Σ φ(k), stretch by stretch of blocks, and back. Letters as in
blocked/__init__.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from linattn.attention.backends.blocked.blocks import Running, Workspace, blocks
from linattn.attention.backends.blocked.bounded import (
    KeyBlock,
    bounded_keys,
    bounded_powers,
    by_head,
    common_exponent,
    fits_sums,
    stretches,
    whole,
    write_powers,
)
from linattn.attention.backends.blocked.features import (
    BiasGradient,
    KeyBlocks,
    MapGradients,
    store_masked,
)
from linattn.attention.backends.blocked.records import Absorb, Gradients, Saved, sums_of
from linattn.attention.sums import Sums, per_feature
from linattn.feature_maps import FeatureMap
from linattn.feature_maps._powers import Powers


def absorb(feature_map: FeatureMap, inputs: Absorb) -> Sums:
    """The sums after these keys, in memory of their own."""
    return KeyPass(feature_map, inputs).sums()


def absorb_backward(feature_map: FeatureMap, saved: Saved) -> Gradients:
    """Gradients of (key, value, S, z); features are recomputed relative to the final m."""
    return KeyPassGradients(feature_map, saved).gradients()


class KeyPass:
    """Blocks of keys folded into sums: bounded where they are (bounded.py), else relative to running maxima."""

    def __init__(self, feature_map: FeatureMap, inputs: Absorb) -> None:
        self._inputs, self.state, self.space = inputs, Running(sums_of(inputs)), Workspace(inputs.S)
        self.keys = KeyBlocks(feature_map, inputs, self.space)
        self.powers = bounded_powers(feature_map, inputs.key, inputs.S)
        self.cut = blocks(inputs.key, feature_map.num_features)
        # Heads in which a stretch was tried in vain are tried no more.
        self._is_hopeful = inputs.z.new_ones(inputs.z.shape[:2], dtype=torch.bool)

    def sums(self) -> Sums:
        """Those after all keys, in memory of their own."""
        for stretch in stretches(self.cut, self._inputs.key, self._inputs.S):
            if self.powers is None:
                self._fold(stretch)
            else:
                self._fold_by_head(self.powers, stretch)
        return self.state.sums()

    def _fold_by_head(self, powers: Powers, stretch: list[slice]) -> None:
        """A stretch, bounded in the heads where that holds."""
        keys = bounded_keys(powers, self.keys, whole(stretch), self.state.m)
        sums = self.state.own()

        def bounded() -> Tensor:
            self.state.rescale(keys.c.unsqueeze(-1).expand(sums.m.shape))
            for block in keys.blocks(stretch):
                phi = write_powers(powers, block.tokens, "keys", self.space)
                self.state.fold_in_weighted(phi, block.weight.flatten(0, 1), block.weighted_values(self.space))
            return fits_sums(*self.state.views()[:2])

        fits = keys.fits & self._is_hopeful
        self._is_hopeful &= ~fits | by_head(fits, bounded, lambda: self._fold(stretch), sums, ())

    def _fold(self, stretch: list[slice]) -> None:
        """A stretch relative to running maxima."""
        for block in stretch:
            found = self.keys.features(block)
            # The sums move to the new maximum first, so that the features' exponents are at most 0.
            self.state.rescale(found.peak(self.state.m))
            self.state.fold_in(found.turned_relative_to(self.state.m), self.keys.values(block))


class KeyPassGradients:
    """The gradients of what blocks of keys were folded into, stretch by stretch as `KeyPass`."""

    def __init__(self, feature_map: FeatureMap, saved: Saved) -> None:
        inputs: Absorb = saved.inputs
        self._inputs, self._m, self.space = inputs, saved.outputs.m, Workspace(inputs.m)
        self.keys = KeyBlocks(feature_map, inputs, self.space)
        self.powers = bounded_powers(feature_map, inputs.key, inputs.S)
        self.cut = blocks(inputs.key, feature_map.num_features)
        self._back = MapGradients(feature_map, saved.tensors)
        self.of_bias = BiasGradient(inputs.bias, inputs.key.shape[1], wanted=saved.bias_grad)
        self._grad_S, self._grad_z, _ = saved.grads
        self._grad_key, self._grad_value = (x.new_empty(x.shape) for x in (inputs.key, inputs.value))

    def gradients(self) -> Gradients:
        """Those of all inputs."""
        for stretch in stretches(self.cut, self._inputs.key, self._inputs.S):
            if self.powers is None:
                self._pull(stretch)
            else:
                self._pull_by_head(self.powers, stretch)
        decay = per_feature((self._inputs.m - self._m).exp_(), self._grad_z.shape[-1])
        of_sums = self._grad_S * decay.unsqueeze(-1), self._grad_z * decay
        of_inputs = [self._grad_key, self._grad_value, *of_sums]
        return Gradients(of_inputs, self.of_bias.total, self._back.finish())

    def _pull_by_head(self, powers: Powers, stretch: list[slice]) -> None:
        """A stretch, bounded in the heads where the final exponent is one of bounded keys."""
        keys, tokens = bounded_keys(powers, self.keys, whole(stretch), self._m), whole(stretch)
        c, is_common = common_exponent(self._m)
        fits = keys.fits & is_common & (keys.c == c)

        def bounded() -> None:
            for block, part in zip(stretch, keys.blocks(stretch), strict=True):
                self._pull_bounded(powers, block, part)

        written = [x[:, :, tokens] for x in (self._grad_key, self._grad_value)]
        by_head(fits, bounded, lambda: self._pull(stretch), (), written + self.of_bias.of(tokens))

    def _pull_bounded(self, powers: Powers, block: slice, keys: KeyBlock) -> None:
        """Store the gradients of a block of keys."""
        (x, v, weight), masked, space = keys, self.keys.masked(block), self.space
        u, flat_grad_S = weight.unsqueeze(-1), self._grad_S.flatten(0, 1)
        phi = write_powers(powers, x, "keys", space)
        # grad u·v = φ grad S and grad φ = u·[v, 1] [grad S, grad z]ᵀ.
        grad_weighted = space.product("grad_v", phi, flat_grad_S).view(v.shape)
        store_masked(self._grad_value[:, :, block], masked, grad_weighted.mul_(u))
        grad = space.product("grad", keys.weighted_values(space), flat_grad_S.mT)
        grad.addcmul_(u.flatten(0, 1), self._grad_z.flatten(0, 1).unsqueeze(-2)).mul_(phi)
        grad = grad.view(*x.shape[:-1], -1)
        total = grad.sum(-1, keepdim=True)
        self.of_bias.store(block, masked, total.squeeze(-1))
        store_masked(self._grad_key[:, :, block], masked, powers.vjp(x, grad, total))

    def _pull(self, stretch: list[slice]) -> None:
        """Store the gradients of a stretch of any keys."""
        m, space = self._m, self.space
        flat_grad_S, row_grad_z = self._grad_S.flatten(0, 1), self._grad_z.unsqueeze(-2)
        for block in stretch:
            x, v, masked = self.keys.tokens(block), self.keys.values(block), self.keys.masked(block)
            found = self.keys.features(block, x)
            phi_k = found.turned_relative_to(m)
            # grad φ(k) = [v, 1] [grad S, grad z]ᵀ, the second part added to all rows alike.
            grad_phi = space.product("grad", v.flatten(0, 1), flat_grad_S.mT).view(phi_k.shape).add_(row_grad_z)
            grad_v = space.product("grad_v", phi_k.flatten(0, 1), flat_grad_S)
            store_masked(self._grad_value[:, :, block], masked, grad_v.view(v.shape))
            of_outputs = found.gradients(m, phi_k, grad_phi)
            self.of_bias.store(block, masked, of_outputs.log)
            self._back.key(x, of_outputs, partial(store_masked, self._grad_key[:, :, block], masked))
