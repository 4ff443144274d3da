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


@pytest.mark.parametrize(
    ("words", "needed", "unneeded"),
    [
        (BENCH, PAGE, HF | TRAINING),
        ("bench --help", PAGE, HF | TRAINING),
        ("reproduce --list", PAGE, HF | TRAINING),
        # transformers itself imports accelerate where it is installed, and jinja2.
        ("audit --help", PAGE | HF, TRAINING - {"accelerate"}),
    ],
)
def test_a_subcommand_imports_what_it_needs_and_no_more(run_program, tmp_path, words, needed, unneeded):
    done = run_program(IMPORTED, *words.split(), *([tmp_path] if words == BENCH else []))
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.splitlines()[-1].split())
    assert needed <= loaded
    assert not unneeded & loaded


@pytest.mark.parametrize(
    ("name", "missing", "words"),
    [
        (
            "audit",
            "transformers",
            "linattn audit: linattn.hf reads transformers models with transformers, not installed here",
        ),
        ("bench", "accelerate", ""),
    ],
)
def test_a_package_that_is_missing_is_named_by_the_subcommands_that_need_it(run_program, name, missing, words):
    program = f"import sys; sys.modules[{missing!r}] = None; from linattn.cli import main; main()"
    done = run_program(program, name, "--help")
    assert (done.returncode, "Traceback" in done.stderr) == (1 if words else 0, False)
    assert done.stderr.startswith(words)
