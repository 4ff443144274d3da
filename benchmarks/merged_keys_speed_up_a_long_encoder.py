"""Claim: merged keys make the whole of MiniLM faster than softmax from 2,048 tokens on, three times at 8,192.

Every layer of the packaged encoder is replaced without training; beside it the same encoder under torch's
scaled_dot_product_attention, one text, float32. MiniLM has 512 learned positions: it is given as many as a text has
tokens by linear interpolation of their table, ends kept, so that no position is beyond those that it knows. What is
exact is softmax in this very model. Verified first: at every length beyond 512, on two texts of pydoc's topics, the
mean-pooled embedding has a cosine of 0.98 or more to the exact one's.

    python merged_keys_speed_up_a_long_encoder.py [LENGTH …]

Figures of other lengths are kept from earlier runs.
"""

from __future__ import annotations

import math
import statistics
import sys
from functools import partial

import torch
from torch.nn import Embedding
from torch.nn.functional import interpolate

from linattn.hf import AttentionCall, LoadedModel, intercept, load
from linattn.methods.method import Method, parse_method
from linattn.records.texts import read_text
from linattn_lab.built_methods import build
from linattn_lab.crossover import find_crossover
from measuring import RESULTS, ratios, record, require, seconds
from result_file import read_rows

SHORT, LENGTHS = 512, (512, 1024, 2048, 4096, 8192)
METHODS = tuple(map(parse_method, ("merged 128", "window 32 + merged 96")))
NUM_TEXTS, LEAST_COSINE = 2, 0.98


def extend(loaded: LoadedModel, table: torch.Tensor, length: int) -> None:
    """Give the encoder so many positions."""
    embeddings = loaded.model.embeddings
    longer = interpolate(table.mT.unsqueeze(0), size=length, mode="linear", align_corners=True)[0].mT.contiguous()
    embeddings.position_embeddings = Embedding.from_pretrained(longer)
    embeddings.position_ids = torch.arange(length).unsqueeze(0)
    embeddings.token_type_ids = torch.zeros(1, length, dtype=torch.long)
    loaded.model.config.max_position_embeddings = length


def embedding(loaded: LoadedModel, inputs: dict[str, torch.Tensor], method: Method | None) -> torch.Tensor:
    """The mean-pooled embedding, every layer by a method, or as it is."""

    def answer(call: AttentionCall) -> torch.Tensor:
        """One layer."""
        assert method is not None
        built = build(method, call.query.shape[-1], num_features=None, scale=call.scale, seed=0)
        return built.attend(call.query, call.key, call.value, is_causal=False)

    if method is None:
        return loaded.model(**inputs)[0][0].mean(0)
    with intercept(loaded.model, answer):
        return loaded.model(**inputs)[0][0].mean(0)


def measure(loaded: LoadedModel, length: int) -> None:
    """Verify and time both methods at a length."""
    prose = read_text()
    texts = [loaded.encode(prose[part * len(prose) // NUM_TEXTS :], length) for part in range(NUM_TEXTS)]
    exact, cosines = [embedding(loaded, each, None) for each in texts], {}
    for method in METHODS:
        pairs = [(embedding(loaded, each, method), truth) for each, truth in zip(texts, exact, strict=True)]
        cosines[method] = min(float(torch.cosine_similarity(*pair, dim=0)) for pair in pairs)
        if length > SHORT:
            require(f"{method.label} at {length:,} tokens, 1 - cosine", 1 - cosines[method], 1 - LEAST_COSINE)
    passes = {"exact": partial(embedding, loaded, texts[0], None)}
    passes |= {method.label: partial(embedding, loaded, texts[0], method) for method in METHODS}
    timed = seconds(passes, repeats=1 if length > 4096 else 5)
    for method in METHODS:
        ours = timed[method.label]
        record(
            f"softmax's time over that of {method.label}, the whole of MiniLM with {length:,} positions",
            figure=ratios(timed["exact"], ours),
            unit="×",
            bound={SHORT: "<= 1", 1024: ">= 0.5", 8192: ">= 3"}.get(length, ">= 1"),
            cosine=cosines[method],
            length=length,
            seconds={"exact": statistics.median(timed["exact"]), "merged": statistics.median(ours)},
        )


@torch.no_grad()
def main(lengths: tuple[int, ...]) -> None:
    """Verify, time, record; then from which length on the whole encoder is faster."""
    loaded = load(None)
    table = loaded.model.embeddings.position_embeddings.weight.detach().clone()
    for length in lengths:
        extend(loaded, table, length)
        measure(loaded, length)
    for method in METHODS:
        measured = f"over that of {method.label}, the whole of MiniLM"
        rows = sorted((row for row in read_rows(RESULTS) if measured in row["claim"]), key=lambda row: row["length"])
        points = [(row["length"], row["seconds"]["merged"], row["seconds"]["exact"]) for row in rows]
        found = find_crossover(points)
        record(
            f"length from which {method.label} makes the whole of MiniLM faster",
            figure=float(points[0][0]) if found.always else found.length or math.inf,
            unit="tokens",
            bound="<= 2048",
            cosine=min((row["cosine"] for row in rows if row["length"] > SHORT), default=None),
            lengths=[length for length, *_ in points],
        )


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or LENGTHS)
