"""Linearized models in half precision and under autocast: wherever softmax models run, and as near to float32."""

from __future__ import annotations

import pytest
import torch

from grid import in_turns
from linattn.hf import BoundedCache, StateCache, from_pretrained, linearize_, save_pretrained
from model_inputs import ENCODERS, LANGUAGE_HEADS, OPTIONS, batch, real

FAVOR = "FavorPlus(num_features=32)"
METHODS = (FAVOR, f"{FAVOR} + window 4", "Taylor(order=2)", "LearnedExponential(num_features=8)")
FAMILIES = (*ENCODERS, *LANGUAGE_HEADS, "vit", "whisper", "bart")
DTYPES = (torch.bfloat16, torch.float16)
WAYS = ("half", "bfloat16", "autocast")
# How much further a kernel may be from itself in float32 than the same model's softmax is. Both round the same products
# before and after attention, so that their errors are alike; maps of exponentials round logits of twice the size.
AS_NEAR = 3


def linear(build, family, method):
    model = build(family, head=LANGUAGE_HEADS.get(family, "Model"), **OPTIONS.get(family, {}))
    if family in LANGUAGE_HEADS:
        model.generation_config.pad_token_id = 0
    linearize_(model, method=method)
    return model


def softmax(build, family):
    """The same weights."""
    return build(family, head=LANGUAGE_HEADS.get(family, "Model"), **OPTIONS.get(family, {}))


def run(model, family, dtype=torch.float32, **options):
    """Its outputs at the positions that mean something, in float64."""
    inputs = batch(family)
    own = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.no_grad():
        return model(**own, **options)[0][real(inputs)].double()


def roundings(ours, wanted, dtype) -> float:
    """The error, relative to the norm, in units of the dtype's."""
    assert ours.isfinite().all()
    return float((ours - wanted).norm() / wanted.norm() / torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("family", "method", "dtype"), in_turns(["bert", "llama", "gpt2", "gpt_neox", "esm"], METHODS, DTYPES)
)
def test_models_that_were_cast(build, family, dtype, method):
    errors = []
    for model in (linear(build, family, method), softmax(build, family)):
        wanted = run(model, family)
        errors.append(roundings(run(model.to(dtype), family, dtype), wanted, dtype))
    assert errors[0] <= AS_NEAR * errors[1]


@pytest.mark.parametrize(
    ("family", "method", "dtype"),
    in_turns(["bert", "llama", "gpt2", "gpt_neox", "qwen3", "esm", "modernbert"], METHODS, DTYPES),
)
def test_autocast(build, family, dtype, method):
    """Rotary positions give queries and keys in float32, beside values in half precision."""
    errors = []
    for model in (linear(build, family, method), softmax(build, family)):
        wanted = run(model, family)
        for options in [{"use_cache": False}, {}] if family in LANGUAGE_HEADS else [{}]:
            with torch.autocast("cpu", dtype=dtype):
                errors.append(roundings(run(model, family, **options), wanted, dtype))
    half = len(errors) // 2
    assert max(errors[:half]) <= AS_NEAR * max(errors[half:])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs(build, family, way):
    model = linear(build, family, FAVOR)
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16}.get(way, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        assert run(model.to(dtype), family, dtype).isfinite().all()


@pytest.mark.parametrize(("family", "method", "way"), in_turns(["llama", "gpt2", "qwen3"], METHODS, WAYS))
def test_a_state_gives_what_no_cache_gives(build, family, way, method):
    """Token by token, to the rounding of the dtype; states themselves are kept in float32."""
    model = linear(build, family, method)
    dtype = {"half": torch.float16}.get(way, torch.bfloat16)
    model.to(torch.float32 if way == "autocast" else dtype)
    cache, ids = StateCache(model), batch(family)["input_ids"][:1]
    with torch.autocast("cpu", dtype=dtype, enabled=way == "autocast"), torch.no_grad():
        whole = model(ids, use_cache=False)[0].double()
        parts = [model(part, past_key_values=cache)[0].double() for part in ids.split([3, 1, 3], 1)]
    # Two layers, each of whose sums is rounded once more or once less: a rounding, or two, of the largest number.
    assert float((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max()) <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("way", "method", "family"), in_turns(WAYS, METHODS, ["llama", "gpt2"]))
def test_generation(build, family, way, method):
    model = linear(build, family, method)
    if way != "autocast":
        model.to({"half": torch.float16, "bfloat16": torch.bfloat16}[way])
    inputs = {name: x for name, x in batch(family).items() if name != "position_ids"}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        made = model.generate(**inputs, **options)
        beams = model.generate(**inputs, **options, num_beams=2)
    for found in (made, beams):
        assert isinstance(found.past_key_values, StateCache)
        assert found.sequences.shape == (3, 12)
        assert all(x.isfinite().all() for x in found.logits)


def test_a_text_begun_under_autocast_goes_on_without(build):
    model = linear(build, "llama", FAVOR)
    cache, ids = StateCache(model), batch("llama")["input_ids"][:1]
    with torch.no_grad():
        whole = model(ids, use_cache=False)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(ids[:, :4], past_key_values=cache)
        ours = model(ids[:, 4:], past_key_values=cache)[0]
    assert float((ours - whole[:, 4:]).norm() / whole[:, 4:].norm()) <= 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_training_under_autocast(build, family, method):
    model = linear(build, family, method)
    options = {"use_cache": False} if family == "llama" else {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch(family), **options)[0].float().square().mean().backward()
    attending = [x for name, x in model.named_parameters() if "attn" in name or "attention" in name]
    assert len(attending) > 8
    assert all(x.grad is not None and x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in attending)


def test_a_half_model_is_saved_and_loaded_under_autocast(build, tmp_path):
    model = linear(build, "bert", FAVOR).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        save_pretrained(model, tmp_path / "new")
        twin = from_pretrained(tmp_path / "new")
    assert torch.equal(run(twin, "bert"), run(model, "bert"))


def test_a_budget_is_in_bytes_of_the_model_where_autocast_saw_its_first_cache(language_model):
    """A first cache within autocast learns the model's own dtype, as one outside does."""
    model, other = language_model("gpt2", n_embd=128), language_model("gpt2", n_embd=128)
    with torch.autocast("cpu", torch.bfloat16):
        within = BoundedCache(model, 64).report
    assert within == BoundedCache(model, 64).report == BoundedCache(other, 64).report
