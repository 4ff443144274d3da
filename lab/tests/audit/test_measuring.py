"""The audit on tiny models: what it writes, and that the figures are those of the definition."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch

from linattn.feature_maps import features
from linattn.hf import capture, load
from linattn.methods.method import parse_method
from linattn_lab.audit.grid import AuditGrid, is_random
from linattn_lab.audit.measuring import Audit
from linattn_lab.audit.records import AUDIT, HeadRow, LengthsRow, ModelRow, RankRow, TimeRow
from linattn_lab.built_methods import build
from linattn_lab.costs import flops_per_token, state_numbers
from linattn_lab.report.audit.summary import summarise_audit
from linattn_lab.texts import Text

# A process audits each model once.
pytestmark = pytest.mark.xdist_group("audits of heads")
LABELS = (
    "FavorPlus",
    "Oprf",
    "Trigonometric",
    "EluPlusOne",
    "Centred(FavorPlus)",
    "Centred(Taylor(order=1))",
    "Centred(Balanced(FavorPlus))",
    "Centred(Balanced(Sderf))",
    "Centred(Balanced(Hyperbolic(num_features=8)))",
    "Expansion(num_centres=4)",
    "window 4 + merged 8",
)
WANTED = AuditGrid(tuple(map(parse_method, LABELS)), features=(8, 16), draws=2, seed=1)
OWN_WIDTH = {"Centred(Taylor(order=1))": 9, "Expansion(num_centres=4)": 36, "window 4 + merged 8": 0}
DRAWN_ONCE = ("EluPlusOne", "Centred(Taylor(order=1))", "Expansion(num_centres=4)", "window 4 + merged 8")


@pytest.fixture(scope="module")
def audited(folder, prose):
    """A function giving one family's audit and its rows."""
    made = {}

    def of(family):
        if family not in made:
            audit = Audit(load(folder(family)), Text("words", prose), WANTED, num_tokens=48)
            made[family] = audit, list(audit.rows())
        return made[family]

    return of


@pytest.mark.parametrize(("family", "causal"), [("bert", False), ("llama", True), ("gpt2", True)])
def test_rows_are_complete(audited, folder, family, causal):
    audit, rows = audited(family)
    header = audit.header
    assert (header.is_causal, header.first_measured) == (causal, 24 if causal else 0)
    assert (header.num_layers, header.num_heads, header.head_dim, header.num_tokens) == (2, 4, 8, 48)
    assert header.maps == list(LABELS)
    assert header.model == str(folder(family))
    assert header.num_rows == (24 if causal else 48)
    assert set(header.versions) == {"python", "linattn", "linattn-compiled", "torch", "transformers"}
    wanted = {
        (label, width, draw)
        for label in LABELS
        for width in ((8, 16) if parse_method(label).takes_features else (OWN_WIDTH.get(label, 8),))
        for draw in range(2 if is_random(parse_method(label).map) else 1)
    }
    models = [row for row in rows if isinstance(row, ModelRow)]
    assert [row.map for row in models[:2]] == ["exact", "uniform"]
    assert {(row.map, row.features, row.draw) for row in models[2:]} == wanted
    ranks = {(row.layer, row.head, row.rank) for row in rows if isinstance(row, RankRow)}
    most = 24 if causal else 48
    assert ranks == {(a, b, 2**c) for a in range(2) for b in range(4) for c in range(6) if 2**c <= most}
    heads = [row for row in rows if isinstance(row, HeadRow)]
    assert {(row.map, row.features, row.draw, row.layer, row.head) for row in heads} == {
        (*configuration, layer, head) for configuration in wanted for layer in range(2) for head in range(4)
    }
    assert len(heads) == len(wanted) * 8


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_figures_are_in_their_ranges(audited, family):
    audit, rows = audited(family)
    audited_header = audit.header
    exact, uniform = rows[:2]
    assert exact.embedding_cosine == pytest.approx(1.0, abs=1e-6)
    assert exact.token_cosine == pytest.approx(1.0, abs=1e-6)
    assert uniform.token_cosine < 0.999
    for row in rows[2:]:
        numbers = [getattr(row, field.name) for field in fields(row)]
        assert all(math.isfinite(value) for value in numbers if isinstance(value, float))
        if isinstance(row, HeadRow):
            method = parse_method(row.map)
            width = row.features if method.takes_features else None
            built = build(method, 8, num_features=width, scale=1.0, seed=0)
            causal = audited_header.is_causal
            assert row.state_numbers == state_numbers(built, value_dim=8, is_causal=causal)
            assert row.flops_per_token == flops_per_token(built, value_dim=8, is_causal=causal)
            assert row.uniform_error > 0
            assert 0 <= row.uniform_total_variation <= 1
            signed = any(name in row.map for name in ("Trigonometric", "Taylor", "Expansion"))
            assert signed or (row.kl > 0 and row.total_variation <= 1)
            assert (row.seed is None) == (row.map in DRAWN_ONCE)
            unknown = row.seed is None or "Sderf" in row.map
            assert (row.predicted_ratio is None) == unknown


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("label", ["FavorPlus", "EluPlusOne", "Centred(FavorPlus)", "Centred(Balanced(FavorPlus))"])
def test_errors_are_those_of_the_quadratic_definition(audited, family, label):
    audit, rows = audited(family)
    loaded = audit._whole._model
    calls = capture(loaded, audit._whole._inputs).calls
    first = audit.header.first_measured
    spec = parse_method(label).map
    draw = 1 if is_random(spec) else 0
    for row in rows:
        if not isinstance(row, HeadRow) or (row.map, row.draw) != (label, draw) or row.features == 16:
            continue
        call = calls[row.layer]
        group = call.query.shape[1] // call.key.shape[1]
        q, k, v = call.query[0].double(), call.key[0].double(), call.value[0].double()
        width = 8 if spec.takes_features else None
        feature_map = spec.build(8, num_features=width, scale=call.scale, seed=row.seed or 0)
        if spec.wrappers:
            span = slice(0, first or None)
            feature_map.fit(q[None, :, span], k[None, :, span])
        logits = call.scale * q @ k.repeat_interleave(group, 0).mT
        phi_q = features(feature_map, q.unflatten(0, (-1, group)).flatten(1, 2), "query").unflatten(1, (group, -1))
        kernel = (phi_q @ features(feature_map, k, "key").unsqueeze(1).mT).flatten(0, 1)
        if call.is_causal:
            future = torch.ones(48, 48, dtype=torch.bool).triu(1)
            logits, kernel = logits.masked_fill(future, -math.inf), kernel.masked_fill(future, 0.0)
        values = v.repeat_interleave(group, 0)[row.head]
        exact = (logits.softmax(-1)[row.head] @ values)[first:]
        weights = kernel[row.head] / kernel[row.head].sum(-1, keepdim=True)
        error = ((weights @ values)[first:] - exact).norm() / exact.norm()
        # The audit attends in float32, as a user would: 2**-24 a rounding, some hundred of them.
        assert row.error == pytest.approx(float(error), rel=1e-4)
        if spec.wrappers:
            q, k = q - feature_map.query_mean.repeat_interleave(group, 0), k - feature_map.key_mean
        if "Balanced" in spec.wrappers:
            matrix = feature_map.inner.transform
            q, k = q @ matrix.repeat_interleave(group, 0).mT, k @ torch.linalg.inv(matrix)
        if is_random(spec):
            sums = (q[:, first:].unsqueeze(2) + k.repeat_interleave(group, 0).unsqueeze(1)).square().sum(-1)
            visible = ~future[first:] if call.is_causal else torch.ones_like(sums[0], dtype=torch.bool)
            assert row.sum_square == pytest.approx(float(call.scale * sums[row.head][visible].mean()), rel=1e-6)
        norms = [call.scale**0.5 * x.norm(dim=-1).mean(-1) for x in (q[:, first:], k)]
        assert row.query_norm == pytest.approx(float(norms[0][row.head]), rel=1e-6)
        assert row.key_norm == pytest.approx(float(norms[1][row.head // group]), rel=1e-6)
        variation = (weights - logits.softmax(-1)[row.head])[first:].abs().sum(-1).mean() / 2
        assert row.total_variation == pytest.approx(float(variation), rel=1e-5)


def test_a_causal_model_tells_its_maps_nothing_of_the_measured_tokens(folder, prose):
    words = prose.split()
    texts = [" ".join(words), " ".join(words[:24] + words[:23:-1])]
    audits = [Audit(load(folder("llama")), Text("words", text), WANTED, num_tokens=48) for text in texts]
    for configuration in WANTED.configurations():
        for layer in range(2):
            one, other = (audit._build(configuration, layer) for audit in audits)
            assert repr(one) == repr(other)


def without_times(rows):
    """All but what depends on the machine."""
    return [row for row in rows if not isinstance(row, TimeRow | LengthsRow)]


def test_the_same_seed_gives_the_same_audit(audited, folder, prose):
    audit, rows = audited("bert")
    again = Audit(load(folder("bert")), Text("words", prose), WANTED, num_tokens=48)
    assert again.header == audit.header
    assert without_times(again.rows()) == without_times(rows)


def test_a_model_that_breaks_down_is_recorded_and_not_fatal(folder, prose, monkeypatch):
    wanted = AuditGrid((parse_method("Centred(Taylor(order=1))"),))
    audit = Audit(load(folder("bert")), Text("words", prose), wanted, num_tokens=48)
    monkeypatch.setattr(
        "linattn_lab.built_methods.linear_attention", lambda q, k, v, feature_map, **_: torch.full_like(q, math.inf)
    )
    row = without_times(audit.rows())[-1]
    assert math.isnan(row.embedding_cosine)
    assert math.isnan(row.token_cosine)


def test_a_head_without_values_is_measured(folder, prose, tmp_path):
    """A pruned one: every method is exact there, averaging too."""
    loaded = load(folder("llama"))
    with torch.no_grad():
        loaded.model.layers[1].self_attn.v_proj.weight[:8] = 0
    audit = Audit(loaded, Text("words", prose), AuditGrid((parse_method("EluPlusOne"),), (8,), 1, 0), num_tokens=32)
    AUDIT.write(tmp_path / "audit.jsonl", audit.header, audit.rows())
    summary = summarise_audit(tmp_path / "audit.jsonl")
    (line,) = summary.lines
    assert summary.uniform_errors[1][:2] == (0.0, 0.0)
    assert line.head_ratios[1][:2] == (1.0, 1.0)
    assert 0 < line.error.mean < math.inf


def test_a_short_text_is_read_whole(folder):
    audit = Audit(load(folder("bert")), Text("words", "w1 w2 w3 w4 w5 w6 w7 w8"), WANTED, num_tokens=48)
    assert audit.header.num_tokens == 8


def test_refusals(folder, prose):
    loaded = load(folder("bert"))
    with pytest.raises(ValueError, match=r"num_tokens must be at least 8 and the text as long; of .* 2 are read"):
        Audit(loaded, Text("words", "w1 w2"), WANTED)
    odd = AuditGrid((parse_method("Hyperbolic"),), features=(7,))
    with pytest.raises(ValueError, match="multiple of 2"):
        Audit(loaded, Text("words", prose), odd, num_tokens=48)
    with pytest.raises(ValueError, match=r"num_tokens must be at least 1 and at most 512, .*; got 600"):
        Audit(loaded, Text("words", prose), WANTED, num_tokens=600)
