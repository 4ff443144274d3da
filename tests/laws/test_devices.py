"""Everything stays on the device of the tensors: fake ones on a device that is not there refuse those of the CPU.

What is computed on a GPU is held by the files test_cuda.py, which need one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import layers
import linattn
from grid import BACKENDS, CAUSAL_MAPS, MAPS, build, in_turns, qkv, tokens
from linattn import MergedKV, positions
from linattn.kv_cache.coded_tokens import CodedTokens
from linattn.softmax import checking, precision
from linattn.softmax.tokens import Tokens

# A device type that every build of torch can name, and none has.
ELSEWHERE = "lazy"
LENGTH = 14
CONFIGS = (
    MergedKV(4, 6, bits=None),
    MergedKV(2, 5, bits=(4, 3)),
    MergedKV(2, 6, bits=4, coded=((4, 4), (5, 2))),
    MergedKV(3, 0, coded=((7, 3.5),)),
)


class Torch:
    """Torch as the checks see it: it knows no autocast elsewhere. Torch itself stays, whose compiler reads it once."""

    def is_autocast_enabled(self, kind: str) -> bool:
        return kind != ELSEWHERE and torch.is_autocast_enabled(kind)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def _named_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors ask for a module of the device's name."""
    monkeypatch.setattr(torch, ELSEWHERE, torch.cpu, raising=False)
    for module in (checking, precision):
        monkeypatch.setattr(module, "torch", Torch())


def stays_there(call: Callable[..., object], given: list[Tensor], *modules: nn.Module) -> None:
    """The law, for a call of these tensors and the modules that it uses."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for module in modules:
            module.requires_grad_(False)._apply(lambda x: mode.from_tensor(x).to(f"{ELSEWHERE}:0"))
        found = call(*(mode.from_tensor(x).to(f"{ELSEWHERE}:0") for x in given))
        # To take a state apart is arithmetic where a factor stands apart.
        leaves = pytree.tree_leaves(found)
    devices = [x.device.type for x in leaves if isinstance(x, Tensor)]
    assert devices
    assert set(devices) == {ELSEWHERE}


def masked() -> list[Tensor]:
    """Query, key, value, mask and bias."""
    return [*qkv(num_queries=LENGTH, num_keys=LENGTH), tokens(2, LENGTH) > -0.8, tokens(2, 2, LENGTH, seed=8)]


def test_tensors_of_the_cpu_are_refused() -> None:
    """What the laws below rest on."""
    query, key, value = qkv()
    with pytest.raises(Exception, match="device"):
        stays_there(lambda q, k: q @ k.mT + tokens(37, 37), [query[:, :2], key])
    with pytest.raises(ValueError, match="device"):
        stays_there(lambda q, k: linattn.softmax_attention(q, k, value, enable_gqa=True), [query, key])


@pytest.mark.parametrize(("name", "backend", "is_causal"), in_turns(MAPS, BACKENDS, [False, True]))
def test_calls_with_any_map(name: str, backend: str, is_causal: bool) -> None:
    """In both directions and by both backends, one direction by each; with a window and without, one by each."""
    options = {"is_causal": is_causal and name in CAUSAL_MAPS, "enable_gqa": True, "backend": backend}
    feature_map = build(name)
    # By each backend with a window in one direction and without in the other, of maps in turns.
    may_have_window = feature_map.softmax_kernel and feature_map.positive_normalizer
    options["window"] = 4 if may_have_window and (is_causal + MAPS.index(name) // 2) % 2 else None

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor) -> object:
        return linattn.linear_partial(query, key, value, feature_map, key_mask=mask, key_bias=bias, **options)

    stays_there(attend, masked(), feature_map)


@pytest.mark.parametrize("name", CAUSAL_MAPS)
def test_streams_with_any_map(name: str) -> None:
    feature_map = build(name)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> object:
        first = linattn.linear_attention_with_state(query, key, value, feature_map, enable_gqa=True)
        token = [x[:, :, :1] for x in (query, key, value)]
        later = linattn.linear_attention_with_state(*token, feature_map, first.state, enable_gqa=True)
        return first, later, later.state.read(feature_map, query)

    stays_there(attend, masked()[:3], feature_map)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_streams_of_merged_keys(config: MergedKV) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> object:
        first = linattn.merged_attention_with_state(query, key, value, config, enable_gqa=True, key_mask=mask)
        token = [x[:, :, :1] for x in (query, key, value)]
        later = linattn.merged_attention_with_state(*token, config, first.state, enable_gqa=True)
        few = [x[:, :, :8] for x in (query, key, value)]
        last = linattn.merged_attention_with_state(*few, config, later.state, enable_gqa=True).state
        return first, later, last, last.tokens(), last.read(query)

    stays_there(attend, masked()[:4])


@pytest.mark.parametrize(("device", "most"), [("cpu", 256), (f"{ELSEWHERE}:0", 300)])
def test_codes_are_read_a_piece_at_a_time_on_a_cpu_alone(
    device: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token starts several dozen operations for each piece, as long as it takes to run them on a GPU."""
    pieces, decoded = [], CodedTokens.decoded

    def counted(coded: CodedTokens, **options: bool) -> Tokens:
        pieces.append(coded.bias.shape[2])
        return decoded(coded, **options)

    config, size = MergedKV(64, 0, coded=((300, 4),)), (1, 32, 448, 64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (torch.empty(size, device=device) for _ in range(3))
        state = linattn.merged_attention_with_state(query, key, value, config, backend="torch").state
        monkeypatch.setattr(CodedTokens, "decoded", counted)
        token = [x[:, :, :1] for x in (query, key, value)]
        linattn.merged_attention_with_state(*token, config, state, backend="torch")
    assert max(pieces) == most


@pytest.mark.parametrize("config", [MergedKV(None, 6, bits=None), MergedKV(7, 20, bits=None)], ids=str)
def test_merged_keys_without_causality(config: MergedKV) -> None:
    stays_there(
        lambda q, k, v, m, b: linattn.merged_attention(q, k, v, config, key_mask=m, key_bias=b, enable_gqa=True),
        masked(),
    )


def test_gates_positions_and_softmax() -> None:
    feature_map = build("FavorPlus")

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor) -> object:
        options, gates = {"key_mask": mask, "enable_gqa": True}, positions.Gates(-bias.square())
        return (
            linattn.softmax_attention(query, key, value, key_bias=bias, is_causal=True, **options),
            positions.gated_attention_with_state(query, key, value, feature_map, gates, **options),
            positions.rotary(query, key, mask.long().cumsum(-1)),
            positions.relative_bias_attention(
                query, key, value, feature_map, torch.cat((bias[0], bias[0]), -1)[:, 1:], **options
            ),
        )

    stays_there(attend, masked(), feature_map)


@pytest.mark.parametrize("kind", layers.LAYERS)
def test_layers(kind: str) -> None:
    layer = layers.LAYERS[kind](is_causal=True)

    def attend(x: Tensor) -> object:
        first = layer.forward_with_state(x)
        return layer(x), first, layer.forward_with_state(x[:, :1], first.state)

    stays_there(attend, [layers.tokens(2, 9)], layer)


def test_a_state_that_has_faded_goes_on_beside_another_default_device() -> None:
    q, k, v = qkv(num_queries=8, num_keys=8, head_dim=4, value_dim=4)
    feature_map = build("FavorPlus", head_dim=4)
    before = linattn.linear_attention_with_state(q, k, v, feature_map, enable_gqa=True).state.decay(-100.0)
    wanted = linattn.linear_attention_with_state(q, k, v, feature_map, before, enable_gqa=True).out
    with torch.device("meta"):
        out = linattn.linear_attention_with_state(q, k, v, feature_map, before, enable_gqa=True).out
    assert torch.equal(out, wanted)
