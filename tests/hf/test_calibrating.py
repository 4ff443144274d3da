"""Maps that take statistics are fitted to what the softmax model itself attends with, each to its own layer."""

from __future__ import annotations

import pytest
import torch

from linattn.feature_maps import Centred, Expansion, FavorPlus, Relu
from linattn.hf import StateCache, calibrating, capture, from_pretrained, linearize_, restore_, save_pretrained
from linattn.hf.layer_attention import rescale_query
from model_inputs import LANGUAGE_HEADS, OPTIONS, batch

EXPANSION = "Expansion(num_centres=3)"
FITTED = (
    EXPANSION,
    f"{EXPANSION} + window 4",
    "Centred(FavorPlus(num_features=16))",
    "Oprf(num_features=16)",
    "Sderf(num_features=16)",
    "Balanced(Taylor)",
)
SHARED = Expansion(8, 2)


def kernels(model):
    return [part for name, part in model.named_modules() if name.endswith("linear_attention")]


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def texts(count=3, length=12):
    return torch.randint(3, 64, (count, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("written", FITTED)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "bert_decoder"])
def test_causal_models_attend_by_fitted_maps(build, family, written):
    """What a text's beginning gives does not depend on its end, and states give what no cache gives."""
    model = build(family, head=LANGUAGE_HEADS[family], **OPTIONS.get(family, {})).double()
    linearize_(model, method=written, calibrate=[texts()])
    ids, other = texts(2, 9), texts(2, 9).clone()
    other[:, 6:] = 5
    whole = run(model, {"input_ids": ids, "use_cache": False})
    assert torch.equal(
        run(model, {"input_ids": other, "use_cache": False})[:, :6].round(decimals=9), whole[:, :6].round(decimals=9)
    )
    cache = StateCache(model)
    parts = [run(model, {"input_ids": part, "past_key_values": cache}) for part in ids.split([4, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9 * float(whole.abs().max()))


@pytest.mark.parametrize("family", ["bert", "llama", "esm", "bart"])
def test_each_map_is_fitted_to_its_own_layers_unpadded_tokens(build, family):
    """By hand: softmax's queries, at the map's temperature, and keys, as `capture` records them; GQA included."""
    model, inputs = build(family).double(), batch(family)
    calls = capture(model, inputs).calls
    layers = range(6) if family == "bart" else None  # cross attention, where it is named
    batches = [inputs, {name: x.flip(0) for name, x in inputs.items()}]
    linearize_(model, method=EXPANSION, layers=layers, calibrate=batches)
    by_name = {call.module_name: call for call in calls}
    assert len(kernels(model)) == len(calls)
    for kernel in kernels(model):
        call, wanted = by_name[kernel.module_name], Expansion(8, 3)
        query, key = rescale_query(wanted, call.query, call.scale), call.key
        rows = [*range(3), *reversed(range(3))]

        def live(x, call=call, rows=rows):
            """Row by row, the padding cut off."""
            own = call.key_mask is not None and x.shape[2] == call.key.shape[2]
            return torch.cat([x[row][:, call.key_mask[row]] if own else x[row] for row in rows], 1)[None]

        wanted.fit(live(query), live(key))
        torch.testing.assert_close(kernel.feature_map.centres, wanted.centres, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(kernel.feature_map.key_mean, wanted.key_mean, rtol=1e-9, atol=1e-9)


def test_what_is_padded_does_not_enter(build):
    """Whatever it holds: the same centres as without it."""
    model, twin = build("bert"), build("bert")
    ids = texts(4, 9)
    padded = torch.cat((ids, torch.full((4, 5), 9)), 1)
    mask = torch.cat((torch.ones(4, 9), torch.zeros(4, 5)), 1).long()
    linearize_(model, method=EXPANSION, calibrate=[ids])
    linearize_(twin, method=EXPANSION, calibrate=[{"input_ids": padded, "attention_mask": mask}])
    for ours, theirs in zip(kernels(twin), kernels(model), strict=True):
        torch.testing.assert_close(ours.feature_map.centres, theirs.feature_map.centres, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_fitted_maps_are_nearer_to_softmax_than_the_calls_own_or_none(build, family):
    """On other texts than those of the fit."""
    model = build(family, num_hidden_layers=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.3)
    softmax = run(model, {"input_ids": texts(2, 40)})
    errors = []
    for method, given in (("Expansion(num_centres=8)", [texts(8, 40)]), ("Exponential", None)):
        linearize_(model, method=method, calibrate=given)
        errors.append(float((run(model, {"input_ids": texts(2, 40)}) - softmax).norm()))
        restore_(model)
    assert errors[0] < 0.5 * errors[1]


def test_left_unchanged_otherwise(build):
    """Modes, gradients and softmax's own outputs are what they were; training mode is no obstacle."""
    model = build("llama", head="ForCausalLM")
    softmax = run(model, batch("llama"))
    model.train()
    model.model.layers[0].eval()
    modes = [part.training for part in model.modules()]
    first = next(model.parameters())
    first.requires_grad_(False)
    linearize_(model, method=EXPANSION, calibrate=[texts()])
    assert [part.training for name, part in model.named_modules() if "linear_attention" not in name] == modes
    assert torch.is_grad_enabled()
    assert not first.requires_grad
    assert all(x.grad is None for x in model.parameters())
    assert all(x.requires_grad for name, x in model.named_parameters() if x is not first)
    restore_(model)
    assert torch.equal(run(model.eval(), batch("llama")), softmax)


def test_an_error_in_a_batch_leaves_the_model_as_it_was(build):
    model = build("bert").train()
    before = model.config._attn_implementation
    with pytest.raises(IndexError):
        linearize_(model, method=EXPANSION, calibrate=[texts(), texts() + 1000])
    assert model.training
    assert model.config._attn_implementation == before
    assert not kernels(model)
    linearize_(model, method=EXPANSION, calibrate=[texts()])


def test_layers_that_keep_their_softmax_may_have_windows(build):
    """Longer texts than the windows: the layers that are not replaced attend as they did."""
    model = build("modernbert", local_attention=4)
    linearize_(model, method=EXPANSION, calibrate=[texts()])
    assert [kernel.feature_map.centres.shape for kernel in kernels(model)] == [(4, 3, 8)]


def test_batches_are_read_once_and_one_at_a_time(build):
    model, alive = build("bert"), []

    def stream():
        for number in range(4):
            alive.append(number)
            yield texts(1, 5 + number)

    linearize_(model, method=EXPANSION, calibrate=stream())
    assert alive == [0, 1, 2, 3]


def test_memory_does_not_grow_with_the_samples(monkeypatch):
    """At most so many tokens are kept, and they are evenly spread over all."""
    monkeypatch.setattr(calibrating, "_MOST_TOKENS", 64)
    observed, numbers = calibrating.Observed("layer"), torch.arange(1000.0)
    for part in numbers.split([1, 300, 7, 500, 192]):
        x = part.view(1, 1, -1, 1)
        observed.add(x, x, None, 1.0)
        assert max(kept.shape[2] for kept in observed.tokens()[:2]) <= 64
    query, key = (x.flatten() for x in observed.tokens()[:2])
    assert torch.equal(query, key)
    assert torch.equal(query, numbers[::16])
    assert query.untyped_storage().nbytes() <= 64 * 4


def test_maps_that_a_function_builds(build):
    model = build("llama")
    report = linearize_(model, method=lambda d: Centred(FavorPlus(d, 16)), calibrate=[texts()])
    first, second = (kernel.feature_map for kernel in kernels(model))
    assert first.key_mean.shape == (2, 1, 8)
    assert not torch.equal(first.key_mean, second.key_mean)
    assert first.extra_repr() in report.replaced[0].feature_map


def test_what_was_calibrated_is_saved(build, tmp_path):
    model = build("llama")
    linearize_(model, method=f"{EXPANSION} + window 4", calibrate=[texts()])
    save_pretrained(model, tmp_path / "new")
    assert torch.equal(run(from_pretrained(tmp_path / "new"), batch("llama")), run(model, batch("llama")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(build, dtype):
    model = build("llama").to(dtype)
    linearize_(model, method=EXPANSION, calibrate=[texts()])
    assert run(model, batch("llama")).isfinite().all()
    assert all(kernel.feature_map.centres.dtype == torch.float32 for kernel in kernels(model))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"calibrate": []}, ValueError, "calibrate holds no batches; give some that are like"),
        ({"calibrate": texts()}, TypeError, "got Tensor; put a single batch into a list"),
        ({"calibrate": {"input_ids": texts()}}, TypeError, "got dict; put a single batch into a list"),
        ({"calibrate": 3}, TypeError, "must be an iterable of batches, got int"),
        ({"calibrate": ["a text"]}, TypeError, r"calibrate\[0\] is str, wanted a mapping of the model's inputs"),
        (
            {"calibrate": [texts(), texts()[0]]},
            ValueError,
            r"calibrate\[1\] is a tensor .*shape \(12,\), wanted input ids",
        ),
        ({"calibrate": [torch.rand(2, 3)]}, ValueError, r"calibrate\[0\] is a tensor of torch.float32"),
        (
            {"method": "Taylor", "calibrate": [texts()]},
            ValueError,
            "nothing to calibrate: Taylor.*leave calibrate out",
        ),
        ({"method": Relu, "calibrate": [texts()]}, ValueError, "nothing to calibrate: Relu"),
        ({"calibrate": None}, ValueError, r"cannot attend by Expansion.*calibrate=batches fits it to samples"),
        (
            {"method": lambda _: SHARED, "calibrate": [texts()]},
            ValueError,
            "several layers have one map, which cannot be fitted to each of them",
        ),
        (
            {"calibrate": [{"input_ids": texts(), "attention_mask": torch.zeros(3, 12, dtype=torch.long)}]},
            ValueError,
            r"every token of the samples is masked in layers\.0\.self_attn",
        ),
    ],
)
def test_what_cannot_be_calibrated(build, options, error, words):
    model = build("llama")
    before = model.config._attn_implementation
    with pytest.raises(error, match=words):
        linearize_(model, **{"method": EXPANSION, **options})
    assert model.config._attn_implementation == before
    assert not kernels(model)


def test_calls_that_no_kernel_can_take(build):
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn asks for a sliding window of 4 over 12 keys"):
        linearize_(build("mistral", sliding_window=4), method=EXPANSION, layers=[0], calibrate=[texts()])


def test_layers_that_no_sample_reaches(build):
    model = build("bert")
    layer = model.encoder.layer[1]
    forward = layer.forward
    # The probe has other tokens, and reaches it.
    layer.forward = lambda hidden, *rest, **more: forward(hidden, *rest, **more) if hidden.shape[1] == 6 else hidden
    with pytest.raises(ValueError, match=r"no sample made encoder\.layer\.1\.attention\.self attend; leave it out"):
        linearize_(model, method=EXPANSION, calibrate=[texts()])
