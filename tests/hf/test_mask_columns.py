"""Column j of an attention_mask is token j: with a window wider than the text, or a large budget, this is softmax."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from linattn import MergedKV
from linattn.hf import BoundedCache, LinearLMConfig, LinearLMForCausalLM, StateCache, StreamCache, linearize_

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
LENGTH = 24
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    # Its softmax layers keep fewer keys than there are tokens.
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    ),
}


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    """For all of these."""
    with torch.no_grad():
        yield


def pair(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model whose attention matters, and itself with a window wider than the text."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.mul_(4)
    linear = copy.deepcopy(model)
    linearize_(linear, method="FavorPlus(num_features=16) + window 64")
    return model, linear


def mask_of(columns: int) -> Tensor:
    """Padding at the left of one row, within the other, and at the end of what is there."""
    mask = torch.ones(2, columns, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, 7:9] = 0
    mask[1, LENGTH - 2 : LENGTH] = 0
    return mask


@pytest.mark.parametrize("cached", [0, 1, 11])
@pytest.mark.parametrize("columns", [LENGTH - 8, LENGTH - 1, LENGTH, LENGTH + 1, LENGTH + 10, 3 * LENGTH])
@pytest.mark.parametrize("name", MODELS)
def test_columns_are_tokens_from_the_first_on(name: str, columns: int, cached: int) -> None:
    """Fewer hide the last tokens, more are not read; after tokens in a cache too, whole or one by one."""
    model, linear = pair(name)
    ids = torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask, found = mask_of(columns), []
    other = copy.deepcopy(model)
    for each in (model, linear, other):
        for single in (False, True):
            cache = DynamicCache(config=each.config)
            if each is not model:
                cache = StateCache(each) if each is linear else BoundedCache(each, config=MergedKV(16, 256, None))
            if cached:
                each(ids[:, :cached], attention_mask=mask[:, :cached], past_key_values=cache)
            # A later token by itself, with a mask that has columns beyond it.
            cuts = [cached, LENGTH - 1, LENGTH] if single else [cached, LENGTH]
            rows = [
                each(ids[:, start:stop], attention_mask=mask, past_key_values=cache).logits
                for start, stop in itertools.pairwise(cuts)
            ]
            found.append(torch.cat(rows, 1)[:, max(5 - cached, 0) :])
    for ours in found[1:]:
        torch.testing.assert_close(ours, found[0], rtol=1e-4, atol=1e-4)


def test_columns_that_are_no_keys_are_refused() -> None:
    """Without a cache transformers has no answer to them either."""
    ids, mask = torch.arange(3, 3 + LENGTH)[None], mask_of(LENGTH + 10)[:1]
    _, linear = pair("llama")
    with pytest.raises(ValueError, match="34 columns for 24 tokens"):
        linear(ids, attention_mask=mask, use_cache=False)
    for layers in (None, [0]):
        bert = BertModel(BertConfig(**SIZES)).eval()
        linearize_(bert, method="FavorPlus(num_features=8)", layers=layers)
        with pytest.raises(ValueError, match="34 columns over 24 keys"):
            bert(input_ids=ids, attention_mask=mask)


def test_columns_of_a_linear_language_model_are_tokens() -> None:
    """In one call, after a cache, and of the new tokens alone."""
    torch.manual_seed(0)
    config = LinearLMConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=97)
    model = LinearLMForCausalLM(config).eval()
    ids, mask = torch.randint(3, 97, (2, LENGTH)), mask_of(LENGTH + 10)
    whole = model(ids, attention_mask=mask[:, :LENGTH]).logits
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, whole)
    for later in (mask, mask[:, :LENGTH], mask[:, 11:LENGTH]):
        cache = StreamCache(2)
        model(ids[:, :11], attention_mask=mask, past_key_values=cache)
        rows = model(ids[:, 11:], attention_mask=later, past_key_values=cache).logits
        torch.testing.assert_close(rows, whole[:, 11:], rtol=1e-4, atol=1e-4)
