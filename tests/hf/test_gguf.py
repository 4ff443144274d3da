"""GGUF files and their folders load as ordinary float32 models, and so does Gemma 3 out of its package."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gguf_models import tiny, write_gguf
from linattn.hf import load, loading

ROOT = Path(__file__).parents[2]
needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="no reader of GGUF: pip install 'linattn[gguf]'")
# Two float32 evaluations of the same sums: 2**-24 a rounding, some hundred roundings in sequence, outputs of order 1.
CLOSE = 1e-5
IDS = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture
def file(tmp_path):
    """A folder with one GGUF file."""
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "tiny.gguf"
    write_gguf(path, tiny())
    return path


@needs_gguf
def test_a_file_and_its_folder(file):
    wanted = logits(tiny())
    for given in (file, str(file), file.parent):
        loaded = load(given, with_head=True)
        assert loaded.model.dtype == torch.float32
        assert (logits(loaded.model) - wanted).abs().max() <= CLOSE * wanted.abs().max()
        assert loaded.tokenizer.decode(loaded.tokenizer("the ä")["input_ids"]) == "the ä"
        assert len(loaded.tokenizer("the")["input_ids"]) == 1
    base = load(file).model
    with torch.no_grad():
        states = base(input_ids=IDS)[0]
        assert (states - tiny().model(input_ids=IDS)[0]).abs().max() <= CLOSE * states.abs().max()


@needs_gguf
def test_quantised_numbers_are_dequantised_and_saved_as_any_others(tmp_path):
    model, path = tiny(), tmp_path / "small.gguf"
    write_gguf(path, model, quantised=True)
    loaded = load(path, with_head=True)
    for name, x in model.named_parameters():
        # A block of 32 numbers is rounded to 127 steps below its largest, the step itself to half precision.
        allowed = x.abs().max() * (0.5 / 127 + 2**-10)
        assert (loaded.model.get_parameter(name) - x).abs().max() <= allowed, name
    assert not torch.equal(loaded.model.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    folder = tmp_path / "folder"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    assert "quantization_config" not in (folder / "config.json").read_text()
    again = load(folder, with_head=True)
    assert type(again.model) is type(loaded.model)
    assert torch.equal(logits(again.model), logits(loaded.model))


@needs_gguf
def test_refusals(file, tmp_path):
    (file.parent / "broken.gguf").write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"holds 2 GGUF files \(broken\.gguf, tiny\.gguf\); name one of them"):
        load(file.parent)
    with pytest.raises(ValueError, match=r"broken\.gguf cannot be read as a GGUF model"):
        load(file.parent / "broken.gguf")
    for missing in (tmp_path / "none.gguf", "none.gguf"):
        with pytest.raises(FileNotFoundError, match="is not a folder and not a GGUF file"):
            load(missing)


# Reads a file where modules of these names are not installed.
HIDING = """
import sys
from importlib.machinery import PathFinder

path, *hidden = sys.argv[1:]

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
from linattn.hf import load
assert load(path, with_head=True).model.lm_head is not None
"""


def brought_by(extra):
    """Names of all distributions that an extra of linattn brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {"": project["dependencies"], **project["optional-dependencies"]}
    names, left = set(), [Requirement(f"linattn[{extra}]"), *map(Requirement, own[""])]
    while left:
        one = left.pop()
        texts = [text for name in one.extras for text in own[name]] if one.name == "linattn" else []
        if one.name != "linattn" and canonicalize_name(one.name) not in names:
            names.add(canonicalize_name(one.name))
            with contextlib.suppress(PackageNotFoundError):
                texts = requires(one.name) or []
        each = (Requirement(text) for text in texts)
        left += [
            x for x in each if x.marker is None or any(x.marker.evaluate({"extra": y}) for y in one.extras or [""])
        ]
    return names


@needs_gguf
def test_the_extra_brings_all_that_a_file_needs(file):
    names = brought_by("gguf") | {"linattn"}
    found = packages_distributions().items()
    hidden = [module for module, given in found if names.isdisjoint(map(canonicalize_name, given))]
    assert "peft" in hidden
    assert "torch" not in hidden
    run = subprocess.run([sys.executable, "-c", HIDING, file, *hidden], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_without_the_reader(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("linattn.hf.loading.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"a\.gguf is a GGUF file, .* pip install 'linattn\[gguf\]'"):
        load(tmp_path / "a.gguf")


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The package of Gemma, which assembles a tiny model; the calls it got."""
    calls = []

    def assemble(path):
        calls.append(path)
        write_gguf(path, tiny())
        return path

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "find_spec", lambda name: name)
    monkeypatch.setattr(loading, "import_module", lambda name: SimpleNamespace(assemble=assemble))
    return calls


@needs_gguf
def test_the_package_becomes_a_folder_once(package, tmp_path, capsys):
    loaded = load("gemma-3-270m", with_head=True)
    folder = tmp_path / "linattn" / "gemma-3-270m"
    assert (loaded.name, loaded.source) == ("gemma-3-270m", str(folder))
    assert "subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms" in capsys.readouterr().err
    assert "Gemma Terms of Use" in (folder / "NOTICE").read_text()
    again = load("gemma-3-270m", with_head=True)
    assert (len(package), capsys.readouterr().err) == (1, "")
    assert torch.equal(logits(again.model), logits(loaded.model))
    # Neither the GGUF file nor anything unfinished stays.
    assert [path.name for path in folder.parent.iterdir()] == ["gemma-3-270m"]
    assert not list(folder.glob("*.gguf"))


@needs_gguf
def test_an_interrupt_leaves_nothing(package, tmp_path, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load("gemma-3-270m")
    assert not list((tmp_path / "linattn").iterdir())


@needs_gguf
def test_another_process_may_be_first(package, tmp_path, monkeypatch):
    own = loading.load_gguf

    def meanwhile(file, *, with_head):
        model, tokenizer = own(file, with_head=with_head)
        model.save_pretrained(tmp_path / "linattn" / "gemma-3-270m")
        tokenizer.save_pretrained(tmp_path / "linattn" / "gemma-3-270m")
        return model, tokenizer

    monkeypatch.setattr(loading, "load_gguf", meanwhile)
    assert load("gemma-3-270m").source == str(tmp_path / "linattn" / "gemma-3-270m")


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'linattn\[demo-lm\]'.*Gemma Terms of Use"):
        load("gemma-3-270m")


@pytest.mark.lm
def test_gemma_itself():
    """Made in the user's cache if it is not there yet, which takes minutes."""
    loaded = load("gemma-3-270m", with_head=True)
    config = loaded.model.config
    assert (config.num_hidden_layers, config.head_dim, config.sliding_window) == (18, 256, 512)
    ids = loaded.tokenizer("The days of the week are Monday, Tuesday, Wednesday,", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == config.bos_token_id
    with torch.no_grad():
        token = loaded.model(input_ids=ids).logits[0, -1].argmax()
    assert loaded.tokenizer.decode(token) == " Thursday"
