"""A LinearLM as a model of transformers: saved, loaded, generated with, trained."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.cache_utils import DynamicCache

from layers import text
from linattn.feature_maps import FavorPlus, FeatureMap
from linattn.hf import LinearLMConfig, LinearLMForCausalLM, RedrawCallback, StreamCache, linearize_
from linattn.hf.language_model_config import blocks_of
from linattn.nn import LinearLM, SoftmaxAttention
from linattn.positions import FixedDecay, Rotary

SIZES = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 3, "num_key_value_heads": 2, "num_features": 8}
MODELS = {
    "plain": {},
    "hybrid": {"pattern": "lls", "gate": "ForgetGate", "qk_norm": "rms", "output_gate": True},
    "learned": {
        "method": "LearnedExponential + window 4",
        "positions": "Rotary(require_relative=False)",
        "gate": "Alibi",
    },
    "codes": {"method": "FavorPlus", "positions": "SinusoidalCodes(code_dim=4)"},
    "decay": {"method": "Relu", "positions": "SinusoidalCodes(code_dim=4)", "gate": "RetNet"},
    # Constants that no folder has.
    "monomials": {"method": "Taylor", "num_features": None},
}


def model(kind: str = "plain", **options) -> LinearLMForCausalLM:
    """A small one, in float64 and evaluation mode, with weights under which it does not repeat its last token."""
    torch.manual_seed(0)
    made = LinearLMForCausalLM(LinearLMConfig(**{**SIZES, **MODELS[kind], **options})).double().eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("proj.weight") or "embedding" in name:
                weight.mul_(20)
    return made


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 6 and of 3 tokens."""
    ids, mask = text(2, 6), torch.ones(2, 6, dtype=torch.long)
    ids[1, :3], mask[1, :3] = 0, 0
    return ids, mask


@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_brings_the_model_back_to_the_bit(kind: str, tmp_path) -> None:
    """Redrawn maps and float64 draws included, by its own class and by transformers' registry."""
    saved, words = model(kind).float(), text(2, 7)
    for place, part in enumerate(part for part in saved.modules() if isinstance(part, FavorPlus)):
        part.redraw(100 + place)
    saved.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(read, LinearLMForCausalLM)
    assert torch.equal(read(words).logits, saved(words).logits)
    maps = [[part for part in of.modules() if isinstance(part, FeatureMap)] for of in (saved, read)]
    assert [one.fingerprint() for one in maps[0]] == [one.fingerprint() for one in maps[1]]
    assert read.config.to_diff_dict() == saved.config.to_diff_dict()
    again, report = LinearLMForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16
    assert not report["missing_keys"] | report["unexpected_keys"]
    draws = [part for part in again.modules() if isinstance(part, FavorPlus)]
    assert all(part.projection.dtype == torch.float64 for part in draws)


def test_a_folder_that_does_not_fit_is_refused(tmp_path) -> None:
    """Weights of other settings."""
    saved = model(method="Centred(FavorPlus)", positions=None).float()
    saved.save_pretrained(tmp_path / "unfitted")
    LinearLMForCausalLM.from_pretrained(tmp_path / "unfitted")
    with pytest.raises(ValueError, match=r"without a place here: model.blocks.0.attention.gate.rates"):
        LinearLMForCausalLM.from_pretrained(tmp_path / "unfitted", gate="Alibi")


def test_a_fresh_model_has_the_initial_weights_of_linear_lm() -> None:
    config = LinearLMConfig(**SIZES, gate="ForgetGate")
    torch.manual_seed(3)
    wrapped = LinearLMForCausalLM(config)
    torch.manual_seed(3)
    plain = LinearLM(config.vocab_size, blocks_of(config))
    pairs = zip(wrapped.model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("kind", MODELS)
def test_generation_equals_recomputation(kind: str) -> None:
    """Greedily, beside the logits of whole passes."""
    made, words = model(kind), text(2, 6)
    options = {"attention_mask": torch.ones_like(words), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = made.generate(words, **options, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(found.sequences, made.generate(words, **options, use_cache=False))
    whole = made(found.sequences, use_cache=False).logits[:, 5:-1]
    # generate gives logits in float32.
    torch.testing.assert_close(torch.stack(found.logits, 1), whole.float(), rtol=1e-5, atol=1e-6)
    assert isinstance(found.past_key_values, StreamCache)
    assert found.past_key_values.get_seq_length() == 13


@pytest.mark.parametrize("kind", ["plain", "hybrid", "codes"])
def test_left_padding_changes_no_generated_token(kind: str) -> None:
    made, (ids, mask) = model(kind), left_padded()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert made.generate(ids, attention_mask=mask, **options)[:, 6:].unique().numel() > 2
    together = made.generate(ids, attention_mask=mask, **options)
    for row in range(2):
        real = mask[row : row + 1, mask[row].bool()]
        alone = made.generate(ids[row : row + 1, mask[row].bool()], attention_mask=real, **options)
        assert torch.equal(together[row, 6:], alone[0, -6:])


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"prefill_chunk_size": 2}],
    ids=str,
)
def test_ways_of_generating_equal_those_without_a_cache(options) -> None:
    made, (ids, mask) = model("hybrid"), left_padded()
    common = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0, **options}
    torch.manual_seed(1)
    found = made.generate(ids, **common)
    common.pop("prefill_chunk_size", None)
    torch.manual_seed(1)
    assert torch.equal(found, made.generate(ids, **common, use_cache=False))


def test_memory_of_generation_is_constant() -> None:
    made, words = model(), text(1, 4)
    sizes = []
    for length in (1, 40):
        out = made.generate(words, max_new_tokens=length, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
        sizes.append(out.past_key_values.num_bytes)
    # S, z and m of 3 layers, 2 heads, 8 features and values of 4; and one count.
    assert sizes == [3 * (8 * 2 * (8 * 4 + 8 + 8) + 8)] * 2


def test_a_text_goes_on_from_its_cache_and_forks() -> None:
    made, words = model("hybrid"), text(2, 9)
    cache = StreamCache(3)
    made(words[:, :4], past_key_values=cache)
    fork = cache.fork()
    whole = made(words, use_cache=False).logits
    for held in (fork, cache):
        found = made(words[:, 4:], past_key_values=held, logits_to_keep=2)
        torch.testing.assert_close(found.logits, whole[:, -2:], rtol=1e-12, atol=1e-12)
        assert held.get_seq_length() == 9
    cache.batch_select_indices(torch.tensor([False, True]))
    cache.batch_repeat_interleave(2)
    step = made(words[1:, :1].expand(2, 1), past_key_values=cache).logits
    torch.testing.assert_close(step, made(words[:, :1], past_key_values=fork).logits[1:].expand(2, -1, -1))
    cache.reset()
    assert (cache.get_seq_length(), cache.streams, cache.num_bytes) == (0, None, 0)


def test_a_mask_that_changes_tokens_of_a_stream_is_refused() -> None:
    """Hidden afterwards, shown afterwards, or forgotten; with more columns it goes on, and of new tokens alone."""
    made, words = model(), text(2, 9)
    ones, padded = torch.ones_like(words), torch.ones_like(words)
    padded[0, :3] = 0
    for before, after in ((ones, padded), (None, padded), (padded, ones), (padded, None)):
        for cache in (StreamCache(3), None):
            shown = None if before is None else before[:, :6]
            cache = made(words[:, :6], past_key_values=cache, attention_mask=shown).past_key_values
            streams = cache.streams
            with pytest.raises(ValueError, match="changes which of the 6 tokens"):
                made(words[:, 6:], past_key_values=cache, attention_mask=after)
            assert cache.streams == streams
    whole = made(words, attention_mask=padded).logits[:, 6:]
    cache = made(words[:, :6], attention_mask=padded[:, :6]).past_key_values
    for after in (padded, ones[:, 6:], torch.cat((padded, ones), 1)):
        fork = cache.fork()
        rows = [
            made(words[:, place : place + 1], past_key_values=fork, attention_mask=mask).logits
            for place, mask in ((6, after if len(after[0]) > 3 else after[:, :1]), (7, after), (8, after))
        ]
        torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=1e-4, atol=1e-5)
    cache.reorder_cache(torch.tensor([1, 0]))
    made(words[:, 6:].flip(0), past_key_values=cache, attention_mask=padded.flip(0))


def test_an_error_leaves_the_cache_as_it_was() -> None:
    made, words = model("hybrid"), text(1, 6)
    cache = StreamCache(3)
    made(words[:, :3], past_key_values=cache)
    with pytest.raises(IndexError):
        made(words[:, 3:] + 100, past_key_values=cache)
    # After all blocks too, where the largest tensors are made.
    for labels in (words, words[:, 3:] + 100):
        with pytest.raises((IndexError, ValueError)):
            made(words[:, 3:], past_key_values=cache, labels=labels)
    assert cache.get_seq_length() == 3
    found = made(words[:, 3:], past_key_values=cache).logits
    torch.testing.assert_close(found, made(words, use_cache=False).logits[:, 3:], rtol=1e-12, atol=1e-12)


def test_the_loss_is_that_of_the_next_tokens() -> None:
    made, (ids, mask) = model("hybrid"), left_padded()
    labels = ids.masked_fill(mask == 0, -100)
    out = made(ids, attention_mask=mask, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    summed = made(ids, attention_mask=mask, labels=labels, num_items_in_batch=2).loss
    torch.testing.assert_close(summed, expected * (labels[:, 1:] != -100).sum() / 2)
    assert out.past_key_values is None


def train(folder, *, steps: int, resume: bool = False, stop_after: int | None = None) -> LinearLMForCausalLM:
    """Some steps of transformers' Trainer, checkpoints and redraws included."""
    torch.manual_seed(0)
    made = LinearLMForCausalLM(LinearLMConfig(**SIZES, pattern="ls", gate="ForgetGate"))
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        activation_checkpointing=True,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in text(32, 12)]
    trainer = Trainer(made, arguments, train_dataset=rows, callbacks=[RedrawCallback(every=3)])
    trainer.train(resume_from_checkpoint=resume)
    assert made.model.gradient_checkpointing
    return made


def test_the_trainer_trains_and_resumes(tmp_path) -> None:
    """Cut after a checkpoint and resumed: the weights and draws of an uncut run, to the bit."""
    uncut = train(tmp_path / "uncut", steps=8)
    train(tmp_path / "cut", steps=4)
    resumed = train(tmp_path / "cut", steps=8, resume=True)
    fresh = LinearLMForCausalLM(uncut.config)
    for name, tensor in uncut.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    seeds = [[int(part.seed) for part in of.modules() if isinstance(part, FavorPlus)] for of in (uncut, fresh)]
    assert not set(seeds[0]) & set(seeds[1])
    read = LinearLMForCausalLM.from_pretrained(tmp_path / "cut" / "checkpoint-8")
    assert torch.equal(read(text(1, 5)).logits, uncut.eval()(text(1, 5)).logits)


def test_a_softmax_twin_gives_its_weights_to_a_linear_model() -> None:
    """Projections have the same names; with every key exact the logits are the twin's."""
    twin, made, words = (
        model(pattern="s", qk_norm="rms"),
        model(method="FavorPlus + window 8", qk_norm="rms"),
        text(2, 7),
    )
    with torch.no_grad():
        for weight in twin.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    found = made.load_state_dict(twin.state_dict(), strict=False)
    assert not found.unexpected_keys
    assert all(".feature_map." in name for name in found.missing_keys)
    torch.testing.assert_close(made(words).logits, twin(words).logits, rtol=1e-10, atol=1e-10)


def test_other_embeddings_give_the_logits_too() -> None:
    made = model()
    made.resize_token_embeddings(13)
    assert made(text(1, 4)).logits.shape == (1, 4, 13)
    assert made.config.vocab_size == 13


def test_settings_say_which_layers_there_are() -> None:
    blocks = blocks_of(
        LinearLMConfig(**SIZES, pattern="ls", positions="Rotary(base=100.0)", gate="FixedDecay(rates=[0.5, 1])")
    )
    assert [isinstance(block.attention, SoftmaxAttention) for block in blocks] == [False, True, False]
    assert {block.attention.positions.base for block in blocks} == {100.0}
    assert isinstance(blocks[0].attention.positions, Rotary)
    assert all(isinstance(block.attention.gate, FixedDecay) for block in blocks)
    assert blocks[0].attention.gate.rates.tolist() == [0.5, 1]
    assert [int(block.attention.feature_map.seed) for block in blocks[::2]] == [0, 2]


REFUSED = {
    "pattern must be letters": {"pattern": "lx"},
    "gated must be kinds of the pattern's blocks": {"pattern": "l", "gate": "RetNet", "gated": "s"},
    '"l", "s" or "ls", got \'x\'': {"gate": "RetNet", "gated": "x"},
    r"positions='Rotary\(' is no written form": {"positions": "Rotary("},
    "'Rotaries' is no written form": {"positions": "Rotaries"},
    r"'Rotary\(4\)' is no written form": {"positions": "Rotary(4)"},
    r"'Rotary\(base=open\)' is no written form": {"positions": "Rotary(base=open)"},
    r"'Rotary\(\*\*x\)' is no written form": {"positions": "Rotary(**x)"},
    r"'Rotary\(bass=4\)': .*unexpected keyword": {"positions": "Rotary(bass=4)"},
    "gate='Forget' is no written form; write one of ForgetGate, Alibi": {"gate": "Forget"},
    "there is no feature map": {"method": "Softmax"},
    "not relative": {"method": "EluPlusOne"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_settings_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**REFUSED[message])


def test_no_block_is_split_over_devices() -> None:
    assert model()._no_split_modules == {"Block"}


def test_wrong_calls_are_refused() -> None:
    made, words = model(), text(1, 4)
    with pytest.raises(TypeError, match=r"must be a linattn.hf.StreamCache, got DynamicCache"):
        made(words, past_key_values=DynamicCache())
    number = len(made.model.blocks)
    for other in (number - 1, number + 1):
        with pytest.raises(
            ValueError, match=rf"has {other} layers and the model {number} .*give StreamCache\({number}\)"
        ):
            made(words, past_key_values=StreamCache(other))
    for mask in (torch.ones(1, 3), torch.ones(2, 4), torch.ones(1, 1, 4, 4)):
        with pytest.raises(ValueError, match="a kernel masks keys, not single pairs"):
            made(words, attention_mask=mask)
    with pytest.raises(ValueError, match="keeps streams, not keys and values, got cache_implementation='static'"):
        made.generate(words, max_new_tokens=1, cache_implementation="static")
    with pytest.raises(ValueError, match="use_cache=False gives the whole text again for each token"):
        made.generate(words, max_new_tokens=1, use_cache=False, past_key_values=StreamCache(number))
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        made.generate(words, max_new_tokens=1, assistant_model=made)
    cache = StreamCache(3)
    with pytest.raises(ValueError, match="cannot forget its last tokens"):
        cache.crop(1)
    with pytest.raises(RuntimeError, match="serves a LinearLMForCausalLM"):
        cache.update(words, words, 0)
    with pytest.raises(ValueError, match="LinearLMForCausalLM"):
        linearize_(made, method="EluPlusOne")


@pytest.mark.parametrize(("gated", "expected"), [("ls", [True, True]), ("l", [True, False]), ("s", [False, True])])
def test_the_gate_is_in_blocks_of_the_kinds_named(gated: str, expected: list[bool]) -> None:
    blocks = blocks_of(
        LinearLMConfig(**{**SIZES, "num_hidden_layers": 2}, pattern="ls", gate="ForgetGate", gated=gated)
    )
    assert [block.attention.gate is not None for block in blocks] == expected


def test_a_cache_that_is_asked_for_comes_beside_a_loss() -> None:
    made, ids = model("hybrid"), text(2, 10)
    with torch.no_grad():
        assert made(ids, labels=ids).past_key_values is None
        assert made(ids, labels=ids, use_cache=True).past_key_values.get_seq_length() == 10


def test_states_are_those_of_every_layer() -> None:
    made, ids = model("hybrid"), text(2, 10)
    with torch.no_grad():
        for options in ({"use_cache": False}, {"past_key_values": StreamCache(3)}):
            found = made(ids, output_hidden_states=True, logits_to_keep=1, **options)
            assert [tuple(x.shape) for x in found.hidden_states] == [(2, 10, 16)] * 4
            embedding, first, _, last = found.hidden_states
            assert torch.equal(embedding, made.model.embedding(ids))
            torch.testing.assert_close(first, made.model.blocks[0](embedding))
            torch.testing.assert_close(last @ made.model.embedding.weight.T, made(ids, use_cache=False).logits)
    assert made(ids).hidden_states is None


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT
def test_an_adapter_of_a_language_model_trains_it() -> None:
    """Which gives it by keyword what other models take, mostly None."""
    made, ids = model("hybrid"), text(2, 10)
    wanted = made(ids, labels=ids).loss
    adapted = get_peft_model(made, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    loss = adapted(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert any(x.grad is not None and bool(x.grad.any()) for x in adapted.parameters())
    for options in ({"inputs_embeds": torch.ones(2, 10, 16)}, {"output_attentions": True}):
        with pytest.raises(ValueError, match="takes input_ids alone; leave out inputs_embeds"):
            made(ids, **options)
    with pytest.raises(ValueError, match="takes input_ids alone"):
        made(inputs_embeds=torch.ones(2, 10, 16))


def test_fitted_maps_are_not_saved(tmp_path) -> None:
    """A model that is loaded has no place for their tensors."""
    made = model(method="Centred(FavorPlus)", positions=None)
    feature_map = made.model.blocks[1].attention.feature_map
    feature_map.fit(torch.randn(1, 4, 9, 4).double(), torch.randn(1, 2, 9, 4).double())
    with pytest.raises(ValueError, match=r"model\.blocks\.1\.attention\.feature_map of this LinearLM were fitted"):
        made.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
