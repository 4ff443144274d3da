"""Texts that an audit reads: prose, source code, and both in turn, all of them Python's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from sysconfig import get_path

from linattn.records.texts import read_text
from linattn_lab.texts import Text

PROSE, CODE, MIXED = "prose", "code", "mixed"
KINDS = (PROSE, CODE, MIXED)

# Long modules of the standard library that every version has.
_MODULES = "argparse tarfile typing inspect _pydecimal zipfile pickle subprocess smtplib ast"
# Characters of one text in a row, in a mixed one.
_PIECE = 3000
# Places in prose and in code that each text takes, no place twice; topics of prose may hold the words of others.
_SHARES = {PROSE: (0.0, 0.5), CODE: (0.0, 0.5), MIXED: (0.5, 0.85)}
_CALIBRATION = (0.85, 1.0)


def audit_texts(file: Path | None = None, kinds: Sequence[str] = KINDS) -> dict[str, Text]:
    """Texts by their kind: a file's alone, or prose, code and mixed text that come with Python."""
    if file is not None:
        text = Text.read(file)
        return {text.source: text}
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"text_kinds must be among {', '.join(KINDS)}; got {', '.join(unknown)}")
    sources = {PROSE: ("pydoc topics", _prose()), CODE: ("the standard library", _code())}
    texts = {kind: Text(source, _part(text, _SHARES[kind])) for kind, (source, text) in sources.items()}
    texts[MIXED] = _mixed(_SHARES[MIXED])
    return {kind: text for kind, text in texts.items() if kind in kinds}


def calibration_text(file: Path | None = None) -> Text:
    """A text to plan on: a file, or mixed text of which `audit_texts` has no part."""
    return _mixed(_CALIBRATION) if file is None else Text.read(file)


def _prose() -> str:
    """The language reference by topic."""
    return read_text()


@cache
def _code() -> str:
    """Modules one after another."""
    return "\n\n".join(
        (Path(get_path("stdlib")) / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES.split()
    )


def _mixed(share: tuple[float, float]) -> Text:
    """Pieces of prose and code in turn."""
    both = _part(_prose(), share), _part(_code(), share)
    halves = [[text[i : i + _PIECE] for i in range(0, len(text), _PIECE)] for text in both]
    pieces = chain.from_iterable(zip(*halves, strict=False))
    return Text("pydoc topics and the standard library in turn", "\n\n".join(pieces))


def _part(text: str, share: tuple[float, float]) -> str:
    """A text from one share of its length to another."""
    start, stop = (int(len(text) * place) for place in share)
    return text[start:stop]
