"""Shapes without values: under FakeTensorMode a call gives the shapes, dtypes and devices of a real one, and what
torch.export makes of a layer is the layer.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

import layers
import linattn
from grid import CAUSAL_MAPS, HEAD_DIM, MAPS, RECORDED_MAPS, build, build_anew, qkv, tokens
from linattn import MergedKV, nn, positions
from merged_rows import MergedLayer

MERGED = (MergedKV(4, 6, bits=None), MergedKV(4, 6, bits=4), MergedKV(None, 6, bits=None))
LENGTH = 20
WIDTH = 2 * HEAD_DIM


def given() -> list[Tensor]:
    """Query, key, value, mask and bias."""
    return [*qkv(num_queries=LENGTH, num_keys=LENGTH), tokens(2, LENGTH) > -0.8, tokens(2, 2, LENGTH, seed=8)]


def has_the_shapes_of_a_real_call(call: Callable[..., object], arguments: list[Tensor]) -> None:
    """The law; maps have values, which torch mixes with shapes where it is told to."""
    wanted = described(call(*arguments))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert described(call(*map(mode.from_tensor, arguments)), FakeTensor) == wanted


def described(found: object, kind: type = Tensor) -> list[object]:
    """What is told of each tensor of a result."""
    leaves = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
    assert leaves
    assert all(isinstance(x, kind) for x in leaves)
    return [(x.shape, x.dtype, x.device) for x in leaves]


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", MAPS)
def test_calls_with_any_map(name: str, is_causal: bool) -> None:
    if is_causal and name not in CAUSAL_MAPS:
        return
    feature_map = build(name).requires_grad_(False)
    for window in (None, 4) if feature_map.softmax_kernel and feature_map.positive_normalizer else (None,):
        options = {"is_causal": is_causal, "enable_gqa": True, "window": window}

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor, options=options) -> object:
            plain = linattn.linear_attention(query, key, value, feature_map, **options)
            masked = linattn.linear_partial(query, key, value, feature_map, key_mask=mask, key_bias=bias, **options)
            return plain, *masked

        has_the_shapes_of_a_real_call(attend, given())


def streamed(call: Callable[..., object], how: object) -> Callable[..., object]:
    """A stream of a text and a token after it, its state with them, by a map or with merged keys."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> object:
        first = call(query, key, value, how, enable_gqa=True)
        token = [x[:, :, :1] for x in (query, key, value)]
        return call(*token, how, first.state, enable_gqa=True)

    return attend


@pytest.mark.parametrize("name", CAUSAL_MAPS)
def test_streams_with_any_map(name: str) -> None:
    attend = streamed(linattn.linear_attention_with_state, build(name).requires_grad_(False))
    has_the_shapes_of_a_real_call(attend, given()[:3])


@pytest.mark.parametrize("config", MERGED, ids=str)
def test_merged_keys(config: MergedKV) -> None:
    query, key, value, mask, bias = given()
    for is_causal in (False, True) if config.window else (False,):

        def attend(*x: Tensor, is_causal: bool = is_causal) -> Tensor:
            return linattn.merged_attention(
                *x[:3], config, key_mask=x[3], key_bias=x[4], is_causal=is_causal, enable_gqa=True
            )

        has_the_shapes_of_a_real_call(attend, [query, key, value, mask, bias])
    if config.window:
        has_the_shapes_of_a_real_call(streamed(linattn.merged_attention_with_state, config), [query, key, value])


MAP = build("FavorPlus")
OTHERS: dict[str, Callable[..., object]] = {
    "softmax_attention": lambda q, k, v, m, b: linattn.softmax_attention(
        q, k, v, key_mask=m, key_bias=b, is_causal=True, enable_gqa=True
    ),
    "softmax_attention of the last queries": lambda q, k, v, *_: linattn.softmax_attention(
        q[:, :, 3:], k, v, is_causal=True, enable_gqa=True
    ),
    "softmax_partial": lambda q, k, v, m, b: linattn.softmax_partial(q, k, v, key_mask=m, key_bias=b, enable_gqa=True),
    "attention_rows": lambda q, k, v, m, b: linattn.attention_rows(
        q, k, MAP, torch.zeros_like(m[0], dtype=torch.int64), key_mask=m, enable_gqa=True
    ),
    "relative_bias": lambda q, k, v, m, b: positions.relative_bias_attention(
        q, k, v, MAP, torch.cat((b[0], b[0]), -1)[:, 1:], key_mask=m, enable_gqa=True
    ),
    "gated": lambda q, k, v, m, b: positions.gated_attention_with_state(
        q, k, v, MAP, positions.Gates(-b.square()), key_mask=m, enable_gqa=True
    ),
    "rotary": lambda q, k, v, m, b: positions.rotary(q, k, m.long().cumsum(-1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls(name: str) -> None:
    has_the_shapes_of_a_real_call(OTHERS[name], given())


def test_where_sequences_start_is_asked_for() -> None:
    with FakeTensorMode():
        fake = [torch.empty(1, 2, LENGTH, HEAD_DIM) for _ in range(3)]
        starts = torch.tensor([0, 9, LENGTH])
        with pytest.raises(ValueError, match="cu_seqlens says how long sequences are, and a fake tensor has no values"):
            linattn.linear_attention_packed(*fake, MAP, starts)


def test_a_map_is_known_again_after_its_shapes_were_traced() -> None:
    """A digest that could not be taken is not kept."""
    feature_map, known = build("FavorPlus"), build("FavorPlus").fingerprint()
    # A copy derives anew what was there before its first use.
    feature_map.query(torch.ones(1, HEAD_DIM, dtype=torch.float64))
    with FakeTensorMode() as mode:
        shapes = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in feature_map.named_buffers()}
        assert all(isinstance(x, FakeTensor) for x in shapes.values())
    with mode, _reparametrize_module(feature_map, shapes):
        assert "unread" in feature_map.fingerprint()
    assert feature_map.fingerprint() == known
    with FakeTensorMode():
        assert "unread" in linattn.feature_maps.FavorPlus(HEAD_DIM, 12).fingerprint()


def exported_is_eager(layer: torch.nn.Module, *x: Tensor, **options: Tensor) -> None:
    """The law, for values other than those it was exported with too."""
    layer = layer.eval()
    with torch.no_grad():
        program = torch.export.export(layer, x, options).module()
        others = {name: mask.flip(0, 1) for name, mask in options.items()}
        for given, masks in ((x, options), (tuple(each.flip(0) for each in x), others)):
            torch.testing.assert_close(program(*given, **masks), layer(*given, **masks), rtol=1e-10, atol=1e-10)


def padding(batch: int, length: int) -> Tensor:
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, : length // 3] = False
    return mask


# Causal ones are gated or not in turns.
EXPORTED = [(name, "plain") for name in RECORDED_MAPS]
EXPORTED += [(name, ("causal", "gated")[i % 2]) for i, name in enumerate(x for x in RECORDED_MAPS if x in CAUSAL_MAPS)]


@pytest.mark.parametrize(("name", "kind"), EXPORTED)
def test_layers_of_any_map_are_exported(name: str, kind: str) -> None:
    """A gate's state asks for the map's fingerprint, of tensors that the exporter replaces by shapes."""
    torch.manual_seed(0)
    for is_trained in (False, True) if list(build(name).parameters()) else (False,):
        options = {"plain": {}, "causal": {"is_causal": True}}.get(
            kind, {"is_causal": True, "gate": positions.ForgetGate(WIDTH, 2)}
        )
        layer = nn.LinearAttention(WIDTH, 2, build(name).requires_grad_(is_trained), **options).double()
        exported_is_eager(layer, tokens(2, 13, WIDTH))


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("kind", layers.LAYERS)
def test_layers_with_padding_are_exported(kind: str, is_causal: bool) -> None:
    if not is_causal and kind not in layers.BIDIRECTIONAL:
        return
    layer = layers.LAYERS[kind](is_causal=is_causal)
    exported_is_eager(layer, layers.tokens(2, 7), key_mask=padding(2, 7))


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_merged_keys_with_padding_are_exported(is_causal: bool) -> None:
    torch.manual_seed(0)
    exported_is_eager(MergedLayer(is_causal=is_causal).double(), tokens(2, 13, 16), key_mask=padding(2, 13))


def test_models_with_padding_are_exported() -> None:
    torch.manual_seed(0)
    text = layers.text(2, 13)
    blocks = [nn.Block(layers.LAYERS[kind](is_causal=True)) for kind in ("gated", "rotary", "softmax", "random")]
    exported_is_eager(nn.LinearLM(layers.VOCABULARY, blocks).double(), text, key_mask=padding(2, 13))
    block = nn.Block(layers.LAYERS["softmax-rotary"]())
    exported_is_eager(block, layers.tokens(2, 13), key_mask=padding(2, 13))


class Step(torch.nn.Module):
    """One call of a stream."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.feature_map = build(name)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, state: linattn.State) -> object:
        return linattn.linear_attention_with_state(query, key, value, self.feature_map, state, enable_gqa=True)


@pytest.mark.parametrize("name", ["FavorPlus", "LearnedExponential", "Expansion", "Taylor", "Centred-Balanced-Sderf"])
def test_steps_are_exported_with_the_map_that_their_state_was_built_with(name: str) -> None:
    """By its weights: a state of other weights is refused while it is exported."""
    step, (query, key, value) = Step(name), qkv()
    with torch.no_grad():
        state = linattn.linear_attention_with_state(query, key, value, step.feature_map, enable_gqa=True).state
        token = qkv(num_queries=1, num_keys=1, seed=8)
        found, wanted = torch.export.export(step, (*token, state)).module()(*token, state), step(*token, state)
        torch.testing.assert_close(found.out, wanted.out, rtol=1e-10, atol=1e-10)
        assert found.state.built_with == wanted.state.built_with
        weights = list(step.feature_map.parameters())
        if weights:
            weights[0].add_(1.0)
            with pytest.raises(ValueError, match="the state was built with"):
                torch.export.export(step, (*token, state))


def test_a_program_that_another_process_exported_is_refused(tmp_path: Path, run_program) -> None:
    """It finds its map by a number, which no other map may have."""
    layer = nn.LinearAttention(WIDTH, 2, build("FavorPlus")).double().eval()
    torch.export.save(torch.export.export(layer, (tokens(2, 7, WIDTH),)), tmp_path / "program.pt2")
    script = """
        import sys, torch, linattn.attention.backends.blocked.opaque
        maps = [linattn.feature_maps.FavorPlus(8, 12) for _ in range(1000)]
        program = torch.export.load(sys.argv[1]).module()
        try:
            program(torch.randn(2, 7, 16, dtype=torch.float64))
        except RuntimeError as error:
            print(error)
    """
    found = run_program(textwrap.dedent(script), tmp_path / "program.pt2")
    assert "runs in the process that exported it" in found.stdout


@pytest.mark.parametrize("gate", [None, positions.ForgetGate(WIDTH, 2), positions.FixedDecay.retnet(2)], ids=repr)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((nn.LinearAttention, name) for name in (None, "Rotary", "LearnedCodes")),
        *((nn.SoftmaxAttention, name) for name in (None, "Rotary")),
    ],
)
def test_layers_on_the_meta_device_are_built_loaded_and_refuse_calls_in_words(kind, name, gate) -> None:
    def built(device: str) -> nn.Attention:
        encoding = None
        if name is not None:
            encoding = positions.Rotary(8) if name == "Rotary" else positions.LearnedCodes(8, 4, max_length=9)
        feature_map = [build("FavorPlus") if name != "LearnedCodes" else linattn.feature_maps.FavorPlus(12, 8)]
        feature_map = feature_map if kind is nn.LinearAttention else []
        options = {"is_causal": True, "gate": copy.deepcopy(gate), "positions": encoding, "device": device}
        return kind(WIDTH, 2, *feature_map, **options)

    layer, real, x = built("meta"), built("cpu"), torch.randn(1, 5, WIDTH)
    for call in (layer, layer.forward_with_state):
        with pytest.raises(ValueError, match=r"meta device.*attention needs values: move the tensors"):
            call(x.to("meta"))
    layer.to_empty(device="cpu").load_state_dict(real.state_dict())
    assert torch.equal(layer(x), real(x))


@pytest.mark.parametrize("name", ["FavorPlus", "Taylor", "Hyperbolic"])
def test_layers_with_rotary_positions_are_built_under_a_fake_mode(name: str) -> None:
    with FakeTensorMode():
        layer = nn.LinearAttention(WIDTH, 2, build_anew(name), positions=positions.Rotary(8))
        assert layer(torch.randn(2, 7, WIDTH)).shape == (2, 7, WIDTH)


WITH_FITTED = {
    "transform": lambda **fitted: linattn.feature_maps.Balanced(linattn.feature_maps.Taylor(2), **fitted),
    "second_moment": lambda **fitted: linattn.feature_maps.Sderf(2, 4, **fitted),
}


@pytest.mark.parametrize("name", WITH_FITTED)
def test_fitted_tensors_are_given_and_loaded_under_a_fake_mode(name: str) -> None:
    with FakeTensorMode():
        first, second = WITH_FITTED[name](**{name: torch.eye(2)}), WITH_FITTED[name]()
        second.load_state_dict(first.state_dict())
        assert second.query(torch.ones(3, 2)).shape == first.query(torch.ones(3, 2)).shape
