"""Tokens drawn without end: greedy ones are transformers' own, draws follow the model's distribution."""

from __future__ import annotations

import re
from itertools import islice
from math import inf, nan

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from architectures import ARCHITECTURES
from linattn.hf import (
    LinearLMConfig,
    LinearLMForCausalLM,
    StateCache,
    StreamCache,
    linearize_,
    new_cache,
    stream_tokens,
)

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS = ("linear", "hybrid", "softmax llama", "linearized llama")


def model_of(kind: str, layers: int = 2):
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers}
    if "llama" not in kind:
        config = LinearLMConfig(**sizes, num_features=8, pattern="ls" if kind == "hybrid" else "l")
        return LinearLMForCausalLM(config).eval()
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, intermediate_size=16, eos_token_id=None)).eval()
    if kind.startswith("linearized"):
        linearize_(model, method="FavorPlus", num_features=8)
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def adapted(model):
    return get_peft_model(model, LoraConfig(target_modules="all-linear"))


def taken(count, *args, **options):
    return torch.cat(list(islice(stream_tokens(*args, **options), count)), 1)


@torch.no_grad()
def test_a_new_cache_holds_all_of_the_encoders_text():
    """Though the decoder's own layers have windows, in T5Gemma."""
    model, ids = ARCHITECTURES["T5Gemma"].build(), torch.arange(3, 27).expand(2, -1)
    tokens, cache = ids[:, :14] + 20, new_cache(model)
    parts = [model(ids, decoder_input_ids=part, past_key_values=cache).logits for part in tokens.split([5, 1, 8], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids, decoder_input_ids=tokens, use_cache=False).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind):
    model, prompt = model_of(kind), torch.randint(3, 60, (2, 5))
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert torch.equal(taken(12, model, prompt, temperature=0), expected[:, 5:])


def test_a_prompt_in_chunks_and_a_text_gone_on_with(monkeypatch):
    model, prompt = model_of("hybrid"), torch.randint(0, 256, (2, 11))
    whole = taken(6, model, prompt, temperature=0)
    monkeypatch.setattr("linattn.hf.streaming._CHUNK", 4)
    assert torch.equal(taken(6, model, prompt, temperature=0), whole)
    cache = StreamCache(2)
    # The first of them is drawn but not read yet.
    taken(1, model, prompt[:, :7], temperature=0, cache=cache)
    assert torch.equal(taken(6, model, prompt[:, 7:], temperature=0, cache=cache), whole)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6)])
def test_draws_follow_the_distribution(temperature, top_p):
    """Chi-square over 4,000 independent rows."""
    model, rows = model_of("softmax llama"), 4000
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
        logits = model(torch.tensor([[5, 7]])).logits[0, -1].double()
    p = (logits / temperature).softmax(0)
    if top_p < 1:
        order = p.argsort(descending=True)
        kept = int((p[order].cumsum(0) < top_p).sum()) + 1
        p = torch.zeros_like(p).index_copy(0, order[:kept], p[order[:kept]] / p[order[:kept]].sum())
    draws = torch.Generator().manual_seed(1)
    prompt = torch.tensor([[5, 7]]).repeat(rows, 1)
    found = taken(1, model, prompt, temperature=temperature, top_p=top_p, generator=draws)
    counts = torch.bincount(found[:, 0], minlength=len(p)).double()
    assert not counts[p == 0].any()
    likely = rows * p >= 5
    expected = torch.cat([rows * p[likely], (rows * p[~likely]).sum()[None]])
    counts = torch.cat([counts[likely], counts[~likely].sum()[None]])
    present = expected > 0
    chi2 = ((counts - expected)[present] ** 2 / expected[present]).sum()
    freedom = int(present.sum()) - 1
    assert freedom >= 3
    # The square is above this once in 30,000 draws (Wilson and Hilferty).
    assert chi2 < freedom * (1 - 2 / (9 * freedom) + 4 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_the_same_seed_draws_the_same_text():
    model, prompt = model_of("linear"), torch.tensor([list(b"linear")])
    texts = [taken(20, model, prompt, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_what_is_kept_does_not_grow():
    model, cache = model_of("linear"), StreamCache(2)
    stream = stream_tokens(model, torch.tensor([list(b"linear")]), cache=cache)
    sizes = set()
    for _ in range(100):
        next(stream)
        sizes.add(cache.num_bytes)
    assert len(sizes) == 1


def test_a_linearized_model_keeps_states():
    model, kept = model_of("linearized llama"), []
    model.register_forward_hook(lambda _, __, kwargs, ___: kept.append(kwargs["past_key_values"]), with_kwargs=True)
    taken(3, model, torch.tensor([[5, 7]]))
    assert {type(cache) for cache in kept} == {StateCache}
    assert len(set(map(id, kept))) == 1


@pytest.mark.parametrize("top_p", [1.0, 0.5, 1e-300])
def test_the_least_and_the_largest_temperature(top_p):
    """The likeliest token, and any."""
    model, prompt = model_of("softmax llama"), torch.tensor([[5, 7]])
    finite = torch.finfo(torch.float32)
    with torch.no_grad():
        # Logits that the least temperature makes infinite.
        model.get_output_embeddings().weight.mul_(1000)
    least = taken(10, model, prompt, temperature=finite.tiny, top_p=top_p)
    assert torch.equal(least, taken(10, model, prompt, temperature=0))
    most = taken(200, model, prompt, temperature=finite.max, top_p=1.0)
    # 200 draws of 64 tokens: 61 different ones are expected, with a deviation of 2.
    assert most.unique().numel() > 50


def test_refusals():
    """At the call, before anything is read."""
    model, prompt = model_of("linear"), torch.tensor([[1, 2]])
    for name, values, words in (
        ("temperature", (-1.0, -0.1, nan, inf, -inf, 1e-300, 1e-40, 1e300), "must be 0 or from 1.18e-38 to 3.4e+38"),
        ("top_p", (0.0, -1.0, 1.5, nan, inf), "must be above 0 and at most 1"),
    ):
        for value in values:
            with pytest.raises(ValueError, match=re.escape(f"{name} {words}") + f".*got {re.escape(str(value))}"):
                stream_tokens(model, prompt, **{name: value})
    with pytest.raises(ValueError, match=r"prompt must be \(B, L\) with at least one token, got \(1, 0\)"):
        stream_tokens(model, prompt[:, :0])
    for other in (model_of("softmax llama").model, ARCHITECTURES["BART"].build()):
        with pytest.raises(ValueError, match="does not go on with a text from its tokens alone; give a causal"):
            stream_tokens(other, prompt)
    with pytest.raises(ValueError, match=r"is in training mode; call model.eval\(\) first"):
        stream_tokens(model.train(), prompt)


def test_a_model_without_a_kv_cache_is_refused():
    """Its forward swallows the cache among its keywords, and would read each token alone."""
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1)).eval()
    for each in (model, torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match=r"MambaForCausalLM does not go on .* or has another cache"):
            stream_tokens(each, torch.tensor([[1, 2]]))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("wrap", [compiled, adapted])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_model_goes_on_as_the_model_within(kind, wrap):
    # Graphs have every layer: one of each kind shows what more of them do.
    model, prompt = model_of(kind, 2 if kind == "hybrid" else 1), torch.randint(3, 60, (1, 5))
    wrapped = wrap(model).eval()
    assert type(new_cache(wrapped)) is type(new_cache(model))
    assert torch.equal(taken(3, wrapped, prompt, temperature=0), taken(3, model, prompt, temperature=0))


@pytest.mark.parametrize("layers", [(), (0, 1), (2, 4)], ids=["softmax", "the encoder", "the decoder"])
def test_a_new_cache_of_two_texts_is_that_of_generate(layers):
    model, prompt = ARCHITECTURES["BART"].build(), torch.randint(3, 60, (2, 5))
    if layers:
        linearize_(model, method="FavorPlus(num_features=8)", layers=layers)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    wanted, cache = model.generate(prompt, **options), new_cache(model)
    assert torch.equal(model.generate(prompt, **options, past_key_values=cache).sequences, wanted.sequences)
    assert type(cache.self_attention_cache) is type(wanted.past_key_values.self_attention_cache)


def test_chunks_of_a_prompt_are_told_as_they_are_read(monkeypatch):
    monkeypatch.setattr("linattn.hf.streaming._CHUNK", 4)
    model = LinearLMForCausalLM(LinearLMConfig(num_hidden_layers=1)).eval()
    told = []
    stream = stream_tokens(model, torch.arange(10)[None], notify=told.append)
    assert told == []
    next(stream)
    next(stream)
    assert told == [4, 8, 10]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("kind", [PrefixTuningConfig, PromptTuningConfig])
def test_tokens_that_an_adapter_puts_before_each_call_are_refused(kind):
    """They would stand before every new token."""
    model = get_peft_model(model_of("softmax llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with pytest.raises(ValueError, match=r"does not go on with a text from its tokens alone.*or call generate of one"):
        stream_tokens(model, torch.tensor([[1, 2, 3]]))
