"""What the laboratory's subcommands import, and say of a package that is missing."""

from __future__ import annotations

import pytest

IMPORTED = """
import sys
from linattn.cli import main
before = set(sys.modules)
try:
    main()
finally:
    sys.stderr.write(" ".join(set(sys.modules) - before))
"""
HF, TRAINING = {"transformers", "linattn.hf"}, {"accelerate", "tensorboard", "linattn.convert"}
PAGE = {"jinja2", "linattn_lab.report"}
BENCH = "bench --lengths 16 --features 8 --heads 1 --head-dim 4 --repeats 1 --no-memory --out"


@pytest.mark.parametrize("words", [BENCH, "reproduce --list"])
def test_a_subcommand_imports_what_it_needs_and_no_more(run_program, tmp_path, words):
    done = run_program(IMPORTED, *words.split(), *([tmp_path] if words == BENCH else []))
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.splitlines()[-1].split())
    assert loaded >= PAGE
    assert not (HF | TRAINING) & loaded


def test_a_package_that_is_missing_is_named_by_the_subcommand_that_needs_it(run_program):
    program = "import sys; sys.modules['transformers'] = None; from linattn.cli import main; main()"
    done = run_program(program, "audit")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert done.stderr.startswith(
        "linattn audit: linattn.hf reads transformers models with transformers, not installed here"
    )
