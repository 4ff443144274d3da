"""A conversion says what it keeps, and from which length on it is faster."""

from __future__ import annotations

import pytest

from linattn.convert import DEFAULT_MAP, ConvertConfig, Paying, convert_
from linattn.hf import is_linearized
from linattn.methods import crossover


@pytest.fixture
def machine(monkeypatch):
    """A function that sets how many times as long as softmax linear attention takes, at every length."""

    def takes(ratio):
        def seconds(contenders, *, repeats):
            """Both are called once, and take what was said."""
            for run in contenders.values():
                run()
            return {"linear": [0.1 * ratio] * repeats, "exact": [0.1] * repeats}

        monkeypatch.setattr(crossover, "seconds", seconds)

    return takes


@pytest.mark.parametrize(("family", "ratio"), [("gpt2", 2.0), ("gpt2", 0.9), ("bert", 2.0)])
def test_a_layer_is_timed_until_it_is_faster(build, batches, machine, family, ratio):
    """At its own length, then at twice that; an encoder keeps no state between calls."""
    machine(ratio)
    model = build(family, max_position_embeddings=512)
    found = convert_(model, batches, ConvertConfig("FavorPlus(num_features=4) + window 2", minutes=0)).paying
    # Sums of 4 features by 8 values, weights and maxima; keys and values of two blocks of two.
    assert (found.state_numbers, found.exact_numbers) == (4 * (8 + 1 + 1) + 4 * 16, 12 * 16)
    assert (found.longest, found.num_tokens) == (512, 12)
    assert found.lengths == ((12,) if ratio < 1 else (12, 24))
    assert found.crossover.always == (ratio < 1)
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
    machine(2.0)
    model = build(family, max_position_embeddings=longest)
    with pytest.raises(ValueError, match=f"the default, does not pay on {name}: it keeps {STATE:,} numbers") as told:
        convert_(model, batches, ConvertConfig(minutes=0))
    assert f"the exact cache of {longest:,} tokens {16 * longest:,}. Attention alone is not faster up to" in str(
        told.value
    )
    assert "name a method by feature_map, which is taken whatever it costs" in str(told.value)
    assert not is_linearized(model)


def test_a_layer_may_be_faster_beyond_what_a_model_takes():
    """L/32 and L²/4096 seconds cross at 128 tokens."""
    found = Paying(64, 1, 1, (64, 256), (2.0, 8.0), (1.0, 16.0), 512, is_causal=False)
    assert [found.is_faster_at(length) for length in (127, 128, 300)] == [False, True, True]


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
