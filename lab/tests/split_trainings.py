"""Jobs of ranks, and of one process: a training in a layout, from its last checkpoint to a step."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from linattn.hf import LinearLMConfig, LinearLMForCausalLM
from linattn.training import Processes, Progress, Steps, Training, WorkFolder, train
from linattn_lab.pretraining.sharing import Share

STEPS, TEXTS, LENGTH = 32, 4, 16
# Parts of a text, as many as processes for None, and whether weights are sharded.
LAYOUTS = {
    "data": (1, False),
    "sequence": (None, False),
    "both": (2, False),
    "sharded data": (1, True),
    "sharded both": (2, True),
    "alone": (1, False),
}


class ReachedError(Exception):
    """The training is cut off, as by a kill."""


def model() -> LinearLMForCausalLM:
    """A hybrid with a window, a gate and a learned map, in float64."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    method = {
        "pattern": "ls",
        "method": "LearnedExponential + window 4",
        "num_features": 4,
        "gate": "ForgetGate",
        "positions": None,
    }
    return LinearLMForCausalLM(LinearLMConfig(vocab_size=256, **sizes, **method)).double()


def texts(step: int) -> torch.Tensor:
    """The windows of a step, a pattern with noise."""
    draw = torch.Generator().manual_seed(step)
    first = torch.randint(0, 8, (TEXTS, 1), generator=draw)
    noise = torch.randint(0, 2, (TEXTS, LENGTH + 1), generator=draw)
    return (first + 3 * torch.arange(LENGTH + 1) + noise) % 16


def trained(mesh: DeviceMesh | None, layout: str, work: Path | None, until: int = STEPS) -> list[tuple[float, float]]:
    """The losses of steps and looks from the last checkpoint to a step after which the training is cut off."""
    processes, (parts, is_sharded) = Processes.of_this_run(), LAYOUTS[layout]
    share = Share(processes, parts or processes.size, is_sharded)
    folder = WorkFolder(work, {}, kind="training") if work is not None and share.processes.is_first else None
    found: list[tuple[float, float]] = []

    def notify(name: str, spent: float, progress: Progress) -> None:
        assert progress.training_loss is not None
        found.append((progress.training_loss, progress.loss))
        if progress.step == until < STEPS:
            raise ReachedError

    with share.laid_out(model()) as laid_out:

        def losses(batch: torch.Tensor) -> torch.Tensor:
            """Nats of each token (B, L)."""
            logits = laid_out(input_ids=batch[:, :-1], use_cache=False).logits
            return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").view(
                batch[:, 1:].shape
            )

        def look() -> float:
            with torch.no_grad():
                # Three windows: some processes have one less.
                return share.mean(losses, texts(STEPS)[:3])

        rates = [(list(laid_out.parameters()), 3e-2)]
        training = Training(
            "law", laid_out, rates, lambda step: losses(share.of(texts(step))).mean(), look, Steps(STEPS)
        )
        with suppress(ReachedError):
            train(training, folder, notify)
    return found
