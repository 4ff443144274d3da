"""What an audit of a constant memory writes, as JSON lines: a header, then a row per contender and text or task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from linattn.records.jsonl import Form

EXACT = "exact"
UNIFORM = "uniform"
PLANNED = "planned"
BASELINE = 0
"""The budget of rows that have none: exact attention keeps all, averaging the values one."""


@dataclass(frozen=True)
class MemoryHeader:
    """The circumstances of an audit.

    Attributes:
        versions: version of python, torch, transformers and linattn by name.
        model: the model's name or folder.
        architecture: the model's class.
        layers: numbers of the layers that attend to all tokens, the ones that are bounded.
        num_windowed: layers with a sliding window, which stay as they are.
        num_heads: query heads of a layer.
        num_key_heads: key/value heads of a layer.
        head_dim: width of a key.
        value_dim: width of a value.
        number_bytes: bytes of a number in keys and values.
        text: source of the text.
        text_sha256: digest of the whole text.
        num_tokens: tokens of a passage.
        num_measured: the last tokens of a passage, of which every one is measured.
        passages: first token of each passage in the text.
        ends: where the stretches end by which figures are told along a passage.
        recall_tokens: tokens of a recall task.
        tasks: names of the recall tasks that there is room for.
        budgets: in exact keys and their values, per key/value head.
        kinds: names of the contenders.
        left_out: why a contender, by "name at budget", or a task is not measured.
        calibration: source of the text plans were made on; null without plans.
    """

    versions: dict[str, str]
    model: str
    architecture: str
    layers: list[int]
    num_windowed: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    number_bytes: int
    text: str
    text_sha256: str
    num_tokens: int
    num_measured: int
    passages: list[int]
    ends: list[int]
    recall_tokens: int
    tasks: list[str]
    budgets: list[int]
    kinds: list[str]
    left_out: dict[str, str] = field(default_factory=dict)
    calibration: str | None = None

    def measures_as(self, other: MemoryHeader) -> bool:
        """Whether figures of the same contender at the same budget are the same in both audits, but for plans."""
        own = {name: getattr(self, name) for name in ("budgets", "kinds", "left_out", "calibration")}
        return self == replace(other, **own)

    @property
    def exact_bytes(self) -> int:
        """What exact attention keeps of a passage in all global layers."""
        width = (self.head_dim + self.value_dim) * self.number_bytes
        return len(self.layers) * self.num_key_heads * self.num_tokens * width


@dataclass(frozen=True)
class PassageRow:
    """One contender in all global layers, on one passage.

    Attributes:
        passage: its number, from 0.
        contender: its name, or "exact", "uniform", "planned".
        label: its written form.
        budget: in exact keys; 0 for baselines.
        num_bytes: what all global layers keep after the passage.
        kl: KL divergence from the exact model, nats, mean over the last tokens.
        perplexity: of the last tokens.
        same: share of the last tokens at which the likeliest next one is the exact model's.
        kl_by_position: mean over each stretch; nan where nothing is measured.
        perplexity_by_position: the same.
        errors: relative error of each global layer's heads, on the exact model's queries, keys and values.
    """

    passage: int
    contender: str
    label: str
    budget: int
    num_bytes: int
    kl: float
    perplexity: float
    same: float
    kl_by_position: list[float]
    perplexity_by_position: list[float]
    errors: list[list[float]]


@dataclass(frozen=True)
class RecallRow:
    """One contender in all global layers, on one recall task.

    Attributes:
        task: its name.
        contender: its name, or "exact", "uniform", "planned".
        label: its written form.
        budget: in exact keys; 0 for baselines.
        depths: of each question, where its answer stands, as a share of the text.
        hits: of each question, the share of the answer's tokens that are the likeliest.
    """

    task: str
    contender: str
    label: str
    budget: int
    depths: list[float]
    hits: list[float]

    @property
    def score(self) -> float:
        """Mean over the questions."""
        return sum(self.hits) / len(self.hits)


MemoryRow = PassageRow | RecallRow

MEMORY: Form[MemoryHeader, MemoryRow] = Form(
    "an audit of a constant memory", MemoryHeader, {"passage": PassageRow, "recall": RecallRow}
)


def key_of(row: MemoryRow) -> tuple[str, str, int]:
    """What a row was measured of: text or task, contender, budget."""
    where = f"passage {row.passage}" if isinstance(row, PassageRow) else row.task
    return where, row.contender, row.budget
