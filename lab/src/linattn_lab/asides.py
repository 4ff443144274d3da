"""Files of former measurements, kept under a name of their own when others take their place."""

from __future__ import annotations

import re
import shutil
from itertools import count
from pathlib import Path


def set_aside(file: Path, *, is_replaced: bool = False) -> Path:
    """Copy a file beside itself, under the first free name: audit.1.jsonl, audit.2.jsonl, …

    Of a file whose figures are measured again audit.replaced.1.jsonl, which `asides` does not find. A copy: whenever
    what follows ends, either the old file or the new one is whole under its name.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.jsonl"
        >>> _ = file.write_text("figures")
        >>> set_aside(file).name, set_aside(file).name
        ('a.1.jsonl', 'a.2.jsonl')
    """
    stem = f"{file.stem}.replaced" if is_replaced else file.stem
    aside = next(name for number in count(1) if not (name := file.with_stem(f"{stem}.{number}")).exists())
    shutil.copy2(file, aside)
    return aside


def asides(file: Path) -> list[Path]:
    """The copies that `set_aside` made of a file, the latest first."""
    pattern = re.compile(rf"{re.escape(file.stem)}\.([1-9][0-9]*){re.escape(file.suffix)}")
    found = [(int(match[1]), path) for path in file.parent.glob("*") if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]
