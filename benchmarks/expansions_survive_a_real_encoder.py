"""Claim: expansions around query centres keep a pretrained encoder's embeddings, without any training.

The packaged MiniLM encoder on six texts of 512 tokens from the language reference. Error: the mean over layers and
heads of the relative error of a head's output, on the exact model's own queries, keys and values. Cosine: of the
mean-pooled embedding with all layers replaced to the exact model's. Both are medians over the texts. Fixed centres are
of the five texts that are not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import linattn
from linattn.feature_maps import Expansion
from linattn.hf import AttentionCall, capture, intercept, load
from linattn.methods.measures import relative_error, uniform_average
from linattn.records.texts import read_text
from linattn_lab.costs import spread
from measuring import record, verified_window

NUM_TEXTS, NUM_TOKENS = 6, 512


@dataclass(frozen=True)
class Method:
    """An expansion, with an exact window or without."""

    num_centres: int
    order: int
    window: int | None = None
    fixed: bool = False

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.num_centres} centres order {self.order}{window}{', centres of other text' if self.fixed else ''}"


# Method, bound on the error, bound on the cosine.
CASES = (
    (Method(16, 1), 0.33, 0.90),
    (Method(16, 1, 32), None, 0.978),
    (Method(64, 1, fixed=True), None, 0.925),
)


class Encoder:
    """The model with its texts, each recorded under exact attention."""

    def __init__(self) -> None:
        self.loaded = load(None)
        prose = read_text()
        starts = [part * len(prose) // (NUM_TEXTS + 1) for part in range(NUM_TEXTS)]
        self.inputs = [self.loaded.encode(prose[start:], NUM_TOKENS) for start in starts]
        self.recorded = [capture(self.loaded.model, inputs) for inputs in self.inputs]

    def maps(self, method: Method, text: int) -> list[Expansion]:
        """One per layer; fixed centres are those of all other texts."""
        found, others = [], [recorded.calls for number, recorded in enumerate(self.recorded) if number != text]
        for calls in zip(*others, strict=True):
            head_dim, scale = calls[0].query.shape[-1], calls[0].scale
            expansion = Expansion(head_dim, method.num_centres, order=method.order, scale=scale)
            if method.fixed:
                expansion.fit(torch.cat([call.query for call in calls]), torch.cat([call.key for call in calls]))
            found.append(expansion)
        return found

    def error(self, method: Method, text: int) -> float:
        """Mean relative error over all heads."""
        errors = []
        for call, expansion in zip(self.recorded[text].calls, self.maps(method, text), strict=True):
            errors.append(relative_error(attend(call, expansion, method), exact(call)))
        return float(torch.cat(errors).mean())

    def verify(self, method: Method) -> None:
        """Refuse a method whose output on some layer of the first text is not what its definition says."""
        for call, expansion in zip(self.recorded[0].calls, self.maps(method, 0), strict=True):
            if not method.fixed:
                expansion.fit(call.query, call.key)
            verified_window(method.window, expansion, (call.query, call.key, call.value), is_causal=False)

    def uniform_error(self, text: int) -> float:
        """The same of averaging the values."""
        errors = []
        for call in self.recorded[text].calls:
            average = uniform_average(call.value, num_heads=call.query.shape[1], num_queries=call.query.shape[2])
            errors.append(relative_error(average, exact(call)))
        return float(torch.cat(errors).mean())

    def cosine(self, method: Method, text: int) -> float:
        """Of the embedding, every layer replaced."""
        maps = self.maps(method, text)
        with intercept(self.loaded.model, lambda call: attend(call, maps[call.layer], method)):
            ours = self.loaded.model(**self.inputs[text])[0][0].mean(0)
        return float(torch.cosine_similarity(ours, self.recorded[text].output[0].mean(0), dim=0))


def attend(call: AttentionCall, expansion: Expansion, method: Method) -> torch.Tensor:
    """One layer's answer."""
    return linattn.linear_attention(call.query, call.key, call.value, expansion, window=method.window)


def exact(call: AttentionCall) -> torch.Tensor:
    """Softmax attention in float64."""
    tensors = (x.double() for x in (call.query, call.key, call.value))
    return linattn.softmax_attention(*tensors, scale=call.scale)


def main() -> None:
    """Verify, measure and record every case, beside averaging the values uniformly."""
    encoder, texts = Encoder(), range(NUM_TEXTS)
    with torch.no_grad():
        uniform = spread([encoder.uniform_error(text) for text in texts])
        for method, most, least in CASES:
            encoder.verify(method)
            if most is not None:
                figure = spread([encoder.error(method, text) for text in texts])
                claim = f"error per head on MiniLM, {method} (averaging the values: {uniform['median']:.2f})"
                record(claim, figure=figure, unit="", bound=f"<= {most}", uniform=uniform)
            if least is not None:
                figure = spread([encoder.cosine(method, text) for text in texts])
                record(f"cosine of the embedding on MiniLM, {method}", figure=figure, unit="", bound=f">= {least}")


if __name__ == "__main__":
    main()
