"""A backend plugs in: an object with four functions and a line in the table. Here is one, under the laws of all."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

import linattn
from grid import Case, build, qkv
from laws import (
    test_bias,
    test_causality,
    test_convexity,
    test_independence,
    test_masking,
    test_precision,
    test_truth,
)
from linattn.attention.backends import BACKENDS, Call, Rows
from linattn.attention.sums import Sums


class TokenByToken:
    """One key after the other: sums absorb it by the verbs of `Sums`, and each query reads them as it comes.

    For maps whose features are exponentials, and bidirectional calls of the others.
    """

    def objections(self, call: Call) -> list[str]:
        """What it leaves to others."""
        reasons = [] if call.bound.feature_map.exponential else ["it takes exponential maps only"]
        return reasons + (["it takes no float16"] if call.query.dtype == torch.float16 else [])

    def absorb(self, call: Call, before: Sums) -> Sums:
        """Merge one key's sums at a time."""
        bound, _, key, value, bias, _ = call
        if bias is not None:
            key, value = (x.masked_fill((bias == -torch.inf).unsqueeze(-1), 0) for x in (key, value))
        log = bound.run(lambda feature_map, x: feature_map.key(x), key.device, key.to(before.S.dtype))
        if bias is not None:
            log = log + bias.unsqueeze(-1)
        floor = torch.finfo(log.dtype).min / 4
        for j in range(key.shape[2]):
            m = log[:, :, j].detach().clamp(min=floor)
            z = torch.exp(log[:, :, j] - m)
            before = before.merge(Sums(z.unsqueeze(-1) * value[:, :, j].to(z.dtype).unsqueeze(-2), z, m))
        return before

    def read(self, call: Call, sums: Sums) -> Rows:
        """All queries at once."""
        bound, query = call.bound, call.query
        x = query.flatten(2, 3).to(sums.S.dtype)
        log = bound.run(lambda feature_map, x: feature_map.query(x), query.device, x) + sums.m.unsqueeze(-2)
        reference = log.detach().amax(-1)
        phi = torch.exp(log - reference.unsqueeze(-1))
        den = (phi * sums.z.unsqueeze(-2)).sum(-1)
        out = phi @ sums.S / den.masked_fill(den == 0, torch.inf).unsqueeze(-1)
        shape = query.shape[2:4]
        return Rows(out.to(query.dtype).unflatten(2, shape), den.unflatten(2, shape), reference.unflatten(2, shape))

    def attend(self, call: Call, before: Sums, *, span: int = 0) -> tuple[Rows, Sums]:
        """Causal queries read before the next key comes."""
        after, query = self.absorb(call, before), call.query
        if not call.is_causal:
            return self.read(call, after), after
        found = [self.read(call._replace(query=query[..., :0, :]), before)]
        extra = call.key.shape[2] - query.shape[3]
        for i in range(query.shape[3]):
            stop = i // span * span if span else max(i + 1 + extra, 0)
            part = call.with_keys(slice(stop))._replace(query=query[..., i : i + 1, :])
            found.append(self.read(part, self.absorb(part, before)))
        return Rows(*(torch.cat(rows, 3) for rows in zip(*found, strict=True))), after


MODULES = (test_bias, test_causality, test_convexity, test_independence, test_masking, test_precision, test_truth)
MAPS = ("FavorPlus", "LearnedExponential", "Sderf", "Centred-call-FavorPlus")


def laws() -> dict[str, tuple[Callable[..., None], tuple[Case, ...]]]:
    """Every law of these modules that a case decides, and its cases; block sizes are the blocked backend's affair."""
    found = {}
    for module in MODULES:
        for name, law in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and set(inspect.signature(law).parameters) in ({"case"}, {"case", "blocks_of"}):
                (cases,) = (mark.args[1] for mark in law.pytestmark if mark.args[0] == "case")
                found[f"{module.__name__.removeprefix('laws.')}-{name.removeprefix('test_')}"] = law, tuple(cases)
    return found


LAWS = laws()
# The third backend in the place of the blocked one, wherever a law runs on that.
CELLS = [
    (law, Case(case.map_name, "token by token", case.is_causal))
    for law, (_, cases) in LAWS.items()
    for case in cases
    if case.backend == "blocked" and case.map_name in MAPS
]


@pytest.fixture(autouse=True)
def _plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "token by token", TokenByToken())


@pytest.mark.parametrize(("law", "case"), CELLS, ids=[f"{law}-{case}" for law, case in CELLS])
def test_a_third_backend_obeys_the_laws(law: str, case: Case) -> None:
    function = LAWS[law][0]
    options = {"blocks_of": lambda size: None} if "blocks_of" in inspect.signature(function).parameters else {}
    function(case=case, **options)


def test_there_are_laws_to_run() -> None:
    assert len(LAWS) >= 10
    assert len(CELLS) >= 50


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_stands_beside_a_third_backend(is_causal: bool) -> None:
    query, key, value = qkv(num_queries=18, num_keys=18)
    mask = torch.ones(2, 18, dtype=torch.bool)
    mask[0, 3:6] = False
    outs = [
        Case("FavorPlus", backend, is_causal).attend(query, key, value, build("FavorPlus"), key_mask=mask, window=4)
        for backend in ("token by token", "blocked")
    ]
    torch.testing.assert_close(*outs, rtol=1e-11, atol=1e-11)


def test_a_named_backend_runs_or_lists_every_reason() -> None:
    tokens = qkv(dtype=torch.float16)
    with pytest.raises(ValueError, match=r"'token by token' cannot run this call: it takes exponential maps only; it "):
        linattn.linear_attention(*tokens, build("Relu"), enable_gqa=True, backend="token by token")
    listed = r"one of 'auto', 'blocked', 'reference', 'triton', 'compiled', 'token by token'"
    with pytest.raises(ValueError, match=listed):
        linattn.linear_attention(*tokens, build("Relu"), enable_gqa=True, backend="cuda")


def test_auto_takes_the_first_without_an_objection(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = {name: BACKENDS[name] for name in ("token by token", "blocked")}
    monkeypatch.setattr("linattn.attention.backends.BACKENDS", ordered)
    used = []
    for name, backend in ordered.items():
        monkeypatch.setattr(type(backend), "attend", lambda self, *_, name=name, **__: used.append(name))
    for feature_map in (build("FavorPlus"), build("Relu")):
        with pytest.raises(TypeError):
            linattn.linear_attention(*qkv(), feature_map, enable_gqa=True)
    assert used == ["token by token", "blocked"]


def test_a_state_is_read_and_absorbed_by_the_table_s_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    feature_map, (query, key, value) = build("FavorPlus"), qkv()
    empty = linattn.State.empty(feature_map, batch_size=2, num_heads=2, value_dim=5, dtype=torch.float64)
    expected = empty.absorb(feature_map, key, value).read(feature_map, query)
    ordered = {name: BACKENDS[name] for name in ("token by token", "blocked")}
    monkeypatch.setattr("linattn.attention.backends.BACKENDS", ordered)
    for verb in ("absorb", "read"):
        monkeypatch.setattr(type(BACKENDS["blocked"]), verb, None)
    found = empty.absorb(feature_map, key, value).read(feature_map, query)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
