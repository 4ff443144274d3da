"""A conversion says what it keeps, and is refused by default where that saves neither memory nor time."""

from __future__ import annotations

import pytest

from linattn.convert import DEFAULT_MAP, ConvertConfig, convert_, speed
from linattn.hf import is_linearized


@pytest.fixture
def machine(monkeypatch):
    """A function that sets how many times as long as softmax linear attention takes; the lengths that are timed."""
    lengths = []

    def takes(ratio):
        def seconds(contenders, *, repeats):
            """Both are called once, and take what was said."""
            for run in contenders.values():
                run()
            return {"linear": [0.1 * ratio] * repeats, "exact": [0.1] * repeats}

        def timed(attention, call, num_tokens):
            lengths.append(num_tokens)
            return is_faster(attention, call, num_tokens)

        is_faster = speed.is_faster
        monkeypatch.setattr(speed, "seconds", seconds)
        monkeypatch.setattr("linattn.convert.course.is_faster", timed)
        return lengths

    return takes


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_layers_numbers_are_counted(build, batches, family):
    """An encoder keeps no state between calls."""
    found = convert_(build(family), batches, ConvertConfig("FavorPlus(num_features=4) + window 2", minutes=0)).paying
    # Sums of 4 features by 8 values, weights and maxima; keys and values of two blocks of two.
    assert (found.state_numbers, found.exact_numbers) == (4 * (8 + 1 + 1) + 4 * 16, 12 * 16)
    assert found.num_tokens == 12
    assert found.saves_memory == (family == "gpt2")


# 16 centres of 1 + 8 features by 8 values, weights and maxima, and 64 keys and values; 16 of a token in the cache.
STATE = 16 * 9 * 9 + 16 + 64 * 16


@pytest.mark.parametrize(
    ("family", "ratio", "longest", "options"),
    [
        ("gpt2", 2.0, STATE // 16, {"feature_map": DEFAULT_MAP}),
        ("gpt2", 0.9, STATE // 16, {}),
        ("gpt2", 2.0, STATE // 16 + 1, {}),
        ("bert", 0.9, 64, {}),
    ],
)
def test_the_default_is_taken_where_it_saves_something_or_is_named(
    build, batches, machine, family, ratio, longest, options
):
    machine(ratio)
    model = build(family, max_position_embeddings=longest)
    assert convert_(model, batches, ConvertConfig(minutes=0, **options)).paying.state_numbers == STATE
    assert is_linearized(model)


@pytest.mark.parametrize(
    ("family", "name", "longest"), [("gpt2", "GPT2LMHeadModel", STATE // 16), ("bert", "BertModel", 512)]
)
def test_the_default_is_refused_where_it_saves_nothing(build, batches, machine, family, name, longest):
    """A decoder keeps its cache between calls; an encoder keeps none, and a smaller state saves it nothing."""
    lengths = machine(2.0)
    model = build(family, max_position_embeddings=longest)
    with pytest.raises(ValueError, match=f"the default, does not pay on {name}: it keeps {STATE:,} numbers") as told:
        convert_(model, batches, ConvertConfig(minutes=0))
    words = f"the exact cache of {longest:,} tokens {16 * longest:,}, and its attention is no faster over so many"
    assert words in str(told.value)
    assert lengths == [longest]
    assert "name a method by feature_map, which is taken whatever it costs" in str(told.value)
    assert not is_linearized(model)


def test_the_longest_texts_are_timed(build, batches):
    # Held out are the eighth and the sixteenth.
    longer = [{"input_ids": one["input_ids"].repeat(1, 1 + number % 3)} for number, one in enumerate(batches)]
    found = convert_(build("bert"), longer, ConvertConfig("Expansion(num_centres=2)", minutes=0))
    assert found.speed.num_tokens == found.paying.num_tokens == 24


def test_a_state_is_counted_beside_the_cache_of_its_key_head(build, batches):
    found = convert_(build("llama"), batches, ConvertConfig("EluPlusOne", minutes=0))
    assert found.paying.exact_numbers == 12 * 16
    # Sums of 8 features by 8 values, weights and one maximum.
    assert found.paying.state_numbers == 8 * 9 + 1
