"""Small files of audit, bench and reproduce, measured here, once; that of a KV cache is made up."""

from __future__ import annotations

import pytest

from linattn.hf import load
from linattn.methods.method import parse_method
from linattn_lab.audit.grid import AuditGrid
from linattn_lab.audit.measuring import Audit
from linattn_lab.audit.records import AUDIT
from linattn_lab.bench.measuring import Bench
from linattn_lab.bench.records import BENCH
from linattn_lab.bench.settings import Settings
from linattn_lab.experiments import reproduction
from linattn_lab.experiments.records import CLAIMS
from linattn_lab.experiments.reproduction import Reproduction
from linattn_lab.kv_audit.names import BOUNDED, FULL, UNIFORM
from linattn_lab.kv_audit.records import MEMORY
from linattn_lab.texts import Text
from memory_rows import MEMORY_HEADER, memory_facts, memory_passage
from trials import Trial


@pytest.fixture(scope="session")
def whole(folder, prose, tmp_path_factory):
    """A folder with a small audit, claims and benchmark, measured here, and an audit of a KV cache."""
    made = tmp_path_factory.mktemp("report")
    wanted = AuditGrid(tuple(map(parse_method, ("FavorPlus", "Expansion(num_centres=2)"))), (8, 16), draws=2)
    audit = Audit(load(str(folder("bert"))), Text("words", prose), wanted, num_tokens=16)
    AUDIT.write(made / "audit.jsonl", audit.header, audit.rows())
    bench = Bench(Settings(lengths=(8, 16, 32), heads=1, head_dim=4, repeats=2, memory=False, backward=True))
    BENCH.write(made / "bench.jsonl", bench.header, bench.rows([], lambda words: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduction, "EXPERIMENTS", {"first": Trial(), "second": Trial(status="fails")})
        run = Reproduction([], "full")
        CLAIMS.write(made / "claims.jsonl", run.header, run.records([]))
    baselines = [memory_passage(0, FULL, 0.0, budget=0), memory_passage(0, UNIFORM, 1.5, budget=0)]
    rows = [memory_passage(number, name, 0.01) for number in (0, 1) for name in (BOUNDED, "sinks + window")]
    facts = [memory_facts(FULL, [1.0, 0.9], 0), memory_facts(BOUNDED, [0.5, 1.0])]
    MEMORY.write(made / "memory.jsonl", MEMORY_HEADER, [*baselines, *rows, *facts])
    return made
