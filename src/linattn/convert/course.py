"""The course of a conversion: from the softmax model to the linear one, with the error measured on the way."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from torch import nn

from linattn.convert.config import ConvertConfig
from linattn.convert.distilling import ADAPTER_RATE, adapted, distil, teacher_outputs
from linattn.convert.running import Outputs, to_device
from linattn.convert.samples import Samples
from linattn.convert.speed import Paying, Speed, count_numbers, is_faster, measure_speed
from linattn.convert.stages import BASELINE, Measured, Stage, best, measure, measure_uniform
from linattn.convert.transfer import build_maps, fit_maps, transfer
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.hf import AttentionCall, LayerAttention, PreTrainedModel, capture
from linattn.hf.layer_attention import ATTRIBUTE, attention_of
from linattn.hf.linearization import Linearization, choose_layers, is_linearized, linearize_, restore_
from linattn.methods.method import Method, together
from linattn.processes import Processes
from linattn.training import Notify, Trained, Training, WorkFolder, train

# Of the time, when a map learns and the model is distilled afterwards.
_TRANSFER_SHARE = 1 / 3
_DISTILLED_MAP_RATE = 0.1


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion: replaced layers, and the model's error at each stage, on texts it never trained on.

    Attributes:
        method: written form of the map and its exact part, those of the converted layers in order where they differ.
        linearization: which layers were replaced, and why others were not.
        stages: "uniform" (every converted layer averages), "unconverted" (the map as drawn), "calibrated" (fitted, or
            trained by attention transfer) and "converted" (distilled): those that took place, in order.
        trainings: attention transfer and distillation, those that took at least one step.
        num_held_out: texts behind every figure.
        num_held_out_tokens: their tokens.
        stopped: whether an interrupt ended it early.
        kept: name of the stage that the model was left at, the best (`linattn.convert.stages.best`); empty: the last.
        speed: its time beside the original's; None where it was not measured. Of no account in comparisons.
        paying: what its first converted layer keeps; None where it was not counted. Of no account in comparisons.
    """

    method: str
    linearization: Linearization
    stages: tuple[Stage, ...]
    trainings: tuple[Trained, ...]
    num_held_out: int
    num_held_out_tokens: int
    stopped: bool
    kept: str = ""
    speed: Speed | None = field(default=None, compare=False)
    paying: Paying | None = field(default=None, compare=False)

    @property
    def result(self) -> Stage:
        """The stage that the model was left at."""
        return next((stage for stage in self.stages if stage.name == self.kept), self.stages[-1])


class Course:
    """A conversion under way; without a folder nothing is kept."""

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel,
        methods: tuple[Method, ...],  # one for all layers, or one for each
        config: ConvertConfig,
        samples: Samples,
        work: WorkFolder | None,
        notify: Notify,
        measured: Measured,
    ) -> None:
        self._model, self._teacher, self._methods, self._config = model, teacher, methods, config
        self._samples, self._work, self._notify, self._measured = samples, work, notify, measured
        # Of these the first has the folder.
        self._processes = Processes.of_this_run()
        self._stages: list[Stage] = []
        self._trainings: list[Trained] = []
        # Copies of the layers' kernels by stage; with the original weights they restore the model of that stage.
        self._kernels: dict[str, list[nn.Module]] = {}

    def go(self) -> Conversion:
        """All stages in order."""
        teacher = self._teacher
        numbers = range(len(self._samples.held_out))
        share = numbers[self._processes.rank :: self._processes.size]
        self._exact: dict[int, Outputs] = {}
        for number in share:
            self._exact[number] = teacher_outputs(teacher, self._samples.held_out[number])
            self._measured("exact", len(self._exact) / len(share))
        self._layers = choose_layers(self._model, self._config.layers).replaced
        # Checked once, that what is recorded explains the model.
        first = to_device(self._samples.calibration[0], teacher.device)
        calls = {call.module_name: call for call in capture(teacher, first).calls}
        if absent := [layer.module_name for layer in self._layers if layer.module_name not in calls]:
            raise ValueError(
                f"texts are longer than the sliding window of {', '.join(absent)}; give shorter ones, or other layers"
            )
        maps, fitted, linearization = self._linearize(calls)
        self._train(maps, fitted)
        stage_name = self._keep_the_best()
        live = self._processes.each(numbers, lambda number: self._exact[number].live.cpu())
        longest = self._samples.held_out[max(numbers, key=lambda number: live[number].shape[1])]
        # While the other processes wait.
        speed = self._processes.first_does(lambda: measure_speed(self._model, self._teacher, longest))
        return Conversion(
            method=together([method.label for method in self._methods]),
            linearization=linearization,
            stages=tuple(self._stages),
            trainings=tuple(training for training in self._trainings if training.steps),
            num_held_out=sum(map(len, live)),
            num_held_out_tokens=sum(int(tokens.sum()) for tokens in live),
            stopped=self._stopped,
            kept=stage_name,
            speed=speed,
            paying=count_numbers(*self._first_layer(calls), speed.num_tokens),
        )

    def _linearize(self, calls: dict[str, AttentionCall]) -> tuple[list[FeatureMap], bool, Linearization]:
        """Every layer by its method: the maps, and whether any takes statistics."""
        config, calibration, methods = self._config, self._samples.calibration, self._methods
        layers = config.layers
        if len(methods) == 1:
            methods, layers = methods * len(self._layers), layers and tuple(sorted(layers))
        maps = build_maps(methods, self._layers, calls, num_features=config.num_features, seed=config.seed)
        learning = any(x.requires_grad for module in (self._model, *maps) for x in module.parameters())
        if config.distil and config.minutes and config.adapter_rank is None and not learning:
            raise ValueError("no weight requires a gradient: nothing can be distilled; give adapter_rank, or minutes=0")
        fitted = any(isinstance(feature_map, FittedMap) for feature_map in maps)
        # Before its fit, a map that takes statistics of a call cannot attend causally: there is nothing to measure.
        measurable = not (fitted and any(calls[layer.module_name].is_causal for layer in self._layers))
        if not measurable:
            fit_maps(maps, self._layers, self._teacher, calibration)
        following, windows = iter(maps), [method.window for method in methods]
        linearization = linearize_(self._model, lambda _: next(following), layers=layers, window=windows)
        if config.feature_map is None:
            self._check_pays(calls)
        # Nothing is refused any more: the folder is taken, and the baseline measured. The kernels evaluate too.
        self._model.train(False)
        if self._work is not None:
            self._work.claim()
        names = {layer.module_name for layer in self._layers}
        texts, exact = self._samples.held_out, self._exact
        self._stage(BASELINE, lambda: measure_uniform(self._teacher, texts, exact, names, self._measured))
        if measurable:
            self._audit("unconverted")
            fit_maps(maps, self._layers, self._teacher, calibration)
        return maps, fitted, linearization

    def undo(self) -> None:
        """Make the model what it was."""
        if is_linearized(self._model):
            restore_(self._model)
        self._model.load_state_dict(self._teacher.state_dict())

    def _train(self, maps: list[FeatureMap], fitted: bool) -> None:
        """Attention transfer and distillation, each where there is something to train and time for it."""
        config, pairs = self._config, zip(maps, self._layers, strict=True)
        learning = [(feature_map, layer) for feature_map, layer in pairs if any(True for _ in feature_map.parameters())]
        seconds = config.minutes * 60
        transferring = seconds * (_TRANSFER_SHARE if config.distil else 1) * bool(learning)
        learned = [feature_map for feature_map, _ in learning], [layer for _, layer in learning]
        data = self._teacher, self._samples
        training = transfer(self._model, *learned, *data, seconds=transferring, learning_rate=config.map_learning_rate)
        transferred = transferring and self._run(training)
        if fitted or transferred:
            self._audit("calibrated")
        if config.distil and seconds and not self._stopped:
            rank = config.adapter_rank
            rate = config.learning_rate if rank is None else config.learning_rate * ADAPTER_RATE
            map_rate = config.map_learning_rate * _DISTILLED_MAP_RATE
            attentions = [layer.module_name for layer in self._layers]
            whole = nullcontext(list(self._model.parameters()))
            with whole if rank is None else adapted(self._model, attentions, rank, config.seed) as parameters:
                weights = parameters, rate
                left = seconds - transferring
                training = distil(self._model, weights, maps, *data, seconds=left, map_learning_rate=map_rate)
                distilled = self._run(training)
            if distilled:
                self._audit("converted")

    def _keep_the_best(self) -> str:
        """Take the model back to its best stage, if it is past that; the stage's name."""
        name = best(self._stages).name
        if name != self._stages[-1].name:
            # All but the kernels; no stage before the last has other weights than the original's.
            self._model.load_state_dict(self._teacher.state_dict(), strict=False)
            for layer, kernel in zip(self._layers, self._kernels[name], strict=True):
                module = self._model.get_submodule(layer.module_name)
                module.add_module(ATTRIBUTE, kernel.to(self._model.device).train(False))
        return name

    def _check_pays(self, calls: dict[str, AttentionCall]) -> None:
        """Refuse a method of our own choice that saves nothing on any text that the model takes."""
        longest: int | None = getattr(self._model.config, "max_position_embeddings", None)
        attention, call = self._first_layer(calls)
        if longest is None or call.query.shape[2] != call.key.shape[2]:
            return
        paying = count_numbers(attention, call, longest)
        if not (paying.saves_memory or self._processes.first_does(lambda: is_faster(attention, call, longest))):
            raise ValueError(
                f"{self._methods[0].label}, the default, does not pay on {type(self._model).__name__}: it keeps "
                f"{paying.state_numbers:,} numbers per head, the exact cache of {longest:,} tokens "
                f"{paying.exact_numbers:,}, and its attention is no faster over so many tokens. Keep the model as it "
                "is, or name a method by feature_map, which is taken whatever it costs"
            )

    def _first_layer(self, calls: dict[str, AttentionCall]) -> tuple[LayerAttention, AttentionCall]:
        """The first converted layer's attention, and what it was given."""
        first = self._layers[0].module_name
        attention = attention_of(self._model.get_submodule(first))
        assert attention is not None
        return attention, calls[first]

    @property
    def _stopped(self) -> bool:
        """Whether an interrupt ended a training."""
        return any(training.stopped for training in self._trainings)

    def _run(self, training: Training) -> bool:
        """A training, noted, and whether it took place: an interrupt may come before its first step."""
        done = self._processes.from_first(train(training, self._work, self._notify))
        self._trainings.append(done)
        return done.steps > 0

    def _audit(self, name: str) -> None:
        """The model as it is now, on held-out texts; its kernels are kept, for `_keep_the_best`."""
        modules = [self._model.get_submodule(layer.module_name) for layer in self._layers]
        self._kernels[name] = [copy.deepcopy(module.get_submodule(ATTRIBUTE)) for module in modules]
        texts, exact = self._samples.held_out, self._exact
        self._stage(name, lambda: measure(name, self._model, texts, exact, self._measured))

    def _stage(self, name: str, taken: Callable[[], Stage]) -> None:
        """A stage, remembered where there is a folder and measured where it is not."""
        # What comes after a training depends on when that ended.
        lasting = self._work if name in (BASELINE, "unconverted") else None
        stage = self._processes.from_first(None if lasting is None else lasting.recall(name, Stage))
        if stage is None:
            stage = taken()
            if lasting is not None:
                lasting.remember(name, stage)
        self._stages.append(stage)
