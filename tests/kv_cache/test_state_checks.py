"""A state with merged keys is whole or refused: every tensor of one that was read from a file or built by hand."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

import linattn
from damaged_states import CHANGES, read_again, tokens
from linattn import MergedKV, MergedState

CONFIGS = {"numbers": MergedKV(4, 8, bits=None), "codes": MergedKV(4, 8, bits=4)}
# Which record each tensor belongs to, as errors name it.
OTHERS = ["sample"] * 2 + ["recent"] * 3
SINKS = ["sinks"] * 3
RECORDS = {"numbers": SINKS + ["merged"] * 3 + OTHERS, "codes": SINKS + ["merged"] * 13 + OTHERS}


def begun(config: MergedKV) -> MergedState:
    return linattn.merged_attention_with_state(*tokens(), config).state


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_of_a_state_is_checked(name: str, change: str) -> None:
    config = CONFIGS[name]
    leaves, tree = pytree.tree_flatten(begun(config))
    for number, (leaf, record) in enumerate(zip(leaves, RECORDS[name], strict=True)):
        # Sizes are read from the latest tokens, which are kept in the dtype they came in, keys and values alike: where
        # these are wrong, others differ.
        match = rf"the state's {record}[\w.]* must be .*, got "
        if record == "recent":
            match = (
                rf"{match}|the state's (sinks|merged|sample|recent)[\w.]* must be|the state (holds|is kept in|is on)"
            )
        wrong = pytree.tree_unflatten([*leaves[:number], CHANGES[change](leaf), *leaves[number + 1 :]], tree)
        with pytest.raises(ValueError, match=match):
            linattn.merged_attention_with_state(*tokens(1), config, wrong)
        with pytest.raises(ValueError, match=match):
            wrong.read(tokens(1)[0])
        with pytest.raises(ValueError, match=match):
            read_again(wrong).read(tokens(1)[0])


@pytest.mark.parametrize("field", ["sinks", "merged", "sample", "recent", "config"])
@pytest.mark.parametrize("name", CONFIGS)
def test_another_record_is_refused(name: str, field: str) -> None:
    state = begun(CONFIGS[name])
    wrong = dataclasses.replace(state, keys=dataclasses.replace(state.keys, **{field: None}))
    for use in (
        lambda: linattn.merged_attention_with_state(*tokens(1), CONFIGS[name], wrong),
        lambda: wrong.read(tokens(1)[0]),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"the state('s {field} must be| was built with None)"):
            use()


def test_a_state_of_an_earlier_version_is_refused() -> None:
    """It has no sinks and no tiers, and is to be made of its tokens again."""
    state = begun(CONFIGS["numbers"])
    for field in ("sinks", "coded"):
        older = copy.deepcopy(state)
        del older.keys.__dict__[field]
        with pytest.raises(
            TypeError, match=rf"the state's {field} must be .*, got NoneType; .* rebuild it from the tokens"
        ):
            linattn.merged_attention_with_state(*tokens(1), CONFIGS["numbers"], read_again(older))


def test_a_file_does_not_say_that_its_state_was_looked_at() -> None:
    config = CONFIGS["numbers"]
    state = begun(config)
    recent = state.keys.recent._replace(bias=state.keys.recent.bias[:, :1])
    wrong = dataclasses.replace(state, keys=dataclasses.replace(state.keys, recent=recent)).known_to_fit((8, 1))
    with pytest.raises(ValueError, match=r"the state's recent.bias must be torch.float32 of shape \(1, 2, 6\)"):
        linattn.merged_attention_with_state(*tokens(1), config, read_again(wrong))


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_another_width_or_fewer_query_heads_are_refused(name: str) -> None:
    config, (query, key, value) = CONFIGS[name], tokens()
    state = linattn.merged_attention_with_state(query, key, value, config).state
    with pytest.raises(ValueError, match=r"the state's recent.key must be torch.float32 of shape \(1, 2, 6, 4\)"):
        linattn.merged_attention_with_state(query[..., :4], key[..., :4], value, config, state)
    many = query.repeat_interleave(20, 1)
    state = linattn.merged_attention_with_state(many, key, value, config, enable_gqa=True).state
    with pytest.raises(ValueError, match=r"the state's sample.there must be of shape \(B, H, n ≤ 16\)"):
        linattn.merged_attention_with_state(query, key, value, config, state)


# Of the numbers of a frame: where coordinates are in a code, and the bits of its blocks.
VALUES = {
    "order": {"beyond": lambda x: x + 1_000, "below": lambda x: x - 5, "twice": lambda x: x * 0},
    "bits": {"more": lambda x: x * 0 + 9, "many": lambda x: x * 0 + 200, "none": lambda x: x * 0},
}
USES = {
    "tokens": lambda state: state.tokens(),
    "read": lambda state: state.read(tokens(1)[0]),
    "select": lambda state: state.select(torch.tensor([0])),
    "detach": lambda state: state.detach(),
    "to": lambda state: state.to("cpu"),
    "go on": lambda state: linattn.merged_attention_with_state(*tokens(9), state.config, state),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("config", [CONFIGS["codes"], MergedKV(4, 0, coded=((12, (2.5, 3)),))], ids=lambda x: x.label)
def test_frames_that_a_file_has_are_those_of_its_codes(config: MergedKV, use: str) -> None:
    """Every use of a state: other numbers would be read out of bounds, or as other coordinates."""
    state = begun(config)
    USES[use](read_again(state))
    leaves, tree = pytree.tree_flatten(state)
    frames = {torch.int16: "order", torch.uint8: "bits"}
    places = [number for number, x in enumerate(leaves) if x.ndim == 3 and x.dtype in frames]
    assert len(places) == 4
    for number in places:
        field = frames[leaves[number].dtype]
        for change in VALUES[field].values():
            wrong = pytree.tree_unflatten([*leaves[:number], change(leaves[number]), *leaves[number + 1 :]], tree)
            with pytest.raises(ValueError, match=r"the state's \S+\.frames\.\w+ must have .* rebuild it from the"):
                USES[use](read_again(wrong))


def test_a_block_has_no_more_bits_than_there_are_levels_of() -> None:
    """Also where those of all blocks are as many as the codes have."""
    given = [torch.randn(1, 1, 60, 64, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    state = linattn.merged_attention_with_state(*given, MergedKV(4, 30, bits=8)).state
    leaves, tree = pytree.tree_flatten(state)
    (number, *_) = [number for number, x in enumerate(leaves) if x.shape == (1, 1, 2) and x.dtype == torch.uint8]
    leaves[number] = torch.tensor([[[9, 7]]], dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"at most 8 bits a block, 16 in all, got \[.*\] and \[9, 7\]; pass a state"):
        pytree.tree_unflatten(leaves, tree).tokens()


@pytest.mark.parametrize("use", USES)
def test_a_damaged_state_is_refused_by_every_use(use: str) -> None:
    state = begun(CONFIGS["codes"])
    for field in ("merged", "recent", "sample"):
        wrong = dataclasses.replace(state, keys=dataclasses.replace(state.keys, **{field: None}))
        with pytest.raises(TypeError, match=rf"the state's {field} must be .*, got NoneType; pass a state"):
            USES[use](wrong)


def test_more_merged_keys_than_the_config_keeps_are_refused() -> None:
    config = CONFIGS["numbers"]
    state = begun(config)
    merged = state.keys.merged
    state = dataclasses.replace(state, keys=dataclasses.replace(state.keys, merged=merged.then(merged)))
    for backend in ("auto", "torch"):
        with pytest.raises(ValueError, match=r"merged.bias must be of shape \(B, H, n ≤ 8\)"):
            linattn.merged_attention_with_state(*tokens(100), config, read_again(state), backend=backend)


@pytest.mark.parametrize(
    "wrong",
    [{"window": 4.0}, {"window": 0}, {"num_merged": True}, {"num_merged": 2**62}, {"bits": 9}, {"num_sinks": -1}],
    ids=str,
)
def test_a_config_that_is_read_from_a_file_is_checked(wrong: dict[str, object]) -> None:
    state = begun(MergedKV(4, 8, bits=None))
    state.config.__dict__.update(wrong)
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} must be"):
        read_again(state)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_selection_heals_no_state(name: str, is_padded: bool) -> None:
    given, mask = [torch.cat((x, x)) for x in tokens()], torch.ones(2, 30, dtype=torch.bool)
    # Rows that begin at different tokens are kept in groups.
    mask[1, :3] = not is_padded
    state = linattn.merged_attention_with_state(*given, CONFIGS[name], key_mask=mask).state
    assert len(state.groups) == 1 + is_padded
    leaves, tree = pytree.tree_flatten(state)
    for number, leaf in enumerate(leaves):
        wrong = pytree.tree_unflatten([*leaves[:number], torch.cat((leaf, leaf)), *leaves[number + 1 :]], tree)
        with pytest.raises(ValueError, match=r"the state's \S+ must be"):
            wrong.select(torch.tensor([0]))
