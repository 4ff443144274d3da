"""The tokenizer of byte-level models: a text's tokens are the bytes of its UTF-8 form."""

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizer

from linattn.hf.language_model_config import LinearLMConfig

NUM_BYTES = 256
# No single characters, which tokens that are added may be.
_NAMES = [f"<0x{number:02X}>" for number in range(NUM_BYTES)]
_NUMBERS = {name: number for number, name in enumerate(_NAMES)}
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
        """Each byte's token, as "<0x61>"."""
        return _NUMBERS | self.added_tokens_encoder

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """No file: there is nothing to write down."""
        return ()

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of bytes, and of tokens that were added."""
        parts = (bytes([_NUMBERS[token]]) if token in _NUMBERS else token.encode() for token in tokens)
        return b"".join(parts).decode("utf-8", errors="replace")

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        """The name of each byte."""
        return [_NAMES[number] for number in text.encode("utf-8")]

    def _convert_token_to_id(self, token: str) -> int | None:
        """The byte; None for what names none."""
        return _NUMBERS.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        """A byte's name; U+FFFD for the number of no token."""
        return _NAMES[index] if index < NUM_BYTES else "\N{REPLACEMENT CHARACTER}"


AutoTokenizer.register(LinearLMConfig, tokenizer_class=ByteTokenizer, exist_ok=True)
