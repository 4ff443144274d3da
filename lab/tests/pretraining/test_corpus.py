"""The parts of a corpus share no document, and a step's windows are always the same."""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch

from linattn_lab.pretraining import from_documents, python_documents, read_documents
from linattn_lab.pretraining.corpus import _LONGEST


def contents(part):
    """The documents of a part."""
    return bytes(part.tolist()).split(b"\0")[:-1]


def documents(count):
    return [(f"{number}.txt", b"text %d " % number * 3) for number in range(count)]


def test_every_document_is_in_one_part_alone():
    corpus = from_documents(documents(500), context=4)
    parts = [contents(part) for part in (corpus.training, corpus.validation, corpus.test)]
    assert sorted(chain(*parts)) == sorted(content for _, content in documents(500))
    # Sixteenths of 500: 31.25 ± 5.4, within four standard deviations.
    assert all(9 <= len(part) <= 53 for part in parts[1:])


def test_the_part_of_a_document_is_that_of_its_name():
    """Other documents, and their order, move none from training to test."""
    few, many = from_documents(documents(200), context=4), documents(300)
    random.Random(0).shuffle(many)
    more = from_documents(many, context=4)
    assert set(contents(few.test)) < set(contents(more.test))
    assert not set(contents(few.training)) & set(contents(more.test))
    assert from_documents(reversed(documents(200)), context=4).digest == few.digest != more.digest


def test_the_same_bytes_are_read_once():
    doubled = [*documents(100), *((f"copy of {name}", content) for name, content in documents(100))]
    corpus = from_documents(doubled, context=4)
    assert corpus.num_documents == 100
    found = [content for part in (corpus.training, corpus.validation, corpus.test) for content in contents(part)]
    assert len(set(found)) == len(found) == 100


def test_windows_of_a_step():
    corpus = from_documents(documents(100), context=4)
    sizes = {"context": 4, "batch_size": 3, "seed": 1}
    first = corpus.batch(7, **sizes)
    assert (first.shape, first.dtype) == ((3, 5), torch.int64)
    assert torch.equal(first, corpus.batch(7, **sizes))
    assert not torch.equal(first, corpus.batch(8, **sizes))
    assert not torch.equal(first, corpus.batch(7, **{**sizes, "seed": 2}))
    text = bytes(corpus.training.tolist())
    assert all(bytes(row.tolist()) in text for row in first)


def test_windows_reach_both_ends():
    corpus = from_documents(documents(100), context=4)
    length = len(corpus.training) - 1
    for row in corpus.batch(0, context=length, batch_size=2, seed=0):
        assert torch.equal(row, corpus.training.long())


def test_pythons_own_sources_are_split_by_file():
    found = dict(python_documents())
    assert {"argparse.py", "json/decoder.py", "topics/import"} <= found.keys()
    parts = {part for name in found for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "site-packages", "pydoc_data"}
    corpus = from_documents(found.items(), context=4096)
    assert corpus.num_documents == len(set(found.values()))
    assert len(corpus.training) > 10 * len(corpus.test)


def test_a_link_to_itself_is_left_out(tmp_path):
    (tmp_path / "one.txt").write_bytes(b"1")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    documents, left_out = read_documents([tmp_path], without=(tmp_path / "out",))
    assert [content for _, content in documents] == [b"1"]
    assert left_out == {"a link to a folder, or no file": 1}


def test_no_topic_holds_another():
    texts = {name: text.decode() for name, text in python_documents() if name.startswith("topics/")}
    assert len(texts) > 40
    paragraphs = {name: {" ".join(x.split()) for x in text.split("\n\n")} for name, text in texts.items()}
    long = Counter(paragraph for x in paragraphs.values() for paragraph in x if len(paragraph) > 100)
    assert sum(number > 1 for number in long.values()) <= 3  # A reference to the same PEP.


def test_text_files_alone_are_read(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / ".git").mkdir()
    (tmp_path / "a" / "b" / "one.txt").write_bytes("née".encode())
    (tmp_path / "a" / "two.txt").write_bytes(b"2")
    for name, content in (("picture.png", b"\x89PNG\r\n"), ("latin.txt", b"n\xe9e"), ("program", b"ELF\0")):
        (tmp_path / "a" / name).write_bytes(content)
    for name in (".hidden", ".git/config", ".git/index"):
        (tmp_path / "a" / name).write_bytes(b"text")
    (tmp_path / "three.txt").write_bytes(b"3")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "four.txt").write_bytes(b"4")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "linked")
    os.mkfifo(tmp_path / "a" / "b" / "pipe")
    found, left_out = read_documents([tmp_path / "a", tmp_path / "three.txt"])
    assert [content for _, content in found] == ["née".encode(), b"2", b"3"]
    assert left_out == {"hidden": 3, "no text in UTF-8": 3, "a link to a folder, or no file": 2}
    assert len({name for name, _ in found}) == 3
    (tmp_path / "c").mkdir()
    (tmp_path / "a").rename(tmp_path / "c" / "a")
    assert read_documents([tmp_path / "c" / "a", tmp_path / "three.txt"])[0] == found
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*nowhere; give one"):
        read_documents([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"picture.png is no text in UTF-8; give a text"):
        read_documents([tmp_path / "c" / "a" / "picture.png"])


def test_folders_that_may_not_be_read_are_counted(tmp_path, monkeypatch):
    for name in ("open/a.txt", "closed/b.txt", "closed/deeper/c.txt"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(name)
    scan = os.scandir

    def refusing(path="."):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    (tmp_path / "texts" / "open" / "d.txt").write_text("d")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "d.txt")  # the superuser may read all
    found, left_out = read_documents([tmp_path / "texts"])
    assert found == [("texts/open/a.txt", b"open/a.txt")]
    assert left_out == {"a folder that may not be read": 1, "a file that may not be read": 1}


def test_a_name_may_be_of_any_bytes(tmp_path):
    """As of files from systems with another encoding: it says only which part a document is in."""
    for number in range(100):
        (tmp_path / f"{number}.txt").write_bytes(b"%d bottles" % number)
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"coffee")
    corpus = from_documents(read_documents([tmp_path])[0], context=4)
    assert (corpus.is_split_by_file, corpus.num_documents) == (True, 101)


@pytest.mark.parametrize("count", [1, 3, 99])
def test_few_documents_are_split_by_position(count):
    texts = [(f"{number:02}.txt", bytes([97 + number % 26]) * 100 + b"%d" % number * 30) for number in range(count)]
    corpus = from_documents(texts, context=2)
    assert (corpus.is_split_by_file, corpus.num_documents) == (False, count)
    parts = [contents(part) for part in (corpus.training, corpus.validation, corpus.test)]
    assert [b"".join(joined) for joined in zip(*parts, strict=True)] == [content for _, content in texts]
    for beginning, middle, end in zip(*parts, strict=True):
        length = len(beginning + middle + end)
        assert abs(len(middle) - length / 16) <= 1 >= abs(len(end) - length / 16)


def test_of_many_documents_a_long_one_is_several():
    long = bytes(range(1, 256)) * (_LONGEST // 255 * 3)
    corpus = from_documents([*documents(100), ("long", long)], context=4)
    assert corpus.is_split_by_file
    pieces = [content for part in (corpus.training, corpus.validation, corpus.test) for content in contents(part)]
    assert sorted(map(len, pieces))[-2:] == [_LONGEST, _LONGEST]
    assert sum(map(len, pieces)) == len(long) + sum(len(content) for _, content in documents(100))


def test_too_little_is_refused():
    with pytest.raises(ValueError, match=r"the training part has 3 bytes of 1 documents, wanted more than con"):
        from_documents([("a", b"few")], context=4)
    with pytest.raises(ValueError, match=r"wanted more than context=100000; give more text, or a shorter context"):
        from_documents(documents(100), context=100_000)


def test_pipes_are_refused_and_no_file_is_read_twice(tmp_path, monkeypatch):
    """A pipe has its bytes once, and may never have any; a file may be written meanwhile."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*pipe; give one that .* no pipe"):
        read_documents([tmp_path / "pipe"])
    (tmp_path / "text").write_bytes(b"words")
    read, times = Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda path: times.append(path.name) or read(path))
    assert read_documents([tmp_path / "text"])[0] == [("text", b"words")]
    assert read_documents([tmp_path])[0][0][1] == b"words"
    assert times == ["text", "text"]


def test_what_a_training_writes_is_not_read_and_a_folder_has_its_name_from_within(tmp_path, monkeypatch):
    """Or no training whose folder lies among its texts could be resumed."""
    for name in ("texts/a.txt", "texts/models/out/README.md", "texts/models/out.unfinished/training.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    out = tmp_path / "texts" / "models" / "out"
    found, left_out = read_documents([tmp_path / "texts"], (out, out.with_name("out.unfinished")))
    assert (found, left_out) == ([("texts/a.txt", b"texts/a.txt")], {"of this training": 2})
    # What is given by name is read.
    assert read_documents([out / "README.md"], (out,))[0] == [("README.md", b"texts/models/out/README.md")]
    monkeypatch.chdir(out)
    assert read_documents([Path("..") / ".."], (out, out.with_name("out.unfinished")))[0] == found
    monkeypatch.chdir(tmp_path / "texts")
    assert read_documents([Path()], (out, out.with_name("out.unfinished")))[0] == found
