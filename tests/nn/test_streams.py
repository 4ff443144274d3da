"""A stream that a layer did not return is refused by name: each tensor of one, as from a damaged file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from damaged_states import read_again
from linattn.feature_maps import Relu
from linattn.nn import LinearAttention, SoftmaxAttention
from linattn.positions import FixedDecay

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "softmax": lambda: SoftmaxAttention(8, 2, is_causal=True),
    "gated softmax": lambda: SoftmaxAttention(8, 2, is_causal=True, gate=FixedDecay.alibi(2)),
}
CHANGES = {
    "shorter": lambda x: x[:, :-1],
    "another batch": lambda x: torch.cat((x, x)),
    "flat": lambda x: x.flatten(),
    "another dtype": lambda x: x.to(torch.float64 if x.dtype != torch.float64 else torch.float16),
    "another device": lambda x: x.to("meta"),
    "no tensor": lambda _: 3,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_tensor_of_kept_tokens_is_checked(name: str, change: str) -> None:
    layer = LAYERS[name]()
    mask = torch.ones(2, 6, dtype=torch.bool)
    stream = layer.forward_with_state(X, key_mask=mask).state.detach()
    fields = [field for field, x in stream.kept._asdict().items() if isinstance(x, Tensor)]
    for field in fields:
        wrong = CHANGES[change](getattr(stream.kept, field))
        damaged = read_again(stream._replace(kept=stream.kept._replace(**{field: wrong})))
        with pytest.raises((TypeError, ValueError), match=r"the state's (key|value|key_mask|key_bias) must") as raised:
            layer.forward_with_state(X, damaged, key_mask=mask)
        # How many tokens there are is read from the keys.
        assert field == "key" or f"the state's {field} " in str(raised.value)


def test_a_stream_without_its_gate_s_biases_is_refused() -> None:
    plain, gated = (LAYERS[name]() for name in LAYERS)
    for layer, other in ((plain, gated), (gated, plain)):
        with pytest.raises(ValueError, match="a stream belongs to the layer that began it"):
            layer.forward_with_state(X, other.forward_with_state(X).state)


@pytest.mark.parametrize("wrong", [torch.zeros(1, dtype=torch.int64), torch.zeros(2), torch.zeros(2, 1).long(), 6])
def test_how_many_tokens_a_stream_has_is_checked(wrong: object) -> None:
    for layer in (LinearAttention(8, 2, Relu(4), is_causal=True), LAYERS["softmax"]()):
        stream = layer.forward_with_state(X).state.detach()
        with pytest.raises(
            (TypeError, ValueError), match=r"the state's num_tokens must be torch.int64 of shape \(2,\)"
        ):
            layer.forward_with_state(X, stream._replace(num_tokens=wrong))
