"""A linearized sentence encoder, saved: sentence-transformers loads it with its maps, or says why not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from linattn.hf import from_pretrained, linearize_
from linattn.hf.layer_attention import LayerAttention
from linattn.hf.loading import default_folder
from linattn.hf.sentence_transformers import LinearTransformer, save_pretrained
from programs import TRANSFORMERS

# The model is loaded once, and one process has what its program is forked after imported.
pytestmark = pytest.mark.xdist_group("transformers")

LOCAL = {"device": "cpu", "local_files_only": True}
METHOD = "Expansion(num_centres=4) + window 16"
TEXTS = [
    "Linear time.",
    "A kernel that factors lets all keys and values collapse into a state of fixed size, whatever their number.",
    "No.",
    "Texts of more tokens than the window and its neighbour hold see what the map makes of the rest. " * 4,
]
# float32 sums of some hundred terms, in batches of another shape: 2**-24 a rounding.
CLOSE = 2e-6


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Every attempt to reach it fails."""

    def refuse(*args, **options):
        raise AssertionError("a test reached for the network")

    for owner, name in ((socket.socket, "connect"), (socket, "getaddrinfo"), (socket, "create_connection")):
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture(scope="module")
def encoder() -> SentenceTransformer:
    """all-MiniLM-L6-v2, linearized."""
    found = SentenceTransformer(str(default_folder()), **LOCAL)
    linearize_(found[0].auto_model, method=METHOD)
    return found


@pytest.fixture(scope="module")
def folder(encoder, tmp_path_factory) -> Path:
    """Where it was saved."""
    place = tmp_path_factory.mktemp("sentences") / "linear"
    save_pretrained(encoder, place)
    return place


def load(folder: Path, **options) -> SentenceTransformer:
    return SentenceTransformer(str(folder), trust_remote_code=True, **{**LOCAL, **options})


def words(count: int) -> str:
    return " ".join("abcd"[n * n % 4] for n in range(count))


@pytest.fixture
def tiny(build, tmp_path):
    """A function that gives a SentenceTransformer of a tiny random model of some family, not linearized."""

    def of(family: str, **options) -> SentenceTransformer:
        known = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "a", "b", "c", "d"))}
        fast = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
        fast.pre_tokenizer = pre_tokenizers.Whitespace()
        build(family, **options).save_pretrained(tmp_path / "plain")
        PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(
            tmp_path / "plain"
        )
        first = Transformer(str(tmp_path / "plain"))
        return SentenceTransformer(modules=[first, Pooling(32), Normalize()], device="cpu")

    return of


def test_what_is_loaded_attends_by_the_maps(encoder, folder):
    loaded = load(folder)
    assert [type(module) for module in loaded] == [LinearTransformer, Pooling, Normalize]
    model = loaded[0].auto_model
    assert sum(isinstance(part, LayerAttention) for part in model.modules()) == 6
    assert loaded.max_seq_length == encoder.max_seq_length == 256
    assert (loaded.encode(TEXTS) == encoder.encode(TEXTS)).all()
    softmax = SentenceTransformer(str(default_folder()), **LOCAL)
    assert abs(loaded.encode(TEXTS) - softmax.encode(TEXTS)).max() > 1e-3


def test_an_embedding_is_the_mean_of_the_models_own_output(folder):
    loaded, model = load(folder), from_pretrained(folder)
    for text, found in zip(TEXTS, loaded.encode(TEXTS, convert_to_tensor=True), strict=True):
        inputs = loaded.tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            mean = model(**inputs)[0].mean(1)
        torch.testing.assert_close(found, torch.nn.functional.normalize(mean)[0], rtol=0, atol=CLOSE)


def test_padding_changes_nothing(folder):
    loaded = load(folder)
    together = loaded.encode(TEXTS, convert_to_tensor=True)
    alone = torch.stack([loaded.encode(text, convert_to_tensor=True) for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=0, atol=CLOSE)


def test_another_process_loads_it_by_its_name_alone(run_program, encoder, folder, tmp_path):
    program = (
        "import sys, torch; from sentence_transformers import SentenceTransformer\n"
        "assert not any(name.startswith('linattn') for name in sys.modules)\n"
        "m = SentenceTransformer(sys.argv[1], trust_remote_code=True, device='cpu', local_files_only=True)\n"
        "torch.save(m.encode(sys.argv[3:], convert_to_tensor=True), sys.argv[2])"
    )
    arguments = [str(folder), str(tmp_path / "found"), *TEXTS]
    done = run_program(program, *arguments, after=TRANSFORMERS, warned="error")
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "found"), encoder.encode(TEXTS, convert_to_tensor=True))


def test_it_loads_with_its_maps_or_not_at_all(folder, tmp_path):
    with pytest.raises(ValueError, match=r"(?s)LinearTransformer.*trust_remote_code=True"):
        SentenceTransformer(str(folder), **LOCAL)
    for name in ("linattn.json", "linattn.safetensors"):
        broken = tmp_path / name
        broken.mkdir()
        for path in folder.iterdir():
            if path.name != name:
                (broken / path.name).symlink_to(path)
        with pytest.raises(FileNotFoundError, match=rf"{name} is missing"):
            load(broken)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_kwargs": {"attn_implementation": "sdpa"}}, r"options \['attn_implementation'\]"),
        ({"model_kwargs": {"dtype": torch.bfloat16}}, r"options \['dtype'\]"),
        ({"backend": "onnx"}, "backend='onnx'"),
    ],
)
def test_options_for_the_model_are_refused(folder, options, words):
    with pytest.raises(ValueError, match=words):
        load(folder, **options)


def test_its_own_save_keeps_the_maps(encoder, folder, tmp_path):
    loaded = load(folder)
    loaded.save(str(tmp_path / "again"))
    assert (load(tmp_path / "again").encode(TEXTS) == encoder.encode(TEXTS)).all()
    with pytest.raises(ValueError, match="leave safe_serialization on"):
        loaded.save(str(tmp_path / "other"), safe_serialization=False)


def test_the_save_of_a_model_that_was_linearized_in_memory_is_no_softmax_model(tiny, tmp_path):
    model = tiny("bert")
    linearize_(model[0].auto_model, method="FavorPlus(num_features=16)")
    model.save(str(tmp_path / "new"))
    with pytest.raises(ValueError, match=r"linattn\.hf\.from_pretrained reads this folder"):
        SentenceTransformer(str(tmp_path / "new"), **LOCAL)
    inputs = {"input_ids": torch.tensor([[2, 3, 4]])}
    with torch.no_grad():
        assert torch.equal(from_pretrained(tmp_path / "new")(**inputs)[0], model[0].auto_model(**inputs)[0])


def test_prompts_and_pooling_are_those_of_the_model(tiny, tmp_path):
    model = tiny("bert")
    model.prompts["query"] = "a b "
    model[1].pooling_mode = "cls"
    linearize_(model[0].auto_model, method="FavorPlus(num_features=16)", layers=[1])
    before = type(model[0]), [type(module) for module in model]
    save_pretrained(model, tmp_path / "new")
    assert (type(model[0]), [type(module) for module in model]) == before == (Transformer, before[1])
    loaded = load(tmp_path / "new")
    assert loaded.prompts["query"] == "a b "
    assert loaded[1].pooling_mode == model[1].pooling_mode
    options = {"prompt_name": "query"}
    assert (loaded.encode("c d", **options) == model.encode("c d", **options)).all()


def test_longer_texts_than_the_positions_are_refused_clearly(folder):
    loaded = load(folder)
    loaded.max_seq_length = 1024
    with pytest.raises(
        ValueError, match=r"BertModel has 512 positions and failed on 902 tokens .*max_seq_length to"
    ) as e:
        loaded.encode(words(900))
    assert str(e.value.__cause__) in str(e.value)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_long_texts(tiny, tmp_path, family):
    """1500 tokens, where the table has 2048 positions, and where the positions are rotary and have no end."""
    limit = {"bert": 2048, "modernbert": 64}[family]
    model = tiny(family, max_position_embeddings=limit)
    linearize_(model[0].auto_model, method="FavorPlus(num_features=16)", layers=[0])
    model.max_seq_length = 2048
    save_pretrained(model, tmp_path / "new")
    loaded = load(tmp_path / "new")
    # sentence-transformers lowers it to the configured positions, binding or not.
    assert loaded.max_seq_length == limit
    loaded.max_seq_length = 2048
    texts = [words(1500), words(3)]
    assert len(loaded.tokenizer(texts[0])["input_ids"]) == 1500
    assert (loaded.encode(texts) == model.encode(texts)).all()
    together, alone = loaded.encode(texts), [loaded.encode(text) for text in texts]
    assert abs(together - alone).max() <= CLOSE
    assert abs(loaded.encode(words(1499) + " d") - loaded.encode(words(1499) + " c")).max() > 0  # the last token counts


def test_the_model_within_is_named(tiny):
    """A SentenceTransformer, and its first module, are no models of transformers."""
    encoder = tiny("bert")
    for wrong, words in (
        (encoder, r"got SentenceTransformer; pass the one within, model\.get_submodule\('0\.\w+'\)"),
        (encoder[0], r"got Transformer; pass the one within, model\.get_submodule\('\w+'\)"),
    ):
        with pytest.raises(TypeError, match=words):
            linearize_(wrong, method="EluPlusOne")


def test_what_is_no_linearized_encoder_is_refused(tiny, folder, tmp_path):
    model = tiny("bert")
    with pytest.raises(ValueError, match="BertModel is not linearized"):
        save_pretrained(model, tmp_path / "new")
    for wrong, name in (
        (SentenceTransformer(modules=[Normalize()], device="cpu"), "Normalize"),
        (SentenceTransformer(modules=[type("Other", (Transformer,), {})(str(tmp_path / "plain"))]), "Other"),
    ):
        with pytest.raises(TypeError, match=f"the first module is {name}, wanted sentence-transformers' Transformer"):
            save_pretrained(wrong, tmp_path / "new")
    with pytest.raises(FileExistsError, match="give a new folder"):
        save_pretrained(load(folder), folder)
    assert not (tmp_path / "new").exists()
    named = json.loads((folder / "modules.json").read_text())[0]["type"]
    assert named == "linattn.hf.sentence_transformers.LinearTransformer"
