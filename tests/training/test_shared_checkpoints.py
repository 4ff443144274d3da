"""Checkpoints of several processes: the first writes them, each reads its part, an error of one is every one's."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from ranks import NUM_RANKS
from split_checkpoints import cut_off, draws, refused, resumed, written

pytestmark = pytest.mark.xdist_group("ranks")

# A mesh, and the dimension in which weights are cut; over (2, 2) each part is on two ranks.
LAYOUTS = {"rows": (NUM_RANKS, 0), "columns": (NUM_RANKS, 1), "rows twice": ((2, 2), 0), "whole": (None, 0)}
FILE = "tensors.safetensors"


@pytest.fixture
def run(on_ranks):
    """A function that runs a job in a layout: what each process returns."""

    def of(layout, job, folder):
        shape, dim = LAYOUTS[layout]
        return [job(None, folder, dim)] if shape is None else on_ranks(shape, job, folder, dim)

    return of


@pytest.mark.parametrize("before", LAYOUTS)
def test_any_layout_reads_what_any_other_wrote(run, tmp_path, before):
    expected = run(before, written, tmp_path)[0]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert load_file(tmp_path / FILE).keys() == expected.keys()
    for after in LAYOUTS:
        for found in run(after, resumed, tmp_path):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_that_differs_on_one_rank_is_refused_on_all(run, on_ranks, tmp_path):
    run("rows", written, tmp_path)
    answers = on_ranks(NUM_RANKS, refused, tmp_path, 2)
    for rank, (said, is_changed) in enumerate(answers):
        assert said.startswith("ValueError: " + ("" if rank == 2 else f"process 2 of {NUM_RANKS}: ") + str(tmp_path))
        assert "0.bias is torch.float64 [5], wanted torch.float64 [6]" in said
        assert not is_changed


def test_each_process_draws_numbers_of_its_own_and_the_same_again_when_resumed(on_ranks, tmp_path):
    """As for dropout: masks that all share would drop the same of every text."""
    answers = on_ranks(NUM_RANKS, draws, tmp_path)
    every = [tuple(drawn.tolist()) for whole, _ in answers for drawn in whole]
    assert len(every) == len(set(every)) == NUM_RANKS * 8
    assert every == [tuple(drawn.tolist()) for _, cut in answers for drawn in cut]


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_damaged_file_is_refused_on_all(run, on_ranks, tmp_path, harm):
    run("rows", written, tmp_path)
    file = tmp_path / FILE
    content = file.read_bytes()
    file.unlink()
    if harm == "cut":
        file.write_bytes(content[:-8])
    for said, is_changed in on_ranks(NUM_RANKS, refused, tmp_path, None):
        assert f"{file} cannot be read" in said
        assert not is_changed


@pytest.mark.parametrize(
    ("is_sharded", "place", "rank"),
    [
        (True, "tensors.save_file", 0),
        (True, "checkpoints.write_json", 0),
        (True, "WorkFolder.draft", 0),
        (True, "WorkFolder.last", 0),
        (False, "tensors.save_file", 0),
        (False, "WorkFolder.last", 0),
    ],
)
def test_an_error_of_one_ends_the_training_of_all(on_ranks, tmp_path, is_sharded, place, rank):
    answers = on_ranks(NUM_RANKS, cut_off, tmp_path, is_sharded=is_sharded, place=place, rank=rank)
    assert all(said.startswith("OSError: ") and "no space left here" in said for said in answers)
    assert all(f"process {rank} of {NUM_RANKS}: " in said for number, said in enumerate(answers) if number != rank)
    # Nothing is half-written.
    place = tmp_path / "checkpoints" / "law"
    assert not place.exists() or not list(place.iterdir())
