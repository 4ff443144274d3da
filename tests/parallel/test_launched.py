"""`linattn train` under torchrun: what a killed rank leaves, and that one process goes on from it as if alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linattn.lab.commands.app import app

pytestmark = pytest.mark.xdist_group("ranks")
SECONDS = 60
# The second rank is killed after the third look.
DYING = """
import os, signal
from linattn.training.loop import _Run
own = _Run._look
def dying(run):
    own(run)
    if os.environ["RANK"] == "1" and run.progress.step >= 30:
        os.kill(os.getpid(), signal.SIGKILL)
_Run._look = dying
from linattn.cli import main
main()
"""


@pytest.fixture
def options(tmp_path) -> list[str]:
    """A training of a few seconds, on texts of two lines."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(" ".join(f"{count} bottles of beer {number}" for count in range(40)))
    sizes = "--steps 200 --context 32 --batch 2 --layers 2 --width 16 --heads 2 --features 4 --pattern ls"
    return ["--text", str(texts), *sizes.split()]


def best(folder: Path) -> float:
    """The validation loss of the kept weights."""
    return json.loads((folder / "training.json").read_text())["trained"]["best_loss"]


def run(*words: object) -> None:
    """The command in this process."""
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output


def test_a_killed_rank_ends_the_others_and_one_process_goes_on(tmp_path, options):
    out, script = tmp_path / "split", tmp_path / "dying.py"
    script.write_text(DYING)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    # Raises if it takes longer.
    launched = subprocess.run(
        [*launch, "train", str(out), *options, "--parts", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert launched.returncode != 0
    cause = launched.stderr[launched.stderr.index("Root Cause") :]
    assert "rank      : 1" in cause
    assert "SIGKILL" in cause
    work = tmp_path / "split.unfinished"
    assert not out.exists()
    assert [path.name for path in (work / "checkpoints" / "training").glob("step-*")]
    # One process, which is not told of parts, goes on to the loss of one that was never interrupted.
    run("train", out, *options)
    run("train", tmp_path / "alone", *options)
    assert not work.exists() or not list(work.glob("checkpoints"))
    assert best(out) == pytest.approx(best(tmp_path / "alone"), rel=1e-3)
