"""GGUF: a quantised model in one file, read as an ordinary model in float32."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SUFFIX = ".gguf"

# What transformers leaves in a model that came from quantised numbers, though none are left in it.
_MARKS = ("hf_quantizer", "is_quantized", "quantization_method")


def gguf_file(source: Path) -> Path | None:
    """The GGUF file that a path means: the file itself, or the only one of a folder without a model of another format.

    Raises ValueError for a folder with several.
    """
    if source.is_file() and source.suffix.lower() == SUFFIX:
        return source
    if not source.is_dir() or (source / "config.json").is_file():
        return None
    files = sorted(path for path in source.iterdir() if path.suffix.lower() == SUFFIX)
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{source} holds {len(files)} GGUF files ({names}); name one of them")
    return files[0] if files else None


def load_gguf(file: Path, *, with_head: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a GGUF file, dequantised; `save_pretrained` writes the model as any other."""
    if find_spec("gguf") is None:
        raise ImportError(f"{file} is a GGUF file, whose reader is missing: pip install 'linattn[gguf]'")
    kind = AutoModelForCausalLM if with_head else AutoModel
    where, name = file.parent, file.name
    try:
        model: PreTrainedModel = kind.from_pretrained(where, gguf_file=name, local_files_only=True, dtype=torch.float32)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where, gguf_file=name, local_files_only=True)
    # Whatever a broken file makes any of its readers raise: the file is at fault, and named.
    except Exception as error:
        raise ValueError(
            f"{file} cannot be read as a GGUF model ({type(error).__name__}: {error}); give a whole file of an "
            "architecture that transformers reads from GGUF"
        ) from error
    for mark in _MARKS:
        vars(model).pop(mark, None)
    vars(model.config).pop("quantization_config", None)
    return model, tokenizer
