"""Saved states name their classes by module: those names stay, or a later version could not read them."""

from __future__ import annotations

import io
import pickletools
import zipfile

import torch

import linattn
from linattn import MergedKV
from linattn.feature_maps import FavorPlus

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


def test_saved_states_name_the_same_classes_in_every_version() -> None:
    x, padded = torch.randn(2, 2, 40, 8), torch.ones(2, 40, dtype=torch.bool)
    padded[1, :3] = False
    merged = MergedKV(4, 8, bits=4, coded=((8, 6),))
    states = (
        linattn.linear_attention_with_state(x, x, x, FavorPlus(8, 16), window=4).state,
        linattn.merged_attention_with_state(x, x, x, merged, key_mask=padded).state,
    )
    torch.save(states, file := io.BytesIO())
    with zipfile.ZipFile(file) as archive:
        pickle = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    found = {str(argument) for code, argument, _ in pickletools.genops(pickle) if code.name == "GLOBAL"}
    assert {name for name in found if name.startswith("linattn")} == NAMES
