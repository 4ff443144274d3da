"""Plans for the layers of a model: a method per head, chosen and fitted on sample texts.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.convert.calibration import live_tokens, record
from linattn.convert.running import Batch
from linattn.hf import AttentionCall, LayerReport, PreTrainedModel
from linattn.planning import Plan, plan

# Texts that the choice is made on, all of one length; maps are fitted to every text.
_MOST_TEXTS = 4


def make_plans(
    layers: Sequence[LayerReport], model: PreTrainedModel, batches: Sequence[Batch], *, target_error: float
) -> list[Plan]:
    """A plan for every layer: methods chosen on the longest texts, maps fitted to all.

    While the choice is made, maps know half of each text's tokens and are measured on the others (`fixed_maps`): what
    is expected is the error on tokens that no map has seen.

    Cost: a forward pass per batch, `linattn.plan` once per layer, and the fits.

    Args:
        layers: the layers to convert.
        model: the original model.
        batches: sample texts; padded tokens are left out.
        target_error: relative error of a head's output to be met.

    Returns:
        The plans, in order, with fitted maps.

    Raises:
        ValueError: as `linattn.plan`, for example where a layer's queries and keys are of different texts.

    Example:
        See `linattn.convert.convert_`.

    Source: `linattn.plan`.
    """
    recorded = [record(model, batch) for batch in batches]
    return [_made([found[layer.module_name] for found in recorded], target_error) for layer in layers]


def _made(calls: Sequence[AttentionCall], target_error: float) -> Plan:
    """One layer's plan."""
    first = calls[0]
    query, key, value = _longest(calls)
    made = plan(
        query,
        key,
        value,
        target_error=target_error,
        is_causal=first.is_causal,
        scale=first.scale,
        fixed_maps=True,
    )
    queries, keys = ([live_tokens(getattr(call, name), call) for call in calls] for name in ("query", "key"))
    return made.fit(torch.cat(queries, 2), torch.cat(keys, 2))


def _longest(calls: Sequence[AttentionCall]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of the longest texts, which are as long as each other: (B, H or Hkv, L, D)."""
    texts = [text for call in calls for text in _texts(call)]
    length = max(text[0].shape[2] for text in texts)
    chosen = [text for text in texts if text[0].shape[2] == length][:_MOST_TEXTS]
    query, key, value = (torch.cat(each) for each in zip(*chosen, strict=True))
    return query, key, value


def _texts(call: AttentionCall) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of each row of a batch, without its padding."""
    found = []
    for row in range(len(call.query)):
        live = slice(None) if call.key_mask is None else call.key_mask[row]
        query = call.query[row : row + 1]
        # Queries of another text than the keys have no padding that is known of.
        if query.shape[2] == call.key.shape[2]:
            query = query[:, :, live]
        found.append((query, call.key[row : row + 1, :, live], call.value[row : row + 1, :, live]))
    return found
