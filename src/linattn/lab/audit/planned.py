"""Plans of a whole model: calibrated on one text, to be measured on another.

Letters: B batch, H query heads, L tokens, D head width.
"""

from __future__ import annotations

from linattn.hf import LoadedModel, capture
from linattn.lab.audit.text import Text
from linattn.planning import Plan, plan


def second_half(loaded: LoadedModel, text: Text, num_tokens: int) -> Text:
    """The half of a text that an audit of its beginning never reads.

    Cost: linear in the text.

    Args:
        loaded: model and tokenizer.
        text: the text whose first tokens are measured.
        num_tokens: how many.

    Returns:
        The second half of its characters.

    Raises:
        ValueError: if the measured tokens reach into it.

    Example:
        See `linattn.lab.commands.audit`.

    Source: none.
    """
    middle = len(text.content) // 2
    measured, first = (
        loaded.encode(part, num_tokens)["input_ids"].shape[1] for part in (text.content, text.content[:middle])
    )
    if first < measured:
        raise ValueError(
            f"{text.source} has {first} tokens in its first half, fewer than the {measured} to be measured: its second "
            "half is not free to calibrate on; name another text with --calibration, or read fewer --tokens"
        )
    return Text(f"second half of {text.source}", text.content[middle:])


def plan_model(loaded: LoadedModel, text: Text, *, target_error: float, num_tokens: int) -> tuple[Plan, ...]:
    """A plan for every layer of a model, calibrated on the attention it pays to a text.

    Cost: two forward passes, and `linattn.plan` once per layer.

    Args:
        loaded: model and tokenizer.
        text: the calibration text.
        target_error: relative error of a head's output to be met.
        num_tokens: tokens of the text to read, and the length the plans are for.

    Returns:
        One plan per layer, in order.

    Raises:
        ValueError: as `linattn.plan`, or if the text gives fewer than `num_tokens` tokens.

    Example:
        See `tests/lab/audit/test_planned.py`.

    Source: none.
    """
    inputs = loaded.encode(text.content, num_tokens)
    length = inputs["input_ids"].shape[1]
    if length < num_tokens:
        raise ValueError(f"{text.source} gives {length} tokens to calibrate on, wanted {num_tokens}; give a longer one")
    return tuple(
        plan(
            call.query,
            call.key,
            call.value,
            target_error=target_error,
            is_causal=call.is_causal,
            scale=call.scale,
        )
        for call in capture(loaded.model, inputs).calls
    )
