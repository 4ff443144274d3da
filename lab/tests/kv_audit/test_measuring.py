"""The audit of a bounded KV cache: every figure against the plain way to it."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from linattn import merged_attention_with_state
from linattn.hf import BoundedCache, intercept, new_cache
from linattn.kv_cache import MergedKV
from linattn.kv_cache.budget import Sizes, kept_bytes, within_budget
from linattn_lab.kv_audit import passage_figures, reading
from linattn_lab.kv_audit.measuring import MemoryAudit
from linattn_lab.kv_audit.methods import KINDS, Bounded, exact_window, largest, methods, num_unmerged
from linattn_lab.kv_audit.names import BOUNDED, FACTS, FULL, UNIFORM
from linattn_lab.kv_audit.passages import TokenText
from linattn_lab.kv_audit.reading import read
from linattn_lab.kv_audit.records import MEMORY, PassageRow, TaskRow, key_of
from linattn_lab.texts import Text
from ranks import NUM_RANKS
from split_work import memory_audited

pytestmark = pytest.mark.usefixtures("unprofiled")

TOKENS, BUDGET = 128, 40
WRITTEN = f"window {TOKENS} + merged {TOKENS}"
ASKED = {"lengths": [TOKENS], "num_passages": 2, "kinds": (BOUNDED, WRITTEN), "chunk": 48}
SMALL = ("window 32 + merged 16",)
# Float32 through five layers: some hundred roundings of 2**-24 of logits of order 10.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def audit(tiny, words):
    return MemoryAudit(tiny("hybrid"), {"letters": words}, [BUDGET], **ASKED)


@pytest.fixture(scope="module")
def rows(audit, unprofiled):
    return list(audit.rows())


def row(rows, method, passage=0):
    return next(r for r in rows if isinstance(r, PassageRow) and (r.method, r.passage) == (method, passage))


def passage(loaded, words, number):
    text = TokenText.of(loaded, words)
    return text.passage(text.starts(TOKENS, 2)[number], TOKENS)


def logs(model, tokens, **options):
    with torch.no_grad():
        return model(input_ids=tokens, **options).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("method", [UNIFORM, BOUNDED])
def test_divergence_and_perplexity_are_those_of_one_pass_over_the_passage(tiny, words, audit, rows, method, number):
    loaded = tiny("hybrid")
    model, tokens = loaded.model, passage(loaded, words, number)
    exact, names = logs(model, tokens), audit.bounded.names
    if method == UNIFORM:
        with intercept(model, lambda call: call.uniform() if call.module_name in names else call.softmax()):
            other = logs(model, tokens)
    else:
        other = logs(model, tokens, past_key_values=BoundedCache(model, BUDGET))
    last = torch.arange(TOKENS // 2 - 1, TOKENS - 1)
    kl = (exact.exp() * (exact - other)).sum(-1)[last]
    found = row(rows, method, number)
    # Codes are rounded by frames that a stream fixes, whatever its chunks.
    assert found.kl == pytest.approx(float(kl.mean()), rel=1e-2)
    assert found.kl > 1e-6
    assert found.kl_median <= found.kl_high <= found.kl_largest
    assert found.kl_largest == pytest.approx(float(kl.max()), rel=1e-2)
    loss = -other[last, tokens[0, last + 1]].mean()
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=CLOSE)
    assert found.same == float((exact.argmax(-1) == other.argmax(-1))[last].double().mean())


@pytest.mark.parametrize(("last", "chunk"), [(1, 128), (5, 48), (60, 16), (128, 50)])
def test_predictions_in_chunks_are_those_of_one_pass(tiny, words, last, chunk):
    loaded = tiny("hybrid")
    tokens = passage(loaded, words, 0)
    found = read(loaded.model, tokens, new_cache(loaded.model), last=last, chunk=chunk).logs
    assert len(found) == last
    assert (found - logs(loaded.model, tokens)[-last:]).abs().max() < CLOSE


def test_the_full_cache_read_in_other_chunks_is_a_control(rows):
    for number in (0, 1):
        found = row(rows, FULL, number)
        assert (found.same, found.unmerged) == (1.0, 1.0)
        # Divergence is of second order: rounding of logits of order 10 in float32, and of its own sums.
        assert found.kl < 1e-6


def test_as_much_room_as_tokens_is_the_full_cache(rows):
    found = row(rows, WRITTEN)
    assert (found.budget, found.unmerged, found.parted) == (0, 1.0, passage_figures.NUM_WRITTEN)
    assert found.kl < 1e-6


def test_bytes_and_what_fits_are_the_cache_s_own(tiny, rows, unprofiled):
    full, bounded = row(rows, FULL), row(rows, BOUNDED)
    # Two layers of two key heads; a key and its value take 64 bytes.
    assert full.num_bytes == 2 * 2 * TOKENS * 64
    assert bounded.num_bytes <= 2 * 2 * BUDGET * 64
    cache = BoundedCache(tiny("hybrid").model, BUDGET)
    layers = [layer for layer in cache.report if layer.config is not None]
    assert bounded.num_bytes == sum(layer.kept_bytes(TOKENS) for layer in layers)
    config = layers[0].config
    assert bounded.label == config.label
    assert bounded.unmerged == min(num_unmerged(config) / TOKENS, 1.0)
    assert bounded.peak_bytes == bounded.num_bytes + unprofiled
    assert bounded.prefill_seconds > 0
    assert bounded.tokens_per_second > 0


@pytest.mark.parametrize(
    "label",
    [
        "sinks 4 + window 74 + 1 in 8 bits",
        "sinks 2 + window 180 + 1 in 8 bits",
        "sinks 4 + window 8 + 20 in 4 bits + merged 16 in 4 bits",
        "sinks 4 + window 33 + 20 in 4 bits",
        "window 5 + merged 7",
    ],
)
def test_what_fits_is_what_a_stream_keeps_token_by_token(label):
    config, state, number = MergedKV.parse(label), None, 0
    for key in torch.randn(300, 1, 1, 1, 8):
        _, state = merged_attention_with_state(key, key, key, config, state)
        if (state.keys.tokens().bias != -torch.inf).sum() <= number:
            break
        number += 1
    assert num_unmerged(config) == number


@pytest.mark.parametrize("budget", [128, 256, 512, 1024])
def test_windows_in_few_bits_keep_as_many_tokens_exact_as_the_default(budget):
    sizes = Sizes(256, 256, num_groups=4)
    assert {KINDS[kind](budget, sizes).blocks.window for kind in (BOUNDED, "sinks + window in 3.5 bits")} == {
        within_budget(budget, sizes).blocks.window
    }


def test_the_time_of_a_prompt_is_without_the_output_layer(tiny):
    """Whose predictions are measured at many tokens, where a prompt needs one."""
    model = tiny("llama").model
    handle = model.get_output_embeddings().register_forward_hook(lambda *_: time.sleep(1.0))
    try:
        prompt = read(model, torch.arange(12).unsqueeze(0), new_cache(model), last=8, chunk=8)
    finally:
        handle.remove()
    assert prompt.seconds < 1.0


def test_a_token_takes_a_step(tiny, words, monkeypatch):
    """By a clock that every call of the model advances; the first token written comes of the text's last call."""
    loaded, calls = tiny("hybrid"), []
    audit = MemoryAudit(loaded, {"letters": words}, [BUDGET], **ASKED | {"tasks": ()})
    monkeypatch.setattr(reading, "time", SimpleNamespace(perf_counter=lambda: float(len(calls))))
    handle = loaded.model.register_forward_hook(lambda *_: calls.append(None))
    try:
        found = list(audit.rows())
    finally:
        handle.remove()
    assert {one.tokens_per_second for one in found} == {1.0}
    assert {one.prefill_seconds for one in found} == {3.0}


def test_the_greedy_text_is_that_of_generate(tiny, words, rows):
    loaded = tiny("hybrid")
    model, tokens = loaded.model, passage(loaded, words, 0)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["max_new_tokens"] = passage_figures.NUM_WRITTEN
    exact, other = (
        model.generate(tokens, past_key_values=cache, **options)[0, TOKENS:]
        for cache in (None, BoundedCache(model, BUDGET))
    )
    found = row(rows, BOUNDED)
    assert found.agreement == float((exact == other).double().mean())
    assert found.parted == int((exact == other).long().cumprod(0).sum())


def test_rows_are_those_announced_and_an_earlier_run_s_are_kept(audit, rows, tmp_path):
    assert list(map(key_of, rows)) == audit.wanted()
    assert len(rows) == 2 * 4
    # Of the second passage only the full cache: it is read again, for others to be held against.
    earlier = rows[:3] + rows[4:5]
    MEMORY.extend(tmp_path / "memory.jsonl", audit.header, earlier, audit.rows(earlier))
    header, found = MEMORY.read(tmp_path / "memory.jsonl")
    assert header == audit.header
    assert sorted(map(key_of, found)) == sorted(map(key_of, rows))
    assert all(one in found for one in earlier)
    # What is measured again has other times, and the same divergences.
    assert sorted(r.kl for r in found) == sorted(r.kl for r in rows)


def test_audits_that_differ_in_budgets_alone_have_the_same_rows(audit):
    header = audit.header
    assert header.measures_as(replace(header, budgets=[1, 2], kinds=[], lengths=[64], tasks=[]))
    assert not header.measures_as(replace(header, dtype="bfloat16"))
    assert not header.measures_as(replace(header, num_passages=3))


def test_keys_are_of_the_model_s_dtype(tiny, words):
    loaded = tiny("llama")
    short = {"lengths": [64], "chunk": 64, "kinds": (BOUNDED,), "tasks": ()}
    wide, narrow = (
        MemoryAudit(replace(loaded, model=loaded.model.to(dtype)), {"letters": words}, [50], **short)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert (wide.header.dtype, narrow.header.dtype) == ("float32", "bfloat16")
    assert (wide.header.number_bytes, narrow.header.number_bytes) == (4, 2)
    full, _, bounded = narrow.rows()
    assert full.num_bytes == 2 * 2 * 64 * 32
    assert bounded.num_bytes <= 2 * 2 * 50 * 32


def test_a_task_that_the_full_cache_fails_is_not_scored(tiny, words):
    asked = {"lengths": [1400], "kinds": SMALL, "tasks": (FACTS, "fwe"), "num_samples": 2, "num_facts": 1}
    audit = MemoryAudit(tiny("llama"), {"letters": words}, [64], **asked)
    found = [one for one in audit.rows() if isinstance(one, TaskRow)]
    assert [(one.task, one.sample, one.method) for one in found] == [
        (task, sample, FULL) for task in (FACTS, "fwe") for sample in (0, 1)
    ]
    assert sorted(found[0].depths) == [0.1, 0.5, 0.9]


def test_a_sample_s_text_is_the_same_however_many_there_are(tiny, words):
    """Figures of an audit with fewer samples are reused."""
    asked = {"lengths": [1024], "kinds": SMALL, "tasks": (FACTS,), "num_facts": 1}
    few, many = (MemoryAudit(tiny("llama"), {"a": words}, [64], num_samples=n, **asked) for n in (2, 5))
    texts = [many._tasks._facts(1024, sample).tokens for sample in range(5)]
    assert all(torch.equal(few._tasks._facts(1024, sample).tokens, texts[sample]) for sample in (0, 1))
    assert len({tuple(text.flatten().tolist()) for text in texts}) == 5


def test_a_task_that_the_full_cache_answers_is_scored(tiny, words, monkeypatch):
    monkeypatch.setattr("linattn_lab.kv_audit.measuring.ENOUGH", 0.0)
    asked = {"lengths": [1024], "kinds": SMALL, "tasks": (FACTS,), "num_facts": 1}
    audit = MemoryAudit(tiny("llama"), {"letters": words}, [64], **asked)
    assert list(map(key_of, audit.rows())) == audit.wanted()


def test_a_task_without_room_says_why(audit):
    assert list(audit.header.left_out) == [f"{FACTS} at {TOKENS}"]
    assert "another number of --tokens" in audit.header.left_out[f"{FACTS} at {TOKENS}"]


def test_a_model_is_as_it_was(tiny, words):
    loaded = tiny("hybrid")
    tokens = passage(loaded, words, 0)
    before = logs(loaded.model, tokens)
    list(MemoryAudit(loaded, {"letters": words}, [BUDGET], lengths=[TOKENS], kinds=(BOUNDED,)).rows())
    assert torch.equal(logs(loaded.model, tokens), before)


def test_the_largest_of_a_kind_fits_and_the_next_does_not(tiny):
    sizes = Bounded.of(tiny("hybrid").model).sizes
    assert (sizes.head_dim, sizes.num_groups) == (8, 2)
    room = 50 * sizes.key_bytes

    def make(size):
        return MergedKV(16, size, bits=None)

    found = largest(make, 50, sizes)
    assert kept_bytes(found, sizes, 10**6) <= room < kept_bytes(make(found.num_merged + 1), sizes, 10**6)
    with pytest.raises(ValueError, match="give more bytes"):
        largest(make, 1, sizes)


@pytest.mark.parametrize("sizes", [Sizes(256, 256, 4, 4), Sizes(128, 128, 2, 4), Sizes(8, 8)])
def test_the_exact_window_is_the_widest_that_fits(sizes):
    """Blocks are finer from 65, 129 and 193 tokens on, so that not every narrower window keeps fewer bytes."""
    for budget in (64, 128, 192, 256):
        fitting = [
            window
            for window in range(1, budget)
            if kept_bytes(MergedKV(window, num_merged=0, coded=((1, 8),)), sizes, 2**62) <= budget * sizes.key_bytes
        ]
        assert exact_window(budget, sizes).window == max(fitting)


def test_every_kind_keeps_its_budget(tiny):
    sizes = Bounded.of(tiny("hybrid").model).sizes
    several, left_out = methods([BUDGET, 4], KINDS, sizes)
    assert {one.budget for one in several} == {0, BUDGET}
    assert set(left_out) == {f"{kind} at 4" for kind in KINDS}
    with pytest.raises(ValueError, match=r"no method fits: bounded cache at 4: .* give a budget of \d+ or more"):
        methods([4], KINDS, sizes)


def test_a_model_without_predictions_is_refused_before_anything_is_measured(tiny, words):
    """Else an audit of hours has figures that are none."""
    loaded = tiny("llama")
    with torch.no_grad():
        loaded.model.lm_head.weight[3] = torch.nan
    audit = MemoryAudit(loaded, {"letters": words}, [BUDGET], lengths=[TOKENS])
    with pytest.raises(ValueError, match="llama predicts NaN; give another model, or another --dtype"):
        audit.work(audit.wanted()[0])


@pytest.mark.parametrize(
    ("family", "text", "options", "says"),
    [
        ("bert", None, {}, "for causal language models"),
        ("llama", Text("short", "abc " * 40), {}, "too few for --passages 1 of 256 each"),
        ("windowed", None, {}, "no layer of MistralForCausalLM would be replaced"),
        ("llama", None, {"lengths": [8]}, "num_tokens must be at least 64, got 8"),
        ("llama", None, {"lengths": [2048]}, "num_tokens must be at most 2,031"),
        (
            "llama",
            None,
            {"kinds": ("oracle",)},
            "among 'bounded cache', 'bounded cache, middle', .*'oracle'",
        ),
        ("llama", None, {"tasks": ("oracle",)}, "tasks must be among facts, .*oracle"),
        ("llama", None, {"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ("llama", None, {"num_facts": 9}, "num_facts must be at most 8, got 9"),
    ],
)
def test_refusals(tiny, words, family, text, options, says):
    with pytest.raises(ValueError, match=says):
        MemoryAudit(tiny(family), {"letters": text or words}, [BUDGET], **{"lengths": [TOKENS * 2], **options})


@pytest.mark.xdist_group("ranks")
def test_processes_that_share_the_rows_have_those_of_one(on_ranks, tiny, words):
    """But for times, which are taken while no other process works."""
    asked = {**ASKED, "kinds": SMALL}
    rows = list(MemoryAudit(tiny("hybrid"), {"letters": words}, [BUDGET], **asked).rows())
    for found in on_ranks(NUM_RANKS, memory_audited, tiny("hybrid"), words, BUDGET, **asked):
        assert [(r.method, r.passage, r.kl, r.num_bytes) for r in found] == [
            (r.method, r.passage, r.kl, r.num_bytes) for r in rows
        ]
