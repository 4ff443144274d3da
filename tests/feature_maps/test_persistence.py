"""A map is its settings, its seed and its fitted numbers: they survive copies, files, casts and processes.

Letters: L tokens, D head width.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from linattn.feature_maps import (
    FEATURE_MAPS,
    Balanced,
    Centred,
    FavorPlus,
    FeatureMap,
    FittedMap,
    Oprf,
    Sderf,
    Taylor,
)

D = 6
RANDOM = ["FavorPlus", "Hyperbolic", "Trigonometric", "Oprf", "Sderf", "RandomRelu"]
Build = Callable[..., FeatureMap]


def points() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * D).view(4, D)


def pickled(feature_map: FeatureMap) -> FeatureMap:
    return pickle.loads(pickle.dumps(feature_map))


def saved(feature_map: FeatureMap) -> FeatureMap:
    file = io.BytesIO()
    torch.save(feature_map, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_copies_are_the_same_map(build: Build, name: str, way: Callable[[FeatureMap], FeatureMap]) -> None:
    feature_map = build(name)
    twin = way(feature_map)
    assert twin.fingerprint() == feature_map.fingerprint()
    assert torch.equal(twin.query(points()), feature_map.query(points()))
    assert twin.handle != feature_map.handle


@pytest.mark.parametrize("name", RANDOM)
def test_a_copy_is_independent(build: Build, name: str) -> None:
    feature_map = build(name)
    twin, before = copy.deepcopy(feature_map), feature_map.query(points())
    twin.redraw(9)
    assert torch.equal(feature_map.query(points()), before)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_state_dict_restores_the_draw(build: Build, name: str) -> None:
    source = build(name, seed=3) if name in RANDOM else build(name)
    target = build(name, seed=4) if name in RANDOM else build(name)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    assert target.fingerprint() == source.fingerprint()
    assert torch.equal(target.query(points()), source.query(points()))


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_inside_a_model(assign: bool) -> None:
    def model(seed: int) -> nn.Sequential:
        return nn.Sequential(FavorPlus(D, 8, seed=seed), Centred(Oprf(D, 8, seed=seed, mean_square=float(seed))))

    source, target = model(1), model(2)
    ones = torch.ones(1, 2, 3, D)
    assert repr(target) != repr(source)
    source[1].fit(ones, 2 * ones)
    target.load_state_dict(source.state_dict(), assign=assign)
    assert repr(target) == repr(source)
    assert torch.equal(target[0].query(points()), source[0].query(points()))
    assert torch.equal(target[1].query(ones), source[1].query(ones))


def test_unfitted_oprf_takes_a_fitted_state() -> None:
    target = Oprf(D, 8)
    target.load_state_dict(Oprf(D, 8, mean_square=0.7).state_dict())
    assert "mean_square=0.7" in repr(target)
    target.query(points())


def sample(num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_heads)
    query, key = (torch.randn(1, num_heads, 20, D, generator=generator) for _ in range(2))
    return query, 2 * key + 0.3


FITTED: dict[str, Callable[[], FittedMap]] = {
    "Centred": lambda: Centred(FavorPlus(D, 8)),
    "Balanced": lambda: Balanced(Taylor(D)),
    "Sderf": lambda: Sderf(D, 8),
    "nested": lambda: Centred(Balanced(Sderf(D, 8))),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("held", [None, 1, 3], ids=["unfitted", "one-head", "three-heads"])
@pytest.mark.parametrize("name", FITTED)
def test_what_was_fitted_is_loaded_where_anything_or_nothing_was(name: str, held: int | None, assign: bool) -> None:
    source, target = FITTED[name]().fit(*sample(2)), FITTED[name]()
    unfitted = repr(target)
    if held is not None:
        target.fit(*sample(held))
    assert len({unfitted, repr(target), repr(source)}) == (2 if held is None else 3)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(torch.finfo(t.dtype).bits >= 32 for t in state.values() if t.is_floating_point())
    target.load_state_dict(state, assign=assign)
    assert repr(target) == repr(source)
    query, key = sample(2)
    assert torch.equal(target.query(query), source.query(query))
    assert torch.equal(target.key(key), source.key(key))


@pytest.mark.parametrize("name", FITTED)
def test_what_was_fitted_survives_casts_and_copies(name: str) -> None:
    feature_map = FITTED[name]().fit(*sample(2))
    x, text = sample(2)[0].double(), repr(feature_map)
    expected = feature_map.query(x)
    for twin in (copy.deepcopy(feature_map), pickled(feature_map), feature_map.to(torch.bfloat16).half()):
        assert repr(twin) == text
        assert torch.equal(twin.query(x), expected)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_casting_the_model_leaves_the_map_alone(build: Build, name: str) -> None:
    feature_map = build(name)
    expected, text = feature_map.query(points().double()), feature_map.fingerprint()
    nn.ModuleList([feature_map]).to(torch.bfloat16)
    assert torch.equal(feature_map.query(points().double()), expected)
    assert feature_map.fingerprint() == text


@pytest.mark.parametrize("name", RANDOM)
def test_low_precision_inputs_are_computed_in_float32(build: Build, name: str) -> None:
    feature_map, x = build(name), points().bfloat16()
    assert torch.equal(feature_map.query(x), feature_map.query(x.float()))


def test_a_rounded_projection_is_refused() -> None:
    state = {name: t.half() if t.is_floating_point() else t for name, t in FavorPlus(D, 8).state_dict().items()}
    with pytest.raises(ValueError, match=r"saved as torch\.float16 with its seed, wanted torch\.float64"):
        FavorPlus(D, 8).load_state_dict(state)


def test_a_projection_without_its_seed_is_refused() -> None:
    state = {"projection": FavorPlus(D, 8, seed=1).projection}
    with pytest.raises(ValueError, match="without its seed"):
        FavorPlus(D, 8).load_state_dict(state, strict=False)


def test_a_seed_alone_is_drawn_from() -> None:
    source, target = FavorPlus(D, 8, seed=1), FavorPlus(D, 8)
    target.load_state_dict({"seed": source.seed}, strict=False)
    assert repr(target) == repr(source)
    assert torch.equal(target.query(points()), source.query(points()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FavorPlus(D, 8), FavorPlus(D, 8, seed=1)),
        (FavorPlus(D, 8), FavorPlus(D, 8, draw="iid")),
        (FavorPlus(D, 8), FavorPlus(D, 8, lengths="fixed")),
        (FavorPlus(D, 8), FavorPlus(D, 8, scale=1.0)),
        (FavorPlus(D, 8), FavorPlus(D, 8, num_heads=1)),
        (Oprf(D, 8), Oprf(D, 8, mean_square=1.0)),
        (Sderf(D, 8), Sderf(D, 8, second_moment=torch.eye(D))),
        (Sderf(D, 8, second_moment=2 * torch.eye(D)), Sderf(D, 8, second_moment=torch.eye(D))),
        (Balanced(Taylor(D)), Balanced(Taylor(D), transform=torch.eye(D))),
        (Balanced(Taylor(D)), Balanced(Taylor(D), ridge=1e-3)),
        (Taylor(D), Taylor(D, order=1)),
        (Centred(Taylor(D)), Centred(Taylor(D), query_mean=torch.zeros(1, D), key_mean=torch.zeros(1, D))),
        (
            Centred(Taylor(D), query_mean=torch.zeros(1, D), key_mean=torch.ones(1, D)),
            Centred(Taylor(D), query_mean=torch.ones(1, D), key_mean=torch.zeros(1, D)),
        ),
    ],
)
def test_different_maps_have_different_names(first: FeatureMap, second: FeatureMap) -> None:
    assert repr(first) != repr(second)
    assert repr(first) == repr(copy.deepcopy(first))


def test_the_same_name_and_draw_in_another_process(run_program) -> None:
    program = (
        "import torch; from linattn.feature_maps import Centred, FavorPlus\n"
        "m = Centred(FavorPlus(6, 8, seed=3), query_mean=torch.ones(1, 6), key_mean=-torch.ones(1, 6))\n"
        "print(m); print(m.inner.projection.sum().item().hex())"
    )
    found = run_program(program).stdout
    here = Centred(FavorPlus(6, 8, seed=3), query_mean=torch.ones(1, 6), key_mean=-torch.ones(1, 6))
    assert found == f"{here}\n{here.inner.projection.sum().item().hex()}\n"


def test_a_map_built_under_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        feature_map = FavorPlus(D, 8)
        feature_map.query(points())
        feature_map.redraw(1)
    x = points().requires_grad_()
    feature_map.query(x).sum().backward()
    assert x.grad is not None
