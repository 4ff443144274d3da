"""Low-rank adapters: what they train, and that nothing of them is left but other weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from architectures import ARCHITECTURES
from linattn.convert import ConvertConfig, convert_, course
from linattn.convert.distilling import adapted
from linattn.hf import is_linearized, linearize_, restore_

RANK = 2
CONFIG = ConvertConfig("LearnedExponential(num_features=8)", minutes=0.2, learning_rate=1e-3, adapter_rank=RANK)
ATTENTIONS = {
    "llama": [f"model.layers.{n}.self_attn" for n in range(2)],
    "gemma3": [f"model.layers.{n}.self_attn" for n in range(2)],
    "gpt2": [f"transformer.h.{n}.attn" for n in range(2)],
    "bert": [f"encoder.layer.{n}.attention.self" for n in range(2)],
}
_GATED = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
PROJECTIONS = {
    "llama": _GATED,
    "gemma3": _GATED,
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "bert": {"query", "key", "value", "dense"},
}


@pytest.mark.parametrize("family", ATTENTIONS)
def test_all_projections_change_and_nothing_else_and_by_so_much_rank(build, batches, ticking, family):
    options = {"layer_types": ["full_attention"] * 2} if family == "gemma3" else {}
    model, before = build(family, **options), build(family, **options).state_dict()
    found = convert_(model, batches, CONFIG)
    assert found.trainings[-1].name == "distillation"
    assert found.trainings[-1].best_loss < found.trainings[-1].first_loss
    assert found.kept == "converted"
    restore_(model)
    after = model.state_dict()
    assert list(after) == list(before)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    projections = {name for name in before if name.removesuffix(".weight").rsplit(".", 1)[-1] in PROJECTIONS[family]}
    # A pooler is after the states that are distilled.
    assert changed == {name for name in projections if name.endswith(".weight") and "pooler" not in name}
    for name in changed:
        assert 1 <= torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-4) <= RANK
    assert all(weight.requires_grad for weight in model.parameters())


def test_what_required_no_gradient_does_not_afterwards_and_kernels_learn(build, batches):
    model = build("llama")
    model.lm_head.weight.requires_grad_(False)
    linearize_(model, method="LearnedExponential", num_features=4)
    kernels = [name for name, _ in model.named_parameters() if "linear_attention" in name]
    assert kernels
    before = {name: (weight, weight.requires_grad) for name, weight in model.named_parameters()}
    logits = model(**batches[0]).logits
    with adapted(model, ATTENTIONS["llama"], RANK, seed=0) as parameters:
        # Before the first step nothing is changed.
        assert torch.equal(model(**batches[0]).logits, logits)
        learning = {name for name, weight in model.named_parameters() if weight.requires_grad}
        assert {name for name in learning if "lora" not in name} == set(kernels)
        assert sum("lora" in name for name in learning) == len(parameters) == 2 * 2 * 7
        first = [x.clone() for x in parameters]
    assert {name: (weight, weight.requires_grad) for name, weight in model.named_parameters()} == before
    # The same draw of the same seed, whatever torch's own generator says.
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with adapted(model, ATTENTIONS["llama"], RANK, seed=0) as parameters:
        assert all(torch.equal(a, b) for a, b in zip(parameters, first, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_leaves_the_model_as_it_was(build, batches, ticking, monkeypatch):
    model, before = build("llama"), build("llama").state_dict()

    def broken(*args, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(course, "distil", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        convert_(model, batches, CONFIG)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in after)


def test_a_conversion_cut_off_goes_on(build, batches, ticking, tmp_path):
    """With less time first, then with more: the second starts at the first one's adapters."""
    shorter = replace(CONFIG, minutes=0.1)
    convert_(build("llama"), batches, shorter, work=tmp_path / "work")
    again = convert_(build("llama"), batches, CONFIG, work=tmp_path / "work")
    alone = convert_(build("llama"), batches, CONFIG)
    assert again.trainings[-1].steps > 0
    assert again.trainings[-1].first_loss == pytest.approx(alone.trainings[-1].first_loss, rel=0.5)


def test_refused(build, batches):
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="adapter_rank must be an integer of at least 1"):
            replace(CONFIG, adapter_rank=wrong)
    for change, words in (({"distil": False}, "distil=False, "), ({"minutes": 0.0}, "distil=True, minutes=0")):
        with pytest.raises(ValueError, match=f"got 2 with {words}"):
            replace(CONFIG, **change)
    with (
        pytest.raises(
            ValueError, match=r"has no projections to adapt from pooler\.activation on; leave adapter_rank out"
        ),
        adapted(build("bert"), ["pooler.activation"], RANK, seed=0),
    ):
        pass


def test_a_model_of_which_nothing_learns(build, batches, ticking):
    """Refused before any audit; a map that learns, adapters, or no time for it are something else."""
    model, told = build("bert").requires_grad_(False), []
    plain = ConvertConfig("Expansion(num_centres=2)", minutes=0.02)
    with pytest.raises(ValueError, match="no weight requires a gradient: nothing can be distilled"):
        convert_(model, batches, plain, measured=lambda name, share: told.append(name))
    assert set(told) == {"exact"}
    assert not is_linearized(model)
    learned = "LearnedExponential(num_features=4)"
    for changes in ({"minutes": 0}, {"distil": False}, {"adapter_rank": 2}, {"feature_map": learned}):
        convert_(build("bert").requires_grad_(False), batches, replace(plain, **changes))


def test_routers_of_experts_are_left_as_they_are(batches, ticking):
    """They are no projections that an adapter takes."""
    torch.manual_seed(0)
    model = ARCHITECTURES["Mixtral"].build().eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = convert_(model, batches, CONFIG)
    assert found.trainings[-1].name == "distillation"
    restore_(model)
    after = model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert any("q_proj" in name for name in changed)
    assert not any("gate.weight" in name for name in changed)
