"""Programs in processes of their own, forked from one that has imported torch, or transformers, and no linattn.

A process that begins with nothing takes some seconds to import them, which is what most such tests would take.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

TORCH = ("torch",)
TRANSFORMERS = (
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)


class Programs:
    """Runs programs; leaving the block ends the servers that they were forked from."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, ...], subprocess.Popen[str]] = {}

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for server in self._servers.values():
            server.communicate()

    def run(
        self, program: str, *arguments: object, after: Sequence[str] = TORCH, warned: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As `python -W WARNED -c PROGRAM ARGUMENTS`, after some imports; whatever its status is."""
        server = self._server(tuple(after))
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            printed = [Path(folder) / name for name in ("out", "err")]
            words = ["-c", *map(str, arguments)]
            task = {"program": program, "words": words, "warned": warned, "printed": list(map(str, printed))}
            server.stdin.write(json.dumps(task) + "\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
            out, err = (path.read_text(encoding="utf-8") for path in printed)
        return subprocess.CompletedProcess(words, status, out, err)

    def _server(self, after: tuple[str, ...]) -> subprocess.Popen[str]:
        """The process to fork from."""
        if after not in self._servers:
            command = [sys.executable, "-X", "utf8", __file__, *after]
            environment = os.environ | {"COLUMNS": "200", "TERM": "dumb"}
            self._servers[after] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        return self._servers[after]


def _serve(names: list[str]) -> None:
    """Import the modules, then fork a process for each line of standard input, and print how it ended."""
    # A tenth of the time of imports would go into looking for garbage.
    gc.disable()
    for name in names:
        import_module(name)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        process = os.fork()
        if not process:
            _become(json.loads(line))
        _, status = os.waitpid(process, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _become(task: dict[str, Any]) -> None:
    """Be the program's process."""
    for stream, path in enumerate([os.devnull, *task["printed"]]):
        os.dup2(os.open(path, os.O_RDONLY if not stream else os.O_WRONLY | os.O_CREAT), stream)
    # Also where a shell has started the tests in the background, with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = task["words"]
    if task["warned"]:
        warnings.simplefilter(task["warned"])
    status = 0
    try:
        exec(compile(task["program"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:
        # What an interpreter does with an error that nobody caught.
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    # The folder of the tests is no place to import from.
    del sys.path[0]
    _serve(sys.argv[1:])
