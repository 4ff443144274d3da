"""Plans of an audit: made for its model and length, and measured beside its methods."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from linattn import softmax_attention
from linattn.hf import intercept
from linattn.kv_cache import MergedKV
from linattn.kv_cache.budget import Sizes, kept_bytes
from linattn.kv_cache.layer_plans import PLAIN, read_memory_plans, write_memory_plans
from linattn_lab.kv_audit.measuring import MemoryAudit
from linattn_lab.kv_audit.methods import Bounded
from linattn_lab.kv_audit.names import BOUNDED, PLANNED
from linattn_lab.kv_audit.planning import CANDIDATES, attended, is_of, kept_by, plan_memory
from linattn_lab.kv_audit.plans import Choice
from linattn_lab.kv_audit.records import PassageRow
from linattn_lab.texts import Text

pytestmark = pytest.mark.usefixtures("unprofiled")

TOKENS, BUDGET = 128, 60


def test_a_plan_is_measured_within_the_bytes_of_its_layers(tiny, words, tmp_path):
    loaded, half = tiny("hybrid"), len(words.content) // 2
    other, said = Text("other half", words.content[half:]), []
    plan = plan_memory(loaded, other, BUDGET, num_tokens=TOKENS, begin=said.append)
    assert plan.kl <= plan.window_kl
    assert plan.layers == [2, 4]
    assert sum(plan.budgets) <= 2 * BUDGET
    assert said
    asked = {"lengths": [TOKENS], "kinds": (BOUNDED,), "calibration": other}
    audit = MemoryAudit(loaded, {"letters": words}, [BUDGET], **asked)
    assert audit.header.calibration == "other half"
    assert is_of(plan, audit.header, other)
    assert not is_of(plan, audit.header, words)
    assert PLAIN not in plan.choices
    write_memory_plans(tmp_path / "plan.json", [plan])
    assert read_memory_plans(tmp_path / "plan.json") == [plan]
    audit.take(plan, tmp_path / "plan.json")
    (row,) = (row for row in audit.rows() if isinstance(row, PassageRow) and row.method == PLANNED)
    assert (row.budget, row.label) == (BUDGET, plan.label)
    assert 0 < row.num_bytes <= 2 * 2 * BUDGET * 64


def test_capped_logits_are_refused_not_planned_without_their_cap():
    """In all layers before anything is measured, in some by the first call that would be answered."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, pad_token_id=0)).eval()
    with pytest.raises(ValueError, match="it asks for soft-capped logits"):
        Bounded.of(model)
    model.model.layers[0].self_attn.attn_logit_softcapping = None
    with pytest.raises(ValueError, match="asks for soft-capped logits"), intercept(model, partial(attended, {})):
        model(torch.tensor([[3, 4, 5]]))


def test_a_plan_of_plain_windows_is_no_method(tiny, words, tmp_path):
    loaded = tiny("hybrid")
    plan = plan_memory(loaded, words, BUDGET, num_tokens=TOKENS, begin=str)
    audit = MemoryAudit(loaded, {"letters": words}, [BUDGET], lengths=[TOKENS], kinds=(BOUNDED,))
    audit.take(replace(plan, choices=[PLAIN, PLAIN]), tmp_path / "plan.json")
    assert [method.name for method in audit.methods][-1] == BOUNDED


def test_each_layer_has_its_own_bytes():
    sizes = Sizes(64, 64)
    for num_keys in (70, 300):
        for name in CANDIDATES:
            layer = kept_by(Choice(name, num_keys), sizes)
            room = num_keys * sizes.key_bytes
            # A pair of keys and a block of exact ones are left at most.
            assert room - 3 * sizes.key_bytes <= kept_bytes(layer, sizes, 10**6) <= room
    with pytest.raises(ValueError, match=r"merged keys in 4 bits: .* give a budget of \d+ or more"):
        kept_by(Choice("merged keys in 4 bits", 2), sizes)


def test_sinks_and_a_window_are_softmax_over_them(tiny):
    """Where no block ends between: beside sinks the latest block and those of the window."""
    loaded, calls = tiny("llama"), []
    tokens = torch.arange(300).unsqueeze(0) % 97

    def keep(call):
        calls.append(call)
        return call.softmax()

    with torch.no_grad(), intercept(loaded.model, keep):
        loaded.model(input_ids=tokens)
    call = calls[0]
    config = MergedKV(32, num_merged=0, coded=((1, 8),))
    out = attended({call.module_name: config}, call)
    for row in (3, 15, 31, 32, 95, 159, 298):
        seen = list(range(row + 1)) if row < 37 else [0, 1, 2, 3, *range(row // 32 * 32 - 32, row + 1)]
        query, key, value = call.query[:, :, row : row + 1], call.key[:, :, seen], call.value[:, :, seen]
        alone = softmax_attention(query, key, value, scale=call.scale, enable_gqa=True)
        # A token of 8 bits beside 36 to 68.
        assert (out[:, :, row : row + 1] - alone).abs().max() < 0.2
