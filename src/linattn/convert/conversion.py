"""A softmax model becomes a linear one: audit, calibrate, distil, audit again."""

import copy
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import linattn
from linattn.convert.config import ConvertConfig
from linattn.convert.course import Conversion, Course
from linattn.convert.running import Batch, check_shared
from linattn.convert.samples import Samples, checked, from_batches, from_texts
from linattn.convert.stages import Measured
from linattn.hf import is_linearized
from linattn.hf._attention_modules import unwrapped
from linattn.hf.linearization import choose_layers
from linattn.hf.loading import most_tokens
from linattn.methods.method import Method, together
from linattn.processes import Processes
from linattn.training import Notify, WorkFolder, alone_in, weights_digest


def convert_(
    model: PreTrainedModel,
    tokenizer_or_batches: PreTrainedTokenizerBase | Iterable[Batch],
    config: ConvertConfig,
    *,
    work: str | os.PathLike[str] | None = None,
    notify: Notify | None = None,
    measured: Measured | None = None,
) -> Conversion:
    """Turn a softmax model into a linear one, in place, and repair the damage as far as time allows.

    Every layer's map is fitted to the queries and keys that sample texts give (`fit`); maps with weights are trained
    until their attention rows are those of softmax (`transfer`); then the whole model is distilled against its original
    outputs (`distil`). The best weights on validation texts are kept. The error, layer by layer and
    end to end, is measured before, between and after on texts held out from all of that, and the model is left at the
    stage with the least error: training that is too short may do harm.

    Inside `linattn.training.launched` every process has the model and the samples: layers, texts and batches are dealt
    out, and the first process writes. Every figure but a time is that of one process, to the bit before training and,
    but for the rounding of gradients' sums, after it.

    Cost: `config.minutes` of training; two copies of the model, and of its optimiser's moments; audits on at most 32
    texts. In `work` two checkpoints of each training, each as large as three to four models.

    Args:
        model: any model that `linattn.hf.linearize_` takes and that gives hidden states, in float32; of a compiled or
            adapted one (PEFT) the model within. It is left in evaluation mode and without gradients; weights that
            require none are not trained, and stay so.
        tokenizer_or_batches: the model's tokenizer, which then reads `config.texts`; or batches, each the keyword
            arguments of a forward pass, tensors without labels.
        config: what to do.
        work: a folder for checkpoints and TensorBoard curves, of one conversion at a time. If it holds a conversion
            that was cut off, this one goes on from its last whole checkpoint. None keeps everything in memory.
        notify: called after each step with the training's name, the share of its time that is spent, and its progress.
        measured: called after each held-out text with the stage's name, or "exact" for the original model's outputs,
            and the share of its texts that are read.

    Returns:
        A `Conversion`, the same in all processes. Ctrl-C during training ends it early.

    Raises:
        TypeError: if the model is none of transformers, or a batch no mapping to tensors.
        ValueError: if the model, its dtype or the method cannot be used, the texts are too short, the processes do not
            divide a step's texts, or `work` holds another conversion, or nothing but damaged checkpoints of a training.
        OSError: if `work` cannot be written, or another process works in it (`linattn.records.files.InUseError`).
        RuntimeError: if the layers' attention is more than softmax (`linattn.hf.capture`), or a loss or gradient is not
            finite. Whatever ends the conversion early, Ctrl-C outside of training included, the model is as it was.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
        >>> batches = [{"input_ids": torch.randint(9, (1, 8))} for _ in range(16)]
        >>> config = ConvertConfig("Expansion(num_centres=2)", minutes=0)
        >>> made = convert_(BertModel(BertConfig(**sizes)), batches, config)
        >>> [stage.name for stage in made.stages]
        ['uniform', 'unconverted', 'calibrated']

    Source: Kasai et al. 2021 (arXiv 2103.13076), swapping and training on; Zhang et al. 2024 (2402.04347), transfer.
    """
    model, methods = unwrapped(model), config.methods
    _check(model, config, methods)
    samples = _samples(model, tokenizer_or_batches, config)
    # The first process writes for all.
    place = Path(work).expanduser() if work is not None and Processes.of_this_run().is_first else None
    with alone_in(place):
        folder = (
            None if place is None else WorkFolder(place, _identity(model, methods, config, samples), kind="conversion")
        )
        modes = [(module, module.training) for module in model.modules()]
        model.train(False)
        teacher = copy.deepcopy(model).requires_grad_(False)
        told = notify or (lambda *_: None), measured or (lambda *_: None)
        course = Course(model, teacher, methods, config, samples, folder, *told)
        try:
            return course.go()
        except BaseException:
            course.undo()
            for module, training in modes:
                module.training = training
            raise


def _check(model: PreTrainedModel, config: ConvertConfig, methods: tuple[Method, ...]) -> None:
    """Refuse models and settings that would fail after minutes."""
    if is_linearized(model):
        raise ValueError(f"{type(model).__name__} is linearized already; call linattn.hf.restore_(model) first")
    if len(methods) > 1 and len(methods) != (number := len(choose_layers(model, config.layers).replaced)):
        raise ValueError(f"got {len(methods)} methods for the {number} layers to convert; give one for each or for all")
    narrow = {str(x.dtype) for x in model.parameters() if not x.is_floating_point() or x.dtype.itemsize < 4}
    if narrow:
        words = f"{', '.join(sorted(narrow))}, whose steps round away; load it with dtype=torch.float32"
        raise ValueError(f"{type(model).__name__} has weights in {words}")
    size = Processes.of_this_run().size
    if config.batch_size % size and config.texts:
        raise ValueError(f"{size} processes share a step's texts, got batch_size={config.batch_size}; give a multiple")
    limit = most_tokens(model)
    if limit is not None and config.num_tokens > limit and config.texts:
        raise ValueError(
            f"num_tokens is {config.num_tokens}, and {type(model).__name__} takes at most {limit}; give fewer"
        )


def _samples(
    model: PreTrainedModel, tokenizer_or_batches: PreTrainedTokenizerBase | Iterable[Batch], config: ConvertConfig
) -> Samples:
    """Batches from texts, or as given."""
    if isinstance(tokenizer_or_batches, PreTrainedTokenizerBase):
        if not config.texts:
            raise ValueError("a tokenizer needs texts to read: give ConvertConfig(texts=…), or batches in its place")
        sizes: Any = {name: getattr(config, name) for name in ("num_tokens", "min_tokens", "batch_size", "seed")}
        return from_texts(tokenizer_or_batches, config.texts, **sizes)
    if config.texts:
        raise ValueError("both batches and texts were given; give a tokenizer for the texts, or the batches alone")
    batches = checked(tokenizer_or_batches)
    check_shared(batches, Processes.of_this_run())
    return from_batches(batches, seed=config.seed)


def _identity(
    model: PreTrainedModel, methods: tuple[Method, ...], config: ConvertConfig, samples: Samples
) -> dict[str, Any]:
    """The settings that two runs must share to be one conversion; the second may have more time."""
    settings = {name: value for name, value in asdict(config).items() if name not in ("texts", "minutes")}
    return {
        **settings,
        "feature_map": together([method.label for method in methods]),
        "model": type(model).__name__,
        "weights": weights_digest(model),
        "samples": samples.digest,
        "linattn": linattn.__version__,
        "torch": torch.__version__,
    }
