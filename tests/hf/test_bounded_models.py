"""A bounded cache of adapted, compiled and planned models, and how few calls a token takes."""

from __future__ import annotations

import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from bounded_texts import FEW, GREEDY, IDS, logits
from linattn import MergedKV
from linattn.hf import BoundedCache
from linattn.kv_cache.layer_plans import MemoryPlan, TrialRecord, write_memory_plans

# PEFT uses names that newer transformers warns of.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def test_adapted_and_compiled_models(language_model):
    """As the model within."""
    model = language_model("llama", num_hidden_layers=1)
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), adapter)
    within = adapted.get_base_model()
    wanted = within.generate(IDS, past_key_values=BoundedCache(within, config=FEW), **GREEDY)
    assert torch.equal(
        adapted.generate(input_ids=IDS, past_key_values=BoundedCache(adapted, config=FEW), **GREEDY), wanted
    )
    compiled = torch.compile(model, backend="eager")
    cuts = (22, 1, 1)
    # Not quantized: graphs read codes in plain torch, single calls in compiled code where it is installed. A graph has
    # each block of a window, of which there are three here.
    config = MergedKV(8, 6, None)
    made = logits(compiled, BoundedCache(compiled, config=config), cuts)
    assert torch.equal(made, logits(model, BoundedCache(model, config=config), cuts))
    cache = BoundedCache(compiled, config=FEW)
    with torch.no_grad():
        compiled(IDS[:, :4], past_key_values=cache)
        with pytest.raises(ValueError, match="changes which of the 4 tokens"):
            compiled(IDS[:, 4:], past_key_values=cache, attention_mask=torch.tensor([[0] + [1] * 23] * 2))


def test_a_plan_of_layers(language_model, tmp_path):
    model, path = language_model("llama"), tmp_path / "plan.json"
    labels, choices = (
        ["window 4 + merged 6 in 4 bits", "window 2 + merged 9"],
        ["merged keys in 4 bits", "merged keys, 15% near"],
    )
    trials = [TrialRecord(choices, [64, 64], 0.1)]
    plan = MemoryPlan("tiny", 64, 24, "text", "0" * 64, [0, 1], choices, [64, 64], labels, 0.1, 0.2, trials)
    write_memory_plans(path, [plan])
    cache = BoundedCache(model, 64, plan=path)
    assert [row.config.label for row in cache.report] == labels
    logits(model, cache)
    for options, words in (
        ({"budget": 65}, "has plans of 64 keys, got a budget of 65"),
        ({"budget": 64, "bits": 8}, "got bits=8 too; leave it out"),
    ):
        with pytest.raises(ValueError, match=words):
            BoundedCache(model, plan=path, **options)
    with pytest.raises(ValueError, match=r"the plan is of tiny, whose global layers are \[0, 1\]"):
        BoundedCache(language_model("llama", num_hidden_layers=3), 64, plan=path)
    values = json.loads(path.read_text())
    values["plans"][0] |= {"choices": ["sinks + window"] * 2, "labels": ["sinks 4 + window 60"] * 2}
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="found nothing better by a margin than sinks 4"):
        BoundedCache(model, 64, plan=path)


def test_ways_of_a_token(language_model):
    """Two entries into linattn per layer, its cache and its attention; the softmax is in the eighth call at most."""
    model = language_model("llama")
    cache = BoundedCache(model, config=FEW)
    logits(model, cache)
    entries: list[str] = []
    stack: list[str] = []
    depths: list[int] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        """Calls of linattn's functions, and of the softmax from them."""
        if not frame.f_globals.get("__name__", "").startswith("linattn"):
            return
        if event == "call":
            if not stack:
                entries.append(frame.f_code.co_name)
            stack.append(frame.f_code.co_name)
        elif event == "return":
            stack.pop()
        elif event == "c_call" and called.__name__ in ("scaled_dot_product_attention", "read_codes"):
            depths.append(len(stack))

    with torch.no_grad():
        sys.setprofile(note)
        try:
            model(IDS[:, :1], past_key_values=cache)
        finally:
            sys.setprofile(None)
    assert [name for name in entries if name in ("update", "attend")] == ["update", "attend"] * 2
    # The length and the mask are asked for once in a call, whatever the layers are.
    assert len(entries) <= 4 + 2 * len(cache.layers)
    assert len(depths) == 2
    assert max(depths) <= 8


def test_a_model_whose_layers_change(language_model):
    """Its caches are those of a model that was built so."""
    model = language_model("llama", num_hidden_layers=3)
    BoundedCache(model, config=FEW)
    model.config.num_hidden_layers = 2
    shorter = logits(model, BoundedCache(model, config=FEW))
    del model.model.layers[2]
    assert torch.equal(logits(model, BoundedCache(model, config=FEW)), shorter)
    model.config.num_hidden_layers = 3
    del model.model.layers[0]
    cache = BoundedCache(model, config=FEW)
    logits(model, cache, cuts=(20, 4))
    assert [layer.get_seq_length() for layer in cache.layers] == [0, 24, 0]


def test_first_caches_of_several_threads(language_model):
    """Made at a time: none is refused, and none is another one."""
    for _ in range(8):
        model = language_model("llama")
        with ThreadPoolExecutor(4) as pool:
            made = [pool.submit(BoundedCache, model, config=FEW) for _ in range(4)]
        assert all(one.result().report == BoundedCache(model, config=FEW).report for one in made)
