"""How wrong a model is: against definitions, rows alone, and the baselines."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import spearmanr

from converted import agreement
from linattn import softmax_attention
from linattn.convert import stages
from linattn.convert.running import Outputs, run
from linattn.convert.stages import Agreement, Stage, best, measure, measure_uniform
from linattn.hf import LayerAttention, intercept, linearize_
from linattn.hf.linearization import choose_layers
from linattn.methods.measures import cosine, relative_error, uniform_average

FAMILIES = ["bert", "llama"]


def ignored(name, share):
    """Take no notice of progress."""


def alone(batch):
    """Every text without its padding."""
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        yield {"input_ids": ids[mask][None], "attention_mask": mask[mask][None].long()}


def outputs(model, batches):
    with torch.no_grad():
        return [run(model, batch) for batch in batches]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_agrees_with_itself(build, padded, family):
    found = outputs(build(family), padded)
    exact = agreement(found, found)
    assert exact.embedding_cosine == pytest.approx(1.0, abs=1e-15)
    assert exact.token_cosine == pytest.approx(1.0, abs=1e-15)
    assert exact.rank_correlation == pytest.approx(1.0, abs=1e-15)
    assert exact.divergence == (0.0 if family == "llama" else None)


def test_the_rank_correlation_is_scipys():
    draw = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(7, 3, 5, generator=draw) for _ in range(2))
    live = torch.ones(7, 3, dtype=torch.bool)
    found = agreement([Outputs((ours,), None, live)], [Outputs((theirs,), None, live)])
    means = [torch.nn.functional.normalize(x.double().mean(1), dim=-1) for x in (ours, theirs)]
    first, second = torch.triu_indices(7, 7, 1)
    expected = spearmanr(*((x @ x.mT)[first, second].numpy() for x in means)).statistic
    assert found.rank_correlation == pytest.approx(expected, abs=1e-12)
    assert found.embedding_cosine == pytest.approx(float((means[0] * means[1]).sum(-1).mean()))
    cosines = torch.nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=-1)
    assert found.token_cosine == pytest.approx(float(cosines.mean()))


def test_fewer_than_three_texts_are_not_ranked(monkeypatch):
    """They are one pair or none, which make no correlation."""
    compared, live = [], torch.ones(2, 3, dtype=torch.bool)
    monkeypatch.setattr(stages, "cosine", lambda a, b: compared.append(a.shape) or cosine(a, b))
    ours, theirs = (Outputs((torch.randn(2, 3, 5),), None, live) for _ in range(2))
    assert agreement([ours], [theirs]).rank_correlation is None
    # Of all tokens, and of each text's mean.
    assert compared == [(6, 5), (2, 5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_is_its_texts_alone(build, padded, family):
    model = build(family).double()
    exact = [outputs(model, batches) for batches in (padded, [text for batch in padded for text in alone(batch)])]
    linearize_(model, method="LearnedExponential", num_features=8)
    together = measure("calibrated", model, padded, exact[0], ignored)
    apart = measure("calibrated", model, [text for batch in padded for text in alone(batch)], exact[1], ignored)
    for name in ("embedding_cosine", "token_cosine", "rank_correlation", "divergence"):
        assert getattr(together.agreement, name) == pytest.approx(getattr(apart.agreement, name), abs=1e-9)
    for ours, theirs in zip(together.layers, apart.layers, strict=True):
        assert ours.layer == theirs.layer
        for name in ("error", "worst", "uniform_error"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-9)
    assert apart.layers[0].error > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_errors_are_those_of_what_each_kernel_was_given(build, padded, family):
    model = build(family)
    texts = [text for batch in padded[:3] for text in alone(batch)]
    exact = outputs(model, texts)
    linearize_(model, method="LearnedExponential", num_features=8)
    seen = {}

    def keep(kernel, args, options, out):
        seen.setdefault(kernel.module_name, []).append((*args, options, out))

    hooks = [
        module.register_forward_hook(keep, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, LayerAttention)
    ]
    outputs(model, texts)
    for hook in hooks:
        hook.remove()
    stage = measure("converted", model, texts, exact, ignored)
    assert [layer.layer for layer in stage.layers] == list(seen)
    for layer in stage.layers:
        ours, averaged = [], []
        for query, key, value, options, out in seen[layer.layer]:
            q, k, v = (x.double() for x in (query, key, value))
            causal = options["is_causal"]
            assert causal == (family == "llama")
            y = softmax_attention(q, k, v, is_causal=causal, scale=options["scale"], enable_gqa=True)
            mean = uniform_average(v, num_heads=4, num_queries=q.shape[2], is_causal=causal)
            ours.append(relative_error(out, y))
            averaged.append(relative_error(mean, y))
        heads = torch.stack(ours).mean(0)
        assert layer.error == pytest.approx(float(heads.mean()), rel=1e-9)
        assert layer.worst == pytest.approx(float(heads.max()), rel=1e-9)
        assert layer.uniform_error == pytest.approx(float(torch.stack(averaged).mean()), rel=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_baseline_averages_in_every_layer(build, padded, family):
    model = build(family)
    exact = outputs(model, padded)

    def average(call):
        return uniform_average(
            call.value, num_heads=4, num_queries=12, key_mask=call.key_mask, is_causal=call.is_causal
        )

    with intercept(model, average):
        expected = agreement(outputs(model, padded), exact)
    layers = {layer.module_name for layer in choose_layers(model, None).replaced}
    stage = measure_uniform(model, padded, exact, layers, ignored)
    assert (stage.name, stage.agreement, stage.layers) == ("uniform", expected, ())
    assert stage.agreement.token_cosine < 0.999


def test_predictions_count_by_token(build):
    model = build("llama")
    draw = torch.Generator().manual_seed(3)
    texts = [{"input_ids": torch.randint(3, 64, (1, length), generator=draw)} for length in (2, 12)]
    exact = outputs(model, texts)
    linearize_(model, method="LearnedExponential", num_features=8)
    ours = outputs(model, texts)
    terms, surprise = [], []
    with torch.no_grad():
        for text, a, b in zip(texts, ours, exact, strict=True):
            log_q, log_p = (model.lm_head(x.states[-1]).double().log_softmax(-1) for x in (a, b))
            terms.append((log_p.exp() * (log_p - log_q)).sum(-1).flatten())
            surprise.append(-log_q[0, :-1].gather(-1, text["input_ids"][0, 1:, None]).flatten())
    found = agreement(ours, exact)
    assert found.divergence == pytest.approx(float(torch.cat(terms).mean()), rel=1e-9)
    assert found.perplexity == pytest.approx(float(torch.cat(surprise).mean().exp()), rel=1e-9)
    assert found.exact_perplexity == agreement(exact, exact).perplexity != found.perplexity


def test_models_without_states_of_tokens_are_refused(build, batches):
    class Mute(torch.nn.Module):
        def forward(self, **inputs):
            return {"logits": torch.zeros(2)}

    with pytest.raises(ValueError, match="Mute gives no hidden states"):
        run(Mute(), batches[0])


def stages_of(**figures):
    """Stages by name, with these embedding cosines."""
    return [Stage(name, Agreement(cosine, 0.5, 0.5, None)) for name, cosine in figures.items()]


def test_the_best_stage_is_the_one_nearest_to_the_original_model():
    assert best(stages_of(uniform=0.4, unconverted=0.9918, calibrated=0.98, converted=0.9884)).name == "unconverted"
    assert best(stages_of(uniform=0.4, unconverted=0.5, calibrated=0.98, converted=0.97)).name == "calibrated"
    assert best(stages_of(uniform=0.4, unconverted=0.5, calibrated=0.98, converted=0.99)).name == "converted"
    # Averaging is no result, whatever its figures.
    assert best(stages_of(uniform=0.9, unconverted=0.5)).name == "unconverted"
    # Training that changes nothing is not named.
    assert best(stages_of(uniform=0.4, unconverted=0.98, calibrated=0.98, converted=0.98)).name == "unconverted"
    assert best(stages_of(uniform=0.4, unconverted=math.nan, converted=0.1)).name == "converted"


def test_a_model_that_predicts_is_judged_by_its_predictions():
    stages = stages_of(uniform=0.4, unconverted=0.99, converted=0.98)
    divergences = dict(zip(("uniform", "unconverted", "converted"), (9.0, 0.2, 0.1), strict=True))
    found = [replace(x, agreement=replace(x.agreement, divergence=divergences[x.name])) for x in stages]
    assert best(found).name == "converted"
    assert [stage.agreement.merit for stage in found] == [-9.0, -0.2, -0.1]
