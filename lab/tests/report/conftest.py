"""Small files of audit, bench and reproduce, measured here, once."""

from __future__ import annotations

import pytest

from linattn.hf import load
from linattn.methods.method import parse_method
from linattn.records.texts import Text
from linattn_lab.audit.grid import AuditGrid
from linattn_lab.audit.measuring import Audit
from linattn_lab.audit.records import AUDIT
from linattn_lab.bench.measuring import Bench
from linattn_lab.bench.records import BENCH
from linattn_lab.bench.settings import Settings
from linattn_lab.experiments import reproduction
from linattn_lab.experiments.records import CLAIMS
from linattn_lab.experiments.reproduction import Reproduction
from trials import Trial


@pytest.fixture(scope="session")
def whole(folder, prose, tmp_path_factory):
    """A folder with a small audit, claims and benchmark, all measured here."""
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
    return made
