"""Rows of an audit of a bounded KV cache, made up."""

from __future__ import annotations

from linattn_lab.kv_audit.names import BOUNDED
from linattn_lab.kv_audit.records import MemoryHeader, PassageRow, TaskRow

MEMORY_HEADER = MemoryHeader(
    versions={"python": "3"},
    processor="some",
    num_threads=2,
    model="small",
    architecture="SmallForCausalLM",
    dtype="float32",
    layers=[1, 3],
    num_exact=2,
    num_heads=2,
    num_key_heads=1,
    head_dim=4,
    value_dim=4,
    number_bytes=4,
    texts={"prose": "letters"},
    texts_sha256={"prose": "0" * 64},
    lengths=[600],
    num_passages=2,
    num_measured=300,
    chunk=128,
    num_written=64,
    tasks=["facts", "vt"],
    num_samples=1,
    num_facts=1,
    budgets=[64],
    kinds=[BOUNDED, "sinks + window", "sinks + window in 2 bits", "sinks + window in 3.5 bits"],
)


def memory_passage(number, method, kl, *, budget=64, text="prose", written=""):
    return PassageRow(
        text=text,
        passage=number,
        num_tokens=600,
        method=method,
        label=f"[{method}]",
        budget=budget,
        num_bytes=1000 + budget,
        unmerged=0.5,
        peak_bytes=5000 + number,
        prefill_seconds=1.0 + number,
        tokens_per_second=10.0,
        kl=kl,
        kl_median=kl / 2,
        kl_high=4 * kl,
        kl_largest=(9 + number) * kl,
        perplexity=8.0 * (1 + kl),
        same=1 - kl,
        parted=20 + number,
        agreement=0.5,
        ending="a river" if written else "",
        written=written,
    )


def memory_facts(method, hits, budget=64):
    return TaskRow("facts", 0, 600, method, method, budget, [0.9, 0.1], hits)
