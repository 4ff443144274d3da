"""States with tensors that do not belong together, as from a damaged file: refused in words, or read as what they are.

Letters: B batch, Hkv key/value heads, L tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from damaged_states import read_again
from fuzzing.case import Case
from fuzzing.dice import Dice
from fuzzing.kinds.attention import draw_window
from fuzzing.maps import draw_map
from fuzzing.oracle import MismatchError
from fuzzing.tokens import Sizes, draw_sizes, laid_out

Rows = linattn.Attended | linattn.Partial
_DTYPES = {torch.float32: 0.7, torch.float64: 0.15, torch.bfloat16: 0.15}
_OTHERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)
# Leaves' tensors are changed by these; "filled" and "laid out" leave a state that is one.
_DAMAGES = {"cut": 3.0, "repeated": 2.0, "cast": 2.0, "reshaped": 2.0, "elsewhere": 1.0, "no tensor": 0.5}
_SOUND = {"filled": 2.0, "laid out": 1.5}
_WORDS = re.compile(r"the state|cannot merge states|query must be|states of|num_merged|window")


class Stream(NamedTuple):
    """A state, and what continues it.

    Attributes:
        feature_map: of the state.
        window: beside it.
        state: after some tokens.
        tokens: query, key and value of one or a few more.
    """

    feature_map: linattn.feature_maps.FeatureMap
    window: int | None
    state: linattn.State
    tokens: tuple[Tensor, Tensor, Tensor]

    @property
    def verbs(self) -> tuple[str, ...]:
        """What may be done with the state, backends of a step among it."""
        return "auto", "auto", "blocked", "compiled", "read", "select", "decay", "flush", "merge", "merge, second"

    def use(self, verb: str, state: linattn.State) -> Rows:
        """The rows of a state after a verb."""
        if verb in ("auto", "blocked", "compiled"):
            options = {"enable_gqa": True, "window": self.window, "backend": verb}
            return linattn.linear_attention_with_state(*self.tokens, self.feature_map, state, **options)
        if verb == "select":
            state = state.select(torch.arange(self.tokens[0].shape[0]))
        elif verb == "decay":
            state = state.decay(-0.5 if len(self.tokens[0]) == 1 else 1e6)
        elif verb == "flush":
            state = state.flush(self.feature_map)
        elif verb == "merge" and self.window is None:
            state = state.merge(self.state)
        elif verb == "merge, second" and self.window is None:
            state = self.state.merge(state)
        return state.read(self.feature_map, self.tokens[0])


class MergedStream(NamedTuple):
    """A state with merged keys, and what continues it.

    Attributes:
        config: of the state.
        state: after some tokens.
        tokens: query, key and value of one or a few more.
    """

    config: linattn.MergedKV
    state: linattn.MergedState
    tokens: tuple[Tensor, Tensor, Tensor]

    @property
    def verbs(self) -> tuple[str, ...]:
        """What may be done with the state, backends of a step among it."""
        return "auto", "auto", "torch", "compiled", "read", "select"

    def use(self, verb: str, state: linattn.MergedState) -> Rows:
        """The rows of a state after a verb."""
        if verb in ("auto", "torch", "compiled"):
            return linattn.merged_attention_with_state(*self.tokens, self.config, state, enable_gqa=True, backend=verb)
        if verb == "select":
            state = state.select(torch.arange(self.tokens[0].shape[0]))
        return state.read(self.tokens[0])


def _draw_stream(dice: Dice) -> Stream | MergedStream:
    """A state of any kind, fitted and of one map."""
    sizes, dtype = draw_sizes(dice), dice.weighted(_DTYPES)
    sizes = Sizes(max(sizes.batch, 1), sizes.kv_heads, sizes.groups, sizes.head_dim, max(sizes.value_dim, 1))
    if dice.chance(0.45):
        bits = dice.pick(None, None, 2, 4, 8)
        config = linattn.MergedKV(dice.pick(1, 2, 3, 4, 8), dice.pick(1, 2, 4, 8, 16), bits)
        before, after = _draw_tokens(dice, sizes, dtype)
        begun = linattn.merged_attention_with_state(*before, config, enable_gqa=True)
        return MergedStream(config, begun.state.detach(), after)
    window = draw_window(dice, share=0.35)
    feature_map = draw_map(dice, sizes, dtype, softmax=window is not None, fitted=True).map
    before, after = _draw_tokens(dice, sizes, dtype)
    state = linattn.linear_attention_with_state(*before, feature_map, enable_gqa=True, window=window).state
    return Stream(feature_map, window, state.detach(), after)


def _draw_tokens(dice: Dice, sizes: Sizes, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Query, key and value that a stream begins with, and those of one or a few tokens after."""
    cut = dice.integer(1, 3)
    length = dice.length() + cut
    query, key, value = (
        dice.normal(sizes.batch, heads, length, width).to(dtype)
        for heads, width in (
            (sizes.heads, sizes.head_dim),
            (sizes.kv_heads, sizes.head_dim),
            (sizes.kv_heads, sizes.value_dim),
        )
    )
    later = 1 if dice.chance(0.6) else cut
    return tuple(x[:, :, :-cut] for x in (query, key, value)), tuple(x[:, :, -later:] for x in (query, key, value))


def _changed(dice: Dice, x: Tensor, damage: str) -> object:
    """A tensor as a damage leaves it."""
    place = dice.integer(0, max(x.ndim - 1, 0))
    if x.ndim == 0:
        return x
    if damage == "cut":
        return x.narrow(place, 0, dice.integer(0, max(x.shape[place] - 1, 0)))
    if damage == "repeated":
        times = dice.pick(2, 3, 50)
        return torch.cat([x] * times, place) if dice.chance(0.5) else x.repeat_interleave(times, place)
    if damage == "cast":
        return x.to(dice.pick(*_OTHERS))
    if damage == "reshaped":
        return dice.pick(x.unsqueeze(place), x.flatten(), x.transpose(0, place), x.reshape(-1)[:0].sum())
    if damage == "elsewhere":
        return x.to("meta")
    if damage == "filled":
        return torch.full_like(x, dice.pick(0, 1) if not x.is_floating_point() else dice.pick(*_FILLINGS))
    return (
        laid_out(dice, x)
        if damage == "laid out" and x.ndim == 4 and x.is_floating_point()
        else None
        if damage == "no tensor"
        else x
    )


_FILLINGS = (float("nan"), float("inf"), -float("inf"), 0.0, 6e4, -6e4)


def _outline(x: object) -> object:
    """What a state is held to."""
    return (tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else type(x)


def run(case: Case) -> None:
    """Change one tensor of a state, or several alike, and use it."""
    dice = case.dice
    stream = _draw_stream(dice)
    leaves, tree = pytree.tree_flatten(stream.state)
    damage = dice.weighted(_DAMAGES | _SOUND)
    number, verb = dice.integer(0, len(leaves) - 1), dice.pick(*stream.verbs)
    wrong = _changed(dice, leaves[number], damage)
    is_one = _outline(wrong) == _outline(leaves[number])
    case.note(
        f"{stream.state} with tensor {number} {damage}, {tuple(leaves[number].shape)} to {_outline(wrong)}: {verb}"
    )
    leaves[number] = wrong
    if more := dice.chance(0.3):
        others = dice.shuffled(range(len(leaves)))[: dice.integer(1, 3)]
        case.note(f"and {others}")
        for other in others:
            leaves[other] = _changed(dice, leaves[other], damage) if isinstance(leaves[other], Tensor) else None
    damaged = pytree.tree_unflatten(leaves, tree)
    if dice.chance(0.3):
        damaged = read_again(damaged)
    # Without keys beside them sums of another value width are those of other values.
    if isinstance(stream, Stream) and verb in ("read", "select", "decay", "flush"):
        is_one |= _is_narrower(wrong, stream.state.S, number, stream.window)
    found = _rows(lambda: stream.use(verb, damaged), is_one=None if more else is_one)
    if found is not None and damage == "laid out":
        _same(found, stream.use(verb, stream.state))


def _is_narrower(wrong: object, S: Tensor, number: int, window: int | None) -> bool:
    """Whether sums are those of values of another width."""
    if number or window is not None or not isinstance(wrong, Tensor) or wrong.ndim != 4:
        return False
    return wrong.shape[:3] == S.shape[:3] and (wrong.dtype, wrong.device) == (S.dtype, S.device)


def _rows(use: Callable[[], Rows], *, is_one: bool | None) -> Tensor | None:
    """The rows, or None where the state is refused in words of its own, as it must be or, if None, may be."""
    try:
        found = use()
    except (TypeError, ValueError) as error:
        # A backend may not run what is asked of it.
        if "cannot run this call" in str(error):
            return None
        if not _WORDS.search(str(error)):
            raise
        # Numbers that compiled code would follow out of bounds are refused too, whatever tensor they are in.
        if is_one and "must have for every head each number below" not in str(error):
            raise MismatchError(f"a state was refused, with {error}") from error
        return None
    if is_one is False:
        raise MismatchError("a state whose tensors do not belong together was taken")
    return found.out


def _same(found: Tensor, wanted: Rows) -> None:
    """A layout of memory changes nothing but the order of sums."""
    rounding = 64 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, wanted.out, rtol=rounding, atol=rounding)
