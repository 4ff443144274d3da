"""Train a language model of bytes, and say how many bits a byte costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import linattn
from linattn.hf import LinearLMForCausalLM
from linattn.nn import RedrawSchedule
from linattn.training import Notify, Processes, Trained, Training, WorkFolder, alone_in, train, weights_digest
from linattn_lab.pretraining.config import TrainConfig
from linattn_lab.pretraining.corpus import Corpus
from linattn_lab.pretraining.looks import Looks
from linattn_lab.pretraining.scoring import UNIFORM, Score, bits, bits_per_byte, frequency_bits, score, windows
from linattn_lab.pretraining.sharing import Share

# Under which a training's folder has its `Looks`: those of a training that is resumed are the same.
_LOOKS = "looks"


@dataclass(frozen=True)
class Pretraining:
    """What became of a training.

    Attributes:
        config: how it was trained.
        trained: steps, seconds, and validation losses in bits per byte.
        test: the kept weights on test documents.
        uniform_bits: bits per byte of guessing among 256, a baseline.
        frequency_bits: bits per byte of the test windows under the training bytes' frequencies, the other baseline.
        num_training_bytes: in the training part; a run may read less than that, or some of it several times.
        num_documents: in the whole corpus.
        is_split_by_file: whether the test is of other documents than those trained on, or of the last part of each.
        num_parameters: of the model, its maps' draws not counted.
    """

    config: TrainConfig
    trained: Trained
    test: Score
    uniform_bits: float
    frequency_bits: float
    num_training_bytes: int
    num_documents: int
    is_split_by_file: bool
    num_parameters: int

    @property
    def tokens_per_second(self) -> float:
        """Bytes trained on, over all the time of the training, looks and checkpoints included."""
        return self.trained.steps * self.config.context * self.config.batch_size / max(self.trained.seconds, 1e-9)


def pretrain(
    model: LinearLMForCausalLM,
    corpus: Corpus,
    config: TrainConfig,
    *,
    work: Path | None = None,
    notify: Notify | None = None,
    num_parts: int = 1,
    shard: bool = False,
) -> Pretraining:
    """Train a language model on a corpus, in place, and leave it with the weights that were best on validation texts.

    The loss is −log₂ p(byte | bytes before it) over windows of L + 1 bytes at random places, drawn by the step's
    number: a run that was cut off and goes on is one that was not, to the bit where the budget is a number of steps,
    the model is on a CPU and torch has one thread.

    Cost: `config.minutes`, a tenth of which are looks at the validation loss at most, and a twentieth more for the
    test, which reads four windows at least. In `work` two checkpoints, each as large as four models.

    Args:
        model: in float32, of 256 tokens; it is left in evaluation mode.
        corpus: what to learn from and to be judged by.
        config: how.
        work: a folder for checkpoints and TensorBoard curves, of one training at a time. If it holds a training that
            was cut off, this one goes on from its last whole checkpoint. None keeps everything in memory.
        notify: called after each step with the training's name, the share of its budget that is spent, and its
            progress, whose losses are bits per byte.
        num_parts: inside `linattn.training.launched`, into how many parts each text is cut, for as many processes; the
            others share the texts of a step. The losses are those of one process up to rounding, and a training goes
            on with any number of processes and parts.
        shard: inside `linattn.training.launched`, whether each process keeps a part of the weights, their gradients and
            the optimiser's moments (torch's `fully_shard`), beside the whole model it was given. Checkpoints are then
            read by all, in a folder that all see, and are gone on from with or without it.

    Returns:
        A `Pretraining`, the same in all processes. Ctrl-C during training ends it early, with the best weights so far
        in the model.

    Raises:
        ValueError: the model has not 256 tokens, or weights of another dtype than float32; `work` holds a training
            with other settings; a redraw is asked for where no map is random; processes and parts do not divide the
            batch and the context.
        RuntimeError: the loss, or a gradient, is not finite.
        OSError: `work` cannot be written.

    Example:
        >>> from linattn.hf import LinearLMConfig
        >>> from linattn_lab.pretraining import from_documents
        >>> corpus = from_documents(((f"{n}.txt", b"%d bottles of beer" % n) for n in range(100)), context=8)
        >>> model = LinearLMForCausalLM(LinearLMConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
        >>> found = pretrain(model, corpus, TrainConfig(context=8, batch_size=4, steps=40))
        >>> found.test.bits < found.uniform_bits
        True

    Source: Radford et al. 2019 (GPT-2) for the task; Al-Rfou et al. 2019 (arXiv 1808.04444) for bytes.
    """
    _check(model)
    share = Share(Processes.of_this_run(), num_parts, shard)
    share.check(config.context, config.batch_size)
    # The first process writes for all.
    work = work if share.processes.is_first else None
    with alone_in(work), share.laid_out(model) as laid_out:
        # What is refused leaves no folder.
        redraw = _redrawing(laid_out, config)
        folder = None if work is None else WorkFolder(work, identity(model, corpus, config), kind="training")
        looks = share.processes.from_first(None if folder is None else folder.recall(_LOOKS, Looks))
        if looks is None:
            one = windows(corpus.validation, config.context, config.context)
            looks = share.processes.from_first(Looks.of(config, lambda: _looked(laid_out, share, one)))
        if folder is not None:
            folder.claim()
            folder.remember(_LOOKS, looks)
        training = _training(laid_out, corpus, config, share, redraw, looks)
        trained = share.processes.from_first(train(training, folder, notify or (lambda *_: None)))
    model.train(False)
    test = windows(corpus.test, config.context, looks.num_tested(config, trained.steps, trained.seconds))
    judged = share.processes.first_does(lambda: score(model, test))
    return Pretraining(
        config=config,
        trained=trained,
        test=judged,
        uniform_bits=UNIFORM,
        frequency_bits=frequency_bits(corpus.training, test[:, 1:]),
        num_training_bytes=len(corpus.training),
        num_documents=corpus.num_documents,
        is_split_by_file=corpus.is_split_by_file,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _training(
    model: LinearLMForCausalLM,
    corpus: Corpus,
    config: TrainConfig,
    share: Share,
    redraw: Callable[[int], None],
    looks: Looks,
) -> Training:
    """The loss of a step and of a look."""
    sizes = {"context": config.context, "batch_size": config.batch_size, "seed": config.seed}
    looked_at = windows(corpus.validation, config.context, looks.num_bytes(config))

    def loss(step: int) -> Tensor:
        """Bits per byte on this process's share of the step's windows."""
        redraw(step)
        model.train()
        return bits_per_byte(model, share.of(corpus.batch(step, **sizes))).mean()

    return Training(
        name="training",
        model=model,
        parameters=[([one for one in model.parameters() if one.requires_grad], config.learning_rate)],
        loss=loss,
        validate=lambda: _looked(model, share, looked_at),
        budget=config.budget,
    )


def _looked(model: LinearLMForCausalLM, share: Share, batch: Tensor) -> float:
    """Bits per byte on windows of validation texts, a part of which each process reads."""
    model.train(False)
    return share.mean(partial(bits, model), batch)


def _redrawing(model: LinearLMForCausalLM, config: TrainConfig) -> Callable[[int], None]:
    """Gives the model's random maps the draw of a step; nothing where none is asked for."""
    every = config.redraw_every
    if every is None:
        return lambda step: None
    schedule, drawn = RedrawSchedule(model, every=every, seed=config.seed), 0

    def redraw(step: int) -> None:
        """A draw where the step has another than the one before."""
        nonlocal drawn
        if step // every != drawn:
            drawn = step // every
            schedule.load_state_dict({**schedule.state_dict(), "num_steps": step})

    return redraw


def _check(model: LinearLMForCausalLM) -> None:
    """Refuse models that would fail after minutes."""
    if model.config.vocab_size != 256:
        raise ValueError(f"a model of bytes has vocab_size=256, got {model.config.vocab_size}")
    narrow = sorted({str(one.dtype) for one in model.parameters() if one.dtype != torch.float32})
    if narrow:
        raise ValueError(f"the model has weights in {', '.join(narrow)}, wanted torch.float32; call model.float()")


def identity(model: LinearLMForCausalLM, corpus: Corpus, config: TrainConfig) -> dict[str, Any]:
    """The settings that two runs must share to be one training, of which the second may go on for longer."""
    settings = asdict(config)
    del settings["minutes"], settings["steps"]
    return {
        **settings,
        "model": model.config.to_diff_dict(),
        "weights": weights_digest(model),
        "corpus": corpus.digest,
        "linattn": linattn.__version__,
        "torch": torch.__version__,
    }
