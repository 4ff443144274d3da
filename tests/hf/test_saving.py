"""A linearized model that was saved and loaded is the model: class, maps, dtypes, outputs and texts, to the bit."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, DynamicCache, SamConfig, SamModel

from linattn import MergedKV
from linattn.feature_maps import Balanced, Centred, FavorPlus, Hedgehog, LearnedExponential, Oprf, Sderf
from linattn.hf import StateCache, capture, from_pretrained, linearize_, load, restore_, save_pretrained
from linattn.hf.layer_attention import LayerAttention
from model_inputs import batch
from programs import TRANSFORMERS

FAVOR = "FavorPlus(num_features=16)"
HEADS = {"gpt2": "LMHeadModel", "llama": "ForCausalLM", "whisper": "ForConditionalGeneration"}
# Every kind of tensor: none, a draw, a draw and a number, learned weights, and methods with an exact part.
METHODS = (FAVOR, "Taylor(order=2)", "LearnedExponential(num_features=8)", f"{FAVOR} + window 4")
MEANS = ("query_mean", "key_mean")


def run(model, inputs):
    with torch.no_grad():
        return model(**{name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()})[0]


def kernels(model) -> dict[str, tuple[object, ...]]:
    """What is known of each kernel."""
    return {
        name: (part.module_name, part.feature_map.fingerprint(), part.window)
        for name, part in model.named_modules()
        if isinstance(part, LayerAttention)
    }


def returned(model, folder):
    """The model, saved and loaded."""
    save_pretrained(model, folder)
    return from_pretrained(folder)


def assert_same(twin, model, inputs) -> None:
    """The law."""
    assert type(twin) is type(model)
    assert kernels(twin) == kernels(model) != {}
    ours, theirs = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, twin))
    assert theirs.keys() == ours.keys()
    for name, x in ours.items():
        assert (theirs[name].dtype, theirs[name].device) == (x.dtype, torch.device("cpu")), name
        assert torch.equal(theirs[name], x), name
        # Products of the same numbers round alike where these lie alike in memory.
        assert theirs[name].stride() == x.stride(), name
        assert theirs[name].data_ptr() % 64 == 0, name
    assert not any(part.training for part in twin.modules())
    assert torch.equal(run(twin, inputs), run(model, inputs))


@pytest.mark.parametrize("method", METHODS[:3])  # cross-attention takes no window
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "modernbert", "whisper", "bart"])
def test_every_family_returns(build, tmp_path, family, method):
    model = build(family, head=HEADS.get(family, "Model"))
    linearize_(model, method=method, seed=5)
    assert_same(returned(model, tmp_path / "new"), model, batch(family))


@pytest.mark.parametrize("method", ["Taylor(order=2)", MergedKV(4, 8, None)])
def test_classes_that_name_no_width_and_choose_modules_by_an_implementation_return(tmp_path, method):
    small = {"hidden_size": 8, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    torch.manual_seed(0)
    config = SamConfig(
        vision_config={**small, "num_hidden_layers": 1, "output_channels": 8, "num_pos_feats": 4},
        prompt_encoder_config={**small, "image_embedding_size": 4, "mask_input_channels": 4},
        mask_decoder_config={**small, "num_hidden_layers": 1, "mlp_dim": 8, "iou_head_hidden_dim": 8},
    )
    model, inputs = SamModel(config).eval(), {"pixel_values": torch.randn(1, 3, 16, 16)}
    inputs["input_points"] = torch.rand(1, 1, 2, 2) * 16
    linearize_(model, method, example=inputs)
    twin = returned(model, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(twin(**inputs).pred_masks, model(**inputs).pred_masks)


def test_the_choice_of_layers_and_the_whole_method_return(build, tmp_path):
    model = build("bert", num_hidden_layers=3)
    linearize_(model, method="Expansion(num_centres=2) + window 2", layers=[0, 2])
    twin = returned(model, tmp_path / "new")
    assert list(kernels(twin)) == [f"encoder.layer.{n}.attention.self.linear_attention" for n in (0, 2)]
    assert_same(twin, model, batch("bert"))


FITTED = {
    "nested": lambda d: Centred(Balanced(Sderf(d, 16, seed=3))),
    "a number": lambda d: Oprf(d, 16, num_heads=2),
    "learned inside": lambda d: Centred(LearnedExponential(d, 8, num_heads=2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FITTED)
def test_what_was_fitted_and_redrawn_returns(build, tmp_path, name, dtype):
    model, inputs = build("llama"), batch("llama")
    calls = iter(capture(model, inputs).calls)

    def fitted(head_dim):
        call = next(calls)
        return FITTED[name](head_dim).fit(call.query.to(dtype), call.key.to(dtype))

    linearize_(model, method=fitted)
    if name == "nested":
        model.layers[0].self_attn.linear_attention.feature_map.inner.inner.redraw(77)
    assert_same(returned(model, tmp_path / "new"), model, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_dtypes_are_those_that_were_saved(build, tmp_path, family, dtype, method):
    """Buffers that no state_dict has, as Llama's frequencies, are cast with the model, and return so."""
    model = build(family)
    linearize_(model, method=method)
    model.to(dtype)
    assert_same(returned(model, tmp_path / "new"), model, batch(family))


def test_weights_of_several_dtypes(build, tmp_path):
    model = build("bert")
    linearize_(model, method=FAVOR)
    model.to(torch.bfloat16)
    for name, part in model.named_modules():
        if name.endswith("LayerNorm"):
            part.float()
            part.weight.data += 1e-4  # lost where it is rounded
            part.register_forward_hook(lambda module, args, out: out.bfloat16())
    twin = returned(model, tmp_path / "new")
    assert {str(x.dtype) for x in twin.parameters()} == {"torch.bfloat16", "torch.float32"}
    weights = dict(twin.named_parameters())
    assert all(torch.equal(weights[name], x) for name, x in model.named_parameters())


@pytest.mark.parametrize("kind", [LearnedExponential, Hedgehog])
def test_learned_maps_return_trained_and_train_on(build, tmp_path, kind):
    model, inputs = build("bert"), batch("bert")
    linearize_(model, method=lambda d: kind(d) if kind is Hedgehog else kind(d, 8, seed=9))
    start = kernels(model)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(**inputs)[0].square().sum().backward()
    optimiser.step()
    assert kernels(model) != start
    twin = returned(model, tmp_path / "new")
    assert_same(twin, model, inputs)
    twin(**inputs)[0].square().sum().backward()
    learned = dict(twin.encoder.layer[1].attention.self.linear_attention.named_parameters())
    assert learned
    assert all(x.requires_grad and x.grad is not None for x in learned.values())


PROGRAM = """
import sys, torch
from linattn.hf import StateCache, from_pretrained
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model, inputs = from_pretrained(folder), torch.load(folder + ".inputs")
    with torch.no_grad():
        found = [model(**inputs)[0]]
    if model.can_generate():
        made = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True,
            return_dict_in_generate=True)
        assert isinstance(made.past_key_values, StateCache)
        found += [made.sequences, *made.logits]
    torch.save(found, folder + ".found")
"""


# Beside other programs that are forked after transformers has been imported.
@pytest.mark.xdist_group("transformers")
def test_another_process_gives_the_same_bits_and_texts(run_program, build, tmp_path):
    wanted = {}
    for family in ("bert", "gpt2", "llama"):
        model, inputs = build(family, head=HEADS.get(family, "Model")), batch(family)
        inputs.pop("position_ids", None)
        linearize_(model, method=f"{FAVOR} + window 4" if family == "llama" else FAVOR)
        wanted[family] = [run(model, inputs)]
        if family != "bert":
            model.generation_config.pad_token_id = 0
            options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_logits": True}
            made = model.generate(**inputs, **options, return_dict_in_generate=True)
            wanted[family] += [made.sequences, *made.logits]
        save_pretrained(model, tmp_path / family)
        torch.save(inputs, tmp_path / f"{family}.inputs")
    folders = [str(tmp_path / family) for family in wanted]
    done = run_program(PROGRAM, *folders, after=TRANSFORMERS, warned="error")
    assert done.returncode == 0, done.stderr
    for family, tensors in wanted.items():
        found = torch.load(tmp_path / f"{family}.found")
        assert len(found) == len(tensors)
        assert all(torch.equal(x, y) for x, y in zip(found, tensors, strict=True)), family


def test_a_loaded_model_keeps_states_and_is_restored(build, tmp_path):
    model, inputs = build("llama", head="ForCausalLM"), {"input_ids": torch.arange(3, 11)[None]}
    softmax = run(model, inputs)
    linearize_(model, method=FAVOR)
    twin = returned(model, tmp_path / "new")
    made = twin.generate(**inputs, max_new_tokens=3, pad_token_id=0, return_dict_in_generate=True)
    assert isinstance(made.past_key_values, StateCache)
    restore_(twin)
    assert torch.equal(run(twin, inputs), softmax)
    made = twin.generate(**inputs, max_new_tokens=3, pad_token_id=0, return_dict_in_generate=True)
    assert type(made.past_key_values) is DynamicCache


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_transformers_reads_the_softmax_model_there_if_told_to(build, tmp_path, family):
    model, inputs = build(family), batch(family)
    softmax = run(model, inputs)
    linearize_(model, method="LearnedExponential(num_features=8)")
    save_pretrained(model, tmp_path)
    plain, info = AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(run(plain, inputs), softmax)


def test_saving_again_writes_the_same_bytes(build, tmp_path):
    model = build("llama")
    linearize_(model, method=lambda d: Centred(FavorPlus(d, 8, seed=4), **{n: torch.ones(2, 1, d) for n in MEANS}))
    save_pretrained(returned(model, tmp_path / "one"), tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_a_map_shared_by_layers_becomes_one_for_each(build, tmp_path):
    model, inputs = build("bert"), batch("bert")
    shared = LearnedExponential(8, 8)
    linearize_(model, method=lambda _: shared)
    twin = returned(model, tmp_path / "new")
    assert torch.equal(run(twin, inputs), run(model, inputs))
    first, second = (layer.attention.self.linear_attention.feature_map for layer in twin.encoder.layer)
    assert first is not second
    assert first.of_key.weight.data_ptr() != second.of_key.weight.data_ptr()


def test_another_version_of_linattn_warns_and_reads(build, tmp_path):
    model, inputs = build("bert"), batch("bert")
    linearize_(model, method=FAVOR)
    save_pretrained(model, tmp_path / "new")
    path = tmp_path / "new" / "linattn.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "linattn": "0.0.7"}))
    with pytest.warns(UserWarning, match=r"saved by linattn 0\.0\.7 and is read by linattn \d+\.\d+\.\d+") as caught:
        twin = from_pretrained(tmp_path / "new")
    assert caught[0].filename == __file__
    assert torch.equal(run(twin, inputs), run(model, inputs))


def test_a_tokenizer_comes_along(tmp_path):
    loaded = load()
    linearize_(loaded.model, method="Expansion(num_centres=2)")
    save_pretrained(loaded.model, tmp_path / "new", tokenizer=loaded.tokenizer)
    twin, inputs = from_pretrained(tmp_path / "new"), loaded.encode("Linear time.", 512)
    again = AutoTokenizer.from_pretrained(tmp_path / "new")("Linear time.", return_tensors="pt")
    assert torch.equal(again["input_ids"], inputs["input_ids"])
    # The packaged weights are mapped from a file: the same numbers, in products that may round otherwise.
    torch.testing.assert_close(run(twin, dict(again)), run(loaded.model, inputs), rtol=1e-5, atol=1e-5)
