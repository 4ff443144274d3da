"""Batch rows and heads do not know of each other; without positions, keys have no order."""

from __future__ import annotations

import pytest
import torch

import linattn
from grid import CASES, CAUSAL_MAPS, NONNEGATIVE_MAPS, PAIRED_CASES, Case, build, qkv
from linattn.attention.backends.blocked import features


@pytest.mark.parametrize("case", PAIRED_CASES, ids=str)
def test_other_rows_and_heads_do_not_matter(case: Case) -> None:
    """Whatever the magnitude of the neighbours, up to the rounding of products of another shape."""
    feature_map, (query, key, value) = case.build(), qkv(dtype=torch.float32)
    whole = case.attend(query, key, value, feature_map)
    loud = [x.clone() for x in (query, key, value)]
    for x in loud:
        x[1] *= 50
    torch.testing.assert_close(case.attend(*loud, feature_map)[0], whole[0], rtol=0, atol=0)
    loud = [x.clone() for x in (query, key, value)]
    for x in loud:
        x[:, x.shape[1] // 2 :] *= 50
    torch.testing.assert_close(case.attend(*loud, feature_map)[:, :2], whole[:, :2], rtol=0, atol=0)
    alone = case.attend(*(x[:1] for x in (query, key, value)), feature_map)
    band = 2e-6 if case.map_name in NONNEGATIVE_MAPS else 1e-3
    torch.testing.assert_close(alone[0], whole[0], rtol=band, atol=band)


@pytest.mark.parametrize("case", [c for c in CASES if not c.is_causal], ids=str)
def test_permuting_keys_with_values_changes_nothing(case: Case, blocks_of) -> None:
    blocks_of(8)
    query, key, value = qkv()
    order = torch.randperm(key.shape[2], generator=torch.Generator().manual_seed(2))
    feature_map = case.build()
    whole = case.attend(query, key, value, feature_map)
    mixed = case.attend(query, key[:, :, order], value[:, :, order], feature_map)
    tolerance = 1e-12 if feature_map.nonnegative else 1e-8
    torch.testing.assert_close(mixed, whole, rtol=tolerance, atol=tolerance)


# Maps that differ from head to head, by their parameters or by the statistics they take.
FITTED = ("Centred", "Balanced", "Sderf", "Expansion")
PER_HEAD = [c for c in CASES if c.map_name.startswith(FITTED) or getattr(c.build(), "num_heads", None) is not None]


@pytest.mark.parametrize("case", [c for c in CASES if c not in PER_HEAD], ids=str)
def test_heads_are_not_tokens(case: Case) -> None:
    """Attending head by head gives the same: no sum runs over the wrong axis (there are 2 heads and 37 tokens)."""
    query, key, value = qkv()
    feature_map = case.build()
    whole = case.attend(query, key, value, feature_map)
    parts = [
        case.attend(query[:, h : h + 1], key[:, h // 2 : h // 2 + 1], value[:, h // 2 : h // 2 + 1], feature_map)
        for h in range(4)
    ]
    tolerance = 1e-12 if feature_map.nonnegative else 1e-8
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.1, 2.0, 30.0])
@pytest.mark.parametrize("name", [name for name in CAUSAL_MAPS if build(name).exponential])
def test_devices_where_a_look_would_wait_compute_the_same(
    name: str, scale: float, is_causal: bool, monkeypatch: pytest.MonkeyPatch, blocks_of
) -> None:
    """On a CPU exponents are looked for where sums say so, elsewhere always: rows have other exponents, no more."""
    blocks_of(8)
    mask = torch.rand(2, 37, generator=torch.Generator().manual_seed(1)) > 0.3
    feature_map, results = build(name), []
    for is_seen in (True, False):
        monkeypatch.setattr(features, "is_seen", lambda _, is_seen=is_seen: is_seen)
        leaves = [x.requires_grad_() for x in qkv(scale=scale)]
        out = linattn.linear_attention(*leaves, feature_map, key_mask=mask, is_causal=is_causal, enable_gqa=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for seen, unseen in zip(*results, strict=True):
        # Exponents of up to |x|²/2 < 2^14, rounded to 2^-53 of that.
        torch.testing.assert_close(seen, unseen, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["blocked", "reference", "auto"])
@pytest.mark.parametrize("name", ["FavorPlus", "Relu", "Expansion", "Centred-FavorPlus"])
@pytest.mark.parametrize("length", [1, 5])
def test_a_nan_in_a_row_changes_no_other_row(name: str, backend: str, length: int) -> None:
    """In a prompt, and in a token whose key moves the exponents of the rows beside it."""
    feature_map, (query, key, value) = build(name), qkv(heads=2, num_queries=9, num_keys=9, dtype=torch.float32)
    if name in ("Expansion", "Centred-FavorPlus"):
        feature_map = feature_map.fit(query, key)
    key[:, :, 4:] *= 9

    def stream() -> list[torch.Tensor]:
        state, outs = None, []
        for query_, key_, value_ in zip(*(x.split(length, 2) for x in (query, key, value)), strict=True):
            step = linattn.linear_attention_with_state(query_, key_, value_, feature_map, state, backend=backend)
            outs, state = [*outs, step.out[0]], step.state
        return [*outs, state.S[0], state.z[0]]

    clean = stream()
    key[1, :, ::4] = torch.nan
    assert all(torch.equal(x, y) for x, y in zip(stream(), clean, strict=True))
