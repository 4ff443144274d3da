"""The tokenizer of byte-level models: a text's tokens are the bytes of its UTF-8 form."""

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizer

from linattn.hf.language_model_config import LinearLMConfig

NUM_BYTES = 256
_INPUTS = ["input_ids", "attention_mask"]


class ByteTokenizer(PreTrainedTokenizer):
    """Token n is byte n: 256 tokens, no special ones, nothing is lost.

    A `LinearLMForCausalLM` of 256 tokens has it by default: `AutoTokenizer.from_pretrained(folder)` gives it for a
    folder without tokenizer files of its own. Decoding replaces bytes that are no UTF-8 by U+FFFD.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer("aé")["input_ids"]
        [97, 195, 169]
        >>> tokenizer.decode([97, 195, 169])
        'aé'

    Source: Xue et al. 2022 (arXiv 2105.13626), without their special tokens.
    """

    model_input_names = _INPUTS

    @property
    def vocab_size(self) -> int:
        """256."""
        return NUM_BYTES

    def get_vocab(self) -> dict[str, int]:
        """Each byte's token: the character of its number."""
        return {chr(number): number for number in range(NUM_BYTES)} | self.added_tokens_encoder

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """No file: there is nothing to write down."""
        return ()

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of bytes, and of tokens that were added."""
        added = self.added_tokens_encoder
        parts = (token.encode() if token in added else bytes([ord(token)]) for token in tokens)
        return b"".join(parts).decode("utf-8", errors="replace")

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        """The character of each byte's number."""
        return list(map(chr, text.encode("utf-8")))

    def _convert_token_to_id(self, token: str) -> int:
        """The byte."""
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        """The character of a byte's number."""
        return chr(index)


AutoTokenizer.register(LinearLMConfig, tokenizer_class=ByteTokenizer, exist_ok=True)
