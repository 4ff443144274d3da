"""The text that a language model goes on with, as its tokens come."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linattn.hf._model_records import RECORD
from linattn.hf.loading import LoadedModel, find_source, load, read_tokenizer
from linattn.hf.saving import from_pretrained

# What a decoder puts in place of bytes that are no character, or not yet one.
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# Tokens of the prompt that the first new ones are decoded with: none has a form that depends on more.
_CONTEXT = 16


class IncrementalDecoder:
    """The text of tokens that come one by one, each character once it is whole.

        "".join(decode(t) for t in tokens) + finish() = text(prompt + tokens) beyond text(prompt)

    A character may be spread over several tokens, and a token's text may depend on the ones before it; so new tokens
    are decoded together with the last ones, and shown once they end with a whole character.

    Cost: decoding a few tokens per call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)[-_CONTEXT:]
        self._num_shown = len(self._tokens)

    def decode(self, token: int) -> str:
        """The text that is whole with this token and was not before."""
        self._tokens.append(token)
        new = self._unshown()
        if not new or new.endswith(_NO_CHARACTER):
            return ""
        self._tokens = self._tokens[self._num_shown :]
        self._num_shown = len(self._tokens)
        return new

    def finish(self) -> str:
        """Text that is left at the end, with characters that were never finished."""
        new = self._unshown()
        self._num_shown = len(self._tokens)
        return new

    def _unshown(self) -> str:
        """The text of the tokens that are not shown yet."""
        return self._text(self._tokens)[len(self._text(self._tokens[: self._num_shown])) :]

    def _text(self, tokens: list[int]) -> str:
        """Decode tokens without cosmetic changes of spaces, which would reach back into text that is shown."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)


def load_language_model(name_or_folder: str | os.PathLike[str]) -> LoadedModel:
    """A causal language model and its tokenizer, to generate with: anything that `load` finds, or a linearized folder.

    Cost: that of `load`, or of `from_pretrained`.

    Args:
        name_or_folder: as in `load`; or a folder that `linattn.hf.save_pretrained` wrote, whose model is linearized.

    Returns:
        A `LoadedModel` with its language model's head.

    Raises:
        ValueError: if the model is no causal language model, or a linearized folder holds no tokenizer; as `load` and
            `from_pretrained`.

    Example:
        >>> import tempfile
        >>> from linattn.hf import LinearLMConfig, LinearLMForCausalLM
        >>> folder = tempfile.mkdtemp()
        >>> LinearLMForCausalLM(LinearLMConfig(num_hidden_layers=1)).save_pretrained(folder)
        >>> load_language_model(folder).tokenizer("a")["input_ids"]
        [97]

    Source: transformers' documentation, "Auto classes".
    """
    name = str(name_or_folder)
    source = find_source(name)
    if (source / RECORD).is_file():
        loaded = LoadedModel(name, str(source), from_pretrained(source), _tokenizer(source))
    else:
        loaded = load(name, with_head=True)
    if not loaded.model.can_generate():
        raise ValueError(
            f"{name} holds a {type(loaded.model).__name__}, which does not predict a next token; give a causal "
            "language model, saved with its head"
        )
    return loaded


def end_tokens(model: PreTrainedModel) -> set[int]:
    """The tokens by which a language model ends a text; none for models that go on without end."""
    config = model.generation_config
    ids = None if config is None else config.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a linearized folder; without files of one, transformers would make one that knows no words."""
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(
            f"{folder} holds a linearized model and no tokenizer; save it with "
            "linattn.hf.save_pretrained(model, folder, tokenizer=tokenizer)"
        )
    return read_tokenizer(str(folder))
