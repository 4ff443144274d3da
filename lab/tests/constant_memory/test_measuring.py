"""The audit of a constant memory: every figure against the plain way to it."""

from __future__ import annotations

import pytest
import torch

from linattn.hf import intercept
from linattn.records.texts import Text
from linattn_lab.constant_memory.answering import GlobalLayers
from linattn_lab.constant_memory.measuring import MemoryAudit
from linattn_lab.constant_memory.passages import TokenText
from linattn_lab.constant_memory.recall import REPEATED, TASKS
from linattn_lab.constant_memory.records import EXACT, MEMORY, UNIFORM, PassageRow, key_of
from linattn_lab.contenders.windows import SinksAndWindow
from ranks import NUM_RANKS
from split_work import memory_audited

TOKENS, BUDGET = 128, 40
KINDS = ("sinks + window", "TOVA")
# Float32 through five layers: some hundred roundings of 2**-24 of logits of order 10.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def audit(tiny, words):
    return MemoryAudit(tiny("hybrid"), words, [BUDGET], num_tokens=TOKENS, num_passages=2, kinds=KINDS)


@pytest.fixture(scope="module")
def rows(audit):
    return list(audit.rows())


def row(rows, kind, passage=0):
    return next(r for r in rows if isinstance(r, PassageRow) and (r.contender, r.passage) == (kind, passage))


def plainly(tiny, words, answer, passage):
    """Log-probabilities at all positions of a passage, with all layers computed."""
    loaded = tiny("hybrid")
    text = TokenText.of(loaded, words)
    tokens = text.passage(text.starts(TOKENS, 2)[passage], TOKENS)
    with torch.no_grad(), intercept(loaded.model, answer):
        return tokens[0], loaded.model(input_ids=tokens).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("passage", [0, 1])
@pytest.mark.parametrize("kind", [UNIFORM, "sinks + window"])
def test_divergence_and_perplexity_of_the_last_tokens(tiny, words, rows, kind, passage):
    layers = GlobalLayers.of(tiny("hybrid").model)
    assert layers.numbers == (2, 4)
    answer = layers.uniform() if kind == UNIFORM else layers.by(SinksAndWindow(BUDGET))
    tokens, other = plainly(tiny, words, answer, passage)
    _, exact = plainly(tiny, words, lambda call: call.softmax(), passage)
    last = torch.arange(TOKENS // 2 - 1, TOKENS - 1)
    kl = (exact.exp() * (exact - other)).sum(-1)
    found = row(rows, kind, passage)
    assert found.kl == pytest.approx(float(kl[last].mean()), rel=CLOSE)
    assert found.kl > 1e-3
    loss = -other[last, tokens[last + 1]].mean()
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=CLOSE)
    assert found.same == float((exact.argmax(-1) == other.argmax(-1))[last].double().mean())
    # Every position before the last ones is measured too in a text as short as this one; one stretch, so their mean.
    assert found.kl_by_position == [pytest.approx(float(kl[:-1].mean()), rel=CLOSE)]


def test_errors_of_heads_are_on_the_exact_model_s_calls(tiny, words, rows):
    layers, calls = GlobalLayers.of(tiny("hybrid").model), []

    def keep(call):
        if call.module_name in layers.names:
            calls.append(call)
        return call.softmax()

    plainly(tiny, words, keep, 0)
    found = row(rows, "sinks + window").errors
    for call, errors in zip(calls, found, strict=True):
        one = SinksAndWindow(BUDGET).attend(call.query, call.key, call.value, call.scale)
        for head, error in enumerate(errors):
            exact = call.softmax()[0, head, TOKENS // 2 :]
            assert error == pytest.approx(float((one[0, head, TOKENS // 2 :] - exact).norm() / exact.norm()), rel=CLOSE)


def test_baselines(rows):
    exact, uniform = row(rows, EXACT), row(rows, UNIFORM)
    assert (exact.kl, exact.same, exact.errors) == (0.0, 1.0, [[0.0] * 4] * 2)
    assert 0 < uniform.same <= 1
    # Two layers of two key heads; a key and its value take 64 bytes, one value 32.
    assert (exact.num_bytes, uniform.num_bytes) == (4 * TOKENS * 64, 4 * 32)
    assert row(rows, "sinks + window").num_bytes == 4 * BUDGET * 64


def test_rows_are_those_announced_and_an_earlier_run_s_are_kept(audit, rows, tmp_path):
    assert list(map(key_of, rows)) == audit.wanted()
    assert len(audit.wanted()) == 2 * 4
    kept = rows[:3] + rows[6:]
    MEMORY.extend(tmp_path / "memory.jsonl", audit.header, kept, audit.rows(kept))
    header, found = MEMORY.read(tmp_path / "memory.jsonl")
    assert header == audit.header
    assert sorted(found, key=key_of) == sorted(rows, key=key_of)


def test_recall_is_measured_after_the_first_passage(tiny, words):
    audit = MemoryAudit(tiny("llama"), words, [200], num_tokens=640, num_passages=2, kinds=KINDS[:1])
    assert audit.header.tasks == [REPEATED]
    found = list(audit.rows())
    assert list(map(key_of, found)) == audit.wanted()
    exact, window = found[3], found[5]
    assert [exact.contender, window.contender] == [EXACT, "sinks + window"]
    assert len(exact.hits) == 5
    again = list(audit.rows(found[:4]))
    assert again == found[4:]


def test_a_model_is_as_it_was(tiny, words):
    loaded = tiny("hybrid")
    tokens = TokenText.of(loaded, words).passage(0, TOKENS)
    with torch.no_grad():
        before = loaded.model(input_ids=tokens).logits
        list(MemoryAudit(loaded, words, [BUDGET], num_tokens=TOKENS, kinds=KINDS[:1]).rows())
        assert torch.equal(loaded.model(input_ids=tokens).logits, before)


def test_what_is_left_out_says_why(tiny, words):
    # Beside the moments of what is evicted 29 keys are left.
    header = MemoryAudit(tiny("llama"), words, [36], num_tokens=TOKENS, kinds=("MomentKV", "TOVA")).header
    assert list(header.left_out) == ["MomentKV at 36", *TASKS]
    assert "give more bytes" in header.left_out["MomentKV at 36"]


@pytest.mark.parametrize(
    ("family", "text", "options", "says"),
    [
        ("bert", None, {}, "for causal language models"),
        ("llama", Text("short", "abc " * 40), {}, "too few for 1 passages"),
        ("windowed", None, {}, "no layer of MistralForCausalLM would be replaced"),
        ("llama", None, {"num_tokens": 8}, "num_tokens must be at least 64, got 8"),
        ("llama", None, {"kinds": ("oracle",)}, "oracle"),
    ],
)
def test_refusals(tiny, words, family, text, options, says):
    with pytest.raises(ValueError, match=says):
        MemoryAudit(tiny(family), text or words, [BUDGET], **{"num_tokens": TOKENS * 2, **options})


@pytest.mark.xdist_group("ranks")
def test_processes_that_share_the_rows_have_those_of_one(on_ranks, tiny, words, rows):
    sizes = {"num_tokens": TOKENS, "num_passages": 2, "kinds": KINDS}
    for found in on_ranks(NUM_RANKS, memory_audited, tiny("hybrid"), words, BUDGET, **sizes):
        assert found == rows
