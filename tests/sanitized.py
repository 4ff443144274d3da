"""Build the compiled code under AddressSanitizer and UndefinedBehaviorSanitizer, and run its laws with it.

    python tests/sanitized.py [PYTEST ARGUMENT …]

Left out, the laws of compiled code and of damaged states are run, some minutes; "tests/test_fuzz.py" are random cases.
The run ends at the first access beyond a tensor or a buffer, and at the first undefined operation. A call that is told
of one number too many comes first and must be seen. It needs GCC, whose sanitizers the interpreter loads before all
else, on Linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAWS = (
    *("tests/laws/test_compiled.py", "tests/laws/test_state_checks.py"),
    *(
        f"tests/kv_cache/test_{name}.py"
        for name in (
            "compiled_bidirectional",
            "compiled_codes",
            "compiled_coding",
            "compiled_coded_streams",
            "compiled_streams",
            "state_checks",
        )
    ),
)
_CHECKS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -Wno-psabi"
# A value of one number, and a step that is told of 64.
_TOO_FAR = (
    "import torch, linattn_compiled; x = [torch.zeros(n) for n in (1, 1, 1, 1, 1, 1, 1, 64, 1, 1, 64, 1, 1)]; "
    "p = [y.data_ptr() for y in x]; "
    "linattn_compiled.step(*p[:3], 0, p[3], 0, *p[4:], 1, 1, 1, 1, 64, 1, 1, 1, 0, 0, 1.0, 0.0, 1.0)"
)


def main() -> int:
    """The exit status of the tests; 1 where the code cannot be built or the sanitizer sees nothing."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "LD_PRELOAD": " ".join(_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")),
            # Python keeps memory to its end, and large allocations of tests are to fail as they do elsewhere.
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=0",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            "PYTHONPATH": os.pathsep.join((folder, str(ROOT / "src"))),
        }
        _build(Path(folder))
        control = subprocess.run(
            [sys.executable, "-c", _TOO_FAR], env=environment, capture_output=True, text=True, check=False
        )
        if "AddressSanitizer" not in control.stderr:
            sys.stdout.write(f"the sanitizer did not see a read beyond a tensor:\n{control.stderr}\n")
            return 1
        arguments = sys.argv[1:] or LAWS
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _library(name: str) -> str:
    """Where GCC has a library."""
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _build(folder: Path) -> None:
    """The package of compiled code, with sanitizers, into a folder."""
    with tempfile.TemporaryDirectory() as source:
        shutil.copytree(ROOT / "compiled", source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("build"))
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)]
        environment = os.environ | {"CC": "gcc", "CFLAGS": _CHECKS, "LDFLAGS": _CHECKS}
        subprocess.run(command, cwd=source, env=environment, check=True)
    init = ROOT / "compiled/src/linattn_compiled/__init__.py"
    shutil.copy(init, folder / "linattn_compiled" / init.name)


if __name__ == "__main__":
    sys.exit(main())
