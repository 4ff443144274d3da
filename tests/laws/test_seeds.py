"""A seed is an integer that an int64 holds, wherever one is taken; what is none is refused in the same words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import linattn
from linattn.convert import ConvertConfig
from linattn.feature_maps import FEATURE_MAPS, Expansion, FavorPlus
from linattn.hf import LinearLMConfig, LinearLMForCausalLM, RedrawCallback, linearize_
from linattn.methods.method import parse_map, parse_method
from linattn.nn import LinearAttention, RedrawSchedule
from linattn.positions import LearnedCodes
from linattn_lab.audit.grid import AuditGrid
from linattn_lab.bench.settings import Settings
from linattn_lab.pretraining import TrainConfig
from public_names import ROOMS, exported, identity

X = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(0))
WRONG = {
    "a word": "a",
    "a fraction": 1.5,
    "no number": float("nan"),
    "negative": -1,
    "a truth": True,
    "nothing": None,
    "beyond an int64": 2**63,
    "a generator": torch.Generator(),
    "a tensor": torch.tensor(1),
}


def language_model(seed: Any, pattern: str) -> LinearLMForCausalLM:
    """A small one."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LinearLMForCausalLM(LinearLMConfig(**sizes, method="EluPlusOne", pattern=pattern, seed=seed))


def encoder() -> BertModel:
    """A small one of softmax."""
    return BertModel(
        BertConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            attn_implementation="eager", attention_probs_dropout_prob=0.0,
        )
    ).eval()  # fmt: skip


def schedule(seed: Any) -> RedrawSchedule:
    """One of a layer."""
    return RedrawSchedule(LinearAttention(8, 2, FavorPlus(4, 8)), every=1, seed=seed)


TAKERS: dict[str, Callable[[Any], object]] = {
    **{
        name: lambda seed, kind=kind: kind(4, 8, seed=seed)
        for name, kind in FEATURE_MAPS.items()
        if "seed" in inspect.signature(kind).parameters
    },
    "RandomFeatureMap.redraw": lambda seed: FavorPlus(4, 8).redraw(seed),
    "Expansion.fit": lambda seed: Expansion(4, 2).fit(X, X, seed=seed),
    "LearnedCodes": lambda seed: LearnedCodes(4, 2, max_length=3, seed=seed),
    "RedrawSchedule": schedule,
    "RedrawCallback": lambda seed: RedrawCallback(every=1, seed=seed),
    "ConvertConfig": lambda seed: ConvertConfig(seed=seed),
    "linearize_": lambda seed: linearize_(encoder(), "EluPlusOne", seed=seed),
    "a map of a function": lambda seed: linearize_(encoder(), lambda dim: FEATURE_MAPS["Relu"](dim), seed=seed),
    "LinearLMConfig": lambda seed: language_model(seed, "l"),
    "a model of softmax": lambda seed: language_model(seed, "s"),
    "a written map": lambda seed: parse_map("Taylor").build(4, num_features=None, scale=1.0, seed=seed),
    "AuditGrid": lambda seed: AuditGrid((parse_method("Taylor"),), seed=seed),
    "Settings": lambda seed: Settings(seed=seed),
    "TrainConfig": lambda seed: TrainConfig(seed=seed),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", TAKERS)
def test_what_is_no_seed_is_refused(name: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=r"^seed must be (an integer of at least 0|below 2\*\*63), got "):
        TAKERS[name](WRONG[wrong])


def test_every_public_taker_of_a_seed_is_held() -> None:
    """By its name in the signature."""
    takers = set()
    for name in (f"{room}.{name}" for room in ROOMS for name in exported(room)):
        thing = identity(name)
        is_built = inspect.isclass(thing) and thing.__module__.startswith("linattn") and not inspect.isabstract(thing)
        if (is_built or inspect.isfunction(thing)) and "seed" in inspect.signature(thing).parameters:
            takers.add(name.rpartition(".")[2])
    assert takers <= TAKERS.keys()
    assert "FavorPlus" in takers


def test_a_schedule_goes_on_from_whole_numbers_alone() -> None:
    for wrong in (True, 1.5, "1", -1):
        with pytest.raises(ValueError, match="a schedule's state has the integers num_steps, every, seed, got"):
            schedule(0).load_state_dict({"num_steps": 0, "every": 1, "seed": wrong})


def test_a_seed_is_one_of_64_bits() -> None:
    largest = FavorPlus(4, 8, seed=2**63 - 1)
    assert int(largest.seed) == 2**63 - 1
    assert isinstance(largest, linattn.feature_maps.FeatureMap)
