"""Claim: a state of fixed size serves longer texts as well: the error does not grow with the length.

Queries, keys and values of 16 texts of 512 tokens, as a pretrained sentence encoder computes them, are joined per head
to one text of 8,192: attention itself knows no positions. Relative error of the output on 256 query rows, mean over the
heads, against exact attention in float64 on those rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.hf import AttentionCall, capture, load
from linattn.methods.measures import relative_error, softmax_log_rows
from linattn.methods.method import parse_method
from linattn.records.texts import read_text
from linattn_lab.built_methods import build
from linattn_lab.costs import flops_per_token, state_numbers
from measuring import record, verified_window

TEXT_LENGTH, NUM_TEXTS, NUM_ROWS = 512, 16, 256
LENGTHS = (512, 2048, 8192)
METHODS = (
    "Expansion(num_centres=1)",
    "Expansion(num_centres=4)",
    "Expansion(num_centres=16)",
    "Expansion(num_centres=64)",
)


def joined(calls: Sequence[AttentionCall]) -> tuple[Tensor, Tensor, Tensor]:
    """One layer's calls, one behind the other."""
    query, key, value = (torch.cat([getattr(call, name) for call in calls], 2) for name in ("query", "key", "value"))
    return query, key, value


def layers() -> list[tuple[tuple[Tensor, Tensor, Tensor], float]]:
    """Queries, keys and values (1, H, 8192, D) of every layer, and the scale."""
    loaded, content = load(), read_text()
    starts = range(0, len(content), len(content) // NUM_TEXTS)[:NUM_TEXTS]
    calls = [capture(loaded.model, loaded.encode(content[start:], TEXT_LENGTH)).calls for start in starts]
    return [(joined(each), each[0].scale) for each in zip(*calls, strict=True)]


def error(label: str, length: int, tensors: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    """Errors of one layer's heads, (H,)."""
    query, key, value = (x[:, :, :length].contiguous() for x in tensors)
    rows = torch.randperm(length, generator=torch.Generator().manual_seed(0))[:NUM_ROWS]
    built = build(parse_method(label), query.shape[-1], num_features=None, scale=scale, seed=0)
    out = built.attend(query, key, value, is_causal=False)[:, :, rows]
    visible = torch.ones(NUM_ROWS, length, dtype=torch.bool)
    exact = softmax_log_rows(query[:, :, rows], key, visible, scale=scale).exp() @ value.double()
    return relative_error(out, exact)


def verified_layers(label: str, recorded: Sequence[tuple[tuple[Tensor, Tensor, Tensor], float]]) -> None:
    """Refuse a method whose output on some layer's first text is not what its definition says."""
    method = parse_method(label)
    for tensors, scale in recorded:
        query, key, value = (x[:, :, : LENGTHS[0]] for x in tensors)
        built = build(method, query.shape[-1], num_features=None, scale=scale, seed=0)
        built.fit(query, key)
        verified_window(method.window, built.feature_map, (query, key, value), is_causal=False)


def main() -> None:
    """Verify, measure, record."""
    recorded = layers()
    head_dim, value_dim = recorded[0][0][0].shape[-1], recorded[0][0][2].shape[-1]
    for label in METHODS:
        built = build(parse_method(label), head_dim, num_features=None, scale=1.0, seed=0)
        verified_layers(label, recorded)
        errors = [
            torch.cat([error(label, length, tensors, scale) for tensors, scale in recorded]).mean().item()
            for length in LENGTHS
        ]
        record(
            f"error at {LENGTHS[-1]:,} tokens over that at {LENGTHS[0]}, on the heads of all-MiniLM-L6-v2, {label}",
            figure=errors[-1] / errors[0],
            unit="×",
            bound="<= 1.1",
            lengths=LENGTHS,
            errors=errors,
            state_numbers=state_numbers(built, value_dim=value_dim),
            flops_per_token=flops_per_token(built, value_dim=value_dim, is_causal=False),
        )


if __name__ == "__main__":
    main()
