"""A folder appears whole, in one step, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from linattn.planning.files import appearing


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_appears_with_all_its_files(tmp_path):
    with appearing(tmp_path / "a" / "new") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("whole")
        assert not (tmp_path / "a" / "new").exists()
    assert names(tmp_path) == ["a", "a/new", "a/new/inner", "a/new/inner/file"]


@pytest.mark.parametrize("end", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_early_end_leaves_nothing(tmp_path, end):
    def interrupted() -> None:
        with appearing(tmp_path / "new") as folder:
            (folder / "file").write_text("half")
            raise end

    with pytest.raises(end):
        interrupted()
    assert names(tmp_path) == []


def test_two_at_once_do_not_meet(tmp_path):
    """The second to end finds the first's folder, and refuses."""

    def both() -> None:
        with appearing(tmp_path / "new") as first, appearing(tmp_path / "new") as second:
            assert first != second
            (first / "one").write_text("1")
            (second / "two").write_text("2")

    with pytest.raises(OSError, match="not empty"):
        both()
    assert names(tmp_path) == ["new", "new/two"]
