"""Faults of how files and folders are written."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "say in the system's words that a file is in the place of a folder",
        "records/files.py",
        "except (FileExistsError, NotADirectoryError):",
        "except ():",
        "tests/records/test_locks.py",
    ),
    Fault(
        "take a mark before UTF-8 for a part of the text",
        "records/texts.py",
        "utf-8-sig",
        "utf-8",
        "lab/tests/audit/test_records.py",
    ),
    Fault(
        "flush what may be read alone",
        "records/files.py",
        "path.open(_MAY_FLUSH)",
        'path.open("rb")',
        "tests/records/test_atomic.py",
    ),
    Fault("rename to a folder", "records/files.py", "folder.rmdir()", "pass", "tests/records/test_atomic.py"),
    Fault(
        "write a folder in its place",
        "records/files.py",
        "        yield temporary\n        for path",
        "        temporary.rename(folder)\n        yield folder\n        folder.rename(temporary)\n        for path",
        "tests/records/test_atomic.py tests/hf/test_saving_refusals.py",
    ),
    Fault(
        "name a temporary file by its process alone",
        "records/files.py",
        "{uuid4().hex}",
        "{os.getpid()}",
        "tests/records/test_atomic.py",
    ),
    Fault(
        "leave a temporary file after an early end",
        "records/files.py",
        "            temporary.unlink()\n",
        "            pass\n",
        "tests/records/test_atomic.py",
    ),
    Fault(
        "leave a full disk to the system's words",
        "records/files.py",
        "if number is None:",
        "if True:",
        "tests/records/test_atomic.py",
    ),
    Fault(
        "let a schema take fields that nobody knows",
        "lab/records/schema.py",
        '"additionalProperties": False,',
        '"additionalProperties": True,',
        "lab/tests/report/test_twin.py",
    ),
    Fault(
        "take a plan whose divergence is negative",
        "kv_cache/layer_plans.py",
        "    kl: Annotated[float, Ge(0)]  # measured",
        "    kl: float  # measured",
        "lab/tests/kv_audit/test_planning.py lab/tests/kv_audit/test_plans.py",
    ),
    Fault(
        "read texts for numbers, and fields that nobody knows",
        "records/json_files.py",
        'ConfigDict(strict=True, extra="forbid", ',
        "ConfigDict(",
        "tests/records/test_fields.py",
    ),
    Fault(
        "take whole numbers that no tensor holds",
        "records/json_files.py",
        '{"lt": _LARGEST, "gt": -_LARGEST, **schema}',
        "schema",
        "tests/records/test_fields.py",
    ),
    Fault(
        "take infinity where a number is wanted",
        "records/json_files.py",
        "allow_inf_nan=not finite",
        "allow_inf_nan=True",
        "tests/records/test_fields.py",
    ),
    Fault(
        "let the threads of a process into each other's folder",
        "records/files.py",
        "is_singleton=True,",
        "is_singleton=True, thread_local=False,",
        "tests/records/test_locks.py",
    ),
    Fault(
        "refuse a thread what it holds",
        "records/files.py",
        "is_singleton=True,",
        "",
        "tests/records/test_locks.py",
    ),
    Fault(
        "free a folder at the end of the inner of two holds",
        "records/files.py",
        "is_last = lock.lock_counter == 1",
        "is_last = True",
        "tests/records/test_locks.py",
    ),
    Fault(
        "fail where who held a folder has just removed it",
        "records/files.py",
        "            continue\n",
        "            raise\n",
        "tests/records/test_locks.py",
    ),
    Fault(
        "let passages share paragraphs",
        "records/texts.py",
        "dict.fromkeys(paragraph for paragraph in paragraphs if paragraph)",
        "[paragraph for paragraph in paragraphs if paragraph]",
        "lab/tests/kv_audit/test_figures.py",
    ),
)
