"""A conversion says what it keeps and from which length it pays, and chooses nothing that is slower and larger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linattn.convert import DEFAULT_MAP, ConvertConfig, convert_
from linattn.hf import is_linearized
from linattn.planning import paying

CALIBRATE = ConvertConfig(minutes=0)


@pytest.fixture
def machine(monkeypatch):
    """A function that sets how many times as long as softmax linear attention takes; the calls it timed."""
    timed = []

    def takes(ratio):
        def seconds(contenders, *, repeats):
            """Both are called once, and take what was said."""
            timed.extend(run() for run in contenders.values())
            return {"linear": [0.1 * ratio] * repeats, "exact": [0.1] * repeats}

        monkeypatch.setattr(paying, "seconds", seconds)
        return timed

    return takes


@pytest.mark.parametrize(
    ("family", "ratio", "longest", "options"),
    [
        # 160·16 + 96 numbers per head, causally 16 queries of 8 more; 16 for each token in the exact cache.
        ("gpt2", 2.0, 173, {"feature_map": DEFAULT_MAP}),
        ("gpt2", 2.0, 173, {"even_if_slower": True}),
        ("gpt2", 0.9, 173, {}),
        ("gpt2", 2.0, 175, {}),
        ("bert", 0.9, 173, {}),
        ("bert", 2.0, 512, {"even_if_slower": True}),
    ],
)
def test_the_default_is_taken_where_it_saves_something_or_is_asked_for(
    build, batches, machine, family, ratio, longest, options
):
    machine(ratio)
    model = build(family, max_position_embeddings=longest)
    found = convert_(model, batches, replace(CALIBRATE, **options))
    assert is_linearized(model)
    assert (found.paying.state_numbers, found.paying.exact_numbers) == (2784 if family == "gpt2" else 2656, 12 * 16)
    assert (found.paying.longest, found.paying.num_tokens) == (longest, 12)
    assert found.paying.lengths == ((12,) if ratio < 1 else (12, 24))
    assert found.paying.crossover.always == (ratio < 1)
    assert not found.paying.saves_memory


@pytest.mark.parametrize(("family", "name", "longest"), [("gpt2", "GPT2LMHeadModel", 173), ("bert", "BertModel", 512)])
def test_the_default_is_refused_where_it_saves_nothing(build, batches, machine, family, name, longest):
    """A decoder keeps its cache between calls; an encoder keeps none, and a smaller state saves it nothing."""
    timed = machine(2.0)
    model = build(family, max_position_embeddings=longest)
    with pytest.raises(ValueError, match=f"does not pay on {name}, which takes at most {longest} tokens: at") as told:
        convert_(model, batches, CALIBRATE)
    kept = "2,784" if family == "gpt2" else "2,656"
    figures = f"takes 2.0 × the time of softmax and keeps {kept} numbers per head, the exact cache {16 * longest:,}; "
    assert f"{figures}the whole model takes " in str(told.value)
    assert "× its time with softmax. Do not convert it" in str(told.value)
    assert "name another method by feature_map, or give even_if_slower=True" in str(told.value)
    assert (len(timed), is_linearized(model)) == (2, False)


def test_the_longest_texts_are_timed(build, batches):
    # Held out are the eighth and the sixteenth.
    longer = [{"input_ids": one["input_ids"].repeat(1, 1 + number % 3)} for number, one in enumerate(batches)]
    found = convert_(build("bert"), longer, ConvertConfig("Expansion(num_centres=2)", minutes=0))
    assert found.speed.num_tokens == found.paying.num_tokens == 24


def test_a_state_is_counted_beside_the_cache_of_its_key_head(build, batches):
    found = convert_(build("llama"), batches, ConvertConfig("window 2 + merged 4", minutes=0))
    assert found.paying.exact_numbers == 12 * 16
    # 8 keys and values of 8 each, 4 biases, and 16 queries.
    assert found.paying.state_numbers == 8 * 16 + 4 + 16 * 8
