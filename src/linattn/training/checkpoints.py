"""The files of a training while it runs: when it is killed, only the last minute is lost."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from linattn.records.files import atomic_folder, full_disk_names, locked, remove
from linattn.records.json_files import Reading, read_json, to_json, write_json
from linattn.training.budgets import Progress
from linattn.training.tensors import FILE

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_PROGRESS, _DIGESTS = "progress.json", "digests.json"
# Should the last be damaged, there is the one before.
_GENERATIONS = 2


class WorkFolder:
    """A folder for one work, as a conversion; its trainings each keep their last two checkpoints.

    A checkpoint is a folder that is renamed when it is whole; the last but two is removed after that. Each holds the
    digests of its files: of a damaged one, the one before takes the place. Settings that are refused before there is
    anything to keep leave no folder. `identity` tells this work from another: settings, samples, versions; `kind` is
    what the work is called.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "work"
        >>> WorkFolder(path, {"seed": 0}, kind="conversion").claim()
        >>> WorkFolder(path, {"seed": 1}, kind="conversion")
        Traceback (most recent call last):
        ...
        ValueError: ... holds an unfinished conversion with other settings (seed: 0, now 1); ...
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], *, kind: str) -> None:
        self.path = path
        self._identity_file = path / f"{kind}.json"
        # As JSON has them: tuples are lists there.
        self._identity = now = json.loads(json.dumps(identity))
        if not self._identity_file.is_file():
            return
        identity_before = read_json(self._identity_file, f"{kind}'s settings", f"remove {path} to begin anew")
        if identity_before != now:
            names = sorted(name for name in {*identity_before, *now} if identity_before.get(name) != now.get(name))
            changes = ", ".join(f"{name}: {identity_before.get(name)!r}, now {now.get(name)!r}" for name in names)
            raise ValueError(
                f"{path} holds an unfinished {kind} with other settings ({changes}); go on with those, or remove "
                "the folder to begin anew"
            )

    def claim(self) -> None:
        """Write the work's identity into the folder; from now on it takes no other."""
        write_json(self._identity_file, self._identity)

    @property
    def logs(self) -> Path:
        """Where TensorBoard finds the curves."""
        return self.path / "logs"

    def wait_for_later_logs(self, training: str) -> None:
        """Wait for a second in which no file of curves was begun: files are read in the order of these seconds."""
        names = (path.name.split(".") for path in (self.logs / training).glob("events.out.tfevents.*"))
        seconds = [int(name[3]) for name in names if name[3].isdecimal()]
        if seconds and (now := time.time()) < max(seconds) + 1:
            # Not longer: a clock may have been put back.
            time.sleep(1 - now % 1)

    def recall(self, name: str, kind: type[T]) -> T | None:
        """The record of a kind that was remembered under a name; None for nothing."""
        file, remedy = self.path / f"{name}.json", "remove it, and it is measured again"
        if not file.is_file():
            return None
        return Reading(str(file), remedy, finite=False).record(kind, read_json(file, "stage", remedy))

    def remember(self, name: str, record: Any) -> None:
        """Keep a record under a name."""
        write_json(self.path / f"{name}.json", to_json(record, finite=False))

    @contextmanager
    def draft(self, training: str, progress: Progress) -> Iterator[Path]:
        """A folder to be filled, which is the training's next checkpoint when the block ends well.

        Then all but it and the one before are removed.
        """
        place = self._place(training) / f"step-{progress.step:08}"
        try:
            with atomic_folder(place) as draft:
                yield draft
                write_json(draft / _PROGRESS, to_json(progress, finite=False))
                write_json(draft / _DIGESTS, {path.name: _digest(path) for path in draft.iterdir() if path.is_file()})
        except OSError as error:
            # It may say neither which file nor why.
            words = f"the checkpoint {place} was not written ({error}); free some space, and start again"
            raise OSError(words) from error
        latest = self._checkpoints(training)[-_GENERATIONS:]
        # Older ones, and what a kill has left of one.
        for other in self._place(training).iterdir():
            if other not in latest:
                remove(other)

    def last(self, training: str) -> tuple[Path, Progress] | None:
        """The last whole checkpoint of a training, and how far it had come; None without one.

        A damaged one is logged and removed where there is a whole one before it; ValueError if all are damaged.
        """
        damages: dict[Path, str] = {}
        for checkpoint in reversed(self._checkpoints(training)):
            if (damage := _damage(checkpoint)) is None:
                break
            damages[checkpoint] = damage
        else:
            if damages:
                raise ValueError(
                    f"no checkpoint of the {training} is whole: {'; '.join(damages.values())}; remove "
                    f"{self._place(training)} to do the {training} anew, or {self.path} to begin all anew"
                )
            return None
        for damaged, damage in damages.items():
            _LOG.warning("%s; the %s goes on from the checkpoint before, %s", damage, training, checkpoint)
            # Steps of that number follow again.
            remove(damaged)
        file, remedy = checkpoint / _PROGRESS, f"remove {checkpoint}"
        reading = Reading(str(file), remedy, finite=False)
        return checkpoint, reading.record(Progress, read_json(file, "progress", remedy))

    def _place(self, training: str) -> Path:
        """The folder of a training's checkpoints."""
        return self.path / "checkpoints" / training

    def _checkpoints(self, training: str) -> list[Path]:
        """A training's checkpoints by step; drafts begin with a dot."""
        return sorted(self._place(training).glob("step-*"))


@contextmanager
def alone_in(work: Path | None) -> Iterator[None]:
    """No other process works in the folder meanwhile, and where the disk is full the error names it."""
    if work is None:
        yield
        return
    with locked(work), full_disk_names(work):
        yield


def _damage(checkpoint: Path) -> str | None:
    """Say how a checkpoint is damaged; None if its files are those that were written, and it has no others."""
    try:
        with os.scandir(checkpoint) as entries:
            files = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
        links = [name for name, is_file in files.items() if not is_file]
        if links or checkpoint.is_symlink():
            return f"{checkpoint} is damaged: {', '.join(links) or 'it'} is no file or folder of its own"
        digests = read_json(checkpoint / _DIGESTS, "table of digests", "remove the checkpoint")
        names = files.keys() - {_DIGESTS}
        if not isinstance(digests, dict) or not digests.keys() == names >= {_PROGRESS, FILE}:
            return f"{checkpoint} is damaged: its files, {', '.join(sorted(names))}, are not those of {_DIGESTS}"
        for name, digest in digests.items():
            if _digest(checkpoint / name) != digest:
                return f"{checkpoint / name} is damaged: its bytes are not those that were written"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        return f"{checkpoint} is damaged: {error}"
    except OSError as error:
        raise OSError(f"{checkpoint} was not read ({error}); try again, or remove it to use the one before") from error
    return None


def _digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
