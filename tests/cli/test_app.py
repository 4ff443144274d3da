"""The `linattn` command itself: its version, its help, its imports, and commands that are not installed."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from typer.testing import CliRunner

import linattn
from linattn import cli
from linattn.cli.app import COMMANDS, LAB_COMMANDS, app, subcommands

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
# No other distribution has commands.
ALONE = """
import importlib.metadata
importlib.metadata.entry_points = lambda **_: ()
from linattn.cli import main
main()
"""


def test_the_version():
    result = CliRunner(env=WIDE).invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"linattn {linattn.__version__}\n")


@pytest.mark.parametrize("words", [["--version"], ["--help"]])
def test_version_and_help_import_no_heavy_package(run_program, words):
    done = run_program(IMPORTED, *words)
    assert done.returncode == 0, done.stderr
    assert "linattn.cli.app" in done.stderr.split()
    assert not set(HEAVY) & set(done.stderr.split())


def test_a_subcommand_imports_what_it_needs_and_no_more(run_program):
    done = run_program(IMPORTED, "convert", "--help")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.splitlines()[-1].split())
    # transformers itself imports accelerate where it is installed, and jinja2.
    assert {"transformers", "linattn.hf", "accelerate", "linattn.convert.card"} <= loaded
    assert not {name for name in loaded if name.startswith("linattn_lab.") and name != "linattn_lab.commands"}


@pytest.mark.parametrize(
    ("name", "missing", "words"),
    [
        (
            "convert",
            "accelerate",
            "linattn convert: linattn.convert trains transformers models, and accelerate",
        ),
        ("generate", "rich", "linattn: the command needs rich, not installed here: pip install 'linattn[cli]'"),
    ],
)
def test_a_package_that_is_missing_is_named(run_program, name, missing, words):
    program = f"import sys; sys.modules[{missing!r}] = None; from linattn.cli import main; main()"
    done = run_program(program, name, "--help")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert done.stderr.startswith(words)


def test_missing_extras_are_named(monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in ("typer", "rich") else object())
    with pytest.raises(SystemExit, match=r"needs typer, rich, not installed here: pip install 'linattn\[cli\]'"):
        cli.main()


@pytest.mark.parametrize("name", LAB_COMMANDS)
def test_a_command_of_the_laboratory_says_what_to_install_without_it(run_program, name):
    done = run_program(ALONE, name, "--help")
    said = f"linattn {name}: linattn-lab is not installed here: pip install 'linattn[lab]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_help_without_the_laboratory_has_the_commands_of_the_library(run_program):
    done = run_program(ALONE, "--help")
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert not any(f"  {name} " in done.stdout for name in LAB_COMMANDS)


def test_the_commands_that_are_named_as_the_laboratory_s_are():
    assert set(LAB_COMMANDS) == set(subcommands()) - set(COMMANDS)


def test_a_module_that_is_run():
    done = subprocess.run([sys.executable, "-m", "linattn", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"linattn {linattn.__version__}\n"


@pytest.mark.parametrize("name", subcommands())
def test_help_says_what_each_subcommand_does(name):
    """Every subcommand is listed with the first sentence of its own help."""
    everything = CliRunner(env=WIDE).invoke(app, ["--help"]).output
    single = CliRunner(env=WIDE).invoke(app, [name, "--help"])
    assert single.exit_code == 0
    assert f" {name} [OPTIONS]" in single.output
    words, module = subcommands()[name]
    assert getattr(import_module(module), name).__doc__.startswith(words)
    assert " ".join(f"{name} {words}".split()) in " ".join(everything.split())


def test_a_word_that_is_no_subcommand():
    result = CliRunner(env=WIDE).invoke(app, ["measure"])
    assert result.exit_code == 2
    assert "measure" in result.output
