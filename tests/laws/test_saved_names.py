"""Saved states name their classes by module: those names stay, or a later version could not read them."""

from __future__ import annotations

import io
import pickletools
import zipfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import linattn
from linattn import MergedKV
from linattn.feature_maps import FavorPlus
from linattn.hf import BoundedCache

NAMES = {
    "linattn.attention.state State",
    "linattn.attention.window.keys WindowKeys",
    "linattn.kv_cache.coded_tokens CodedTokens",
    "linattn.kv_cache.codes Codes",
    "linattn.kv_cache.config MergedKV",
    "linattn.kv_cache.frames Frame",
    "linattn.kv_cache.frames Frames",
    "linattn.kv_cache.keys MergedKeys",
    "linattn.kv_cache.query_sample QuerySample",
    "linattn.kv_cache.state MergedState",
    "linattn.softmax.row_groups RowGroups",
    "linattn.softmax.tokens Tokens",
}


OF_CACHES = {
    "linattn.hf._bounded_layers BoundedLayer",
    "linattn.hf.bounded_cache BoundedCache",
    "linattn.hf.bounded_cache BoundedLayerReport",
    "linattn.kv_cache.budget Sizes",
}


def named(value: object) -> set[str]:
    """The library's modules and names that torch.save writes for a value."""
    torch.save(value, file := io.BytesIO())
    with zipfile.ZipFile(file) as archive:
        pickle = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    globals_ = (str(argument) for code, argument, _ in pickletools.genops(pickle) if code.name == "GLOBAL")
    return {name for name in globals_ if name.startswith("linattn")}


def test_saved_states_name_the_same_classes_in_every_version() -> None:
    x, padded = torch.randn(2, 2, 40, 8), torch.ones(2, 40, dtype=torch.bool)
    padded[1, :3] = False
    merged = MergedKV(4, 8, bits=4, coded=((8, 6),))
    states = (
        linattn.linear_attention_with_state(x, x, x, FavorPlus(8, 16), window=4).state,
        linattn.merged_attention_with_state(x, x, x, merged, key_mask=padded).state,
    )
    assert named(states) == NAMES


def test_so_do_saved_caches() -> None:
    """A prompt's cache is kept, to be read by torch.load with weights_only=False."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
    cache = BoundedCache(model, budget=32)
    model(torch.arange(60).unsqueeze(0) % 32, past_key_values=cache)
    found = named(cache)
    assert found >= OF_CACHES
    assert found <= OF_CACHES | NAMES
