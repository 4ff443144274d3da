"""A whole model under another attention: how far its output is from its own, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from linattn.hf import AttentionCall, PreTrainedModel, intercept
from linattn.methods.measures import cosine
from linattn_lab.audit.paying import time_model
from linattn_lab.audit.records import ModelRow, TimeRow

Answer = Callable[[AttentionCall], Tensor]


class WholeModel:
    """A model on a text.

    Layers that are not audited, those with a window, keep their softmax even where the text fits in.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, Tensor],
        output: Tensor,
        *,
        first: int,
        names: Collection[str],
    ) -> None:
        """Nothing is measured yet."""
        self._model, self._inputs, self._output, self._first, self._names = model, inputs, output, first, names

    def end_to_end(self, label: str, features: int | None, draw: int, answer: Answer) -> ModelRow:
        """Cosines of its output under another attention with its own."""
        output, first = self._under(answer), self._first
        ours, exact = output[0, first:].double(), self._output[0, first:].double()
        embedding = cosine(ours.mean(0), exact.mean(0))
        return ModelRow(label, features, draw, float(embedding), float(cosine(ours, exact).mean()))

    def time(self, label: str, features: int | None, answer: Answer) -> TimeRow:
        """Its time under another attention, and its own."""

        def exact() -> None:
            """The model as it is."""
            with torch.no_grad():
                self._model(**self._inputs)

        ours, theirs = time_model(lambda: self._under(answer), exact)
        return TimeRow(label, features, ours, theirs, torch.get_num_threads())

    def _under(self, answer: Answer) -> Tensor:
        """Its output under another attention."""

        def answer_audited(call: AttentionCall) -> Tensor:
            """Softmax where another is not asked for."""
            return answer(call) if call.module_name in self._names else call.softmax()

        with torch.no_grad(), intercept(self._model, answer_audited):
            output: Tensor = self._model(**self._inputs)[0]
        return output
