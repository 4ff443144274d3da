"""Learned maps: where training starts, what it changes, and who notices.

Letters: H heads, L tokens, D head width, R features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import linattn
from grid import Learned
from linattn.feature_maps import Centred, FavorPlus, FeatureMap, Hedgehog, LearnedExponential
from linattn.feature_maps.learned import LearnedMap

D, R, L = 4, 8, 32
BUILD: dict[str, Callable[[], FeatureMap]] = {
    "LearnedExponential": lambda: LearnedExponential(D, R, num_heads=2),
    "Hedgehog": lambda: Hedgehog(D),
    "Centred": lambda: Centred(LearnedExponential(D, R)),
    "a user's own": lambda: Learned(D, R, 2),
}
OPTIMISERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.1, foreach=False),
    "foreach": lambda weights: torch.optim.Adam(weights, lr=0.1, foreach=True),
    "fused": lambda weights: torch.optim.Adam(weights, lr=0.1, fused=True),
}


def tokens(seed: int, *, heads: int = 2, length: int = L, scale: float = 1.2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, heads, length, D, generator=generator, dtype=torch.float64) * scale for _ in range(3)
    )
    return query, key, value


def moved(feature_map: LearnedMap) -> LearnedMap:
    """A map whose parameters all differ, in float64."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in feature_map.double().parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return feature_map


@pytest.mark.parametrize("num_heads", [None, 2])
def test_training_starts_at_favor_plus(num_heads: int | None) -> None:
    """To the rounding of W and of the constant to float32, half a unit of each."""
    learned = LearnedExponential(D, R, seed=5, num_heads=num_heads)
    favor = FavorPlus(D, R, seed=5, num_heads=num_heads)
    query, key, value = tokens(0)
    for x in (query, key):
        expected = favor.query(x)
        sizes = (x.abs() * learned.scale**0.5) @ favor.projection.abs().mT + math.log(R) / 2
        for found in (learned.query(x), learned.key(x)):
            assert ((found - expected).abs() <= torch.finfo(torch.float32).eps / 2 * sizes + 1e-14).all()
    out, start = (linattn.linear_attention(query, key, value, each) for each in (learned, favor))
    torch.testing.assert_close(out, start, rtol=0, atol=1e-5)
    assert not torch.equal(LearnedExponential(D, R, seed=6).of_key.weight, LearnedExponential(D, R).of_key.weight)


def test_the_exponents_of_a_learned_exponential_by_hand() -> None:
    learned = moved(LearnedExponential(2, 3, scale=0.25))
    x = torch.tensor([3.0, -1.0], dtype=torch.float64)
    for exponents, found in ((learned.of_query, learned.query(x[None])[0]), (learned.of_key, learned.key(x[None])[0])):
        for i in range(3):
            w, b, c = (t.item() for t in (exponents.weight[i] @ x, exponents.bias[i], exponents.curvature[i]))
            # √scale = 1/2, |x|² = 10.
            assert found[i].item() == pytest.approx(w / 2 + b - c * 0.25 * 10 / 2, rel=1e-13)
    assert not torch.equal(learned.query(x[None]), learned.key(x[None]))


def test_the_kernel_of_a_hedgehog_by_hand() -> None:
    """Σ_l exp(u_l + v_l) + exp(-u_l - v_l), u and v what W and b make of query and key; at the start themselves."""
    q, k = torch.tensor([[0.5, -1.0]]).double(), torch.tensor([[2.0, 0.25]]).double()
    start = Hedgehog(2, scale=1.0).kernel(q, k).item()
    assert start == pytest.approx(2 * math.cosh(2.5) + 2 * math.cosh(-0.75), rel=1e-13)
    hedgehog = moved(Hedgehog(2, scale=4.0))
    u, v = (side.weight @ (2 * x[0]) + side.bias for side, x in ((hedgehog.of_query, q), (hedgehog.of_key, k)))
    assert hedgehog.kernel(q, k).item() == pytest.approx(2 * torch.cosh(u + v).sum().item(), rel=1e-13)
    assert torch.equal(hedgehog.query(q)[..., :2], -hedgehog.query(q)[..., 2:])


def divergence(feature_map: FeatureMap, query: Tensor, key: Tensor) -> Tensor:
    """KL(exact softmax ‖ the map's) of each row, in nats."""
    rows = linattn.attention_rows(query, key, feature_map, torch.arange(query.shape[2]))
    exact = torch.log_softmax(query @ key.mT * D**-0.5, -1)
    return (exact.exp() * (exact - rows.log())).sum(-1)


@pytest.mark.parametrize("build", [lambda: LearnedExponential(D, R), lambda: Hedgehog(D)], ids=["exponential", "hog"])
def test_training_does_more_than_another_draw(build: Callable[[], FeatureMap]) -> None:
    """Below the best of twenty FAVOR+ maps, and below the start by four standard errors of the mean over rows."""
    feature_map, seen, other = build(), tokens(0)[:2], tokens(1)[:2]
    start = copy.deepcopy(feature_map)
    optimiser = torch.optim.Adam(feature_map.parameters(), lr=0.05)
    for _ in range(50):
        optimiser.zero_grad()
        divergence(feature_map, *seen).mean().backward()
        optimiser.step()
    with torch.no_grad():
        for sample in (seen, other):
            found = divergence(feature_map, *sample)
            assert found.mean() < min(divergence(FavorPlus(D, R, seed=seed), *sample).mean() for seed in range(20))
            fall = divergence(start, *sample) - found
            assert fall.mean() > 4 * fall.std() / math.sqrt(fall.numel())


def test_only_a_window_sees_a_common_factor() -> None:
    """Adding one number to all exponents of a query changes nothing alone, and the share of the map beside a window."""
    learned, (query, key, value) = LearnedExponential(D, R).double(), tokens(2)
    for window, is_seen in ((None, False), (4, True)):
        out = linattn.linear_attention(query, key, value, learned, window=window)
        (grad,) = torch.autograd.grad(out.square().sum(), learned.of_query.bias)
        assert (abs(grad.sum().item()) > 1e-3) == is_seen
        assert is_seen or abs(grad.sum().item()) <= 1e-12 * grad.abs().sum().item()


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("name", BUILD)
def test_a_state_does_not_outlive_a_step_of_the_optimiser(name: str, optimiser: str) -> None:
    feature_map, (query, key, value) = BUILD[name](), tokens(3)
    if isinstance(feature_map, Centred):
        feature_map.fit(query, key)
    twin, state = copy.deepcopy(feature_map), linattn.linear_attention_with_state(query, key, value, feature_map).state
    state.read(twin, query)
    steps = OPTIMISERS[optimiser](list(feature_map.parameters()))
    linattn.linear_attention(query, key, value, feature_map).square().sum().backward()
    steps.step()
    assert feature_map.fingerprint() != twin.fingerprint()
    for use in (
        lambda: state.read(feature_map, query),
        lambda: state.absorb(feature_map, key, value),
        lambda: linattn.linear_attention_with_state(query, key, value, feature_map, state),
        lambda: state.merge(linattn.State.empty(feature_map, batch_size=1, num_heads=2, value_dim=D)),
    ):
        with pytest.raises(ValueError, match=r"with weights \w{16}"):
            use()
    feature_map.load_state_dict(twin.state_dict())
    state.read(feature_map, query)


def test_frozen_weights_are_read_once_until_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn.feature_maps import digests

    reads, learned = [], LearnedExponential(D, R).requires_grad_(False)
    read = digests.digest
    monkeypatch.setattr(digests, "digest", lambda *x: (reads.append(x), read(*x))[1])
    first = learned.fingerprint()
    assert learned.fingerprint() == first
    assert len(reads) == len(list(learned.parameters()))
    learned.of_key.curvature[2] += 1
    second = learned.fingerprint()
    assert second != first
    assert len(reads) == len(list(learned.parameters())) + 1
    learned.requires_grad_(True)
    assert learned.fingerprint() == second
    assert learned.fingerprint(dict(learned.named_parameters())) == repr(learned)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_written_between_forward_and_backward_are_refused(frozen: bool) -> None:
    learned, (query, key, value) = LearnedExponential(D, R).requires_grad_(not frozen), tokens(4)
    out = linattn.linear_attention(query.requires_grad_(), key, value, learned)
    with torch.no_grad():
        learned.of_key.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"recomputed for gradients" if frozen else "modified by an inplace"):
        out.sum().backward()


def test_a_stream_can_be_trained_through() -> None:
    """A state built and read within one step: gradients of all parameters are those of the whole sequence."""
    learned, (query, key, value) = moved(LearnedExponential(D, R)), tokens(5)
    weights = list(learned.parameters())
    out = linattn.linear_attention(query, key, value, learned, is_causal=True)
    first, second = ([x[:, :, part] for x in (query, key, value)] for part in (slice(0, 19), slice(19, None)))
    before = linattn.linear_attention_with_state(*first, learned)
    after = linattn.linear_attention_with_state(*second, learned, before.state)
    pieces = torch.cat((before.out, after.out), 2)
    wanted, found = (torch.autograd.grad(x.square().sum(), weights) for x in (out, pieces))
    for expected, grad in zip(wanted, found, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-11)


def test_torch_func_goes_through_a_stream() -> None:
    learned, (query, key, value) = moved(LearnedExponential(D, R)), tokens(6)

    class Stream(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = learned

        def forward(self) -> Tensor:
            return linattn.linear_attention_with_state(query, key, value, self.map).out.square().sum()

    stream = Stream()
    weights = {name: weight.detach() for name, weight in stream.named_parameters()}
    found = torch.func.grad(lambda swapped: torch.func.functional_call(stream, swapped, ()))(weights)
    expected = torch.autograd.grad(stream(), list(stream.parameters()))
    for grad, wanted in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_heads", [None, 2])
def test_a_state_dict_holds_all_that_was_learned(num_heads: int | None) -> None:
    source = moved(LearnedExponential(D, R, num_heads=num_heads))
    target = LearnedExponential(D, R, seed=1, num_heads=num_heads).double()
    assert target.fingerprint() != source.fingerprint()
    target.load_state_dict(source.state_dict())
    assert target.fingerprint() == source.fingerprint()
    query = tokens(7)[0]
    assert torch.equal(target.query(query), source.query(query))
    assert torch.equal(target.key(query), source.key(query))


def test_casts_go_up_but_not_below_float32() -> None:
    learned, x = LearnedExponential(D, R), tokens(8)[0]
    text, expected = learned.fingerprint(), learned.query(x)
    for dtype, kept in (
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
        (torch.float16, torch.float64),
        (torch.float32, torch.float32),
    ):
        learned.to(dtype)
        assert {weight.dtype for weight in learned.parameters()} == {kept}
        assert torch.equal(learned.query(x), expected)
        assert learned.query(x.to(torch.bfloat16)).dtype == torch.float32
        # Going up and coming back loses nothing.
        assert learned.fingerprint() == text


def test_a_map_built_under_inference_mode_can_be_trained() -> None:
    with torch.inference_mode():
        maps = [LearnedExponential(D, R), Hedgehog(D)]
        before = [each.fingerprint() for each in maps]
    for each, text in zip(maps, before, strict=True):
        linattn.linear_attention(*tokens(9), each).square().sum().backward()
        assert all(weight.grad is not None and weight.grad.any() for weight in each.parameters())
        assert each.fingerprint() == text
