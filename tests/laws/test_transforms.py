"""What composes equals eager; what does not compose says so."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import linattn
from grid import CASES, CAUSAL_MAPS, HEAD_DIM, MAPS, RECORDED_MAPS, Case, Learned, build, build_anew, qkv, sums, total
from linattn import MergedKV
from linattn.feature_maps import RandomFeatureMap
from linattn.feature_maps.base import live_map

TRANSFORM_CASES = tuple(
    c
    for c in CASES
    if c.backend == "blocked"
    and c.map_name
    in (
        "FavorPlus",
        "EluPlusOne",
        "Taylor",
        "Trigonometric",
        "Centred-FavorPlus",
        "Centred-call-Taylor",
        "Learned",
        "LearnedExponential",
    )
)


# One call compiled to machine code; what is linattn's, the graph and its gradients, is the same without.
TO_MACHINE_CODE = Case("FavorPlus", "blocked", True)


@pytest.mark.parametrize("case", TRANSFORM_CASES, ids=str)
def test_compiled_equals_eager(case: Case) -> None:
    torch.compiler.reset()
    feature_map = case.build()
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[1, :9] = False
    backend = "inductor" if case == TO_MACHINE_CODE else "aot_eager"
    compiled = torch.compile(lambda *x: case.attend(*x, feature_map, key_mask=mask), fullgraph=True, backend=backend)
    results = []
    for function in (lambda *x: case.attend(*x, feature_map, key_mask=mask), compiled):
        leaves = [x.requires_grad_() for x in qkv()]
        out = function(*leaves)
        wanted = [*leaves, *feature_map.parameters()]
        results.append((out, *torch.autograd.grad(out.square().sum(), wanted)))
    for eager, found in zip(*results, strict=True):
        torch.testing.assert_close(found, eager, rtol=1e-12, atol=1e-12)


def test_a_graph_whose_map_is_gone_says_so() -> None:
    """A compiled graph knows its map by a number."""
    with pytest.raises(RuntimeError, match="no longer exists; keep the map alive"):
        live_map(-1)


@pytest.mark.parametrize("map_name", [name for name in RECORDED_MAPS if name in CAUSAL_MAPS])
def test_compiled_decoding_equals_eager(map_name: str) -> None:
    torch.compiler.reset()
    feature_map = build(map_name).requires_grad_(False)
    step = torch.compile(
        lambda q, k, v, state: linattn.linear_attention_with_state(q, k, v, feature_map, state, enable_gqa=True),
        fullgraph=True,
        backend="aot_eager",
    )
    q, k, v = qkv()
    state = linattn.linear_attention_with_state(q, k, v, feature_map, enable_gqa=True).state
    token = qkv(num_queries=1, num_keys=1, seed=8)
    found = step(*token, state)
    expected = linattn.linear_attention_with_state(*token, feature_map, state, enable_gqa=True)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total(found.state, expected.state.m), sums(expected.state), rtol=1e-12, atol=1e-12)
    assert isinstance(found.state, linattn.State)
    assert found.state.built_with == expected.state.built_with


WINDOWS = (4, 1)


@pytest.mark.parametrize("map_name", ["Expansion-call", "Centred-Balanced-FavorPlus"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_compiled_equals_eager_beside_a_window(map_name: str, window: int) -> None:
    """Maps that take statistics from the call included; a graph has each block, and a few show what more of them do."""
    torch.compiler.reset()
    feature_map, (query, key, value) = build(map_name), qkv(num_queries=13, num_keys=13)

    def attend(q, k, v):
        return linattn.linear_attention(q, k, v, feature_map, enable_gqa=True, window=window)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value), attend(query, key, value), rtol=1e-12, atol=1e-12)


# One of each kind: of powers, of products, signed, grouped, wrapped, with statistics of the call, with weights.
@pytest.mark.parametrize(
    "map_name",
    ["FavorPlus", "Relu", "Trigonometric", "Expansion", "Centred-Balanced-FavorPlus", "Centred-call-Taylor", "Learned"],
)
def test_the_reference_compiles(map_name: str) -> None:
    """Errors of the blocked backend recommend it."""
    torch.compiler.reset()
    feature_map, (query, key, value) = build(map_name), qkv()

    def attend(q, k, v):
        return linattn.linear_attention(q, k, v, feature_map, enable_gqa=True, backend="reference")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value), attend(query, key, value), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("map_name", ["FavorPlus", "Expansion", "Expansion-0"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS[:2], ids=str)
def test_vmap_equals_a_loop_beside_a_window(map_name: str, is_causal: bool, window: int) -> None:
    """All inputs mapped, queries alone, and gradients."""
    feature_map, batches = build(map_name), [qkv(seed=10 * i, num_queries=13, num_keys=13) for i in range(3)]
    stacked = [torch.stack(x) for x in zip(*batches, strict=True)]

    def attend(q, k, v):
        return linattn.linear_attention(q, k, v, feature_map, is_causal=is_causal, enable_gqa=True, window=window)

    looped = torch.stack([attend(*x) for x in batches])
    torch.testing.assert_close(torch.func.vmap(attend)(*stacked), looped, rtol=1e-12, atol=1e-12)
    shared = torch.func.vmap(attend, in_dims=(0, None, None))(stacked[0], *batches[0][1:])
    looped = torch.stack([attend(x[0], *batches[0][1:]) for x in batches])
    torch.testing.assert_close(shared, looped, rtol=1e-12, atol=1e-12)
    grad = torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=(0, 1, 2))
    for found, *alone in zip(torch.func.vmap(grad)(*stacked), *(grad(*x) for x in batches), strict=True):
        torch.testing.assert_close(found, torch.stack(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_queries", [0, 1, 2, 5])
def test_masks_are_mapped_beside_a_window(num_queries: int, is_causal: bool) -> None:
    """A mask has no values there: rows are turned, and turned back, as many as there are queries."""
    feature_map, inputs = build("FavorPlus"), qkv(num_queries=num_queries if is_causal else 5, num_keys=5)
    masks = torch.tensor([[[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], [[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]]]).bool()

    def attend(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"is_causal": is_causal, "enable_gqa": True, "window": 4}
        part = linattn.linear_partial(*inputs, feature_map, key_mask=mask, **options)
        return part.out, part.log_normalizer

    looped = (torch.stack(rows) for rows in zip(*map(attend, masks), strict=True))
    for found, wanted in zip(torch.func.vmap(attend)(masks), looped, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_queries", [0, 1])
def test_compiled_rows_of_a_group_share_no_memory(num_queries: int) -> None:
    torch.compiler.reset()
    feature_map, tokens = build("Expansion-one-centre"), qkv(1, 2, 2, num_queries)

    def attend(q, k, v):
        return linattn.linear_partial(q, k, v, feature_map)

    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(*tokens)
    torch.testing.assert_close(found, attend(*tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", TRANSFORM_CASES, ids=str)
def test_vmap_equals_a_loop(case: Case) -> None:
    feature_map, batches = case.build(), [qkv(seed=10 * i) for i in range(3)]
    stacked = [torch.stack(x) for x in zip(*batches, strict=True)]

    def attend(q, k, v):
        return case.attend(q, k, v, feature_map)

    looped = torch.stack([attend(*x) for x in batches])
    torch.testing.assert_close(torch.func.vmap(attend)(*stacked), looped, rtol=1e-12, atol=1e-12)
    shared = torch.func.vmap(attend, in_dims=(0, None, None))(stacked[0], *batches[0][1:])
    looped = torch.stack([attend(x[0], *batches[0][1:]) for x in batches])
    torch.testing.assert_close(shared, looped, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_vmap_of_grad_equals_a_loop(is_causal: bool) -> None:
    case = Case("FavorPlus", "blocked", is_causal)
    feature_map, batches = case.build(), [qkv(seed=10 * i) for i in range(3)]
    grad = torch.func.grad(lambda q, k, v: case.attend(q, k, v, feature_map).square().sum(), argnums=(0, 1, 2))
    found = torch.func.vmap(grad)(*(torch.stack(x) for x in zip(*batches, strict=True)))
    for index in range(3):
        looped = torch.stack([grad(*x)[index] for x in batches])
        torch.testing.assert_close(found[index], looped, rtol=1e-12, atol=1e-12)


def test_vmap_of_a_state() -> None:
    feature_map = build("FavorPlus")
    q, k, v = (torch.stack(x) for x in zip(qkv(), qkv(seed=9), strict=True))
    found = torch.func.vmap(lambda *x: linattn.linear_attention_with_state(*x, feature_map, enable_gqa=True))(q, k, v)
    alone = linattn.linear_attention_with_state(q[1], k[1], v[1], feature_map, enable_gqa=True)
    torch.testing.assert_close(sums(found.state)[1], sums(alone.state), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_dual_numbers_are_refused_by_blocked(is_causal: bool) -> None:
    """Forward-mode derivatives outside torch.func: refused, not zero."""
    feature_map, (q, k, v) = build("FavorPlus"), qkv()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match=r"jvp, jacfwd, hessian.*use backend='reference'"):
            Case("FavorPlus", "blocked", is_causal).attend(dual, k, v, feature_map)
        out = Case("FavorPlus", "reference", is_causal).attend(dual, k, v, feature_map)
        assert torch.autograd.forward_ad.unpack_dual(out).tangent.norm() > 0


SOFTMAX = {
    "merged, exact": (linattn.merged_attention, {"config": MergedKV(None, 40, bits=None)}),
    "merged": (linattn.merged_attention, {"config": MergedKV(None, 4, bits=None)}),
    "merged, causal": (linattn.merged_attention, {"config": MergedKV(2, 4, bits=4), "is_causal": True}),
    "softmax": (linattn.softmax_attention, {}),
    "softmax, causal": (linattn.softmax_attention, {"is_causal": True}),
    "softmax, biased": (linattn.softmax_attention, {"is_causal": True, "key_bias": -torch.ones(2, 1, 16).double()}),
}


@pytest.mark.parametrize("how", ["dual numbers", "jvp"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_has_forward_derivatives(name: str, how: str) -> None:
    """As its gradients say: torch's kernels, which lack them and take values as wide as keys, are left out."""
    (call, options), sizes = SOFTMAX[name], {"num_queries": 16, "num_keys": 16, "value_dim": HEAD_DIM}
    (q, k, v), (dq, dk, dv) = qkv(**sizes), qkv(**sizes, seed=9)

    def attend(*x):
        return call(*x, enable_gqa=True, **options)

    if how == "jvp":
        out, tangent = torch.func.jvp(attend, (q, k, v), (dq, dk, dv))
    else:
        with torch.autograd.forward_ad.dual_level():
            duals = map(torch.autograd.forward_ad.make_dual, (q, k, v), (dq, dk, dv))
            out, tangent = torch.autograd.forward_ad.unpack_dual(attend(*duals))
    torch.testing.assert_close(out, attend(q, k, v), rtol=1e-12, atol=1e-12)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad((attend(*leaves) * out).sum(), leaves)
    wanted = sum((x * y).sum() for x, y in zip(grads, (dq, dk, dv), strict=True))
    torch.testing.assert_close((tangent * out).sum(), wanted, rtol=1e-9, atol=1e-9)


def test_what_does_not_compose_raises() -> None:
    q, k, v = qkv()
    feature_map, learned = build("FavorPlus"), Learned(HEAD_DIM, 6, 2)
    with pytest.raises(NotImplementedError, match=r"jvp, jacfwd, hessian.*use backend='reference'"):
        torch.func.jvp(lambda q: linattn.linear_attention(q, k, v, feature_map, enable_gqa=True), (q,), (q,))
    torch.compiler.reset()
    for transform in (
        lambda q: torch.func.jvp(lambda x: linattn.linear_attention(x, k, v, feature_map, enable_gqa=True), (q,), (q,)),
        lambda q: torch.func.grad(lambda x: linattn.linear_attention(x, k, v, feature_map, enable_gqa=True).sum())(q),
    ):
        with pytest.raises(Exception, match=r"not supported by backend='blocked'"):
            torch.compile(transform, fullgraph=True)(q)

    def loss(weight, q):
        swapped = {"map.query_weight": weight}
        module = torch.nn.Module()
        module.map = learned
        module.forward = lambda q: linattn.linear_attention(q, k, v, module.map, enable_gqa=True).sum()
        return torch.func.functional_call(module, swapped, (q,))

    queries = torch.stack((q, q + 1))
    with pytest.raises(NotImplementedError, match="per-sample gradients"):
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(learned.query_weight.detach(), queries)
    weights = torch.stack((learned.query_weight.detach(),) * 2)
    with pytest.raises(NotImplementedError, match="vmap over a feature map's own parameters"):
        torch.func.vmap(loss, in_dims=(0, None))(weights, q)


@pytest.mark.parametrize("name", ["absorb", "read", "causal"])
@pytest.mark.parametrize("map_name", ["FavorPlus", "Expansion"])
def test_the_compiler_is_told_the_right_shapes(map_name: str, name: str, blocks_of) -> None:
    """Over seven blocks, hence two states kept."""
    blocks_of(3)
    feature_map = build(map_name)
    query, key, value = qkv(num_queries=20, num_keys=20)
    grouped = query.unflatten(1, (2, -1))
    tokens = {"absorb": [key, value], "read": [grouped]}
    inputs = [*tokens.get(name, [grouped, key, value]), *_state(feature_map).sums]
    arguments = (f"linattn.attention.backends.blocked.folds:{name.upper()}", 0, feature_map.handle, "", inputs, [])
    torch.library.opcheck(torch.ops.linattn.fold.default, arguments, test_utils="test_faketensor")


def _state(feature_map: linattn.feature_maps.FavorPlus) -> linattn.State:
    """A state of a few keys."""
    return linattn.linear_attention_with_state(*qkv(num_queries=4, num_keys=4), feature_map, enable_gqa=True).state


@pytest.mark.parametrize("map_name", [name for name in MAPS if name != "Learned"])
def test_maps_built_under_inference_mode_are_ordinary(map_name: str) -> None:
    """Built, fitted and used there; then differentiated through, drawn again and cast outside."""
    with torch.inference_mode():
        feature_map = build_anew(map_name)
        linattn.linear_attention(*qkv(), feature_map, enable_gqa=True)
    leaves = [x.requires_grad_() for x in qkv()]
    out = linattn.linear_attention(*leaves, feature_map, enable_gqa=True)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))
    for module in feature_map.modules():
        if isinstance(module, RandomFeatureMap):
            module.redraw(1)
    assert not any(x.is_inference() for x in feature_map.double().buffers())


@pytest.mark.parametrize("map_name", ["EluPlusOne", "Expansion", "FavorPlus"])
@pytest.mark.parametrize("length", [1, 13])
def test_a_recorded_graph_of_real_tensors_is_that_of_others(map_name: str, length: int) -> None:
    """What torch.fx records knows no choice that the example's numbers made."""
    feature_map = build(map_name).requires_grad_(False)

    def attend(q, k, v):
        return linattn.linear_attention(q, k, v, feature_map, is_causal=True, enable_gqa=True)

    given = {"num_queries": length, "num_keys": length}
    graph, others = make_fx(attend)(*qkv(**given)), [5 * x for x in qkv(seed=9, **given)]
    torch.testing.assert_close(graph(*others), attend(*others), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("map_name", ["EluPlusOne", "FavorPlus"])
def test_forward_mode_is_refused_in_graphs(map_name: str) -> None:
    """An operator of a graph passes on no tangent, and torch says nothing of it."""
    torch.compiler.reset()
    feature_map, (query, key, value) = build(map_name).requires_grad_(False), qkv(num_queries=3, num_keys=3)

    def attend(v):
        return linattn.linear_attention(query, key, v, feature_map, enable_gqa=True)

    def tangent(v):
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(attend(torch.autograd.forward_ad.make_dual(v, v))).tangent

    for backend in ("eager", "aot_eager"):
        with pytest.raises(NotImplementedError, match="use backend='reference'"):
            torch.compile(tangent, backend=backend)(value)
    with pytest.raises(NotImplementedError, match=r"dual numbers inside torch\.compile.* use backend='reference'"):
        torch.func.linearize(attend, value)


@pytest.mark.parametrize(("is_causal", "window"), [(False, None), (True, None), (True, 4)])
def test_a_redraw_before_a_compiled_backward_is_refused(is_causal: bool, window: int | None) -> None:
    """A graph's backward pass reads the map as it is then, in both parts of a call with a window."""
    torch.compiler.reset()
    feature_map, leaves = build_anew("FavorPlus"), [x.requires_grad_() for x in qkv()]

    def attend(*x):
        return linattn.linear_attention(*x, feature_map, is_causal=is_causal, window=window, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    compiled(*leaves).sum().backward()
    out = compiled(*leaves)
    feature_map.redraw(5)
    with pytest.raises(RuntimeError, match=r"another one in the forward pass .*seed=5.*redraw or fit after backward"):
        out.sum().backward()
    compiled(*leaves).sum().backward()
