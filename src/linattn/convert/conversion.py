"""A softmax model becomes a linear one: audit, calibrate, distil, audit again."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import linattn
from linattn.convert.calibration import build_maps, fit_maps
from linattn.convert.checkpoints import WorkFolder
from linattn.convert.config import DEFAULT_MAP, ConvertConfig
from linattn.convert.distilling import distil, taught
from linattn.convert.planning import make_plans
from linattn.convert.running import Batch, to_device
from linattn.convert.samples import Samples, from_batches, from_texts
from linattn.convert.stages import Stage, measure, measure_uniform
from linattn.convert.training import Notify, Trained, train
from linattn.convert.transfer import transfer
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.hf import AttentionCall, Linearization, capture, is_linearized, linearize_, restore_
from linattn.planning import Plan, read_plans, write_plans
from linattn.planning.methods import Method, parse_method

# Of the time, when a map learns and the model is distilled afterwards.
_TRANSFER_SHARE = 1 / 3
_DISTILLED_MAP_RATE = 0.1
# A map that fits every layer, to ask which layers can be converted.
_ANY = "Exponential"


@dataclass(frozen=True)
class Conversion:
    """What a conversion did, and how wrong the model is at each stage of it, on texts it never trained on.

    Attributes:
        method: written form of the map and its exact part, or the error that the methods of all heads were planned for.
        linearization: which layers were replaced, and why others were not.
        stages: "uniform" (every attention averages), "unconverted" (the map as drawn), "calibrated" (fitted, or trained
            by attention transfer) and "converted" (distilled): those there are, in order; the last is the result.
        trainings: attention transfer and distillation, those that took place.
        num_held_out: texts behind every figure.
        num_held_out_tokens: their tokens.
        stopped: whether an interrupt ended it early.
        heads: by converted layer, the written form of each head's method, "exact" for softmax; none where all heads
            share `method`.
    """

    method: str
    linearization: Linearization
    stages: tuple[Stage, ...]
    trainings: tuple[Trained, ...]
    num_held_out: int
    num_held_out_tokens: int
    stopped: bool
    heads: tuple[tuple[str, ...], ...] = ()


def convert_(
    model: PreTrainedModel,
    tokenizer_or_batches: PreTrainedTokenizerBase | Iterable[Batch],
    config: ConvertConfig,
    *,
    work: Path | None = None,
    notify: Callable[[str, float, float], None] | None = None,
) -> Conversion:
    """Turn a softmax model into a linear one, in place, and repair the damage as far as time allows.

    Every layer's map is fitted to the queries and keys that sample texts give (`fit`), or, for a target error, a method
    for each of its heads is chosen and fitted there (`linattn.plan`); maps with weights are trained
    until their attention rows are those of softmax (`transfer`); then the whole model is trained to make of texts what
    it made of them before (`distil`). The best weights on validation texts are kept. How wrong the model is, layer by
    layer and end to end, is measured before, between and after on texts held out from all of that.

    Cost: `config.minutes` of training; two copies of the model, and of its optimiser's moments; audits on at most 32
    texts.

    Args:
        model: any model that `linattn.hf.linearize_` takes and that gives hidden states, in float32. It is left in
            evaluation mode and without gradients; weights that require none are not trained, and stay so.
        tokenizer_or_batches: the model's tokenizer, which then reads `config.texts`; or batches, each the keyword
            arguments of a forward pass.
        config: what to do.
        work: a folder for checkpoints and TensorBoard curves. If it holds a conversion that was cut off, this one goes
            on from its last checkpoint. None keeps everything in memory.
        notify: told of the training's name, the share of its time that is spent, and its best validation loss.

    Returns:
        A `Conversion`. Ctrl-C during training ends it early, with the best weights so far in the model.

    Raises:
        ValueError: if the model, its dtype or the method cannot be used, the texts are too short, or `work` holds
            another conversion.
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

    Source: Kasai et al. 2021 (arXiv 2103.13076) for swapping and training on; Zhang et al. 2024 (arXiv 2402.04347) for
        attention transfer.
    """
    # None where a method for each head is to be planned.
    method = None if config.target_error is not None else parse_method(config.feature_map or DEFAULT_MAP)
    _check(model, config)
    samples = _samples(model, tokenizer_or_batches, config)
    folder = None if work is None else WorkFolder(work, _identity(model, method, config, samples))
    modes = [(module, module.training) for module in model.modules()]
    model.train(False)
    teacher = copy.deepcopy(model).requires_grad_(False)
    converting = _Converting(model, teacher, method, config, samples, folder, notify or _silent)
    try:
        return converting.go()
    except BaseException:
        converting.undo()
        for module, training in modes:
            module.training = training
        raise


class _Converting:
    """A conversion under way."""

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel,
        method: Method | None,
        config: ConvertConfig,
        samples: Samples,
        work: WorkFolder | None,
        notify: Notify,
    ) -> None:
        self._model, self._teacher, self._method, self._config = model, teacher, method, config
        self._samples, self._work, self._notify = samples, work, notify
        self._stages: list[Stage] = []
        self._trainings: list[Trained] = []
        self._plans: list[Plan] = []

    def go(self) -> Conversion:
        """All stages in order."""
        held_out, teacher = self._samples.held_out, self._teacher
        self._exact = [taught(teacher, to_device(batch, teacher.device)) for batch in held_out]
        probe = linearize_(self._model, feature_map=_ANY, layers=self._config.layers)
        restore_(self._model)
        self._layers = probe.replaced
        # Checked once, that what is recorded explains the model.
        first = to_device(self._samples.calibration[0], teacher.device)
        calls = {call.module_name: call for call in capture(teacher, first).calls}
        is_causal = any(calls[layer.module_name].is_causal for layer in self._layers)
        if self._method is None:
            maps, fitted, put = self._by_plans(is_causal=is_causal)
        else:
            maps, fitted, put = self._by_one_method(self._method, calls, is_causal=is_causal)
        replaced = {layer.layer: layer for layer in put.replaced}
        self._train(maps, fitted)
        return Conversion(
            method=_label(self._method, self._config),
            linearization=Linearization(tuple(replaced.get(layer.layer, layer) for layer in probe.layers)),
            stages=tuple(self._stages),
            trainings=tuple(self._trainings),
            num_held_out=sum(len(found.live) for found in self._exact),
            num_held_out_tokens=sum(int(found.live.sum()) for found in self._exact),
            stopped=self._stopped,
            heads=tuple(tuple(head.method for head in made.heads) for made in self._plans),
        )

    def _by_one_method(
        self, method: Method, calls: dict[str, AttentionCall], *, is_causal: bool
    ) -> tuple[list[FeatureMap], bool, Linearization]:
        """A map for every layer, as drawn and as fitted: the maps, and whether there was anything to fit."""
        maps = build_maps(method, self._layers, calls, num_features=self._config.num_features, seed=self._config.seed)
        fitted = any(isinstance(feature_map, FittedMap) for feature_map in maps)
        late = not (fitted and is_causal)
        if not late:
            # Before its fit, a map that takes statistics of a call cannot attend causally: there is nothing to measure.
            fit_maps(maps, self._layers, self._teacher, self._samples.calibration)
        put = self._put(maps, method)
        self._nothing_is_refused_any_more()
        if late:
            self._audit("unconverted")
            fit_maps(maps, self._layers, self._teacher, self._samples.calibration)
        return maps, fitted, put

    def _by_plans(self, *, is_causal: bool) -> tuple[list[FeatureMap], bool, Linearization]:
        """A method for every head, its maps learning from each call and as fitted; none has weights to train."""
        # Kept where there is a folder: a checkpoint's tensors are those of these methods.
        file = None if self._work is None else self._work.path / "plan.json"
        self._plans = read_plans(file) if file is not None and file.is_file() else self._made_plans()
        put = self._put_plans(self._plans)
        self._nothing_is_refused_any_more()
        if file is not None:
            write_plans(file, self._plans)
        if not is_causal:
            restore_(self._model)
            self._put_plans([replace(made, fitted={}) for made in self._plans])
            self._audit("unconverted")
            restore_(self._model)
            self._put_plans(self._plans)
        return [], True, put

    def _made_plans(self) -> list[Plan]:
        """A plan for every layer."""
        target = self._config.target_error
        assert target is not None
        return make_plans(self._layers, self._teacher, self._samples.calibration, target_error=target)

    def _nothing_is_refused_any_more(self) -> None:
        """Take the folder, and measure the baseline."""
        if self._work is not None:
            self._work.claim()
        self._stage("uniform", lambda: measure_uniform(self._teacher, self._samples.held_out, self._exact))

    def undo(self) -> None:
        """Make the model what it was."""
        if is_linearized(self._model):
            restore_(self._model)
        self._model.load_state_dict(self._teacher.state_dict())

    def _train(self, maps: list[FeatureMap], fitted: bool) -> None:
        """Attention transfer and distillation, each where there is something to train and time for it."""
        config, learned = self._config, [any(True for _ in feature_map.parameters()) for feature_map in maps]
        seconds, some = config.minutes * 60, any(learned)
        transferring = seconds * (_TRANSFER_SHARE if config.distil else 1) * some
        if transferring:
            chosen = [(m, layer) for m, layer, learns in zip(maps, self._layers, learned, strict=True) if learns]
            self._run(
                transfer(
                    self._model,
                    [feature_map for feature_map, _ in chosen],
                    [layer for _, layer in chosen],
                    self._teacher,
                    self._samples,
                    seconds=transferring,
                    learning_rate=config.map_learning_rate,
                )
            )
        if fitted or transferring:
            self._audit("calibrated")
        if config.distil and seconds and not self._stopped:
            self._run(
                distil(
                    self._model,
                    maps,
                    self._teacher,
                    self._samples,
                    seconds=seconds - transferring,
                    learning_rate=config.learning_rate,
                    map_learning_rate=config.map_learning_rate * _DISTILLED_MAP_RATE,
                )
            )
            self._audit("converted")

    @property
    def _stopped(self) -> bool:
        """Whether an interrupt ended a training."""
        return any(training.stopped for training in self._trainings)

    def _run(self, training: Any) -> None:
        """A training, noted."""
        self._trainings.append(train(training, self._work, self._notify))

    def _put_plans(self, plans: list[Plan]) -> Linearization:
        """Linearize the model by these plans."""
        found = linearize_(self._model, plans=plans, layers=[layer.layer for layer in self._layers])
        # The kernels too.
        self._model.train(False)
        return found

    def _put(self, maps: list[FeatureMap], method: Method) -> Linearization:
        """Linearize the model by these maps and the method's exact part."""
        following = iter(maps)
        found = linearize_(
            self._model,
            feature_map=lambda head_dim: next(following),
            layers=[layer.layer for layer in self._layers],
            window=method.window,
            num_heavy=method.num_heavy,
        )
        # The kernels too.
        self._model.train(False)
        return found

    def _audit(self, name: str) -> None:
        """The model as it is now, on held-out texts."""
        self._stage(name, lambda: measure(name, self._model, self._samples.held_out, self._exact))

    def _stage(self, name: str, taken: Callable[[], Stage]) -> None:
        """A stage, remembered where there is a folder and measured where it is not."""
        # What comes after a training depends on when that ended.
        lasting = self._work if name in ("uniform", "unconverted") else None
        found = None if lasting is None else lasting.recall(name)
        stage = taken() if found is None else Stage.from_json(found)
        if lasting is not None and found is None:
            lasting.remember(name, asdict(stage))
        self._stages.append(stage)


def _check(model: PreTrainedModel, config: ConvertConfig) -> None:
    """Refuse what would end badly after minutes."""
    if is_linearized(model):
        raise ValueError(f"{type(model).__name__} is linearized already; call linattn.hf.restore_(model) first")
    narrow = {str(parameter.dtype) for parameter in model.parameters() if torch.finfo(parameter.dtype).bits < 32}
    if narrow:
        raise ValueError(
            f"{type(model).__name__} has weights in {', '.join(sorted(narrow))}, whose steps round away; load it with "
            "dtype=torch.float32, and cast it when it is converted"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and config.num_tokens > limit and config.texts:
        raise ValueError(
            f"num_tokens is {config.num_tokens}, and {type(model).__name__} takes at most {limit}; give at most that"
        )


def _samples(
    model: PreTrainedModel, tokenizer_or_batches: PreTrainedTokenizerBase | Iterable[Batch], config: ConvertConfig
) -> Samples:
    """Batches from texts, or as given."""
    if isinstance(tokenizer_or_batches, PreTrainedTokenizerBase):
        if not config.texts:
            raise ValueError("a tokenizer needs texts to read: give ConvertConfig(texts=…), or batches in its place")
        return from_texts(
            tokenizer_or_batches,
            config.texts,
            num_tokens=config.num_tokens,
            batch_size=config.batch_size,
            seed=config.seed,
        )
    if config.texts:
        raise ValueError("both batches and texts were given; give a tokenizer for the texts, or the batches alone")
    return from_batches(list(tokenizer_or_batches), seed=config.seed)


def _label(method: Method | None, config: ConvertConfig) -> str:
    """The method in words."""
    return f"planned for an error of {config.target_error:g}" if method is None else method.label


def _identity(model: PreTrainedModel, method: Method | None, config: ConvertConfig, samples: Samples) -> dict[str, Any]:
    """What two runs must share to be one conversion; more time may be given to the second."""
    settings = {name: value for name, value in asdict(config).items() if name not in ("texts", "minutes")}
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        weights.update(name.encode())
        weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {
        **settings,
        "feature_map": _label(method, config),
        "model": type(model).__name__,
        "weights": weights.hexdigest(),
        "samples": samples.digest,
        "linattn": linattn.__version__,
        "torch": torch.__version__,
    }


def _silent(name: str, share: float, loss: float) -> None:
    """Nobody is told."""
