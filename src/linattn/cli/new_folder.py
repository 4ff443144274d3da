"""A command's long work on a new folder: one process at a time, unfinished beside it, whole at the end."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer
from rich.console import Console

from linattn.cli.terminal import ending
from linattn.processes import Processes
from linattn.records.files import LOCK, InUseError, check_new, full_disk_names, locked, remove

# The first process alone writes.
_OF_FIRST = ("out", "plan_out")


@contextmanager
def shared_folder(
    doing: str, processes: Processes, out: Path, call: typer.Context, *, is_continued: bool = False
) -> Iterator[tuple[Console, Path | None]]:
    """A console, and the folder of unfinished work on `out`, held meanwhile; all but the first process have none."""
    if not out.name:
        raise ValueError(f"{out} cannot be a new folder; give one in it")
    console, work = Console(quiet=not processes.is_first), out.with_name(f"{out.name}.unfinished")
    # Before anything of the first process's can fail while the others wait.
    check_same_options(processes, call)
    left = f"The work so far is in {work}; run the same command again to resume."
    # All but the first process have a console that prints nothing.
    with ending(console, lambda: left if work.exists() else "Nothing was kept yet."):
        if not processes.is_first:
            yield console, None
            return
        try:
            with locked(work):
                check_new(out, is_replaced=is_continued)
                yield console, work
        except InUseError:
            raise InUseError(f"another process is {doing} into {out}; wait for it, or give another OUT") from None


def check_same_options(processes: Processes, call: typer.Context) -> None:
    """Refuse a command whose processes were started with different arguments, on all of them; one small gather."""
    shared = [one for one in call.command.params if one.name in call.params and one.name not in _OF_FIRST]
    asked = {"command": str(call.info_name), **{one.opts[0]: str(call.params[one.name]) for one in shared}}
    every = processes.gather(asked)
    differing = []
    for name in dict.fromkeys(name for each in every for name in each):
        values = [each.get(name, "none") for each in every]
        if len(set(values)) > 1:
            holders = ", ".join(f"process {rank} has {value}" for rank, value in enumerate(values))
            differing.append(f"{name} ({holders})")
    if differing:
        words = "; ".join(differing)
        raise ValueError(f"every process must be started with the same command, got different ones: {words}")


def finish(work: Path, out: Path, kind: str, write: Callable[[Path], None], *, is_continued: bool = False) -> None:
    """Let `write` fill a draft, give it `out`'s name, curves and other files beside it, and remove this kind's work."""
    with full_disk_names(out):
        draft = work / "result"
        shutil.rmtree(draft, ignore_errors=True)
        write(draft)
        if (work / "logs").is_dir():
            shutil.copytree(work / "logs", draft / "logs")
        former = work / "former"
        # What a user keeps beside the model; a kill between the two renames has left it in the second.
        for path in [path for place in (out, former) if place.is_dir() for path in place.iterdir()]:
            if not (draft / path.name).exists():
                if path.is_dir() and not path.is_symlink():
                    shutil.copytree(path, draft / path.name, symlinks=True)
                else:
                    shutil.copy2(path, draft / path.name, follow_symlinks=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        if is_continued and out.exists():
            shutil.rmtree(former, ignore_errors=True)
            out.rename(former)
        with suppress(OSError):
            out.rmdir()  # empty: Windows renames to no folder that exists
        draft.rename(out)
    # Settings last: a kill leaves nothing without those that it belongs to.
    for path in sorted(work.iterdir(), key=lambda path: path.stem == kind):
        # The lock goes with the process that holds it.
        if path.name != LOCK:
            remove(path)
