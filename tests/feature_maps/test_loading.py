"""A map's fitted tensors are checked where they are read from a checkpoint, as where they are given."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grid import VARIANTS, build, tokens
from linattn import linear_attention
from linattn.feature_maps import FEATURE_MAPS, Balanced, Centred, Expansion, FavorPlus, FeatureMap, Sderf

MAPS: dict[str, Callable[[], FeatureMap]] = {
    "Expansion": lambda: Expansion(4, 3),
    "Sderf": lambda: Sderf(4, 6),
    "Balanced": lambda: Balanced(FavorPlus(4, 6)),
    "Centred": lambda: Centred(FavorPlus(4, 6)),
}
CHANGES = {
    "narrower": lambda x: x[..., :-1],
    "wider": lambda x: torch.cat((x, x), -1),
    "longer": lambda x: torch.cat((x, x), -2),
    "flat": lambda x: x.flatten(),
    "deeper": lambda x: x[None],
    "cast": lambda x: x.half(),
    "whole numbers": lambda x: x.long(),
    "NaN": lambda x: torch.full_like(x, torch.nan),
}


def fitted(name: str) -> tuple[FeatureMap, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    feature_map = MAPS[name]().fit(*(torch.randn(1, 2, 20, 4, generator=generator) for _ in range(2)))
    return feature_map, {key: x.clone() for key, x in feature_map.state_dict().items()}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MAPS)
def test_a_fitted_tensor_of_another_kind_is_refused(name: str, change: str) -> None:
    feature_map, saved = fitted(name)
    for buffer in feature_map.fitted_buffers:
        for target in (MAPS[name](), feature_map):
            before = target.state_dict()
            with pytest.raises(ValueError, match=rf"cannot be loaded into {type(feature_map).__name__}: .*; load what"):
                target.load_state_dict(saved | {buffer: CHANGES[change](saved[buffer])})
            # Nothing of it was taken.
            assert repr(target.state_dict()) == repr(before)


@pytest.mark.parametrize("name", ["Expansion", "Centred"])
def test_half_of_what_was_fitted_is_refused(name: str) -> None:
    feature_map, saved = fitted(name)
    del saved[feature_map.fitted_buffers[-1]]
    with pytest.raises(ValueError, match=f"{feature_map.fitted_buffers[-1]} must be saved beside"):
        MAPS[name]().load_state_dict(saved, strict=False)


def test_what_no_fit_would_give_is_refused() -> None:
    _, saved = fitted("Sderf")
    with pytest.raises(ValueError, match="second_moment must be positive semidefinite"):
        MAPS["Sderf"]().load_state_dict(saved | {"second_moment": -saved["second_moment"]})
    _, saved = fitted("Balanced")
    with pytest.raises(ValueError, match="transform must be invertible"):
        MAPS["Balanced"]().load_state_dict(saved | {"transform": 0 * saved["transform"]})


LEFT = {"zeros": 0.0, "NaN": torch.nan, "large": 3e38, "small": -1e-30}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("name", [*FEATURE_MAPS, *VARIANTS])
def test_values_loaded_after_to_empty_are_all_that_counts(
    name: str, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the memory held; and constants, which no file holds, are there again."""

    def empty(x: Tensor, **options: torch.device) -> Tensor:
        return torch.full_like(x, LEFT[left] if x.is_floating_point() else 2**62, **options)

    monkeypatch.setattr(torch, "empty_like", empty)
    feature_map, x = build(name), tokens(2, 2, 11, 8)
    for device in ("cpu", "meta"):
        for assign in (False, True):
            target = copy.deepcopy(feature_map).to(device)
            if not assign or device == "cpu":
                target = target.to_empty(device="cpu")
            target.load_state_dict(feature_map.state_dict(), assign=assign)
            assert torch.equal(linear_attention(x, x, x, target), linear_attention(x, x, x, feature_map))
            assert target.fingerprint() == feature_map.fingerprint()


@pytest.mark.parametrize("name", [*FEATURE_MAPS, *VARIANTS])
def test_what_a_map_holds_outlives_to_empty(name: str) -> None:
    """As of a model that is built on "meta", and materialised without a checkpoint: a map has what its seed says."""
    with torch.device("meta"):
        made = build(name)
    feature_map, x = build(name), tokens(2, 2, 11, 8)
    for each in (made, copy.deepcopy(feature_map)):
        each.to_empty(device="cpu")
        # Weights are the user's to initialise.
        each.load_state_dict(dict(feature_map.named_parameters()), strict=False)
        assert torch.equal(linear_attention(x, x, x, each), linear_attention(x, x, x, feature_map))
