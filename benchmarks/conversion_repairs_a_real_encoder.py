"""Claim: fifteen minutes of conversion repair most of what linear attention breaks in a pretrained encoder.

`linattn convert` on the packaged MiniLM encoder and the prose that comes with Python, once per method. Figures are of
at least twenty texts of 128 to 512 tokens that nothing was fitted to or trained on; centres and maps are fixed by the
conversion. Embedding cosine: of the mean over tokens of the last states to the exact model's, mean over the texts. Rank
correlation: Spearman's, of the texts' pairwise similarities with the exact model's.

    python conversion_repairs_a_real_encoder.py [FOLDER]

A conversion that FOLDER (a temporary one if left out) holds already is read and not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.hf import LayerAttention, capture, from_pretrained, load
from linattn.records.texts import read_text
from measuring import record, verified_window

MINUTES = 15
NUM_VERIFIED = 512
FEWEST_TEXTS = 20


@dataclass(frozen=True)
class Case:
    """A method, and what is claimed of it."""

    folder: str
    words: tuple[str, ...]
    cosine: float
    rank: float | None

    @property
    def method(self) -> str:
        """Its written form and width."""
        return ", ".join(self.words[1::2])


CASES = (
    # A learned map is to be clearly above its unconverted self, which is at 0.56.
    Case("learned", ("--map", "LearnedExponential", "--features", "64"), 0.80, None),
    Case("expansion", ("--map", "Expansion(num_centres=64)"), 0.95, 0.95),
)


def convert(case: Case, folder: Path) -> dict[str, Any]:
    """The conversion's own report, made by the command where it is missing."""
    out = folder / case.folder
    if not out.exists():
        command = [str(Path(sys.executable).with_name("linattn")), "convert", "all-MiniLM-L6-v2", str(out)]
        subprocess.run([*command, "--minutes", str(MINUTES), *case.words], check=True)
    found: dict[str, Any] = json.loads((out / "conversion.json").read_text(encoding="utf-8"))
    return found


def verify(out: Path) -> None:
    """Refuse a converted folder that, loaded, attends otherwise than the definition of its maps says."""
    exact, converted = load(), from_pretrained(out)
    kernels = [part for part in converted.modules() if isinstance(part, LayerAttention)]
    calls = capture(exact.model, exact.encode(read_text(), NUM_VERIFIED)).calls
    for kernel, call in zip(kernels, calls, strict=True):
        verified_window(kernel.window, kernel.feature_map, (call.query, call.key, call.value), is_causal=False)


def measure(case: Case, folder: Path) -> None:
    """A row for the embedding, and one for the ranking where it is claimed."""
    report = convert(case, folder)
    verify(folder / case.folder)
    if report["num_held_out"] < FEWEST_TEXTS:
        raise SystemExit(f"{case.folder}: {report['num_held_out']} held-out texts, wanted {FEWEST_TEXTS}")
    stages = {stage["name"]: stage["agreement"] for stage in report["stages"]}
    minutes = sum(training["seconds"] for training in report["trainings"]) / 60
    for name, key, bound in (
        ("embedding cosine", "embedding_cosine", case.cosine),
        ("rank correlation of similarities", "rank_correlation", case.rank),
    ):
        if bound is not None:
            record(
                f"{name} after conversion, MiniLM, {case.method}",
                figure=stages["converted"][key],
                unit="",
                bound=f">= {bound}",
                uniform=stages["uniform"][key],
                unconverted=stages["unconverted"][key],
                calibrated=stages["calibrated"][key],
                minutes=round(minutes, 1),
                texts=report["num_held_out"],
                tokens=report["num_held_out_tokens"],
            )


def main() -> None:
    """Verify and record every case."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        for case in CASES:
            measure(case, folder)


if __name__ == "__main__":
    main()
