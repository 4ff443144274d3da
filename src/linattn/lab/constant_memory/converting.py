"""What a conversion to a constant memory takes from its audit: a method that fits a budget, and recall on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from linattn.convert.running import Batch
from linattn.convert.samples import Samples
from linattn.hf import LinearLMForCausalLM, LoadedModel, linearize_, restore_
from linattn.lab.audit.text import Text
from linattn.lab.constant_memory.answering import log_probabilities
from linattn.lab.constant_memory.measuring import MemoryAudit
from linattn.lab.constant_memory.passages import TokenText
from linattn.lab.constant_memory.planning import CANDIDATES, PLAIN, MemoryPlan
from linattn.lab.constant_memory.recall import Task, tasks
from linattn.lab.pace import Silent, Watch
from linattn.records.tables import Table

_SILENT = Silent()
RECALL = (
    "Recall: the share of the tokens of what was said once in a text, and is asked for at its end, that are the "
    "likeliest:"
)
BEFORE, AFTER, EXACT = "before training", "converted", "exact attention"


@dataclass(frozen=True)
class Recalled:
    """How much of what was said once a model says again.

    Attributes:
        model: "exact attention", "before training" or "converted".
        scores: by task, the share of the answers' tokens that are the likeliest.
    """

    model: str
    scores: dict[str, float]


@dataclass(frozen=True)
class BoundedConversion:
    """What a conversion to a constant memory adds to its report.

    Attributes:
        plan: the layers' methods and what they were chosen from.
        recall_tokens: of each recall task.
        recall: exact attention's, and the model's before and after training.
        left_out: recall tasks that there was no room for, and why.
    """

    plan: MemoryPlan
    recall_tokens: int
    recall: list[Recalled]
    left_out: dict[str, str]

    def table(self) -> Table:
        """Recall by task, the exact model first."""
        names = tuple(self.recall[0].scores)
        rows = tuple((one.model, *(f"{one.scores[name]:.2f}" for name in names)) for one in self.recall)
        return Table(("recall", *names), rows, baselines=1)

    def sentence(self) -> str:
        """Which methods were chosen, and against what."""
        plan = self.plan
        return (
            f"At the bytes of {plan.budget:,} keys per layer and key/value head {plan.label} is taken. Untrained, its "
            f"predictions are {plan.kl:.4f} nats from the exact model's at the end of {plan.num_tokens:,} tokens; "
            f"those of {PLAIN} in as many bytes are {plan.window_kl:.4f}."
        )


class BoundedMemory:
    """A language model that is to be converted to a constant memory."""

    def __init__(
        self, loaded: LoadedModel, samples: Samples, budget: int, num_tokens: int, watch: Watch = _SILENT
    ) -> None:
        """Choose each layer's method by the texts that are trained on, and measure recall before training.

        Cost: ten forward passes over `num_tokens` tokens, two per global layer, and six of the recall tasks.

        Args:
            loaded: a causal language model with softmax attention.
            samples: of the conversion.
            budget: in exact keys and values, per key/value head of a global layer; some layers get more of the bytes
                than others.
            num_tokens: of the longest text of the conversion.
            watch: told what is measured.

        Raises:
            ValueError: if texts are not longer than the budget, or nothing that a model can be converted to is better
                than a plain window of as many bytes.
        """
        if num_tokens <= budget:
            raise ValueError(
                f"texts of {num_tokens:,} tokens never exceed a budget of {budget:,} keys, and nothing would be "
                f"learnt; give --tokens {2 * budget} or more, or a smaller --budget"
            )
        self._loaded = loaded
        read = _joined(loaded, "texts of the conversion", samples.calibration)
        audit = MemoryAudit(loaded, read, [budget], num_tokens=num_tokens, kinds=CANDIDATES)
        # The blocks of a LinearLM share one method.
        self.plan = audit.plan(read, budget, watch, is_common=isinstance(loaded.model, LinearLMForCausalLM))
        if self.plan.choices[0] == PLAIN:
            raise ValueError(
                f"at the bytes of {budget:,} keys nothing is better by a margin than {self.plan.label} (KL "
                f"{self.plan.kl:.4f}), which is no method of a converted model; give a larger --budget, or a method "
                'all the same, as in --map "window 64 + merged 128"'
            )
        asked = TokenText.of(loaded, _joined(loaded, "held-out texts", samples.held_out))
        self._size = min(num_tokens, len(asked.content))
        self._tasks, self._left_out = tasks(loaded, asked, self._size)
        watch.begin(f"Recall of {', '.join(task.name for task in self._tasks) or 'nothing'}, before")
        self._recall = [self._measured(EXACT)]
        linearize_(loaded.model, feature_map=self.plan.labels, layers=self.plan.layers)
        try:
            self._recall.append(self._measured(BEFORE))
        finally:
            restore_(loaded.model)

    def finished(self) -> BoundedConversion:
        """With the recall of the model as it is now."""
        recall = [*self._recall, self._measured(AFTER)]
        return BoundedConversion(self.plan, self._size, recall, self._left_out)

    def _measured(self, name: str) -> Recalled:
        """The model's recall."""
        return Recalled(name, {task.name: _score(self._loaded, task) for task in self._tasks})


def _score(loaded: LoadedModel, task: Task) -> float:
    """The mean over a task's questions."""
    device = loaded.model.device
    found = log_probabilities(loaded.model, task.tokens.to(device), task.positions.to(device))[0]
    return float(torch.tensor(task.hits(found.cpu())).mean())


def _joined(loaded: LoadedModel, source: str, batches: Sequence[Batch]) -> Text:
    """The texts of batches, one after another."""
    rows = [row for batch in batches for row in batch["input_ids"]]
    return Text(source, "\n\n".join(loaded.tokenizer.batch_decode(rows, skip_special_tokens=True)))
