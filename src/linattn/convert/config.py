"""Settings of a conversion."""

from dataclasses import dataclass

from linattn.methods.method import Method, parse_method
from linattn.softmax.checking import check_count, check_number, check_seed

DEFAULT_MAP = "Expansion(num_centres=16) + window 32"
"""The method of a conversion that names none: of maps the nearest to softmax, before any training."""


@dataclass(frozen=True)
class ConvertConfig:
    """How `convert_` turns a softmax model into a linear one.

    Attributes:
        feature_map: the method in its written form, as "Expansion(num_centres=64)", "LearnedExponential" or
            "FavorPlus + window 32", for all layers, or one for each converted layer, in order; None for `DEFAULT_MAP`,
            which is refused where it saves nothing.
        num_features: R, for a map whose width is free and not written.
        layers: numbers of the attention modules to convert, as in `linattn.hf.linearize_`; None for its choice.
        texts: what a tokenizer is to read; to be left empty when batches are given.
        num_tokens: the longest text, in tokens. Not above what the model was built for.
        min_tokens: the shortest, from 1 to `num_tokens`; None for a quarter of that. A method that is exact up to some
            length learns from longer texts alone.
        minutes: wall-clock time of training, the audits before and after not included; 0 to calibrate only.
        distil: whether the weights of the whole model are trained to give the model's outputs. Else only maps learn.
        adapter_rank: rank of low-rank adapters of the model's projections from the first converted layer on, which are
            trained in place of all weights and then added to these: for models beside which their gradients and moments
            do not fit. None for all weights.
        batch_size: texts per step.
        learning_rate: of the model's weights, at its largest; times the relative error that is left before training.
        map_learning_rate: of the maps' weights in attention transfer, at its largest; a tenth of it in distillation.
        seed: of the draws and of the order of texts.

    Raises:
        TypeError: if `texts` or `layers` are not several.
        ValueError: if `feature_map` names no map, as merged keys, which need no training; a number is not positive
            (`minutes`, `seed`: negative), not finite, or no integer where it has to be one; adapters come without
            distillation.

    Example:
        >>> ConvertConfig(minutes=-1)
        Traceback (most recent call last):
        ...
        ValueError: minutes must be a finite number >= 0, got -1
    """

    feature_map: str | tuple[str, ...] | None = None
    num_features: int | None = None
    layers: tuple[int, ...] | None = None
    texts: tuple[str, ...] = ()
    num_tokens: int = 512
    min_tokens: int | None = None
    minutes: float = 15.0
    distil: bool = True
    adapter_rank: int | None = None
    batch_size: int = 2
    learning_rate: float = 2e-4
    map_learning_rate: float = 1e-2
    seed: int = 0

    @property
    def methods(self) -> tuple[Method, ...]:
        """The method of all layers, or of each."""
        written = DEFAULT_MAP if self.feature_map is None else self.feature_map
        return tuple(map(parse_method, (written,) if isinstance(written, str) else written))

    def __post_init__(self) -> None:
        """Refuse what is no map, numbers that mean nothing, and one thing in the place of several."""
        if self.feature_map is not None and not self.feature_map:
            raise ValueError(f"feature_map must name a method, got {self.feature_map!r}; None is {DEFAULT_MAP!r}")
        try:
            methods = self.methods
        except ValueError as error:
            raise ValueError(f"feature_map: {error}") from None
        if merged := [method.label for method in methods if method.map is None]:
            raise ValueError(
                f"feature_map must be a map, as LearnedExponential, got {merged[0]!r}: merged keys need no training; "
                "bound a decoder's KV cache with linattn.hf.BoundedCache, or linearize_ an encoder by them"
            )
        check_seed(self.seed)
        check_number("minutes", self.minutes)
        for name in ("learning_rate", "map_learning_rate"):
            check_number(name, getattr(self, name), positive=True)
        optional = ("num_features", "min_tokens", "adapter_rank")
        for name in ("num_tokens", "batch_size", *optional):
            if (value := getattr(self, name)) is not None or name not in optional:
                check_count(name, value)
        if self.min_tokens is not None and self.min_tokens > self.num_tokens:
            raise ValueError(f"min_tokens must be at most num_tokens={self.num_tokens}, got {self.min_tokens}")
        if self.adapter_rank is not None and not (self.distil and self.minutes):
            raise ValueError(
                f"adapter_rank is for weights that are distilled, got {self.adapter_rank} with distil={self.distil}, "
                f"minutes={self.minutes:g}; leave it out, or distil"
            )
        for name, kinds in (("texts", str), ("layers", int | str)):
            if isinstance(value := getattr(self, name), kinds):
                raise TypeError(f"{name} must be several, got {type(value).__name__}; write {name}=(…,)")
        for spec in filter(None, (method.map for method in methods)):
            spec.check_features(self.num_features)
