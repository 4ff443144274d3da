"""On a CUDA GPU bounded caches and linearized models write what they write on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from bounded_texts import ENOUGH, FEW, GREEDY, IDS, logits
from linattn import MergedKV
from linattn.hf import BoundedCache, StateCache, linearize_, stream_tokens

# What a GPU computes only a GPU shows; on the CPU these would compare a model with itself.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU = "cuda"
TIERS = MergedKV(2, 6, bits=4, num_sinks=1, coded=((5, 4), (6, 3)))
MASK = torch.ones_like(IDS)
MASK[1, :5] = 0


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def pair(language_model):
    """A function giving a model of a family in float64, on the CPU and on the GPU."""

    def of(family):
        model = language_model(family).double()
        return model, copy.deepcopy(model).to(GPU)

    return of


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("config", [ENOUGH, FEW, TIERS], ids=lambda config: config.label)
def test_bounded_caches(pair, family, config):
    """Logits in any cut, the greedy text of a padded batch, and beams."""
    ours, theirs = pair(family)
    truth = logits(ours, BoundedCache(ours, config=config), (9, 1, 14))
    cache = BoundedCache(theirs, config=config)
    parts = [theirs(part, past_key_values=cache).logits for part in IDS.to(GPU).split((9, 1, 14), 1)]
    torch.testing.assert_close(torch.cat(parts, 1).cpu(), truth, rtol=1e-9, atol=1e-9)
    for options in ({}, {"num_beams": 3}):
        texts = [
            model.generate(
                IDS.to(model.device),
                attention_mask=MASK.to(model.device),
                past_key_values=BoundedCache(model, config=config),
                **GREEDY,
                **options,
            ).cpu()
            for model in (ours, theirs)
        ]
        assert torch.equal(*texts)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_bounded_cache_is_forked_and_saved(pair, tmp_path, implementation):
    _, model = pair("llama")
    model.set_attn_implementation(implementation)
    cache, ids = BoundedCache(model, config=TIERS), IDS.to(GPU)
    model(ids[:, :20], past_key_values=cache)
    torch.save(cache, tmp_path / "cache")
    fork = cache.fork()
    truth = model(ids[:, 20:], past_key_values=cache).logits
    assert torch.equal(model(ids[:, 20:], past_key_values=fork).logits, truth)
    read = torch.load(tmp_path / "cache", weights_only=False)
    assert torch.equal(model(ids[:, 20:], past_key_values=read).logits, truth)


def test_prompt_lookup(pair):
    _, model = pair("llama")
    repeated = IDS[:1, :5].repeat(1, 4).to(GPU)
    texts = [
        model.generate(repeated, past_key_values=BoundedCache(model, config=ENOUGH), **GREEDY, **options)
        for options in ({}, {"prompt_lookup_num_tokens": 3})
    ]
    assert torch.equal(*texts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("budget", [30, 96])
def test_a_budget_in_sixteen_bits(language_model, dtype, budget):
    """Logits are finite, and softmax's where all tokens fit."""
    model, ids = language_model("llama").to(GPU, dtype), IDS.to(GPU).repeat(1, 3)
    found = model(ids, past_key_values=BoundedCache(model, budget=budget)).logits
    assert found.isfinite().all()
    if budget > ids.shape[1]:
        exact = model(ids).logits
        assert (found - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize(
    "options",
    [{"method": "FavorPlus(num_features=16)"}, {"method": "LearnedExponential(num_features=8)"}, {"method": "Taylor"}],
)
def test_linearized_decoders(pair, options):
    ours, theirs = pair("llama")
    for model in (ours, theirs):
        linearize_(model, **options)
    truth = ours(IDS).logits
    torch.testing.assert_close(theirs(IDS.to(GPU)).logits.cpu(), truth, rtol=1e-9, atol=1e-9)
    texts = [
        model.generate(IDS[:1].to(model.device), past_key_values=StateCache(model), **GREEDY).cpu()
        for model in (ours, theirs)
    ]
    assert torch.equal(*texts)
    drawn = stream_tokens(theirs, IDS[:1].to(GPU), temperature=0)
    assert torch.equal(torch.cat([next(drawn) for _ in range(10)], 1).cpu(), texts[0][:, 24:])


@pytest.mark.parametrize(
    "method", [MergedKV(None, 6, None), MergedKV(4, 8, None), "FavorPlus(num_features=16)"], ids=str
)
def test_linearized_encoders(build, method):
    model = build("bert").double()
    twin = copy.deepcopy(model).to(GPU)
    for each in (model, twin):
        linearize_(each, method=method)
    truth = model(IDS, attention_mask=MASK)[0]
    found = twin(IDS.to(GPU), attention_mask=MASK.to(GPU))[0]
    torch.testing.assert_close(found.cpu(), truth, rtol=1e-9, atol=1e-9)
