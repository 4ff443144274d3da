"""Bytes as tokens, and the folders that are read so."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from linattn.hf import ByteTokenizer, LinearLMConfig, LinearLMForCausalLM, load

TEXT = "  a é\n\n\x00<s> € 😀 \t  end "
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "pattern": "s"}


@pytest.mark.parametrize("text", [TEXT, "", "\n", "".join(map(chr, range(0x300)))])
def test_every_text_is_its_bytes_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    found = tokenizer(text)
    assert found["input_ids"] == list(text.encode())
    assert set(found) == {"input_ids", "attention_mask"}
    assert tokenizer.decode(found["input_ids"]) == text


def test_bytes_that_are_no_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, 255, 105]) == "h\ufffdi"
    assert (len(tokenizer), tokenizer.vocab_size, tokenizer.all_special_tokens) == (256, 256, [])
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))


def test_tokens_that_are_added_have_their_text() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_tokens("€")
    tokens = tokenizer("a<pad>é€")["input_ids"]
    assert len(tokens) == 5
    assert tokenizer.decode(tokens) == "a<pad>é€"
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "aé€"


def test_an_added_character_takes_no_byte_s_number() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.add_special_tokens({"eos_token": "§"})
    assert tokenizer.eos_token_id == 256
    tokens = tokenizer("ça§")["input_ids"]
    assert tokens == [*"ça".encode(), 256]
    assert tokenizer.decode(tokens) == "ça§"
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "ça"


def test_numbers_and_names_of_no_token() -> None:
    """As of a model with more embeddings than the tokenizer has tokens."""
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([97, 300]) == "a\ufffd"
    assert tokenizer.convert_tokens_to_ids("<pad>") is None
    names = tokenizer.convert_ids_to_tokens(list(range(256)))
    assert tokenizer.convert_tokens_to_ids(names) == list(range(256))


def test_a_folder_without_a_tokenizer_is_read_in_bytes(tmp_path) -> None:
    model = LinearLMForCausalLM(LinearLMConfig(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, with_head=True)
    assert type(loaded.model) is LinearLMForCausalLM
    inputs = loaded.encode(TEXT, 9)
    assert inputs["input_ids"].tolist() == [list(TEXT.encode())[:9]]
    assert torch.equal(loaded.model(**inputs).logits, model(**inputs).logits)
    loaded.tokenizer.save_pretrained(tmp_path / "bytes")
    LinearLMConfig(**SIZES).save_pretrained(tmp_path / "bytes")
    again = AutoTokenizer.from_pretrained(tmp_path / "bytes")
    assert type(again) is ByteTokenizer
    assert again(TEXT)["input_ids"] == list(TEXT.encode())


def test_other_tokens_need_their_tokenizer(tmp_path) -> None:
    LinearLMForCausalLM(LinearLMConfig(**SIZES, vocab_size=5)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a LinearLM of 5 tokens and no tokenizer; its tokens are bytes only where"):
        load(tmp_path, with_head=True)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    assert load(tmp_path, with_head=True).encode("a", 4)["input_ids"].tolist() == [[1]]
