"""The `linattn` command itself: its version, its help, and what it imports for them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from typer.testing import CliRunner

import linattn
from linattn.lab.commands.app import COMMANDS, app

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
HEAVY = ("transformers", "accelerate", "jinja2", "numpy.random", "linattn.hf", "linattn.convert", "rich.live")
IMPORTED = """
import sys
from linattn.cli import main
before = set(sys.modules)
try:
    main()
finally:
    sys.stderr.write(" ".join(set(sys.modules) - before))
"""


def test_the_version():
    result = CliRunner(env=WIDE).invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"linattn {linattn.__version__}\n")


@pytest.mark.parametrize("words", [["--version"], ["--help"]])
def test_version_and_help_import_no_heavy_package(run_program, words):
    done = run_program(IMPORTED, *words)
    assert done.returncode == 0, done.stderr
    assert "linattn.lab.commands.app" in done.stderr.split()
    assert not set(HEAVY) & set(done.stderr.split())


HF, TRAINING = {"transformers", "linattn.hf"}, {"accelerate", "tensorboard", "linattn.convert"}
PAGE = {"jinja2", "linattn.lab.report"}
BENCH = "bench --lengths 16 --features 8 --heads 1 --head-dim 4 --repeats 1 --no-memory --out"


@pytest.mark.parametrize(
    ("words", "needed", "unneeded"),
    [
        (BENCH, PAGE, HF | TRAINING),
        ("bench --help", PAGE, HF | TRAINING),
        ("reproduce --list", PAGE, HF | TRAINING),
        # transformers itself imports accelerate where it is installed, and jinja2.
        ("audit --help", PAGE | HF, TRAINING - {"accelerate"}),
        ("convert --help", HF | {"accelerate", "linattn.convert.card"}, PAGE - {"jinja2"}),
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
            "convert",
            "accelerate",
            "linattn convert: linattn.convert trains transformers models, and accelerate is missing",
        ),
        ("audit", "transformers", "linattn audit: linattn.hf reads transformers models, and transformers is missing"),
        ("bench", "jinja2", "linattn: the command needs jinja2, not installed here: pip install 'linattn[lab]'"),
        ("bench", "accelerate", ""),
    ],
)
def test_a_package_that_is_missing_is_named_by_the_subcommands_that_need_it(run_program, name, missing, words):
    program = f"import sys; sys.modules[{missing!r}] = None; from linattn.cli import main; main()"
    done = run_program(program, name, "--help")
    assert (done.returncode, "Traceback" in done.stderr) == (1 if words else 0, False)
    assert done.stderr.startswith(words)


def test_a_module_that_is_run():
    done = subprocess.run([sys.executable, "-m", "linattn", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"linattn {linattn.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_each_subcommand_does(name):
    """Every subcommand is listed with the first sentence of its own help."""
    everything = CliRunner(env=WIDE).invoke(app, ["--help"]).output
    own = CliRunner(env=WIDE).invoke(app, [name, "--help"])
    assert own.exit_code == 0
    assert f" {name} [OPTIONS]" in own.output
    function = getattr(import_module(f"linattn.lab.commands.{name}"), name)
    assert function.__doc__.startswith(COMMANDS[name])
    assert " ".join(f"{name} {COMMANDS[name]}".split()) in " ".join(everything.split())


def test_a_word_that_is_no_subcommand():
    result = CliRunner(env=WIDE).invoke(app, ["measure"])
    assert result.exit_code == 2
    assert "measure" in result.output
