"""Deliberate faults, each of which the laws must catch: this script breaks copies of the source and says which did.

    python tests/mutations.py [PLACE …]

A place is the beginning of a broken file's path below src/linattn, as in "training" or "nn/models.py"; of a file of the
laboratory it is "lab/" and the path below lab/src/linattn_lab, of the kernels for GPUs "gpu/" and the path below
gpu/src/linattn_triton. All of them if left out. Not a test of its own (it runs the laws once per fault, some minutes):
it shows that the laws can fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from faults import FAULTS

ROOT = Path(__file__).parents[1]


def main() -> int:
    """The number of faults no law caught."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("places", nargs="*", metavar="PLACE", help="beginnings of paths, as faults have them")
    places = tuple(parser.parse_args().places)
    faults = [fault for fault in FAULTS if not places or fault.file.startswith(places)]
    if not faults:
        parser.error(
            f"no fault is at {', '.join(places)}; name the beginning of a path below src/linattn, lab/ or gpu/"
        )
    survivors = 0
    for fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            sources = [Path(folder) / name for name in ("src", "lab/src", "gpu/src")]
            for source in sources:
                shutil.copytree(ROOT / source.relative_to(folder), source)
            target = Path(folder) / fault.path
            text = target.read_text()
            if text.count(fault.old) < 1:
                sys.exit(f"{fault.name}: {fault.file} no longer contains {fault.old!r}; bring the fault up to date")
            target.write_text(text.replace(fault.old, fault.new))
            command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "", *fault.tests.split()]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            red = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
            # Compiled code that is given too little memory ends the process.
            red += [f"the process died of signal {-done.returncode}"] if done.returncode < 0 else []
            sys.stdout.write(f"{'caught' if red else 'SURVIVED':9s} {fault.name}: {red[0] if red else ''}\n")
            sys.stdout.flush()
            survivors += not red
    return survivors


if __name__ == "__main__":
    sys.exit(main())
