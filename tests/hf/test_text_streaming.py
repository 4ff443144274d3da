"""Text as tokens come: whole characters only, and in all what decoding at once gives."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gguf_models import TOKENS
from linattn.hf import ByteTokenizer
from linattn.hf.streaming import IncrementalDecoder

TEXT = "Zoë sah 你好 – 👩‍🚀 und café, n’est-ce pas?"


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges."""
    fast = Tokenizer(models.BPE({token: number for number, token in enumerate(TOKENS)}, []))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=TOKENS[-1])


def with_fallback() -> PreTrainedTokenizerFast:
    """As SentencePiece: words begin with a sign, the first of a text without; what is no word is bytes."""
    words = ["▁Zoë", "▁sah", "▁und", "▁café", ",", "▁n", "’", "est-ce", "▁pas", "?", "▁", "–"]
    vocabulary = {word: number for number, word in enumerate(["<unk>", *(f"<0x{n:02X}>" for n in range(256)), *words])}
    fast = Tokenizer(models.Unigram([(word, -1.0) for word in vocabulary], unk_id=0, byte_fallback=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>")


KINDS = {"bytes": ByteTokenizer, "byte-level": byte_level, "byte fallback": with_fallback}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_whole_and_each_is_whole(kind):
    tokenizer = KINDS[kind]()
    tokens = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(tokens) == TEXT
    for cut in range(len(tokens)):
        prompt, new = tokens[:cut], tokens[cut:]
        # A prompt is a text: it ends with a whole character.
        if "\ufffd" in tokenizer.decode(prompt):
            continue
        decoder = IncrementalDecoder(tokenizer, prompt)
        parts = [decoder.decode(token) for token in new]
        assert "".join(parts) == TEXT[len(tokenizer.decode(prompt)) :]
        assert not any("\ufffd" in part for part in parts)
        assert decoder.finish() == ""


@pytest.mark.parametrize("kind", ["bytes", "byte-level"])
def test_bytes_that_are_no_characters(kind):
    tokenizer, draws = KINDS[kind](), random.Random(0)
    for _ in range(50):
        tokens = [draws.randrange(256) for _ in range(40)]
        decoder = IncrementalDecoder(tokenizer)
        text = "".join(map(decoder.decode, tokens)) + decoder.finish()
        assert text == tokenizer.decode(tokens)
        assert decoder.finish() == ""


@pytest.mark.parametrize("kind", ["bytes", "byte-level"])
def test_tokens_without_a_character_are_not_all_held(kind):
    """Nor is a character lost that begins among them."""
    tokenizer = KINDS[kind]()
    for number in range(60):
        euro = tokenizer("€")["input_ids"]
        tokens = [euro[1]] * number + euro + [euro[2]] * 60
        decoder = IncrementalDecoder(tokenizer)
        text = ""
        for token in tokens:
            text += decoder.decode(token)
            assert len(decoder._tokens) <= 50
        assert text + decoder.finish() == tokenizer.decode(tokens)
        assert "€" in text


def test_special_tokens_are_not_shown():
    tokenizer = byte_level()
    decoder = IncrementalDecoder(tokenizer)
    end = tokenizer.eos_token_id
    tokens = [*tokenizer("a")["input_ids"], end, *tokenizer("b")["input_ids"]]
    assert [decoder.decode(token) for token in tokens] == ["a", "", "b"]
