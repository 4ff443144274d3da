"""The bytes that a language model learns from and is judged by, split by file.

Letters: B batch, L bytes of context.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

Document = tuple[str, bytes]
"""A name, by which a document finds its part of the corpus, and its bytes."""

# Of sixteen documents one is for validation and one for the test.
_PERIOD, _VALIDATION, _TEST = 16, 0, 1
# Between two documents; no text has it.
_END = b"\0"
# A longer file is cut into parts of so many bytes, each a document.
_LONGEST = 1 << 20
# Not read: packages of others, tests, which some distributions leave out, tables that a program wrote, and the topics.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """Bytes by their use; no document is in two of the parts.

    Attributes:
        training: uint8, all training documents, each ended by a zero byte.
        validation: the same of those that choose the best weights.
        test: the same of those that are read once, at the end.
        num_documents: how many there are, of the three parts together.
        digest: SHA-256 of the three parts.
    """

    training: Tensor
    validation: Tensor
    test: Tensor
    num_documents: int
    digest: str

    def batch(self, step: int, *, context: int, batch_size: int, seed: int) -> Tensor:
        """The windows of a step, (B, L + 1) int64: random places, the same whenever they are asked for."""
        draws = random.Random(f"{seed} {step}")
        starts = [draws.randrange(len(self.training) - context) for _ in range(batch_size)]
        return torch.stack([self.training[start : start + context + 1] for start in starts]).long()


def from_documents(documents: Iterable[Document], *, context: int) -> Corpus:
    """A corpus of documents: of sixteen one is for validation and one for the test, by a digest of their names.

    Documents of the same bytes are read once. Raises ValueError if a part has no window of `context` + 1 bytes.

    Example:
        >>> corpus = from_documents(((f"{n}.txt", b"%d bottles of beer" % n) for n in range(100)), context=8)
        >>> corpus.num_documents, corpus.batch(0, context=8, batch_size=2, seed=0).shape
        (100, torch.Size([2, 9]))
    """
    parts: dict[int, list[bytes]] = {_VALIDATION: [], _TEST: [], _PERIOD: []}
    seen: set[bytes] = set()
    for name, content in sorted(documents):
        if content in seen:
            continue
        seen.add(content)
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % _PERIOD
        parts[place if place in parts else _PERIOD].append(content)
    joined = {place: b"".join(content + _END for content in contents) for place, contents in parts.items()}
    for words, place in (("training", _PERIOD), ("validation", _VALIDATION), ("test", _TEST)):
        if len(joined[place]) <= context:
            raise ValueError(
                f"the {words} part has {len(joined[place])} bytes of {len(parts[place])} documents, wanted more than "
                f"context={context}; give more files, or a shorter one"
            )
    training, validation, test = (
        torch.frombuffer(bytearray(joined[place]), dtype=torch.uint8) for place in (_PERIOD, _VALIDATION, _TEST)
    )
    digest = hashlib.sha256(b"".join(hashlib.sha256(joined[place]).digest() for place in sorted(joined))).hexdigest()
    return Corpus(training, validation, test, sum(map(len, parts.values())), digest)


def python_documents() -> Iterator[Document]:
    """The sources of Python's standard library and the topics of its language reference, as this Python has them.

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
    for topic, text in topics.items():
        yield f"topics/{topic}", text.encode()


def read_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """The bytes of files, and of every file in folders; a file of more than 1 MiB is several documents.

    Names, by which documents are split, begin at the file or folder given: where that stands is no matter.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}; give one that there is")
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            content = file.read_bytes()
            for start in range(0, len(content), _LONGEST):
                yield f"{file.relative_to(path.parent)} {start // _LONGEST}", content[start : start + _LONGEST]
