"""Models within models: adapted, compiled, offloaded, prefixed ones attend as they do alone, or are refused by name."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils.modeling import get_state_dict_offloaded_model
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from linattn import MergedKV
from linattn.hf import (
    AttentionCall,
    BoundedCache,
    StateCache,
    capture,
    from_pretrained,
    intercept,
    is_linearized,
    linearize_,
    restore_,
    save_pretrained,
    stream_tokens,
)

# PEFT, and older transformers, use names that newer transformers warns of.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
METHODS = ("FavorPlus(num_features=16)", "Hedgehog", "FavorPlus(num_features=16) + window 4")
IDS = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    """For all of these."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def llama() -> LlamaForCausalLM:
    """Two layers, drawn."""
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def adapted(model: LlamaForCausalLM) -> Any:
    """With a LoRA adapter that does something."""
    return get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    )


def compile_forward(model: Any) -> None:
    """Its forward pass alone."""
    model.forward = torch.compile(model.forward, backend="eager")


def greedy(model: Any, **options: Any) -> Any:
    """What a model generates, and its cache."""
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, **options}
    return model.generate(input_ids=IDS, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wrap", [adapted, lambda model: torch.compile(model, backend="eager")])
def test_a_wrapper_is_linearized_as_the_model_within(wrap: Any, method: str) -> None:
    """It generates from states, the text of the model that was linearized first; restored it has its own again."""
    first, second = llama(), llama()
    second.load_state_dict(first.state_dict())
    wrapped = wrap(first)
    within = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else first
    softmax = within(input_ids=IDS).logits
    linearize_(wrapped, method=method)
    assert is_linearized(wrapped)
    assert is_linearized(within)
    made = greedy(wrapped)
    assert isinstance(made.past_key_values, StateCache)
    assert torch.equal(made.sequences, greedy(within).sequences)
    restore_(wrapped)
    assert not is_linearized(within)
    assert torch.equal(within(input_ids=IDS).logits, softmax)
    greedy(wrapped)


@pytest.mark.parametrize("method", METHODS)
def test_adapters_are_merged_into_a_linearized_model(method: str) -> None:
    wrapped = adapted(llama())
    linearize_(wrapped, method=method)
    logits = wrapped(input_ids=IDS).logits
    merged = wrapped.merge_and_unload()
    assert is_linearized(merged)
    torch.testing.assert_close(merged(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("save", [save_pretrained, lambda model, folder: model.save_pretrained(folder)])
def test_weights_that_no_reader_would_find_a_place_for_are_not_saved(save: Any, tmp_path: Path) -> None:
    """Nothing is written; merged into the model, they are saved and read."""
    wrapped = adapted(llama())
    linearize_(wrapped, method=METHODS[-1])
    with pytest.raises(ValueError, match="merge_and_unload"):
        save(wrapped.get_base_model(), tmp_path / "model")
    assert not (tmp_path / "model").exists()
    merged = wrapped.merge_and_unload()
    save(merged, tmp_path / "model")
    assert torch.equal(from_pretrained(tmp_path / "model").eval()(input_ids=IDS).logits, merged(input_ids=IDS).logits)


@pytest.mark.parametrize("options", [{}, {"offload_buffers": True}, {"preload_module_classes": ["LayerAttention"]}])
@pytest.mark.parametrize("method", METHODS)
def test_offloaded_models_attend_as_before(method: str, options: dict[str, Any]) -> None:
    """In a pass and from states."""
    model = llama()
    linearize_(model, method=method)
    logits, made = model(input_ids=IDS).logits, greedy(model).sequences
    cpu_offload(model, execution_device=torch.device("cpu"), **options)
    assert torch.equal(model(input_ids=IDS).logits, logits)
    assert torch.equal(greedy(model).sequences, made)


def from_disk(model: LlamaForCausalLM, folder: Path) -> None:
    """Its weights in files."""
    disk_offload(model, folder, execution_device=torch.device("cpu"))


def from_memory(model: LlamaForCausalLM, _: Path) -> None:
    """Its weights on the CPU, brought where a module is called."""
    cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize(
    "save", [save_pretrained, lambda model, *args, **options: model.save_pretrained(*args, **options)]
)
@pytest.mark.parametrize("offload", [from_memory, from_disk])
def test_an_offloaded_model_is_saved_once_its_weights_are_back(save: Any, offload: Any, tmp_path: Path) -> None:
    """Before, nothing is written, and what was there stays."""
    model = llama()
    linearize_(model, method="Hedgehog")
    logits = model(input_ids=IDS).logits
    offload(model, tmp_path / "weights")
    with pytest.raises(ValueError, match=r"more tensors of LlamaForCausalLM are on the meta device, .*remove_hook"):
        save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    if save is not save_pretrained:
        save(model, tmp_path / "given", state_dict=get_state_dict_offloaded_model(model))
        assert torch.equal(from_pretrained(tmp_path / "given")(input_ids=IDS).logits, logits)
    remove_hook_from_submodules(model)
    save(model, tmp_path / "model")
    assert torch.equal(from_pretrained(tmp_path / "model")(input_ids=IDS).logits, logits)


@pytest.mark.parametrize("method", METHODS)
def test_an_offloaded_model_is_linearized(method: str) -> None:
    """Its maps stay where it computes."""
    model = llama()
    other = copy.deepcopy(model)
    linearize_(other, method=method)
    cpu_offload(model, execution_device=torch.device("cpu"))
    linearize_(model, method=method)
    assert torch.equal(model(input_ids=IDS).logits, other(input_ids=IDS).logits)


@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_a_model_whose_first_weights_are_offloaded(place: str, tmp_path: Path) -> None:
    """It takes tokens on the CPU, as in `generate`: bounded, streamed, linearized and calibrated as with weights."""
    model, prompt = llama(), IDS[:1]
    model.save_pretrained(tmp_path / "model")
    rest = dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    devices = {"": "disk"} if place == "disk" else {"model.embed_tokens": "disk", **rest}
    folders = {"offload_folder": tmp_path / "offloaded"}
    offloaded = LlamaForCausalLM.from_pretrained(tmp_path / "model", device_map=devices, **folders).eval()
    assert offloaded.device.type == "meta"
    made = []
    for each in (model, offloaded):
        texts = [greedy(each, past_key_values=BoundedCache(each, config=MergedKV(4, 4))).sequences]
        texts.append(torch.cat([*islice(stream_tokens(each, prompt, temperature=0), 4)]))
        linearize_(each, "Expansion(num_centres=2)", calibrate=[{"input_ids": IDS}])
        made.append([*texts, each(input_ids=IDS).logits])
    for expected, result in zip(*made, strict=True):
        assert torch.equal(result, expected)


class EightBitLinear(nn.Module):
    """A linear layer whose weights are whole numbers of 8 bits, as bitsandbytes and torchao leave them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(linear.weight.abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by weights in the numbers of x."""
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_counts_keys_in_their_own_dtype_where_weights_are_quantized(dtype: torch.dtype) -> None:
    """A cache that holds all tokens gives the quantized model's own text."""
    model = llama().to(dtype)
    expected = [each.config for each in BoundedCache(model, 512).report]
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Linear):
            model.set_submodule(name, EightBitLinear(part))
    assert [each.config for each in BoundedCache(model, 512).report] == expected
    made = greedy(model, past_key_values=BoundedCache(model, config=MergedKV(16, 64, bits=None)))
    assert torch.equal(made.sequences, greedy(model).sequences)


def test_a_compiled_model_is_read_as_the_model_within() -> None:
    """By its calls; whichever of the two is called in the block, a handler answers."""
    model, numbers = llama(), []
    compiled = torch.compile(model, backend="eager")
    softmax = compiled(input_ids=IDS).logits
    recorded, alone = capture(compiled, {"input_ids": IDS}), capture(model, {"input_ids": IDS})
    assert torch.equal(recorded.output, alone.output)
    assert [call.module_name for call in recorded.calls] == [call.module_name for call in alone.calls]

    def doubled(call: AttentionCall) -> Tensor:
        numbers.append(call.layer)
        return 2 * call.softmax()

    for given in (model, compiled):
        with intercept(given, doubled):
            expected = model(input_ids=IDS).logits
            assert torch.equal(compiled(input_ids=IDS).logits, expected)
            assert torch.equal(compiled(input_ids=IDS).logits, expected)
        assert not torch.equal(expected, softmax)
    assert numbers == [0, 1] * 6
    assert torch.equal(compiled(input_ids=IDS).logits, softmax)


@pytest.mark.parametrize("compile_", [lambda model: model.compile(backend="eager"), compile_forward])
def test_a_model_compiled_in_place_is_probed_as_the_model(compile_: Any) -> None:
    """The same layers are bounded, or replaced, in the same words."""
    torch._dynamo.reset()
    model, bounds = llama(), MergedKV(window=4, num_merged=4, num_sinks=0)
    caches = [BoundedCache(model, config=bounds)]
    other = copy.deepcopy(model)
    compile_(other)
    caches.append(BoundedCache(other, config=bounds))
    assert caches[1].report == caches[0].report
    assert all(layer.reason is None for layer in caches[0].report)
    assert str(linearize_(other, "Hedgehog")) == str(linearize_(model, "Hedgehog"))


@pytest.mark.parametrize(
    "read", [lambda model: intercept(model, AttentionCall.softmax).__enter__(), lambda model: capture(model, {})]
)
@pytest.mark.parametrize("make", [lambda: nn.DataParallel(llama()).eval(), lambda: Bag().eval(), lambda: "llama"])
def test_what_is_no_model_is_not_read(make: Any, read: Any) -> None:
    with pytest.raises(TypeError, match="a transformers model is wanted, got"):
        read(make())


def test_a_prefix_in_a_cache_is_attended_to() -> None:
    """A feature map takes keys that no query of the text came with."""
    torch.manual_seed(3)
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    base = llama()
    linearize_(base, method="FavorPlus(num_features=16)")
    model = get_peft_model(base, prefix).eval()
    made = greedy(model).sequences
    # Token by token it is the pass over the whole text.
    logits = model(input_ids=made).logits
    assert torch.equal(logits[:, IDS.shape[1] - 1 : -1].argmax(-1), made[:, IDS.shape[1] :])


class Bag(nn.Module):
    """A module that holds a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, ids: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.inner(ids).logits
        return logits


@pytest.mark.parametrize("change", [lambda model: linearize_(model, method="Hedgehog"), restore_])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.DataParallel(llama()), r"got DataParallel; pass model\.module"),
        (Bag, r"got Bag; pass the one within, model\.get_submodule\('inner'\)"),
        (lambda: nn.Linear(2, 2), "got Linear; load one with transformers"),
        (lambda: None, "got NoneType; load one with transformers"),
        (lambda: "bert-base-uncased", "got str; load one with transformers"),
    ],
)
def test_what_is_no_model_of_transformers_is_refused_by_name(change: Any, make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        change(make())


def part_adapted(model: LlamaForCausalLM) -> None:
    """PEFT trains copies of what attends."""
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["linear_attention"]))


def part_compiled(model: LlamaForCausalLM) -> None:
    """What attends, compiled by itself."""
    for layer in model.model.layers:
        layer.self_attn.linear_attention = torch.compile(layer.self_attn.linear_attention, backend="eager")


@pytest.mark.parametrize("wrap", [part_adapted, part_compiled])
def test_a_wrapper_of_what_attends_is_refused_and_leaves_with_it(wrap: Any) -> None:
    model, plain = llama(), llama()
    plain.load_state_dict(model.state_dict())
    linearize_(model, method="Hedgehog")
    wrap(model)
    with pytest.raises(TypeError, match=r"linear_attention is wrapped in .*modules_to_save=\['of_query', 'of_key'\]"):
        model(IDS)
    restore_(model)
    assert not any("linear_attention" in name for name, _ in model.named_modules())
    if wrap is part_compiled:
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_adapters_of_a_map_are_those_that_attend() -> None:
    """The cure that the refusal names."""
    model = llama()
    linearize_(model, method="Hedgehog")
    before = model(IDS).logits
    parts = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["of_query", "of_key"])
    wrapped = get_peft_model(model, parts).eval()
    assert torch.equal(wrapped(IDS).logits, before)
    with torch.enable_grad():
        wrapped(IDS).logits.square().sum().backward()
    copies = {name: x for name, x in wrapped.named_parameters() if "modules_to_save" in name}
    assert len(copies) >= 4
    assert all(x.grad is not None and bool(x.grad.any()) for x in copies.values())


def test_a_wrapper_is_saved_as_the_model_within_or_refused_in_words(tmp_path: Path) -> None:
    model = llama()
    compiled = torch.compile(model, backend="eager")
    linearize_(compiled, method=METHODS[0])
    save_pretrained(compiled, tmp_path / "compiled")
    assert torch.equal(from_pretrained(tmp_path / "compiled")(IDS).logits, model(IDS).logits)
    wrapper = adapted(llama())
    linearize_(wrapper, method=METHODS[0])
    with pytest.raises(ValueError, match="merge adapters into it first"):
        save_pretrained(wrapper, tmp_path / "adapted")
    assert [path.name for path in tmp_path.iterdir()] == ["compiled"]
