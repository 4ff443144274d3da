"""What an audit writes: one header row, then one row per measurement, as JSON lines.

Numbers JSON does not have are written as the texts "inf", "-inf" and "nan"; what does not exist is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from linattn.lab.files import replacing

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
        num_layers: attention calls per forward pass.
        num_heads: query heads, of the first layer.
        head_dim: width of a query, of the first layer.
        text: source of the text.
        text_sha256: digest of the whole text.
        num_tokens: tokens read.
        first_measured: queries from this one on are measured; those before serve to fit maps of a causal model.
        num_rows: attention rows per head behind total variation and KL divergence.
        maps: written forms of the maps.
        features: feature counts asked for.
        draws: draws per random map.
        seed: seed of the audit.
    """

    versions: dict[str, str]
    model: str
    architecture: str
    is_causal: bool
    num_layers: int
    num_heads: int
    head_dim: int
    text: str
    text_sha256: str
    num_tokens: int
    first_measured: int
    num_rows: int
    maps: list[str]
    features: list[int]
    draws: int
    seed: int


@dataclass(frozen=True)
class HeadRow:
    """One map on one head, with one draw.

    Attributes:
        layer: from 0.
        head: from 0.
        map: the map's written form.
        features: R, the map's width.
        draw: from 0; 0 for maps that are not random.
        seed: seed of this layer's draw; null for maps that are not random.
        error: relative Frobenius error of the head's output.
        uniform_error: the same for averaging the values uniformly.
        total_variation: mean total variation between the attention rows.
        uniform_total_variation: the same for uniform rows.
        kl: mean KL divergence (nats) of the approximate rows from the exact ones; null where a weight is not positive.
        uniform_kl: the same for uniform rows.
        query_norm: mean |x|, x = √scale · q, as the map sees it (centred for centred maps).
        key_norm: mean |y|, y = √scale · k.
        sum_square: mean |x + y|².
        logit_std: standard deviation of the logits over the keys a query sees.
        predicted_ratio: error / uniform_error as the norms predict it; null where no closed form is known.
    """

    layer: int
    head: int
    map: str
    features: int
    draw: int
    seed: int | None
    error: float
    uniform_error: float
    total_variation: float
    uniform_total_variation: float
    kl: float | None
    uniform_kl: float | None
    query_norm: float
    key_norm: float
    sum_square: float
    logit_std: float
    predicted_ratio: float | None


@dataclass(frozen=True)
class ModelRow:
    """The whole model with every layer's attention replaced.

    Attributes:
        map: the map's written form, or "exact" or "uniform" for the baselines.
        features: the map's width; null for the baselines.
        draw: from 0.
        embedding_cosine: cosine of the mean of the last hidden states to the exact model's.
        token_cosine: mean over tokens of the cosine of a last hidden state to the exact model's.
    """

    map: str
    features: int | None
    draw: int
    embedding_cosine: float
    token_cosine: float


Row = HeadRow | ModelRow

_KINDS: dict[str, type[Header] | type[HeadRow] | type[ModelRow]] = {
    "header": Header,
    "head": HeadRow,
    "model": ModelRow,
}


def write_records(path: Path, header: Header, rows: Iterable[Row]) -> None:
    """Write an audit, row by row as it is measured, under a temporary name until it is whole.

    Cost: linear in the rows; memory for one.

    Args:
        path: the file, conventionally audit.jsonl.
        header: the first row.
        rows: consumed one by one; an exception from it, an interrupt included, leaves no file.

    Raises:
        OSError: if the file cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "audit.jsonl"
        >>> header = Header({}, "m", "M", False, 1, 1, 2, "t", "", 8, 0, 8, [], [64], 1, 0)
        >>> write_records(path, header, [ModelRow("exact", None, 0, 1.0, 1.0)])
        >>> read_records(path)[1]
        [ModelRow(map='exact', features=None, draw=0, embedding_cosine=1.0, token_cosine=1.0)]

    Source: the JSON Lines format.
    """
    kinds = {row_type: kind for kind, row_type in _KINDS.items()}
    with replacing(path) as file:
        for record in chain([header], rows):
            values = {name: _plain(value) for name, value in asdict(record).items()}
            file.write(json.dumps({"kind": kinds[type(record)], **values}, ensure_ascii=False, allow_nan=False) + "\n")


def read_records(path: Path) -> tuple[Header, list[Row]]:
    """Read what `write_records` wrote.

    Cost: linear in the file, all of it in memory.

    Args:
        path: a file written by `write_records`.

    Returns:
        The header and the rows, in order.

    Raises:
        ValueError: if a line is not such a row, or the first line alone is not the header.

    Example:
        See `write_records`.

    Source: the JSON Lines format.
    """
    with path.open(encoding="utf-8") as file:
        records = [_record(line, f"{path}:{number}") for number, line in enumerate(file, start=1)]
    rows = [record for record in records[1:] if not isinstance(record, Header)]
    if not records or not isinstance(records[0], Header) or len(rows) != len(records) - 1:
        raise ValueError(f"{path} is no audit: its first line, and no other, must be the header; run the audit again")
    return records[0], rows


def _record(line: str, place: str) -> Header | Row:
    """One line, read and checked against the fields of its kind."""
    values = json.loads(line)
    kind = _KINDS.get(values.pop("kind", None)) if isinstance(values, dict) else None
    if kind is None:
        raise ValueError(f"{place} is no row of an audit; its kind must be one of {', '.join(_KINDS)}")
    wanted = {field.name: field.type for field in fields(kind)}
    if set(values) != set(wanted):
        raise ValueError(f"{place}: got the fields {sorted(values)}, wanted {sorted(wanted)}; run the audit again")
    return kind(**{name: _number(value, str(wanted[name])) for name, value in values.items()})


def _plain(value: Any) -> Any:
    """JSON has no infinities and no nan."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any, wanted: str) -> Any:
    """The float behind "inf" or "nan", where a float is wanted."""
    return float(value) if wanted.startswith("float") and isinstance(value, str) else value
