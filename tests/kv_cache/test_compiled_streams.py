"""A stream with merged keys in compiled code: the rows and the keys of plain torch, in float32, however it is cut."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import linattn
from grid import relative_error
from linattn import MergedKV
from linattn.kv_cache import compiled, stream
from linattn.softmax import extensions
from merged_rows import LENGTH, TOLERANCE, biases, everywhere, given, leaves, streamed

pytest.importorskip("linattn_compiled")

PARTS = (
    MergedKV(4, 6, bits=None, num_sinks=0),
    MergedKV(1, 3, bits=None, num_sinks=0),
    MergedKV(1, 20, bits=None, num_sinks=0),
    MergedKV(7, 20, bits=None, num_sinks=0),
    MergedKV(64, 100, bits=None, num_sinks=0),
    MergedKV(129, 30, bits=None, num_sinks=0),
    MergedKV(20, 330, bits=None, num_sinks=0),
)


# Grouped heads with every kind of bias, which is of keys whatever queries there are; heads of their own with one.
@pytest.mark.parametrize(
    ("groups", "bias"), [*((3, bias) for bias in ("none", "masks", "biases", "heads")), (1, "heads")]
)
@pytest.mark.parametrize("config", PARTS, ids=str)
def test_it_is_what_plain_torch_is(config: MergedKV, groups: int, bias: str) -> None:
    """Which keys are merged included: no two of these cost the same to rounding."""
    # In blocks of one token a third of the text is as good as all of it.
    length = LENGTH if config.blocks.size > 1 else LENGTH // 3
    weights = None if bias == "none" else biases(bias)[..., :length]
    tokens = tuple(x[:, :, :length] for x in given(groups))
    ours, theirs = (streamed(tokens, config, backend, (3 * length // 5,), weights) for backend in ("compiled", "torch"))
    torch.testing.assert_close(ours[0], theirs[0], rtol=TOLERANCE, atol=TOLERANCE)
    for x, y in zip(leaves(ours[1]), leaves(theirs[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE)
    # A key that stays alone keeps its bias to the bit.
    own = torch.zeros(1) if weights is None else weights
    for pair in zip(ours[1].groups, theirs[1].groups, strict=True):
        assert torch.equal(*(torch.isin(keys.merged.bias, own) for keys in pair))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (64, 64), (33, 70), (1, 1), (256, 16)])
def test_widths_fill_vectors_or_not(head_dim: int, value_dim: int) -> None:
    """Enough merged keys are softmax attention, and fewer are those of plain torch."""
    tokens = given(3, head_dim=head_dim, value_dim=value_dim)
    truth = linattn.softmax_attention(*(x.double() for x in tokens), is_causal=True, enable_gqa=True)
    bound = TOLERANCE * max(head_dim / 8, 1)
    found = streamed(tokens, MergedKV(20, LENGTH, bits=None, num_sinks=0), cuts=(130,))[0]
    torch.testing.assert_close(found.double(), truth, rtol=bound, atol=bound)
    ours, theirs = (
        streamed(tokens, MergedKV(20, 40, bits=None, num_sinks=0), backend)[0] for backend in ("compiled", "torch")
    )
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize("cuts", [(1,), (64, 128), (5, 6, 7, 130), tuple(range(1, LENGTH))], ids=lambda x: str(len(x)))
@pytest.mark.parametrize("config", PARTS, ids=str)
def test_a_stream_may_be_cut_anywhere(config: MergedKV, cuts: tuple[int, ...]) -> None:
    """What is kept is the same to the bit; a row alone adds its products up in another order."""
    tokens, bias = given(2), biases("biases")
    whole, parts = (streamed(tokens, config, cuts=each, bias=bias) for each in ((), cuts))
    torch.testing.assert_close(parts[0], whole[0], rtol=TOLERANCE, atol=TOLERANCE)
    assert all(torch.equal(x, y) for x, y in zip(leaves(parts[1]), leaves(whole[1]), strict=True))


def test_a_stream_may_change_backends() -> None:
    tokens, config = given(), MergedKV(16, 40, bits=None, num_sinks=0)
    state, outs = None, []
    for start, backend in ((0, "compiled"), (90, "torch"), (150, "compiled"), (151, "auto"), (170, "compiled")):
        stop = {0: 90, 90: 150, 150: 151, 151: 170, 170: LENGTH}[start]
        out, state = linattn.merged_attention_with_state(
            *(x[:, :, start:stop] for x in tokens), config, state, backend=backend
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), streamed(tokens, config)[0], rtol=TOLERANCE, atol=TOLERANCE)


def test_later_tokens_change_nothing_before_them() -> None:
    tokens, config = given(), MergedKV(16, 40, bits=None, num_sinks=0)
    before = streamed(tokens, config)[0]
    for x in tokens:
        x[:, :, 200:] *= 1e3
    assert torch.equal(streamed(tokens, config)[0][:, :, :200], before[:, :, :200])


def test_masked_tokens_are_inert() -> None:
    config, bias = MergedKV(16, 40, bits=None, num_sinks=0), biases("masks")
    results = []
    for filling in (0.0, torch.nan, torch.inf, 1e30):
        query, *tokens = given()
        key, value = (x.masked_fill((bias == -torch.inf).unsqueeze(-1), filling) for x in tokens)
        results.append(streamed((query, key, value), config, bias=bias)[0])
    assert all(torch.equal(x, results[0]) for x in results[1:])
    assert (results[0][1] == 0).all()


def test_nan_stays_in_its_head_and_after_it() -> None:
    config, (query, key, value) = MergedKV(16, 40, bits=None, num_sinks=0), given()
    clean = streamed((query, key, value), config)[0]
    key[0, 1, 150, 0] = torch.nan
    query[1, 0, 90, 0] = torch.nan
    found = streamed((query, key, value), config)[0]
    assert found[0, 1, 150:].isnan().all()
    assert found[1, 0, 90].isnan().all()
    assert torch.equal(found[0, 0], clean[0, 0])
    assert torch.equal(found[0, 1, :150], clean[0, 1, :150])
    assert torch.equal(found[1, 0, :90], clean[1, 0, :90])
    assert torch.equal(found[1, 1], clean[1, 1])


def test_an_infinite_value_takes_no_key_its_weight() -> None:
    """However far it is from all others: no distance is a NaN, which would be nobody's least."""
    query, key, value = given()
    value[0, 1, 150, 0] = torch.inf
    options = {"is_causal": True, "config": MergedKV(16, 40, bits=None, num_sinks=0)}
    tokens = query, key, value
    ours, theirs = (linattn.merged_partial(*tokens, backend=name, **options) for name in ("compiled", "torch"))
    torch.testing.assert_close(ours.log_normalizer, theirs.log_normalizer, rtol=TOLERANCE, atol=TOLERANCE)
    assert ours.out[..., 1:].isfinite().all()


@pytest.mark.parametrize("scale", [1e-3, 30.0, 3e4])
def test_short_and_long_tokens_keep_their_digits(scale: float) -> None:
    """In float64 plain torch merges the same keys: an error of theirs is one of rounding, of logits in their size."""
    query, key, value = given()
    config, tokens = MergedKV(16, 40, bits=None, num_sinks=0), (query, scale * key, value / scale)
    found = streamed(tokens, config)[0]
    truth = streamed(tuple(x.double() for x in tokens), config, "torch")[0]
    # Logits are 70·scale at most.
    bound = 8 * max(70 * scale, 25) * torch.finfo(torch.float32).eps
    assert relative_error(found.double(), truth) < min(bound, 0.1)
    assert found.isfinite().all()


def test_outputs_lie_in_the_hull_of_the_values() -> None:
    query, key, value = given()
    for scale in (0.7, 30.0, 1e6):
        out = streamed((query, scale * key, value), MergedKV(4, 6, bits=None, num_sinks=0))[0]
        slack = TOLERANCE * value.abs().max()
        assert (out <= value.amax(2, keepdim=True) + slack).all()
        assert (out >= value.amin(2, keepdim=True) - slack).all()


def test_keys_before_the_first_query_are_merged_by_no_sample() -> None:
    """All of them alike then, as in plain torch: by numbers of equal cost in the order of their masses."""
    query, key, value = given()
    options = {"is_causal": True, "config": MergedKV(16, 40, bits=None, num_sinks=0)}
    for rows in (1, 40, LENGTH - 1):
        few = query[:, :, -rows:]
        ours, theirs = (
            linattn.merged_partial(few, key, value, backend=backend, **options) for backend in ("compiled", "torch")
        )
        # Of equal distances a minimum's place is anyone's: what is merged may differ, but not by much in its sum.
        if rows == LENGTH - 1:
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
        else:
            assert (ours.out <= value.amax(2, keepdim=True) + TOLERANCE).all()
            assert (ours.out >= value.amin(2, keepdim=True) - TOLERANCE).all()


def test_log_normalisers_are_those_of_plain_torch() -> None:
    tokens, options = (
        given(3),
        {"is_causal": True, "enable_gqa": True, "config": MergedKV(7, 20, bits=None, num_sinks=0)},
    )
    bias = biases("heads")
    ours, theirs = (
        linattn.merged_partial(*tokens, key_bias=bias, backend=backend, **options).log_normalizer
        for backend in ("compiled", "torch")
    )
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    assert (ours[1, 3:] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_of_16_bits_lose_no_more_than_their_own_rounding(dtype: torch.dtype) -> None:
    tokens, config = tuple(x.to(dtype) for x in given()), MergedKV(16, 40, bits=None, num_sinks=0)
    (ours, kept), (theirs, others) = (streamed(tokens, config, backend, (100,)) for backend in ("compiled", "torch"))
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=unit, atol=unit)
    pair = [everywhere(tokens, config, backend) for backend in ("compiled", "torch")]
    torch.testing.assert_close(*pair, rtol=unit, atol=unit)
    assert ours.dtype == pair[0].dtype == dtype
    assert [x.dtype for x in leaves(kept)] == [x.dtype for x in leaves(others)]


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, config, before = given(), MergedKV(16, 40, bits=None, num_sinks=0), torch.get_num_threads()
    alone = streamed(tokens, config)[0], everywhere(tokens, config)
    monkeypatch.setattr(compiled, "_MANY", 0)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(streamed(tokens, config)[0], alone[0])
        assert torch.equal(everywhere(tokens, config), alone[1])
    finally:
        torch.set_num_threads(before)


def test_a_state_is_not_written_to_and_may_lie_apart() -> None:
    tokens, config = given(), MergedKV(16, 40, bits=None, num_sinks=0)
    first, then = (tuple(x[:, :, piece] for x in tokens) for piece in (slice(200), slice(200, None)))
    state = linattn.merged_attention_with_state(*first, config).state
    copies = [x.clone() for x in leaves(state)]
    apart = pytree.tree_map(lambda x: torch.stack((x, x), -1)[..., 0], state)
    found, others = (
        linattn.merged_attention_with_state(*then, config, each, backend="compiled") for each in (state, apart)
    )
    assert torch.equal(found.out, others.out)
    assert all(torch.equal(x, y) for x, y in zip(leaves(state), copies, strict=True))


@pytest.fixture
def _eight_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_eight_threads")
def test_auto_takes_it_for_many_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for no fewer heads than half of the threads: four here."""
    used = []
    run = stream.stream_in_compiled_code

    def counted(*call: object, **options: object) -> object:
        used.append(1)
        return run(*call, **options)

    monkeypatch.setattr("linattn.kv_cache.stream.stream_in_compiled_code", counted)
    tokens, config = given(), MergedKV(16, 40, bits=None, num_sinks=0)
    streamed(tokens, config, "auto")
    assert len(used) == 1
    streamed(tokens, config, "torch")
    streamed(tuple(x[:, :, :60] for x in tokens), config, "auto")
    streamed(tuple(x.double() for x in tokens), config, "auto")
    streamed(tuple(x.clone().requires_grad_() for x in tokens), config, "auto")
    streamed(tokens, MergedKV(16, 40, bits=4, num_sinks=0), "auto")
    torch.set_num_threads(9)
    streamed(tokens, config, "auto")
    torch.set_num_threads(8)
    with FlopCounterMode(display=False) as counts:
        streamed(tokens, config, "auto")
    assert counts.get_total_flops() > 0
    assert len(used) == 1


def test_gradients_of_what_is_kept_go_through_plain_torch() -> None:
    tokens, config = given(), MergedKV(16, 40, bits=None, num_sinks=0)
    first, then = (tuple(x[:, :, piece] for x in tokens) for piece in (slice(0, 200), slice(200, None)))
    leaf = first[2].clone().requires_grad_()
    state = linattn.merged_attention_with_state(*first[:2], leaf, config).state
    out = linattn.merged_attention_with_state(*then, config, state).out
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert math.isfinite(grad.sum().item())
    assert grad.abs().sum() > 0
    # Of what is near there are none here.
    recent = type(state.keys.recent)(*(x.detach() for x in state.keys.recent))
    state = dataclasses.replace(state, keys=dataclasses.replace(state.keys, recent=recent))
    with pytest.raises(ValueError, match="gradients follow this call"):
        linattn.merged_attention_with_state(*then, config, state, backend="compiled")


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (lambda x: x.double(), MergedKV(4, 6, bits=None, num_sinks=0), "takes float32, bfloat16 and float16"),
        (lambda x: x[:, :, :0].double(), MergedKV(4, 6, bits=None, num_sinks=0), "takes float32, bfloat16 and float16"),
        (lambda x: x.clone().requires_grad_(), MergedKV(4, 6, bits=None, num_sinks=0), "gradients follow this call"),
        (lambda x: x, MergedKV(4, 6, bits=None), "no attention sinks beside exact keys, and 4 are to be kept"),
    ],
)
def test_it_says_why_not(change: object, config: MergedKV, words: str) -> None:
    tokens = tuple(change(x) for x in given())
    with pytest.raises(ValueError, match=words):
        linattn.merged_attention(*tokens, config, is_causal=True, backend="compiled")


def test_runs_of_tokens_without_a_query_are_taken_in() -> None:
    """The last two tokens have queries, and a hole is before them."""
    query, key, value = given()
    mask = torch.ones(len(key), key.shape[2], dtype=torch.bool)
    mask[:, 5] = False
    tokens, config = (query[:, :, -2:], key, value), MergedKV(4, 6, bits=None, num_sinks=0)
    outs = [
        linattn.merged_attention(*tokens, config, key_mask=mask, is_causal=True, enable_gqa=True, backend=backend)
        for backend in ("torch", "compiled")
    ]
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("config", [MergedKV(4, 6, bits=None, num_sinks=0), MergedKV(4, 20, bits=3)], ids=str)
def test_calls_without_a_query_run_in_it_too(config: MergedKV, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those without a token; what is kept is what a call with queries keeps of them, if its sample had them."""
    query, key, value = given()
    chunks = ((0, 0), (0, 40), (40, 40), (40, key.shape[2]))
    kept = []
    for backend in ("torch", "compiled"):
        if backend == "compiled":
            monkeypatch.setattr(stream, "stream_in_torch", partial(_in_compiled_code, stream.stream_in_torch))
        state = None
        for start, stop in chunks:
            tokens = query[:, :, :0], key[:, :, start:stop], value[:, :, start:stop]
            out, state = linattn.merged_attention_with_state(*tokens, config, state, enable_gqa=True, backend=backend)
            assert out.shape == (*query.shape[:2], 0, value.shape[-1])
        kept.append(state.tokens())
    for x, y in zip(*kept, strict=True):
        torch.testing.assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE)


def _in_compiled_code(run: Callable[..., object], *given: object, in_compiled_code: bool, **options: object) -> object:
    """A stream in plain torch, which must be one whose codes are written elsewhere."""
    assert in_compiled_code
    return run(*given, in_compiled_code=in_compiled_code, **options)


@pytest.mark.parametrize("config", [MergedKV(4, 6, bits=None, num_sinks=0), MergedKV(4, 20, bits=3)], ids=str)
def test_values_of_no_width_are_refused(config: MergedKV) -> None:
    query, key, value = given()
    with pytest.raises(ValueError, match="takes values of a width, and these have none"):
        linattn.merged_attention(
            query, key, value[..., :0], config, is_causal=True, enable_gqa=True, backend="compiled"
        )


def test_graphs_and_maps_of_functions_leave_it_alone() -> None:
    """Of as many tokens as it would take, and no more: a graph has each of their blocks."""
    torch.compiler.reset()
    query, key, value = (x[:, :, :200] for x in given())

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return linattn.merged_attention(query, key, value, MergedKV(64, 40, bits=None, num_sinks=0), is_causal=True)

    alone = call(query, key, value)
    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(query, key, value), alone, rtol=TOLERANCE, atol=TOLERANCE)
    mapped = torch.vmap(call, in_dims=(None, 1, None))(query, torch.stack((key, key), 1), value)
    torch.testing.assert_close(mapped[1], alone, rtol=TOLERANCE, atol=TOLERANCE)


def test_without_the_wheel_plain_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "missing", lambda _: "linattn-compiled is not installed")
    tokens, config = given(), MergedKV(16, 40, bits=None, num_sinks=0)
    assert torch.equal(streamed(tokens, config, "auto")[0], streamed(tokens, config, "torch")[0])
    with pytest.raises(ValueError, match="linattn-compiled is not installed"):
        streamed(tokens, config)


def test_a_window_for_texts_of_any_length_takes_the_memory_of_this_one() -> None:
    tokens = [torch.randn(1, 2, 40, 8) for _ in range(3)]
    wanted = linattn.softmax_attention(*tokens, is_causal=True)
    for window, num_merged in ((2**30, 16), (4, 2**30)):
        config = MergedKV(window, num_merged, bits=None, num_sinks=0)
        found = linattn.merged_attention(*tokens, config, is_causal=True, backend="compiled")
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_torch_s_default_device_and_dtype_change_nothing(device: str) -> None:
    """Streams in few bits and in none, and merged keys with every key in view."""
    tokens = [torch.randn(1, 2, 100, 8) for _ in range(3)]
    calls = [
        partial(linattn.merged_attention, *tokens, config, is_causal=is_causal, backend="compiled")
        for config, is_causal in (
            (MergedKV(4, 6, bits=None, num_sinks=0), True),
            (MergedKV(4, 6, bits=None, num_sinks=0), False),
            (MergedKV(4, 20, bits=4, coded=((10, 6),)), True),
        )
    ]
    wanted = [call() for call in calls]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device(device):
            found = [call() for call in calls]
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
