"""Texts from files, those that Python carries, and tables of texts."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

# Topics of the language reference that are prose rather than grammar, most continuous first; all others follow.
_PROSE_FIRST = ("objects", "typesmethods", "naming", "dynamic-features", "exceptions", "types", "numbers", "import")


def read_text(file: str | os.PathLike[str] | None = None) -> str:
    """A text file, or the English prose that comes with Python: the language reference as pydoc's topics hold it."""
    if file is None:
        return _prose()
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no text file {path}; give a file in UTF-8, or none for the built-in prose")
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8 ({error}); save it in UTF-8") from None
    if not content.strip():
        raise ValueError(f"{path} holds no text; give a file with at least a few sentences")
    return content


def _prose() -> str:
    """All topics, prose first, each paragraph once: topics hold one another. Without underlines and line breaks."""
    order = [name for name in _PROSE_FIRST if name in topics]
    order += sorted(set(topics) - set(order))
    text = "\n\n".join(topics[name] for name in order)
    without_rules = re.sub(r"^\s*[*=~\"^-]{3,}\s*$", "", text, flags=re.MULTILINE)
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", without_rules))
    return "\n\n".join(dict.fromkeys(paragraph for paragraph in paragraphs if paragraph))


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    columns: tuple[str, ...]  # headings; the first column is left-aligned, the others are numbers
    rows: tuple[tuple[str, ...], ...]  # one text per column
    baselines: int = 0  # how many of the first rows are baselines, set apart from the others

    def markdown(self) -> str:
        """The table as Markdown, the first column to the left and the others to the right."""
        head = f"| {' | '.join(self.columns)} |"
        rule = f"|---|{'---:|' * (len(self.columns) - 1)}"
        return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in self.rows)])
