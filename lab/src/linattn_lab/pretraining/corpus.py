"""The bytes that a language model learns from and is judged by, split by file, or by position where files are few.

Letters: B batch, L bytes of context.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

Document = tuple[str, bytes]
"""A name, by which a document finds its part of the corpus, and its bytes."""

# Of sixteen documents, or parts of one, one is for validation and one for the test.
_PERIOD, _VALIDATION, _TEST = 16, 0, 1
# So many documents leave a part without one in three of a thousand corpora; fewer are split by position, each of them.
_MANY = 100
# Between two documents; no text has it.
_END = b"\0"
# Of many, a longer one is cut into parts of so many bytes, each a document.
_LONGEST = 1 << 20
# Not read: packages of others, tests, which some distributions leave out, tables that a program wrote, and the topics.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """Bytes by their use; no byte is in two of the parts.

    Attributes:
        training: uint8, all training documents, each ended by a zero byte.
        validation: the same of those that choose the best weights.
        test: the same of those that are read once, at the end.
        num_documents: how many there are, of the three parts together.
        digest: SHA-256 of the three parts.
        is_split_by_file: whether each document is in one of the parts, or its end in validation and test.
    """

    training: Tensor
    validation: Tensor
    test: Tensor
    num_documents: int
    digest: str
    is_split_by_file: bool

    def batch(self, step: int, *, context: int, batch_size: int, seed: int) -> Tensor:
        """The windows of a step, (B, L + 1) int64: random places, the same whenever they are asked for."""
        draws = random.Random(f"{seed} {step}")
        starts = [draws.randrange(len(self.training) - context) for _ in range(batch_size)]
        return torch.stack([self.training[start : start + context + 1] for start in starts]).long()


def from_documents(documents: Iterable[Document], *, context: int) -> Corpus:
    """A corpus of documents: of sixteen one is for validation and one for the test, by a digest of their names.

    Of fewer than 100 documents each is split: its last sixteenth is for the test, and the one before for validation.
    Documents of the same bytes are read once. Raises ValueError if a part has no window of `context` + 1 bytes.

    Example:
        >>> corpus = from_documents(((f"{n}.txt", b"%d bottles of beer" % n) for n in range(100)), context=8)
        >>> corpus.num_documents, corpus.batch(0, context=8, batch_size=2, seed=0).shape
        (100, torch.Size([2, 9]))
        >>> corpus = from_documents([("numbers", bytes(range(32)))], context=2)
        >>> corpus.validation.tolist(), corpus.test.tolist()
        ([28, 29, 0], [30, 31, 0])
    """
    different = {content: name for name, content in sorted(documents, reverse=True)}
    is_split_by_file = len(different) >= _MANY
    split = _by_name if is_split_by_file else _by_position
    parts: dict[int, list[bytes]] = {_VALIDATION: [], _TEST: [], _PERIOD: []}
    for name, content in sorted((name, content) for content, name in different.items()):
        for place, part in split(name, content):
            parts[place].append(part)
    joined = {place: b"".join(content + _END for content in contents) for place, contents in parts.items()}
    uses = {"training": _PERIOD, "validation": _VALIDATION, "test": _TEST}
    for words, place in uses.items():
        if len(joined[place]) <= context:
            raise ValueError(
                f"the {words} part has {len(joined[place])} bytes of {len(parts[place])} documents, wanted more than "
                f"context={context}; give more text, or a shorter context"
            )
    training, validation, test = (torch.frombuffer(bytearray(joined[at]), dtype=torch.uint8) for at in uses.values())
    digest = hashlib.sha256(b"".join(hashlib.sha256(joined[place]).digest() for place in sorted(joined))).hexdigest()
    return Corpus(training, validation, test, len(different), digest, is_split_by_file)


def _by_name(name: str, content: bytes) -> Iterator[tuple[int, bytes]]:
    """The part of a document by a digest of its name; a long one is several documents."""
    for start in range(0, max(len(content), 1), _LONGEST):
        named = f"{name} {start // _LONGEST}" if start else name
        place = int.from_bytes(hashlib.sha256(named.encode(errors="surrogateescape")).digest()[:8]) % _PERIOD
        yield place if place in (_VALIDATION, _TEST) else _PERIOD, content[start : start + _LONGEST]


def _by_position(name: str, content: bytes) -> Iterator[tuple[int, bytes]]:
    """A document's beginning for training, and its last two sixteenths for validation and for the test."""
    last, test = (len(content) * (_PERIOD - number) // _PERIOD for number in (2, 1))
    yield from ((_PERIOD, content[:last]), (_VALIDATION, content[last:test]), (_TEST, content[test:]))


def python_documents() -> Iterator[Document]:
    """The sources of Python's standard library and the topics of its language reference, as this Python has them.

    A topic whose lines all stand in another one is left out, so that training and test do not share it.

    Example:
        >>> names = {name for name, _ in python_documents()}
        >>> "argparse.py" in names, "topics/import" in names
        (True, True)
    """
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _LEFT_OUT.intersection(name.parts[:-1]):
            yield name.as_posix(), path.read_bytes()
    lines = {topic: _lines(text) for topic, text in topics.items()}
    for topic, text in topics.items():
        # Of topics of equal lines one stays.
        mine = lines.pop(topic)
        if not any(mine <= other for other in lines.values()):
            yield f"topics/{topic}", text.encode()
            lines[topic] = mine


def _lines(text: str) -> set[str]:
    """The lines of a text but for underlines of headings: these are of another level in a topic that holds this one."""
    return {line for line in map(str.strip, text.splitlines()) if len(set(line)) > 1}


def read_documents(paths: Sequence[Path], without: Sequence[Path] = ()) -> tuple[list[Document], Counter[str]]:
    """Texts of files and folders, and how many files of folders were left out, by the reason.

    Of folders hidden files, files in hidden folders, links to folders, folders that may not be read, files that are no
    text in UTF-8 and those in the folders `without`, as what a training writes, are left out. Names, by which documents
    are split, begin at the file or folder given: where that stands is no matter.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: a file that is given is no text in UTF-8.
    """
    documents, left_out = list[Document](), Counter[str]()
    for path in paths:
        if not (path.is_file() or path.is_dir()):
            raise FileNotFoundError(f"there is no file or folder {path}; give one that there is, and no pipe")
        named = Path(os.path.abspath(path)).name  # Of "." too.
        below = os.walk(path, onerror=lambda _: left_out.update(["a folder that may not be read"]))
        files = (Path(top, name) for top, folders, names in below for name in (*folders, *names))
        # What is no folder; a link to one is not followed.
        for file in sorted(x for x in files if x.is_symlink() or not x.is_dir()) if path.is_dir() else [path]:
            if any(part.startswith(".") for part in file.relative_to(path).parts):
                left_out["hidden"] += 1
            elif not file.is_file():
                left_out["a link to a folder, or no file"] += 1
            elif file != path and any(file.resolve().is_relative_to(folder) for folder in without):
                left_out["of this training"] += 1
            elif file != path and not os.access(file, os.R_OK):
                left_out["a file that may not be read"] += 1
            elif _is_text(content := file.read_bytes()):
                documents.append((str(Path(named, file.relative_to(path))), content))
            elif file == path:
                raise ValueError(f"{path} is no text in UTF-8; give a text, or save it in UTF-8")
            else:
                left_out["no text in UTF-8"] += 1
    return documents, left_out


def _is_text(content: bytes) -> bool:
    """Whether bytes are a text: UTF-8 without the zero byte, which stands between documents."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return _END not in content
