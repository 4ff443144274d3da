"""A linearized model as a SentenceTransformer, saved and loaded; this module alone knows sentence-transformers."""

import os
from collections import OrderedDict
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("sentence_transformers") is None:
    raise ImportError("linattn.hf.sentence_transformers needs sentence-transformers: pip install 'linattn[sentences]'")

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from transformers import PreTrainedModel

from linattn.hf.loading import most_tokens, quiet
from linattn.hf.saving import from_pretrained, write_linearized
from linattn.records.files import atomic_folder

# What sentence-transformers itself passes on to every model; other options would have to be obeyed.
_WHERE = {"subfolder", "token", "cache_dir", "revision", "local_files_only", "trust_remote_code"}


class LinearTransformer(Transformer):
    """The first module of a SentenceTransformer, named in modules.json: saved and loaded with its linear attention."""

    def forward(self, features: dict[str, Any], **options: Any) -> dict[str, Any]:
        """The model's token embeddings, as `Transformer` gives them; both names are sentence-transformers' own."""
        try:
            outputs: dict[str, Any] = super().forward(features, **options)
        except (IndexError, RuntimeError) as error:
            limit, ids = most_tokens(self.model), features.get("input_ids")
            if limit is None or not isinstance(ids, Tensor) or ids.shape[-1] <= limit:
                raise
            raise ValueError(
                f"{type(self.model).__name__} has {limit} positions and failed on {ids.shape[-1]} tokens ({error}); "
                f"set max_seq_length to at most {limit}, or take a model with more positions"
            ) from error
        return outputs

    def save(self, output_path: str, *_: Any, safe_serialization: bool = True, **__: Any) -> None:
        """The linearized model, its tokenizer and this module's settings, into a folder that exists."""
        if not safe_serialization:
            raise ValueError("a linearized model is written with safetensors; leave safe_serialization on")
        write_linearized(self.model, Path(output_path))
        self.processor.save_pretrained(output_path)
        self.save_config(output_path)

    def _load_model(
        self,
        model_name_or_path: str,
        transformer_task: Any,
        config: Any,
        backend: str,
        is_peft_model: bool,
        **options: Any,
    ) -> PreTrainedModel:
        """Called by the constructor of `Transformer`: the saved model, or an error."""
        refused = sorted(name for name, value in options.items() if name not in _WHERE and value is not None)
        if backend != "torch" or refused:
            raise ValueError(
                f"a linearized model is loaded as it was saved, with torch; got backend={backend!r} and options "
                f"{refused}; load it without, then move or cast it"
            )
        model = from_pretrained(Path(model_name_or_path) / (options.get("subfolder") or ""))
        if hasattr(config, "use_cache"):
            # sentence-transformers turns caches off, which sentence embeddings have no use for.
            model.config.use_cache = config.use_cache
        return model


def with_model(source: str, model: PreTrainedModel) -> SentenceTransformer:
    """A saved SentenceTransformer with another model inside: its tokenizer, pooling and prompts around that model."""
    with quiet():
        sentence_model = SentenceTransformer(source, device="cpu", local_files_only=Path(source).is_dir())
    first = sentence_model[0]
    if not isinstance(first, Transformer):
        raise TypeError(f"{source} begins with {type(first).__name__}, wanted sentence-transformers' Transformer")
    first.model = model
    return sentence_model


def save_pretrained(model: SentenceTransformer, folder: str | os.PathLike[str]) -> None:
    """Write a SentenceTransformer whose model was linearized to a new folder, which appears whole or not at all.

        SentenceTransformer(folder, trust_remote_code=True).encode(texts) is what model.encode(texts) is

    Linearize `model[0].auto_model` with `linattn.hf.linearize_` first. Pooling, normalisation, prompts and
    max_seq_length, which sentence-transformers lowers to the model's positions, are those of `model`; no model card is
    written. `linattn.hf.from_pretrained` reads the folder too. What was loaded from it may be saved by its own `save`;
    that of a model linearized in memory writes what SentenceTransformer refuses.

    Cost: writing the weights.

    Args:
        model: a SentenceTransformer whose first module is sentence-transformers' `Transformer`; it stays as it is.
        folder: where to write; nothing, or an empty folder.

    Raises:
        TypeError: if the first module is not a `Transformer`, or of a subclass that is not `LinearTransformer`.
        ValueError, FileExistsError, OSError: as `linattn.hf.save_pretrained`.

    Example:
        >>> import tempfile
        >>> from linattn.hf import linearize_
        >>> from linattn.hf.loading import default_folder
        >>> model = SentenceTransformer(str(default_folder()), device="cpu", local_files_only=True)
        >>> _ = linearize_(model[0].auto_model, method="Expansion(num_centres=4) + window 16")
        >>> folder = str(Path(tempfile.mkdtemp()) / "linear")
        >>> save_pretrained(model, folder)
        >>> loaded = SentenceTransformer(folder, trust_remote_code=True, device="cpu", local_files_only=True)
        >>> bool((loaded.encode("linear time") == model.encode("linear time")).all())
        True

    Source: sentence-transformers' documentation, "Creating Custom Models".
    """
    name, first = next(iter(model.named_children()), ("", None))
    if first is None or type(first) not in (Transformer, LinearTransformer):
        raise TypeError(
            f"the first module is {type(first).__name__}, wanted sentence-transformers' Transformer; give a "
            "SentenceTransformer that begins with one"
        )
    # Copies that share every tensor: only what the module is called, and how it saves, differs.
    linear = copy(first)
    linear.__class__ = LinearTransformer
    whole = copy(model)
    whole._modules = OrderedDict(model._modules)
    whole._modules[name] = linear
    with atomic_folder(Path(folder).expanduser().resolve()) as temporary:
        whole.save(str(temporary), create_model_card=False)
