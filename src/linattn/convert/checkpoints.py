"""What a conversion keeps on disk while it runs, so that nothing but the last minute is lost when it is killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor

from linattn.planning.files import appearing, replacing

_PROGRESS, _BEST, _IDENTITY = "progress.json", "best.safetensors", "conversion.json"


@dataclass(frozen=True)
class Progress:
    """How far a training has come.

    Attributes:
        step: steps done.
        seconds: time spent on them, all runs together.
        first: validation loss before the first step.
        best: least validation loss so far.
        loss: validation loss at the last look.
    """

    step: int
    seconds: float
    first: float
    best: float
    loss: float


class WorkFolder:
    """A folder for one conversion; its trainings each keep their last checkpoint.

    A checkpoint is a folder that is renamed when it is whole; the one before is removed after that. Settings that are
    refused before there is anything to keep leave no folder.

    Args:
        path: the folder; made with the first thing that is kept in it.
        identity: what tells this conversion from another: settings, samples, versions.

    Raises:
        ValueError: if the folder holds another conversion.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "work"
        >>> WorkFolder(path, {"seed": 0}).claim()
        >>> WorkFolder(path, {"seed": 1})
        Traceback (most recent call last):
        ...
        ValueError: ... holds an unfinished conversion with other settings (seed: 0, now 1); ...
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        # As JSON has them: tuples are lists there.
        self._identity = now = json.loads(json.dumps(identity))
        file = path / _IDENTITY
        if not file.is_file():
            return
        found = json.loads(file.read_text(encoding="utf-8"))
        if found != now:
            names = sorted(name for name in {*found, *now} if found.get(name) != now.get(name))
            changes = ", ".join(f"{name}: {found.get(name)!r}, now {now.get(name)!r}" for name in names)
            raise ValueError(
                f"{path} holds an unfinished conversion with other settings ({changes}); go on with those, or remove "
                "the folder to begin anew"
            )

    def claim(self) -> None:
        """Say in the folder which conversion it is for; from now on it takes no other."""
        with replacing(self.path / _IDENTITY) as writing:
            json.dump(self._identity, writing, indent=1)

    @property
    def logs(self) -> Path:
        """Where TensorBoard finds the curves."""
        return self.path / "logs"

    def recall(self, name: str) -> Any:
        """What was remembered under a name; None for nothing."""
        file = self.path / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def remember(self, name: str, values: Any) -> None:
        """Keep plain values, as JSON has them, under a name."""
        with replacing(self.path / f"{name}.json") as writing:
            json.dump(values, writing, indent=1)

    def save(self, training: str, accelerator: Accelerator, progress: Progress, best: Mapping[str, Tensor]) -> None:
        """Write a checkpoint of a training and forget the one before.

        Args:
            training: its name.
            accelerator: holds the model and the optimiser.
            progress: how far it has come.
            best: the model's tensors at the least validation loss.
        """
        place = self._place(training) / f"step-{progress.step:08}"
        with appearing(place) as draft:
            # As torch saves it: safetensors would warn of every tied weight at every checkpoint.
            accelerator.save_state(str(draft), safe_serialization=False)
            save_file({name: tensor.contiguous() for name, tensor in best.items()}, draft / _BEST)
            (draft / _PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")
        # Those before, and what a kill has left of one.
        for other in self._place(training).iterdir():
            if other != place:
                shutil.rmtree(other)

    def resume(self, training: str, accelerator: Accelerator) -> tuple[Progress, dict[str, Tensor]] | None:
        """Load the last checkpoint of a training into the accelerator's model and optimiser.

        Args:
            training: its name.
            accelerator: holds the model and the optimiser.

        Returns:
            Its progress and best tensors; None where there is no checkpoint.
        """
        # Ordered by step; drafts begin with a dot.
        found = sorted(self._place(training).glob("step-*"))
        if not found:
            return None
        accelerator.load_state(str(found[-1]))
        values = json.loads((found[-1] / _PROGRESS).read_text(encoding="utf-8"))
        return Progress(**values), load_file(found[-1] / _BEST)

    def _place(self, training: str) -> Path:
        """The folder of a training's checkpoints."""
        return self.path / "checkpoints" / training
