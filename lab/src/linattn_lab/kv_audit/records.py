"""What an audit of a bounded KV cache writes, as JSON lines: a header, then a row per method and passage or task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from linattn_lab.records.jsonl import Form

# What a header has of the figures that are asked for, beside the circumstances of each.
_ASKED = ("budgets", "kinds", "lengths", "tasks", "num_samples", "left_out", "calibration")


@dataclass(frozen=True)
class MemoryHeader:
    """The circumstances of an audit.

    Attributes:
        versions: version of python, torch, transformers and linattn by name.
        processor: what it ran on.
        num_threads: of torch.
        model: the model's name or folder.
        architecture: the model's class.
        dtype: of the model, its keys and its values.
        layers: numbers of the layers that are bounded.
        num_exact: layers that keep their own cache, such as those with a sliding window.
        num_heads: query heads of a layer.
        num_key_heads: key/value heads of a layer.
        head_dim: width of a key.
        value_dim: width of a value.
        number_bytes: bytes of a number in keys and values.
        texts: source of each text by its kind.
        texts_sha256: digest of each text by its kind.
        lengths: tokens of a passage.
        num_passages: passages of each text and length.
        num_measured: predictions of a passage's last tokens that are measured, at most.
        chunk: tokens of a forward pass.
        num_written: tokens that are written greedily after a passage.
        tasks: names of the retrieval tasks.
        num_samples: texts of each task and length.
        num_facts: facts stated at each depth.
        budgets: in exact keys and their values, per key/value head.
        kinds: names of the methods.
        left_out: why a method, by "name at budget", or a task, by "name at length", is not measured.
        calibration: source of the text plans were made on; null without plans.
        weights_sha256: digest of the model's weights, which a folder may change; null in files of earlier versions.
    """

    versions: dict[str, str]
    processor: str
    num_threads: int
    model: str
    architecture: str
    dtype: str
    layers: list[int]
    num_exact: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    number_bytes: int
    texts: dict[str, str]
    texts_sha256: dict[str, str]
    lengths: list[int]
    num_passages: int
    num_measured: int
    chunk: int
    num_written: int
    tasks: list[str]
    num_samples: int
    num_facts: int
    budgets: list[int]
    kinds: list[str]
    left_out: dict[str, str] = field(default_factory=dict)
    calibration: str | None = None
    weights_sha256: str | None = None

    def measures_as(self, other: MemoryHeader) -> bool:
        """Whether rows of the same key are the same in both audits, but for plans."""
        return self == replace(other, **{name: getattr(self, name) for name in _ASKED})


@dataclass(frozen=True)
class PassageRow:
    """One method on one passage: what it loses, keeps and takes."""

    text: str  # kind of the text
    passage: int  # its number, from 0
    num_tokens: int  # of the passage
    method: str  # its name
    label: str  # its written form
    budget: int  # in exact keys; 0 for none
    num_bytes: int  # what all bounded layers keep after the passage
    unmerged: float  # share of the passage's tokens that fit before any are merged or evicted
    peak_bytes: int  # the same and the most that reading one more chunk allocates beside
    prefill_seconds: float  # of reading the passage
    tokens_per_second: float  # of writing after it
    kl: float  # KL divergence from the full cache, nats, mean over the last tokens
    kl_median: float  # median of them
    kl_high: float  # the 99 % quantile
    kl_largest: float  # the largest
    perplexity: float  # of the last tokens
    same: float  # share of the last tokens at which the likeliest next one is the full cache's
    parted: int  # tokens of the greedy text before it leaves the full cache's; all of them where it does not
    agreement: float  # share of the greedy text's tokens that are the full cache's at their place
    ending: str = ""  # the passage's last words; empty in files of earlier versions
    written: str = ""  # the greedy text after them; empty in files of earlier versions


@dataclass(frozen=True)
class TaskRow:
    """One method on one text of a retrieval task."""

    task: str  # its name
    sample: int  # number of the text, from 0
    num_tokens: int  # of the text at most
    method: str  # its name
    label: str  # its written form
    budget: int  # in exact keys; 0 for none
    # of each question, where its answer stands, as a share of the text; empty where that is not told
    depths: list[float]
    hits: list[float]  # of each question, the share of its answer that is right

    @property
    def score(self) -> float:
        """Mean over the questions."""
        return sum(self.hits) / len(self.hits)


MemoryRow = PassageRow | TaskRow
Key = tuple[type[MemoryRow], str, int, int, str, int]
"""Kind of the row, text or task, passage or sample, tokens, method, budget; a text may be called as a task is."""

MEMORY: Form[MemoryHeader, MemoryRow] = Form(
    "an audit of a bounded KV cache", MemoryHeader, {"passage": PassageRow, "task": TaskRow}
)


def key_of(row: MemoryRow) -> Key:
    """What a row was measured of."""
    place = (row.text, row.passage) if isinstance(row, PassageRow) else (row.task, row.sample)
    return (type(row), *place, row.num_tokens, row.method, row.budget)
