"""Concurrent calls of one map give what calls in turn give, to the bit, and leave the map as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

import linattn
from grid import BACKENDS, MAPS, build, qkv, takes_statistics_from_the_call
from linattn.attention.bound_map import named_tensors, with_swapped_tensors

NUM_THREADS, NUM_CALLS = 4, 3


@pytest.fixture(autouse=True)
def _frequent_switches() -> Iterator[None]:
    """Let the interpreter change threads every few microseconds instead of every five milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(function: Callable[[int], list[Tensor]]) -> list[list[Tensor]]:
    """The function's results by thread, all threads started together; each must repeat itself to the bit."""
    start = Barrier(NUM_THREADS)

    def work(number: int) -> list[Tensor]:
        torch.set_num_threads(1)
        start.wait()
        runs = [function(number) for _ in range(NUM_CALLS)]
        for run in runs[1:]:
            assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))
        return runs[0]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(work, range(NUM_THREADS)))


def held(module: nn.Module) -> dict[str, int]:
    """Which tensor objects a module holds, by name."""
    return {name: id(tensor) for name, tensor in named_tensors(module)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("map_name", MAPS)
def test_threads_share_a_map(map_name: str, backend: str) -> None:
    """Forward and backward, of the inputs and of the map's parameters."""
    feature_map = build(map_name)
    before = held(feature_map)

    def call(number: int) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in qkv(num_queries=9, num_keys=9, seed=7 * number)]
        out = linattn.linear_attention(*leaves, feature_map, enable_gqa=True, backend=backend)
        trained = [parameter for parameter in feature_map.parameters() if parameter.requires_grad]
        return [out, *torch.autograd.grad(out.square().sum(), [*leaves, *trained])]

    alone = [call(number) for number in range(NUM_THREADS)]
    for found, expected in zip(in_threads(call), alone, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert held(feature_map) == before
    assert all(isinstance(x, nn.Parameter) for x in feature_map.parameters())
    if takes_statistics_from_the_call(map_name):
        with pytest.raises(ValueError, match="leak the future"):
            linattn.linear_attention(*qkv(), feature_map, is_causal=True, enable_gqa=True, backend=backend)


def test_threads_share_a_map_beside_a_window_and_rows() -> None:
    feature_map = linattn.feature_maps.Expansion(8, 4)

    def call(number: int) -> list[Tensor]:
        query, key, value = qkv(num_queries=12, num_keys=12, seed=7 * number)
        part = linattn.linear_partial(query, key, value, feature_map, enable_gqa=True, window=2)
        rows = linattn.attention_rows(query, key, feature_map, torch.tensor([0, 5]), enable_gqa=True)
        return [*part, rows]

    alone = [call(number) for number in range(NUM_THREADS)]
    for found, expected in zip(in_threads(call), alone, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert feature_map.centres is None


def test_swapping_leaves_the_module_alone() -> None:
    inner = nn.Linear(2, 2)
    module = nn.Sequential(inner, nn.BatchNorm1d(2))
    before = held(module)
    bias, mean = torch.ones(2), torch.full((2,), 3.0)
    swapped = with_swapped_tensors(module, {"0.bias": bias, "1.running_mean": mean})
    assert dict(named_tensors(swapped))["0.bias"] is bias
    assert swapped[1].running_mean is mean
    assert swapped[0].weight is inner.weight
    assert held(module) == before
    assert with_swapped_tensors(module, {}) is module


def test_a_replica_trains_the_parameters_it_came_from() -> None:
    """DataParallel's replicas hold plain tensors that depend on the parameters, outside `parameters()`."""
    feature_map = build("LearnedExponential").requires_grad_()
    replica = feature_map._replicate_for_data_parallel()
    for name, child in feature_map.named_children():
        copy = child._replicate_for_data_parallel()
        replica._modules[name] = copy
        copy._former_parameters = {}
        for key, parameter in child._parameters.items():
            if parameter is not None:
                copy._former_parameters[key] = parameter * 1
                setattr(copy, key, copy._former_parameters[key])
    query, key, value = qkv()
    grads = []
    for used in (feature_map, replica):
        out = linattn.linear_attention(query, key, value, used, enable_gqa=True)
        grads.append(torch.autograd.grad(out.square().sum(), list(feature_map.parameters())))
    for found, expected in zip(*reversed(grads), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
