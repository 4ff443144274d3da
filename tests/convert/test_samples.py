"""What a conversion reads: no text in two uses, special tokens as the tokenizer makes them, steps that repeat."""

from __future__ import annotations

import pytest
import torch

from linattn.convert.samples import from_batches, from_texts

SETTINGS = {"num_tokens": 16, "batch_size": 3, "seed": 5}
SPECIAL = 2


@pytest.fixture
def samples(tokenizer, paragraphs):
    """Of two files, with most paragraphs of the first in the second too, and many twice there."""
    first, second = paragraphs[:80], paragraphs[5:60] + paragraphs[80:] + paragraphs[:50]
    return from_texts(tokenizer, ["\n\n".join(first), "\n\n".join(second)], **SETTINGS)


@pytest.mark.parametrize("between", ["\r\n\r\n", "\n \t\n", "\n\n\n"])
def test_any_empty_line_ends_a_paragraph(tokenizer, paragraphs, between):
    found, wanted = (from_texts(tokenizer, [each.join(paragraphs)], **SETTINGS) for each in (between, "\n\n"))
    assert rows(found.held_out) == rows(wanted.held_out)


def rows(batches):
    """The texts of batches as tuples, special tokens cut off."""
    return [tuple(row[1:-1]) for batch in batches for row in batch["input_ids"].tolist()]


def test_uses_share_no_paragraph(samples, tokenizer, paragraphs):
    known = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in paragraphs]
    training = rows(samples.training(step) for step in range(300))
    uses = [training + rows(samples.calibration), rows(samples.validation), rows(samples.held_out)]
    found = []
    for use in uses:
        # A document begins with a whole paragraph and goes on with whole ones but for the last.
        text = " ".join("|" + ",".join(map(str, row)) + "," for row in use)
        found.append({number for number, words in enumerate(known) if "," + ",".join(map(str, words)) + "," in text})
        assert found[-1]
    assert not found[0] & found[1]
    assert not found[0] & found[2]
    assert not found[1] & found[2]


def test_no_window_of_what_is_held_out_is_trained_on(samples):
    def windows(batches):
        # Five words in a row do not occur twice by chance.
        return {row[start : start + 5] for row in rows(batches) for start in range(len(row) - 4)}

    trained = windows(samples.training(step) for step in range(300))
    assert len(trained) > 300
    assert not trained & windows(samples.held_out)
    assert not trained & windows(samples.validation)
    assert trained > windows(samples.calibration) - {()}


def test_lengths(samples):
    room = SETTINGS["num_tokens"] - SPECIAL
    documents = samples.calibration + samples.validation + samples.held_out
    lengths = {len(row) for row in rows(documents)}
    least = room // 4
    assert lengths <= {least + (room - least) * part // 6 for part in range(7)}
    assert max(lengths) == room
    trained = [samples.training(step)["input_ids"] for step in range(200)]
    assert all(len(ids) == 3 for ids in trained)
    assert {ids.shape[1] - SPECIAL for ids in trained} == set(range(room // 4, room + 1))


def test_the_shortest_may_be_named(tokenizer, paragraphs):
    found = from_texts(tokenizer, ["\n\n".join(paragraphs)], min_tokens=12, **SETTINGS)
    documents = found.calibration + found.validation + found.held_out
    assert {batch["input_ids"].shape[1] for batch in documents} == {12, 13, 14, 15, 16}
    assert {found.training(step)["input_ids"].shape[1] for step in range(200)} == {12, 13, 14, 15, 16}


def test_at_most_so_many(tokenizer, paragraphs):
    many = [f"{text} w{number % 50} w{number // 50}" for number in range(8) for text in paragraphs]
    found = from_texts(tokenizer, ["\n\n".join(many)], num_tokens=10, batch_size=1, seed=0)
    assert (len(found.held_out), len(found.validation), len(found.calibration)) == (32, 8, 16)


def test_special_tokens_are_the_tokenizers(samples, tokenizer):
    for batch in (*samples.held_out, *samples.validation, *samples.calibration, samples.training(0)):
        for row in batch["input_ids"]:
            own = tokenizer(tokenizer.decode(row[1:-1]), return_tensors="pt")
            assert torch.equal(row, own["input_ids"][0])
        assert batch["attention_mask"].all()
        assert batch["attention_mask"].shape == batch["input_ids"].shape


def test_a_step_is_the_same_whenever_it_is_asked_for(samples, tokenizer, paragraphs):
    before = [samples.training(step)["input_ids"] for step in range(5)]
    torch.manual_seed(9)
    assert all(torch.equal(samples.training(step)["input_ids"], before[step]) for step in (4, 2, 0, 3, 1))
    other = from_texts(tokenizer, ["\n\n".join(paragraphs)], **{**SETTINGS, "seed": 6})
    assert not all(torch.equal(other.training(step)["input_ids"], before[step]) for step in range(5))


def test_the_digest_changes_with_any_text(tokenizer, paragraphs):
    def digest(texts, **options):
        return from_texts(tokenizer, ["\n\n".join(texts)], **{**SETTINGS, **options}).digest

    whole = digest(paragraphs)
    assert whole == digest(list(paragraphs)) == digest(paragraphs, seed=6)
    for number in (0, 30, 60, 90, 120):
        changed = list(paragraphs)
        changed[number] = "w0 w1 w2 w3"
        assert digest(changed) != whole


def test_refusals(tokenizer, paragraphs):
    with pytest.raises(ValueError, match=r"give 1 documents of 3 to 14 tokens, wanted 16 or more"):
        from_texts(tokenizer, ["\n\n".join(paragraphs[:2])], **SETTINGS)
    # One paragraph is never in two uses, however long.
    with pytest.raises(ValueError, match=r"give 1 documents .*paragraphs end at an empty line"):
        from_texts(tokenizer, [" ".join(paragraphs)], **SETTINGS)
    with pytest.raises(ValueError, match="num_tokens is 8, which leaves 6 tokens"):
        from_texts(tokenizer, ["\n\n".join(paragraphs)], **{**SETTINGS, "num_tokens": 8})
    with pytest.raises(ValueError, match="got 15 batches, wanted 16 or more"):
        from_batches([{"input_ids": torch.zeros(1, 2)}] * 15, seed=0)


def test_batches_every_eighth_is_held_out():
    given = [{"input_ids": torch.tensor([[number]])} for number in range(26)]
    samples = from_batches(given, seed=0)

    def numbers(batches):
        return [batch["input_ids"].item() for batch in batches]

    assert numbers(samples.held_out) == [7, 15, 23]
    assert numbers(samples.validation) == [3, 11, 19]
    others = [number for number in range(26) if number % 8 not in (3, 7)]
    assert set(numbers(samples.calibration)) < set(others)
    rounds = [numbers(samples.training(step) for step in range(20 * turn, 20 * turn + 20)) for turn in range(3)]
    assert all(sorted(each) == others for each in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert numbers([samples.training(21)]) == [rounds[1][1]]
    changed = from_batches([*given[:-1], {"input_ids": torch.tensor([[99]])}], seed=0)
    assert changed.digest != samples.digest == from_batches(given, seed=1).digest
