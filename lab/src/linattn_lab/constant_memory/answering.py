"""A language model whose global layers attend by contenders; letters as in __init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn.hf import AttentionCall, PreTrainedModel, intercept
from linattn.hf.linearization import choose_layers
from linattn.kv_cache.budget import Sizes
from linattn_lab.contenders.contender import Contender

Answer = Callable[[AttentionCall], Tensor]


@dataclass(frozen=True, eq=False)
class GlobalLayers:
    """The layers of a model that attend to all tokens, of which there are keys to bound.

    Attributes:
        names: of their attention modules, in order.
        numbers: theirs, among the attention modules of the model.
        windowed: names of the modules with a sliding window, which stay as they are.
    """

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    windowed: tuple[str, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> GlobalLayers:
        """Those of a causal model; ValueError where it has none."""
        found = choose_layers(model)
        names, numbers = zip(*((layer.module_name, layer.layer) for layer in found.replaced), strict=True)
        return cls(names, numbers, tuple(layer.module_name for layer in found.kept))

    def by(self, contenders: Contender | Mapping[int, Contender]) -> Answer:
        """Answers by one contender in all of these layers, or by the layer's own; exact in layers that have none."""
        if isinstance(contenders, Contender):
            contenders = dict.fromkeys(range(len(self.names)), contenders)
        chosen = {self.names[place]: contender for place, contender in contenders.items()}

        def answer(call: AttentionCall) -> Tensor:
            """One layer's attention."""
            contender = chosen.get(call.module_name)
            if contender is None:
                return call.softmax()
            return contender.attend(call.query, call.key, call.value, call.scale)

        return answer

    def uniform(self) -> Answer:
        """Averages of the values in these layers."""
        return lambda call: call.uniform() if call.module_name in self.names else call.softmax()


class Beginning:
    """The outputs of the layers before the first global one on one text, which no contender changes.

    `recorded` keeps them from the next forward pass; `replayed` gives them in place of those layers.
    """

    def __init__(self, model: PreTrainedModel, first: str) -> None:
        """The layers before the one whose attention module has the name `first`."""
        path = first.split(".")
        places = [n for n, part in enumerate(path) if part.isdigit()]
        self._layers: list[nn.Module] = []
        self._outputs: list[Any] = []
        if places:
            every = model.get_submodule(".".join(path[: places[0]]))
            self._layers = list(every.children())[: int(path[places[0]])]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep what the layers give in this block."""
        self._outputs = []
        hooks = [layer.register_forward_hook(lambda _, __, out: self._outputs.append(out)) for layer in self._layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Have the layers give what was kept, in this block."""
        for layer, out in zip(self._layers, self._outputs, strict=True):
            vars(layer)["forward"] = lambda *args, out=out, **options: out
        try:
            yield
        finally:
            for layer in self._layers:
                vars(layer).pop("forward", None)


def log_probabilities(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, answer: Answer | None = None
) -> Tensor:
    """Logarithms (B, n, V) of the next token's probabilities after some positions of texts (B, L), in float32.

    With an answer, the model's layers attend by it; without one, as they do.
    """
    with torch.no_grad(), nullcontext() if answer is None else intercept(model, answer):
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=positions).logits.float()
    # In place: two copies of so many numbers would not fit beside a model everywhere.
    found: Tensor = logits.sub_(logits.logsumexp(-1, keepdim=True))
    return found


def recording(layers: GlobalLayers, calls: list[AttentionCall]) -> Answer:
    """Exact answers; the calls of the global layers go to a list."""

    def answer(call: AttentionCall) -> Tensor:
        """Keep what is global, answer exactly."""
        if call.module_name in layers.names:
            calls.append(call)
        return call.softmax()

    return answer


class Probe(NamedTuple):
    """What a model's calls of attention tell of its global layers.

    Attributes:
        layers: the global ones.
        num_heads: query heads of a layer.
        num_key_heads: key/value heads of a layer.
        sizes: of their keys and values.
    """

    layers: GlobalLayers
    num_heads: int
    num_key_heads: int
    sizes: Sizes


def probed(model: PreTrainedModel) -> Probe:
    """The global layers of a causal model and their sizes, which must be alike; a forward pass over one token.

    Raises ValueError if they are not, or there is no such layer.
    """
    layers, calls = GlobalLayers.of(model), list[AttentionCall]()
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    log_probabilities(model, one, torch.zeros(1, dtype=torch.long), recording(layers, calls))
    widths = {
        (call.key.shape[-1], call.value.shape[-1], call.key.element_size(), call.query.shape[1] // call.key.shape[1])
        for call in calls
    }
    if len(widths) != 1:
        raise ValueError(f"budgets want layers of one width; these have {sorted(widths)}: audit another model")
    return Probe(layers, calls[0].query.shape[1], calls[0].key.shape[1], Sizes(*widths.pop()))
