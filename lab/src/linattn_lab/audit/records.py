"""What an audit writes, as JSON lines: one header row, then one row per measurement."""

from __future__ import annotations

from dataclasses import dataclass, field

from linattn_lab.records.jsonl import Form

EXACT = "exact"
UNIFORM = "uniform"


@dataclass(frozen=True)
class Header:
    """The circumstances of an audit.

    Attributes:
        versions: version of python, torch, transformers and linattn by name.
        model: the model's name or folder.
        architecture: the model's class.
        is_causal: whether it is a decoder.
        num_layers: layers that are audited.
        num_heads: query heads, of the first layer.
        head_dim: width of a query, of the first layer.
        value_dim: width of a value, of the first layer.
        text: source of the text.
        text_sha256: digest of the whole text.
        num_tokens: tokens read.
        first_measured: queries from this one on are measured; those before serve to fit maps of a causal model.
        num_rows: attention rows per head behind total variation and KL divergence.
        maps: written forms of the methods.
        features: feature counts asked for.
        draws: draws per random map.
        seed: seed of the audit.
        left_out: why methods were not measured, by their written forms.
        layers: number in the model of each layer that is audited; empty where all are.
        windowed: names of the layers with a sliding window, which keep their own attention throughout.
        longest: tokens that the model takes at most; null where its configuration does not say.
        num_key_heads: key/value heads, of the first layer; null in files of earlier versions.
        weights_sha256: digest of the model's weights, which a folder may change; null in files of earlier versions.
    """

    versions: dict[str, str]
    model: str
    architecture: str
    is_causal: bool
    num_layers: int
    num_heads: int
    head_dim: int
    value_dim: int
    text: str
    text_sha256: str
    num_tokens: int
    first_measured: int
    num_rows: int
    maps: list[str]
    features: list[int]
    draws: int
    seed: int
    left_out: dict[str, str] = field(default_factory=dict)
    layers: list[int] = field(default_factory=list)
    windowed: list[str] = field(default_factory=list)
    longest: int | None = None
    num_key_heads: int | None = None
    weights_sha256: str | None = None

    def number(self, layer: int) -> int:
        """The number in the model of an audited layer, as rows count them."""
        return self.layers[layer] if self.layers else layer


@dataclass(frozen=True)
class HeadRow:
    """One method on one head, with one draw."""

    layer: int  # from 0, of those that are audited
    head: int  # from 0
    map: str  # the method's written form
    features: int  # R, the map's width
    draw: int  # from 0; 0 for maps that are not random
    seed: int | None  # seed of this layer's draw; null for maps that are not random
    error: float  # relative Frobenius error of the head's output
    uniform_error: float  # the same for uniform attention
    total_variation: float  # mean total variation between the attention rows
    uniform_total_variation: float  # the same for uniform rows
    # mean KL divergence (nats) of the approximate rows from the exact ones; null where a weight is not positive
    kl: float | None
    uniform_kl: float | None  # the same for uniform rows
    query_norm: float  # mean |x|, x = √scale · q, as it enters the innermost map (centred, balanced)
    key_norm: float  # mean |y|, y = √scale · k
    sum_square: float  # mean |x + y|²
    logit_std: float  # standard deviation of the logits over the keys a query may attend to
    predicted_ratio: float | None  # error / uniform_error as the norms predict it; null where no closed form is known
    state_numbers: int  # numbers the method keeps per head, see `linattn.methods.measures`
    flops_per_token: int  # its operations per head and token


@dataclass(frozen=True)
class ModelRow:
    """The whole model with every layer's attention replaced."""

    map: str  # the method's written form, "exact" or "uniform" for the baselines
    features: int | None  # the map's width; null where there is no single one
    draw: int  # from 0
    embedding_cosine: float  # cosine of the mean of the last hidden states to the exact model's
    token_cosine: float  # mean over tokens of the cosine of a last hidden state to the exact model's


@dataclass(frozen=True)
class TimeRow:
    """How long the whole model takes for the text, with every audited layer replaced and as it is."""

    map: str  # the method's written form
    features: int | None  # the map's width; null where there is no single one
    seconds: tuple[float, ...]  # of each timed pass under the method
    exact_seconds: tuple[float, ...]  # the same of the model's own passes, taken in turn with those
    threads: int  # torch's threads


@dataclass(frozen=True)
class LengthsRow:
    """How long one layer's attention takes at growing lengths, medians, until a method is faster than softmax."""

    map: str  # the method's written form
    features: int | None  # the map's width; null where there is no single one
    lengths: tuple[int, ...]  # L, ascending, the text's own first
    seconds: tuple[float, ...]  # of a call under the method, at each length
    exact_seconds: tuple[float, ...]  # the same for softmax


@dataclass(frozen=True)
class RankRow:
    """What no state of so many features could beat in the mean square of its weights: a head's matrix cut to a rank."""

    layer: int  # from 0, of those that are audited
    head: int  # from 0
    rank: int  # r, of the best approximation of the head's exact attention matrix (singular values cut after r)
    state_numbers: int  # r·(Dv + 1), what a map of r features keeps
    error: float  # relative Frobenius error of the output that the cut matrix gives


@dataclass(frozen=True)
class WeightsRow:
    """A few attention rows of heads of one layer, with the first draw: what the report's explorer shows."""

    map: str  # the method's written form, or "exact"
    features: int | None  # the map's width; null for "exact"
    layer: int  # from 0, of those that are audited
    heads: tuple[int, ...]  # from 0; those whose rows are kept
    queries: tuple[int, ...]  # numbers of the tokens that attend
    # a text per head: for each query in turn a letter for s, A being 0, B 1 and so on, then a letter per cell, of
    # neighbouring keys whose weights w are added up; there A to Z, a to z, 0 to 9 and + are -31 to 31, the sign of w
    # times 31·√(|w|·2ˢ), beyond 1 as 1, and / is not finite
    rows: tuple[str, ...]


AuditRow = HeadRow | ModelRow | TimeRow | LengthsRow | RankRow | WeightsRow

_KINDS: dict[str, type[AuditRow]] = {
    "head": HeadRow,
    "model": ModelRow,
    "time": TimeRow,
    "lengths": LengthsRow,
    "rank": RankRow,
    "weights": WeightsRow,
}
AUDIT: Form[Header, AuditRow] = Form("an audit", Header, _KINDS)
