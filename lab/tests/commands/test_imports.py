"""What the laboratory's subcommands import, and say of a package that is missing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "linattn_lab"
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


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_a_terminal_cannot_encode_is_escaped(run_program, encoding):
    """Else a table that took minutes to measure would end in an error."""
    program = "import sys; sys.stdout.reconfigure(encoding=sys.argv.pop(1), errors='strict')"
    done = run_program(f"{program}; from linattn.cli import main; main()", encoding, "reproduce", "--list")
    assert done.returncode == 0, done.stderr
    # The claim of theorem 4 has a Θ.
    assert ("m = \\u0398(d" in done.stdout) == (encoding != "utf-8")


def test_a_package_that_is_missing_is_named_by_the_subcommand_that_needs_it(run_program):
    program = "import sys; sys.modules['transformers'] = None; from linattn.cli import main; main()"
    done = run_program(program, "audit")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert done.stderr.startswith(
        "linattn audit: linattn.hf reads transformers models with transformers, not installed here"
    )


@pytest.mark.parametrize("module", ["head_audit", "memory_audit"])
def test_an_audit_needs_no_package_that_trains(run_program, module):
    """The demo installs none."""
    missing = "import sys; sys.modules['tensorboard'] = sys.modules['peft'] = None"
    done = run_program(f"{missing}; import linattn_lab.commands.{module}")
    assert done.returncode == 0, done.stderr


def test_the_laboratory_takes_public_names_alone():
    """A module or a name of the library's that begins with an underscore may change without notice."""
    imports = [
        (f"{path.name}:{node.lineno}", f"{node.module}.{one.name}")
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "linattn"
        for one in node.names
    ]
    assert len(imports) > 100
    assert [(place, name) for place, name in imports if "._" in name] == []
