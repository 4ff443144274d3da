"""A softmax LinearLM read, linearized and saved as the linear model that it then is."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from linattn.feature_maps import EluPlusOne, FavorPlus, FeatureMap, LearnedExponential
from linattn.hf import (
    LinearLMForCausalLM,
    StreamCache,
    capture,
    from_pretrained,
    intercept,
    linearize_,
    restore_,
    save_pretrained,
)
from linattn.hf.linear_twin import linear_twin
from linattn.hf.state_cache import StreamLayer
from linattn.nn import KeptTokens, LinearAttention
from programs import TRANSFORMERS
from twins import byte_ids, twin

METHODS = {
    "LearnedExponential(num_features=8)": "Rotary(require_relative=False)",
    "FavorPlus(num_features=16) + window 4": "Rotary",
    "Expansion(num_centres=4) + window 4": "Rotary(require_relative=False)",
    "Centred(FavorPlus(num_features=16))": "Rotary(require_relative=False)",
    "Balanced(Nystrom(num_features=6))": "Rotary(require_relative=False)",
    "Centred(Balanced(Sderf(num_features=16)))": "Rotary(require_relative=False)",
}
FITTED = [method for method in METHODS if not method.startswith(("Learned", "Favor"))]


@pytest.fixture(scope="module")
def softmax() -> LinearLMForCausalLM:
    """The twin; tests work on copies."""
    return twin()


@pytest.fixture(autouse=True)
def _without_bars():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def linearized(softmax: LinearLMForCausalLM, method: str, **options) -> LinearLMForCausalLM:
    """A copy under a method, fitted where that takes statistics."""
    model = copy.deepcopy(softmax)
    samples = [byte_ids(4, 32, seed=9)] if method in FITTED else None
    linearize_(model, method=method, calibrate=samples, **options)
    return model


def logits(model: LinearLMForCausalLM, ids: torch.Tensor, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **{"use_cache": False, **options}).logits


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 12 and of 7 tokens, padded at the left."""
    ids, mask = byte_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    return ids * mask, mask


@pytest.mark.parametrize("use_cache", [False, True])
def test_its_calls_are_recorded_at_their_positions(softmax, use_cache) -> None:
    """`capture` itself checks that softmax on what it recorded is the model."""
    ids, mask = padded()
    found = capture(softmax, {"input_ids": ids, "attention_mask": mask, "use_cache": use_cache})
    assert [call.module_name for call in found.calls] == [f"model.blocks.{n}.attention" for n in range(2)]
    assert {(call.query.shape[1], call.key.shape[1], call.is_causal, call.scale) for call in found.calls} == {
        (4, 2, True, 8**-0.5)
    }
    bare = capture(twin(positions=None), {"input_ids": ids})
    assert not torch.allclose(bare.calls[0].key, capture(softmax, {"input_ids": ids}).calls[0].key)


def test_a_stream_is_intercepted_too(softmax) -> None:
    """Of each call all keys so far, the queries being the last."""
    ids, lengths = byte_ids(1, 9), []
    cache = StreamCache(2)

    def exact(call):
        lengths.append((call.query.shape[2], call.key.shape[2]))
        return call.softmax()

    with intercept(softmax, exact), torch.no_grad():
        parts = [softmax(part, past_key_values=cache).logits for part in (ids[:, :6], ids[:, 6:])]
    assert lengths == [(6, 6)] * 2 + [(3, 9)] * 2
    torch.testing.assert_close(torch.cat(parts, 1), logits(softmax, ids), rtol=1e-4, atol=1e-5)


def test_states_are_those_of_every_layer(softmax) -> None:
    ids = byte_ids(2, 10)
    with torch.no_grad():
        for options in ({"use_cache": False}, {"past_key_values": StreamCache(2)}):
            found = softmax(ids, output_hidden_states=True, logits_to_keep=1, **options)
            assert [tuple(x.shape) for x in found.hidden_states] == [(2, 10, 32)] * 3
            embedding, first, last = found.hidden_states
            assert torch.equal(embedding, softmax.model.embedding(ids))
            torch.testing.assert_close(first, softmax.model.blocks[0](embedding))
            torch.testing.assert_close(last @ softmax.model.embedding.weight.T, logits(softmax, ids))
    assert softmax(ids).hidden_states is None


@pytest.mark.parametrize("method", METHODS)
def test_the_folder_is_the_linear_model_to_the_bit(softmax, method, tmp_path) -> None:
    model, (ids, mask) = linearized(softmax, method), padded()
    assert not torch.allclose(logits(model, ids), logits(softmax, ids), rtol=1e-3)
    drawn = torch.get_rng_state()
    save_pretrained(model, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), drawn)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(read) is LinearLMForCausalLM
    assert all(isinstance(block.attention, LinearAttention) for block in read.model.blocks)
    assert (read.config.pattern, read.config.method, read.config.fitted) == ("l", method, None)
    assert read.config.positions == METHODS[method]
    assert torch.equal(logits(read, ids, attention_mask=mask), logits(model, ids, attention_mask=mask))
    kept = softmax.state_dict()
    assert all(torch.equal(x, kept[name]) for name, x in read.state_dict().items() if ".feature_map." not in name)
    # The model's own method writes the same, and so does the linear model's.
    model.save_pretrained(tmp_path / "own")
    read.save_pretrained(tmp_path / "again")
    written = [(tmp_path / name / "config.json").read_text() for name in ("out", "own", "again")]
    assert written[0] == written[1] == written[2]
    for name in ("own", "again"):
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / name), ids), logits(model, ids))


SCRIPT = """
import sys, torch, linattn.hf
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.load(sys.argv[2])
with torch.no_grad():
    found = model(ids, use_cache=False).logits
torch.save([found, model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)], sys.argv[3])
"""


@pytest.mark.parametrize("method", ["LearnedExponential(num_features=8)", "Expansion(num_centres=4) + window 4"])
def test_another_process_computes_the_same(run_program, softmax, method, tmp_path) -> None:
    model, ids = linearized(softmax, method), byte_ids(1, 12)
    save_pretrained(model, tmp_path / "out")
    torch.save(ids, tmp_path / "ids")
    done = run_program(SCRIPT, *(tmp_path / name for name in ("out", "ids", "found")), after=TRANSFORMERS)
    assert done.returncode == 0, done.stderr
    found, made = torch.load(tmp_path / "found")
    assert torch.equal(found, logits(model, ids))
    assert torch.equal(made, model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize("method", METHODS)
def test_generation_keeps_states_of_constant_size(softmax, method, tmp_path) -> None:
    """The linearized model and the one that its folder holds, beside the logits of whole passes."""
    model, ids = linearized(softmax, method), byte_ids(2, 12)
    save_pretrained(model, tmp_path / "out")
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
        sizes = []
        for length in (8, 24):
            options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
            made = one.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
            sizes.append(made.past_key_values.num_bytes)
            whole = logits(one, made.sequences)[:, 11:-1]
            torch.testing.assert_close(torch.stack(made.logits, 1), whole, rtol=1e-3, atol=1e-3)
        # The blocks of a window fill up and begin anew: 12 + 7 and 12 + 23 tokens leave 3 in the last of 4.
        assert sizes[0] == sizes[1]


def test_streams_are_of_one_kind(softmax) -> None:
    """A text that softmax began is not gone on with by states, and the other way round; restored, it is softmax."""
    ids, model = byte_ids(1, 6), copy.deepcopy(softmax)
    exact, states = StreamCache(2), StreamCache(2)
    model(ids, past_key_values=exact)
    linearize_(model, method="FavorPlus(num_features=8)", layers=[1])
    model(ids, past_key_values=states)
    layers: list[StreamLayer] = list(states.layers)
    assert [isinstance(layer.state.kept, KeptTokens) for layer in layers] == [True, False]
    with pytest.raises(TypeError, match=r"goes on from the Stream of a linattn\.State, got a Stream of KeptTokens"):
        model(ids, past_key_values=exact)
    restore_(model)
    with pytest.raises(TypeError, match="a softmax layer goes on from the Stream of KeptTokens"):
        model(ids, past_key_values=states)
    assert torch.equal(logits(model, ids), logits(softmax, ids))


def test_some_layers_alone(softmax, tmp_path) -> None:
    model, ids = linearized(softmax, "FavorPlus(num_features=16)", layers=[1]), byte_ids(2, 9)
    save_pretrained(model, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.config.pattern == "sl"
    assert torch.equal(logits(read, ids), logits(model, ids))


@pytest.mark.parametrize("base", [None, 500.0])
def test_positions_are_carried(base, tmp_path) -> None:
    """With every key exact, the linear model is the softmax model: at the twin's own positions."""
    softmax = twin(positions=None if base is None else f"Rotary(base={base})")
    model, ids = linearized(softmax, "LearnedExponential(num_features=4) + window 16"), byte_ids(2, 14)
    save_pretrained(model, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.config.positions == (None if base is None else "Rotary(base=500.0, require_relative=False)")
    torch.testing.assert_close(logits(read, ids), logits(softmax, ids), rtol=1e-4, atol=1e-4)


def test_per_head_maps_and_given_weights(softmax, tmp_path) -> None:
    """Draws for each key/value head, and a state_dict that a trainer passes in the place of the model's."""
    model, ids = copy.deepcopy(softmax), byte_ids(1, 9)
    draws = iter(range(2))
    linearize_(model, method=lambda width: FavorPlus(width, 8, seed=next(draws), num_heads=2), window=4)
    given = model.state_dict()
    given["model.embedding.weight"] = given["model.embedding.weight"] * 2
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "linattn.json").write_text("{}")
    model.save_pretrained(tmp_path / "out", state_dict=given)
    assert not (tmp_path / "out" / "linattn.json").exists()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (read.config.per_head, read.config.method) == (True, "FavorPlus(num_features=8) + window 4")
    model.load_state_dict(given)
    assert torch.equal(logits(read, ids), logits(model, ids))
    with pytest.raises(FileNotFoundError, match="holds no linearized model: load it with transformers"):
        from_pretrained(tmp_path / "out")


def elsewhere(model: LinearLMForCausalLM, *maps: FeatureMap) -> LinearLMForCausalLM:
    """A copy with a map for each layer."""
    model, given = copy.deepcopy(model), iter(maps)
    linearize_(model, method=lambda width: next(given))
    return model


def test_what_no_linear_model_has_is_refused_by_name(softmax) -> None:
    cases = {
        "one method, got EluPlusOne, FavorPlus": (EluPlusOne(8), FavorPlus(8, 4)),
        r"map of scale 1\.0, and a LinearLM's maps have the scale": (FavorPlus(8, 4, scale=1.0),) * 2,
    }
    for message, maps in cases.items():
        with pytest.raises(ValueError, match=message):
            linear_twin(elsewhere(softmax, *maps))
    hybrid = twin(pattern="ls")
    linearize_(hybrid, method="FavorPlus(num_features=4)")
    with pytest.raises(ValueError, match=r"blocks of this LinearLM at \[0\] are linear already"):
        linear_twin(hybrid)
    gated = twin(gate="Alibi")
    with pytest.raises(ValueError, match="softmax of this LinearLM is gated"):
        linearize_(gated, method="FavorPlus(num_features=4)")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int64"}, "wanted a floating dtype"),
        ({"shape": [2**28]}, "wanted a floating dtype and a shape of at most 134217728 numbers"),
        ({"shape": "many"}, "wanted a floating dtype"),
        ({"dtype": "nn"}, "wanted a floating dtype"),
    ],
)
def test_a_config_that_says_otherwise_is_refused(softmax, change, message, tmp_path) -> None:
    save_pretrained(linearized(softmax, "Centred(FavorPlus(num_features=16))"), tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    name = next(iter(config["fitted"]))
    broken = {**config, "fitted": {**config["fitted"], name: {**config["fitted"][name], **change}}}
    file.write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for other in ("model.blocks.0.attention.feature_map.nothing", "model.norm.weight"):
        file.write_text(json.dumps({**config, "fitted": {other: config["fitted"][name]}}))
        with pytest.raises(ValueError, match="which is no map that has them; give the config that"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_config_with_statistics_alone_gives_unfitted_maps(softmax, tmp_path) -> None:
    """No placeholder passes for a statistic."""
    save_pretrained(linearized(softmax, "Centred(FavorPlus(num_features=16))"), tmp_path / "out")
    config = LinearLMForCausalLM.config_class.from_pretrained(tmp_path / "out")
    assert config.fitted
    with pytest.raises(ValueError, match="call fit"):
        LinearLMForCausalLM(config)(byte_ids(1, 4))


def test_learned_weights_train_after_loading(softmax, tmp_path) -> None:
    save_pretrained(linearized(softmax, "LearnedExponential(num_features=8)"), tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    maps = [part for part in read.modules() if isinstance(part, LearnedExponential)]
    assert len(maps) == 2
    assert all(weight.requires_grad for one in maps for weight in one.parameters())
