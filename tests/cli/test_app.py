"""The `linattn` command itself: its version, its help, its imports, and commands that are not installed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from importlib import import_module

import pytest
from typer.testing import CliRunner

import linattn
from linattn import cli
from linattn.cli.app import COMMANDS, LAB_COMMANDS, app, error_line, subcommands
from programs import TRANSFORMERS

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
HEAVY = {"torch", "transformers", "accelerate", "jinja2", "numpy", "linattn.hf", "linattn.convert", "rich.live"}
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


@pytest.mark.parametrize("words", [["--version"], ["--help"], *([name, "--help"] for name in subcommands())])
def test_help_imports_neither_torch_nor_transformers(words):
    line = [sys.executable, "-X", "importtime", "-m", "linattn", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    imported = {row.rpartition("|")[2].strip() for row in done.stderr.splitlines()}
    assert "linattn.cli.app" in imported
    assert not HEAVY & imported


PLUGIN = '''
import sys
import linattn

def attend() -> None:
    """Attend to nothing."""
    assert "torch" not in sys.modules
    from linattn import MergedKV, linear_attention, nn
    assert linattn.kv_cache.MergedKV is MergedKV
    print(hasattr(linattn, "nothing"))
'''


@pytest.mark.parametrize("way", ["module", "script"])
def test_a_subcommand_of_another_distribution_takes_the_package_s_names(tmp_path, way):
    """By `python -m linattn` and by the installed script; help lists it, and torch is imported when a name is taken."""
    information, package, folder = (tmp_path / name for name in ("plugin-1.0.dist-info", "plugin", "bin"))
    for each in (information, package, folder):
        each.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[linattn.commands]\nplugin = plugin:COMMANDS\n")
    (package / "__init__.py").write_text('COMMANDS = {"attend": "Attend to nothing."}\n')
    (package / "attend.py").write_text(PLUGIN)
    script = folder / "linattn"
    script.write_text("from linattn.cli import main\nmain()\n")
    line = [sys.executable, *(["-m", "linattn"] if way == "module" else [str(script)])]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def printed(*words: str) -> str:
        done = subprocess.run([*line, *words], env=os.environ | path, capture_output=True, text=True, check=True)
        return done.stdout

    assert printed("attend") == "False\n"
    assert "attend     Attend to nothing." in printed("--help")


@pytest.mark.parametrize(
    ("words", "missing", "said"),
    [
        (
            ["convert", "MODEL", "OUT"],
            "tensorboard",
            "linattn convert: linattn.convert trains transformers models, and tensorboard",
        ),
        (
            ["generate", "MODEL", "--prompt", "x"],
            "transformers",
            "linattn generate: linattn.hf reads transformers models with transformers, not installed here",
        ),
        (["generate"], "rich", "linattn: the command needs rich, not installed here: pip install 'linattn[cli]'"),
    ],
)
def test_a_package_that_is_missing_is_named(run_program, words, missing, said):
    program = f"import sys; sys.modules[{missing!r}] = None; from linattn.cli import main; main()"
    done = run_program(program, *words)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert done.stderr.startswith(said)


# Beside other programs that are forked after transformers has been imported.
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("module", ["linattn.cli.app", "linattn.cli.generate", "linattn.cli.generation"])
def test_ctrl_c_while_modules_are_loaded_ends_the_command(run_program, tmp_path, module):
    """Also while an object is destroyed, where Python swallows errors."""
    program = f"""
import signal, sys
from linattn.cli import main

class Interrupting:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            Interrupting()

sys.modules.pop({module!r}, None)
sys.meta_path.insert(0, Finder)
main()
"""
    done = run_program(program, "generate", str(tmp_path), "--prompt", "a", after=TRANSFORMERS)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_once_the_work_has_begun_says_what_was_kept(run_program):
    begun = """
import signal
from rich.console import Console
from linattn.cli.terminal import ending

signal.signal(signal.SIGINT, signal.SIG_DFL)
with ending(Console(), lambda: "Nothing was kept yet."):
    signal.raise_signal(signal.SIGINT)
"""
    assert "Interrupted. Nothing was kept yet." in run_program(begun).stdout


def test_missing_extras_are_named(monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in ("typer", "rich") else object())
    with pytest.raises(SystemExit, match=r"needs typer, rich, not installed here: pip install 'linattn\[cli\]'"):
        cli.main()


@pytest.mark.parametrize("name", LAB_COMMANDS)
def test_a_command_of_the_laboratory_says_what_to_install_without_it(run_program, name):
    done = run_program(ALONE, name, "--help")
    said = f"linattn {name} needs linattn-lab: pip install 'linattn[lab]', in a clone ./lab\n"
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


@pytest.mark.parametrize(("rank", "who"), [("", "train"), ("0", "train"), ("2", "train, process 2")])
def test_an_error_names_the_process_where_there_are_several(monkeypatch, rank, who):
    monkeypatch.setenv("RANK", rank)
    assert error_line(ValueError("steps must be 1 or more"), "train", {"steps": "--steps"}) == (
        f"linattn {who}: --steps must be 1 or more"
    )


def test_a_reader_that_has_enough_is_no_error(monkeypatch):
    """As head -c 20, which closes the pipe."""

    def closed(*_, **__):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr("linattn.cli.generation.generation", closed)
    result = CliRunner().invoke(app, ["generate", "model", "--prompt", "x"])
    assert (result.exit_code, result.stderr) == (1, "")


def test_an_error_without_words_has_its_name():
    assert error_line(MemoryError(), "generate", {}).startswith(
        "linattn generate: MemoryError; there is no such memory"
    )
