"""Faults of how files and folders are written."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "take numbers that no count or error has",
        "records/fields.py",
        "if value is not None and not value >= number:",
        "if False:",
        "tests/records/test_fields.py",
    ),
    Fault(
        "write a folder in its place",
        "records/atomic.py",
        "            yield temporary\n            for path",
        "            temporary.rename(folder)\n            yield folder\n            folder.rename(temporary)\n"
        "            for path",
        "tests/records/test_atomic.py tests/hf/test_saving_refusals.py",
    ),
    Fault(
        "name a temporary file by its process alone",
        "records/atomic.py",
        "{uuid4().hex}",
        "{os.getpid()}",
        "tests/records/test_atomic.py",
    ),
    Fault(
        "leave a temporary file after an early end",
        "records/atomic.py",
        "        temporary.unlink(missing_ok=True)\n",
        "",
        "tests/records/test_atomic.py",
    ),
    Fault(
        "leave a full disk to the system's words",
        "records/atomic.py",
        "if number is None:",
        "if True:",
        "tests/records/test_atomic.py",
    ),
    Fault(
        "let two processes into a folder",
        "records/locks.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "tests/records/test_locks.py",
    ),
    Fault(
        "lock a file that is no longer there",
        "records/locks.py",
        "if os.path.samestat(os.fstat(file.fileno()), path.stat()):",
        "if True:",
        "tests/records/test_locks.py",
    ),
    Fault(
        "let the threads of a process into each other's folder",
        "records/locks.py",
        "mine = folder, threading.get_ident()",
        "mine = folder, 0",
        "tests/records/test_locks.py",
    ),
    Fault(
        "let a schema take fields that nobody knows",
        "records/schema.py",
        '"additionalProperties": False,',
        '"additionalProperties": True,',
        "lab/tests/report/test_twin.py",
    ),
    Fault(
        "describe a tuple of two as a list of any length",
        "records/schema.py",
        "if origin is tuple and Ellipsis not in options:",
        "if origin is tuple and not options:",
        "lab/tests/report/test_twin.py",
    ),
    Fault(
        "take 1.0 for the version 1",
        "records/fields.py",
        "value == one and type(value) is type(one)",
        "value == one",
        "lab/tests/report/test_twin.py",
    ),
)
