"""A graph recorded of a linearized model takes other masks than the one it was recorded with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model

import linattn
from grid import default
from linattn.feature_maps import FEATURE_MAPS
from linattn.hf import LinearLMConfig, LinearLMForCausalLM, linearize_

# A graph of one layer reads its mask as one of many does, and is recorded in a fraction of the time.
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97}
MAPS = ("FavorPlus(num_features=16)", "FavorPlus(num_features=16) + window 4")
MERGED = ("merged 8", "window 4 + merged 4", "window 4 + merged 64")
# Three blocks of a window of 4: a graph has each of them, and one more tells no more.
LENGTH = 12


class Called(nn.Module):
    """A model as a function of ids and a mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The first output."""
        out: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        return out


class Encoder(Called):
    """One that has no cache."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The first output."""
        out: Tensor = self.model(input_ids=ids, attention_mask=mask)[0]
        return out


def bert(method: str) -> nn.Module:
    """A layer without causality."""
    model = BertModel(BertConfig(**SIZES)).eval()
    linearize_(model, method=method)
    return Encoder(model)


def llama(method: str) -> nn.Module:
    """A causal one."""
    model = LlamaModel(LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    linearize_(model, method=method)
    return Called(model)


def linear_lm(method: str) -> nn.Module:
    """A block of the library's own."""
    config = LinearLMConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=97)
    return Called(LinearLMForCausalLM(config).eval())


def exported(model: nn.Module, *given: Tensor) -> Callable[..., Tensor]:
    """By torch.export."""
    recorded: Callable[..., Tensor] = torch.export.export(model, given).module()
    return recorded


def compiled(model: nn.Module, *given: Tensor) -> Callable[..., Tensor]:
    """Without a break in the graph."""
    recorded: Callable[..., Tensor] = torch.compile(model, fullgraph=True, backend="eager")
    recorded(*given)
    return recorded


CASES = [*((bert, method) for method in MAPS + MERGED), *((llama, method) for method in MAPS)]
CASES.append((linear_lm, "its own"))
RECORDS = (exported, compiled)
# Maps are recorded in turns, so that each meets both recorders, as each kind of model does; all else by both.
RECORDED = [
    (build, method, RECORDS[(i + j) % 2]) for i, build in enumerate((bert, llama)) for j, method in enumerate(MAPS)
]
RECORDED += [(*case, record) for case in CASES if case[1] not in MAPS for record in RECORDS]


@pytest.mark.parametrize(("build", "method", "record"), RECORDED)
def test_a_graph_reads_the_mask_it_is_given(
    build: Callable[[str], nn.Module], method: str, record: Callable[..., Callable[..., Tensor]]
) -> None:
    """Recorded without padding, as no tracer sees values; called with it on either side, and with other tokens."""
    torch.manual_seed(0)
    model = build(method)
    ids = torch.randint(3, 97, (2, LENGTH))
    ones = torch.ones(2, LENGTH, dtype=torch.long)
    right, left = ones.clone(), ones.clone()
    right[1, 6:] = 0
    left[0, :5] = 0
    with torch.no_grad():
        torch.compiler.reset()
        recorded = record(model, ids, ones)
        for mask in (ones, right, left):
            for words in (ids, ids.flip(1)):
                real = mask.bool()
                torch.testing.assert_close(recorded(words, mask)[real], model(words, mask)[real], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("build", "method"), CASES)
def test_tracing_is_refused(build: Callable[[str], nn.Module], method: str) -> None:
    """Its branches are those of one mask."""
    ids = torch.randint(3, 97, (2, LENGTH))
    with (
        pytest.raises(ValueError, match=r"torch\.jit\.trace records the branches that its example takes"),
        torch.no_grad(),
    ):
        torch.jit.trace(build(method), (ids, torch.ones_like(ids)), check_trace=False)


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
def test_a_window_that_holds_all_keys_is_exported(layer_type: str) -> None:
    """By its size; one that does not is refused, and so is a text that might be packed, as nobody can look."""
    torch.manual_seed(0)
    windows = {"use_sliding_window": True, "sliding_window": 64, "layer_types": [layer_type]}
    model = Qwen2Model(Qwen2Config(**SIZES, num_key_value_heads=2, **windows)).eval()
    linearize_(model, method="FavorPlus(num_features=16)", layers=[0])
    ids, mask = torch.randint(3, 97, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    padded = mask.clone()
    padded[1, 6:] = 0
    with torch.no_grad():
        recorded = exported(Called(model), ids, mask)
        real = padded.bool()
        torch.testing.assert_close(recorded(ids, padded)[real], Called(model)(ids, padded)[real], rtol=1e-4, atol=1e-5)
        with pytest.raises(Exception, match="give the model an attention_mask"):
            torch.export.export(model, (), {"input_ids": ids, "use_cache": False})


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", [None, *FEATURE_MAPS])
def test_sizes_are_known_without_values(feature_map: str | None, is_causal: bool) -> None:
    """The op with a mask under FakeTensorMode, in which no value can be looked at."""
    built = None if feature_map is None else default(feature_map, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens = (torch.randn(2, 2, 30, 8) for _ in range(3))
        mask = torch.ones(2, 30, dtype=torch.bool)
        options = {"key_mask": mask, "is_causal": is_causal}
        if built is None:
            out = linattn.merged_attention(*tokens, linattn.MergedKV(8, 4, None), **options)
        else:
            out = linattn.linear_attention(*tokens, built, **options)
    assert out.shape == (2, 2, 30, 8)
