"""Claim: merged keys keep a pretrained encoder's embeddings in a fourth of an expansion's numbers, without training.

The packaged MiniLM encoder on six texts of 512 tokens from the language reference. Error: the mean over layers and
heads of the relative error of a head's output, on the exact model's own queries, keys and values. Cosine: of the
mean-pooled embedding with all layers replaced to the exact model's. Both are medians over the texts. Verified first:
with as many merged keys as tokens the output is exact.
"""

from __future__ import annotations

import torch

from linattn.hf import AttentionCall, LoadedModel, capture, intercept, load
from linattn.methods.measures import relative_error, uniform_average
from linattn.methods.method import Method, parse_method
from linattn.records.texts import read_text
from linattn_lab.built_methods import build
from linattn_lab.costs import spread, state_numbers
from measuring import record, require

NUM_TEXTS, NUM_TOKENS = 6, 512
# Method, bound on the error, bound on the cosine.
CASES = (
    ("merged 64", 0.22, None),
    ("merged 128", 0.155, None),
    ("window 32 + merged 96", 0.10, 0.985),
    ("Expansion(num_centres=16)", 0.33, None),
)


def answer(method: Method, call: AttentionCall) -> torch.Tensor:
    """One layer's answer."""
    built = build(method, call.query.shape[-1], num_features=None, scale=call.scale, seed=0)
    return built.attend(call.query, call.key, call.value, is_causal=False)


def error(method: Method, calls: tuple[AttentionCall, ...]) -> float:
    """Mean relative error over all heads."""
    return float(torch.cat([relative_error(answer(method, call), call.softmax()) for call in calls]).mean())


def uniform_error(calls: tuple[AttentionCall, ...]) -> float:
    """The same of averaging the values."""
    found = []
    for call in calls:
        average = uniform_average(call.value, num_heads=call.query.shape[1], num_queries=call.query.shape[2])
        found.append(relative_error(average, call.softmax()))
    return float(torch.cat(found).mean())


def cosine(method: Method, loaded: LoadedModel, inputs: dict[str, torch.Tensor], output: torch.Tensor) -> float:
    """Of the embedding, every layer replaced."""
    with intercept(loaded.model, lambda call: answer(method, call)):
        ours = loaded.model(**inputs)[0][0].mean(0)
    return float(torch.cosine_similarity(ours, output[0].mean(0), dim=0))


@torch.no_grad()
def main() -> None:
    """Verify, measure and record every case, beside averaging the values uniformly."""
    loaded, prose = load(None), read_text()
    starts = [part * len(prose) // (NUM_TEXTS + 1) for part in range(NUM_TEXTS)]
    inputs = [loaded.encode(prose[start:], NUM_TOKENS) for start in starts]
    recorded = [capture(loaded.model, each) for each in inputs]
    require("as many merged keys as tokens", error(parse_method(f"merged {NUM_TOKENS}"), recorded[0].calls), 1e-5)
    uniform = spread([uniform_error(each.calls) for each in recorded])
    width = recorded[0].calls[0].query.shape[-1]
    for label, most, least in CASES:
        method = parse_method(label)
        built = build(method, width, num_features=None, scale=1.0, seed=0)
        numbers = state_numbers(built, value_dim=width, is_causal=False)
        claim = f"error per head on MiniLM, {label}, {numbers:,} numbers"
        figure = spread([error(method, each.calls) for each in recorded])
        record(claim, figure=figure, unit="", bound=f"<= {most}", uniform=uniform, numbers=numbers)
        if least is not None:
            pairs = zip(inputs, recorded, strict=True)
            figure = spread([cosine(method, loaded, each, found.output) for each, found in pairs])
            record(f"cosine of the embedding on MiniLM, {label}", figure=figure, unit="", bound=f">= {least}")


if __name__ == "__main__":
    main()
