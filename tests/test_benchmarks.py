"""Benchmarks verify before they measure, and a run that fails costs no figure."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from linattn.kv_cache.budget import Sizes, kept_bytes

FOLDER = Path(__file__).parents[1] / "benchmarks"
CLAIMS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in {"run", "measuring", "ranks", "result_file"})
# `require` ends the process where a result is wrong; the others of measuring.py end in it.
VERIFIES = {"require", "verified", "verified_window"}
MEASURES = {"seconds", "extra_peak", "perf_counter", "record"}


def calls(node: ast.AST, functions: dict[str, ast.AST], seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Names called, in the order of evaluation; functions of the file are followed, bodies that only wait are not."""
    if isinstance(node, ast.Lambda | ast.FunctionDef):
        return
    if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.DictComp):
        parts = [*node.generators, *([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])]
    elif isinstance(node, ast.Call):
        parts = [*node.args, *node.keywords]
    else:
        parts = list(ast.iter_child_nodes(node))
    for part in parts:
        yield from calls(part, functions, seen)
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield from calls(node.func.value, functions, seen)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        yield name
        if name in functions and name not in seen:
            for statement in functions[name].body:
                yield from calls(statement, functions, seen | {name})


def order(text: str) -> list[str]:
    """What `main` calls of verifying and measuring, in order."""
    tree = ast.parse(text)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    body = functions["main"].body
    return [name for part in body for name in calls(part, functions) if name in VERIFIES | MEASURES]


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: path.stem)
def test_every_benchmark_verifies_before_it_measures(path):
    found = order(path.read_text(encoding="utf-8"))
    assert "record" in found
    assert found[0] in VERIFIES, found[:3]


@pytest.mark.parametrize(
    ("main", "first"),
    [
        ("verified(f); seconds(runs)", "verified"),
        ("found = seconds(runs); record(error=verified(f))", "seconds"),
        ("record(error=verified(f))", "verified"),
        ("check(); seconds(runs)", "require"),
        ("runs = {'a': lambda: verified(f)}; seconds(runs)", "seconds"),
        ("[self.check(x) for x in seconds(runs)]", "seconds"),
    ],
)
def test_the_order_is_that_of_evaluation(main, first):
    assert order(f"def check():\n    require()\ndef main():\n    {main}\n")[0] == first


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """benchmarks/run.py in a folder of three benchmarks of one line each, and its file of results."""
    for name in ("run.py", "measuring.py", "result_file.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("measuring", "result_file"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("run_in_a_copy", tmp_path / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("measuring", "result_file"):
        sys.modules.pop(name, None)


def write(folder: Path, name: str, *lines: str) -> None:
    """A benchmark."""
    (folder / f"{name}.py").write_text("\n".join(["from measuring import record", *lines]) + "\n")


def recorded(claim: str, figure: float) -> str:
    """A line that records a figure."""
    return f"record({claim!r}, figure={figure!r}, unit='s', bound='<= 9')"


@pytest.fixture
def forked(runner, run_program, monkeypatch):
    """Benchmarks' processes are forked from one that has torch; those of the test of interrupts begin with nothing."""

    def run(command, *, cwd, check):
        script, *words = command[1:]
        begin = f"import runpy, sys; sys.argv[0] = {script!r}; sys.path.insert(0, {str(cwd)!r})"
        return run_program(f"{begin}; runpy.run_path({script!r}, run_name='__main__')", *words)

    monkeypatch.setattr(runner.subprocess, "run", run)


@pytest.mark.usefixtures("forked")
def test_a_benchmark_that_fails_keeps_its_former_figures_and_is_named(runner, tmp_path, capfd, monkeypatch):
    results = tmp_path / "results.jsonl"
    write(tmp_path, "first", recorded("one", 1.0), recorded("two", 2.0))
    write(tmp_path, "second", recorded("three", 3.0))
    write(tmp_path, "third", recorded("four", 4.0))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert runner.main() == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["benchmark"], row["claim"], row["figure"]) for row in rows] == [
        ("first", "one", 1.0),
        ("first", "two", 2.0),
        ("second", "three", 3.0),
        ("third", "four", 4.0),
    ]
    assert all(row["machine"]["threads"] >= 1 for row in rows)
    write(tmp_path, "first", recorded("one", 10.0), "raise SystemExit('wrong result')")
    write(tmp_path, "second", recorded("three", 30.0), recorded("five", 5.0))
    write(tmp_path, "third", "pass")
    assert runner.main() == 1
    assert "failed, former figures kept: first, third" in capfd.readouterr().err
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    found = [(row["claim"], row["figure"]) for row in rows]
    assert found == [("one", 1.0), ("two", 2.0), ("three", 30.0), ("five", 5.0), ("four", 4.0)]


def test_a_run_that_is_interrupted_keeps_all_figures(runner, tmp_path, monkeypatch):
    results = tmp_path / "results.jsonl"
    write(tmp_path, "first", recorded("one", 1.0))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert runner.main() == 0
    before = results.read_bytes()

    def interrupted(*words, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.main()
    assert results.read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["results.jsonl"]


def test_a_name_that_is_no_benchmark(runner, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "nothing"])
    with pytest.raises(SystemExit, match="no benchmark is called nothing"):
        runner.main()


@pytest.fixture
def benchmark(monkeypatch):
    """Imports a benchmark by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_merged_keys_that_are_timed_beside_sdpa_run_in_compiled_code(benchmark):
    pytest.importorskip("linattn_compiled")
    assert benchmark("merged_keys_beat_sdpa").verify() <= 1e-5


def test_merged_keys_that_are_measured_beside_a_window_fit_its_bytes(benchmark):
    """Heads of Gemma 3 270M."""
    found = benchmark("merged_keys_beat_a_window")
    sizes = Sizes(256, 256, 4, 4)
    for budget, config, _ in found.CASES:
        held = kept_bytes(config, sizes, found.NUM_TOKENS)
        assert budget - 1 <= held / sizes.key_bytes <= budget, config


OWN = ("linattn", "linattn_lab")


def imported(tree: ast.AST) -> dict[str, object]:
    """What a file imports of the library and the laboratory, by its name there; nothing of the file runs."""
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OWN:
            module = importlib.import_module(node.module)
            for alias in node.names:
                is_module = not hasattr(module, alias.name)
                held = importlib.import_module(f"{node.module}.{alias.name}") if is_module else module
                found[alias.asname or alias.name] = held if is_module else getattr(module, alias.name)
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name.partition(".")[0] in OWN:
                module, root = importlib.import_module(alias.name), alias.name.partition(".")[0]
                found[alias.asname or root] = module if alias.asname else sys.modules[root]
    return found


def resolved(node: ast.AST, names: dict[str, object]) -> object | None:
    """What a name, or an attribute of a module or a class, stands for; None for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    holder = resolved(node.value, names) if isinstance(node, ast.Attribute) else None
    return getattr(holder, node.attr, None) if isinstance(holder, type | ModuleType) else None


def missing(text: str) -> list[str]:
    """Attributes of modules and classes of the library that a file names, and there are none of."""
    tree = ast.parse(text)
    names, attributes = imported(tree), [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    holders = ((node, resolved(node.value, names)) for node in attributes)
    return [
        ast.unparse(node)
        for node, holder in holders
        if isinstance(holder, type | ModuleType) and not hasattr(holder, node.attr)
    ]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_names_what_the_library_has(path):
    """Most of them take minutes and run by hand; what is imported is there, or it is an error of `imported`."""
    assert missing(path.read_text(encoding="utf-8")) == []


def test_names_that_are_gone_are_found():
    gone = "import linattn\nfrom linattn.parallel.parts import Views\nlinattn.nn.Gone(Views.of, Views.whole)"
    assert missing(gone) == ["linattn.nn.Gone", "Views.whole"]
    with pytest.raises(ModuleNotFoundError):
        missing("from linattn.gone import Views")
