"""The files of a checkpoint's tensors: one of safetensors for each process that has any, and a record of what is where.

A tensor that is sharded over processes is stored in parts, each a box of it. Numbers are plain bytes, all else is JSON
that is checked field by field: nothing in these files can run code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from linattn.processes import Processes
from linattn.records.fields import Reading, to_json
from linattn.records.json_files import read_record, write_json
from linattn.training.parts import Part, Stored

RECORD = "tensors.json"
_KIND, _VERSION = "record of a checkpoint's tensors", 1
# Names of dtypes in a shard's header.
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}


def write(folder: Path, tensors: Mapping[str, Tensor], processes: Processes) -> None:
    """Write tensors into a folder: of sharded ones each process its parts, all others the first.

    An error of one process is raised on all.

    Raises:
        OSError: a file could not be written.
        ValueError: a tensor's dtype is none of safetensors, or its processes' parts overlap or leave gaps.
    """
    parts = {name: _own_part(x, processes.rank) for name, x in tensors.items()}
    parts = {name: part for name, part in parts.items() if not part.is_empty}
    every = processes.gather({name: part for name, part in parts.items() if _is_written(tensors[name], processes)})
    processes.all_do(lambda: _write(folder, tensors, every, processes))


def read_stored(folder: Path) -> Mapping[str, Stored]:
    """Read the record: dtype, shape and parts of each tensor. ValueError for any other file."""
    path, remedy = folder / RECORD, _remedy(folder)
    try:
        record = Reading(str(path), remedy).record(_Record, read_record(path, _KIND, _VERSION, remedy))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {remedy}") from None
    for name, one in record.tensors.items():
        if one.dtype not in _BY_NAME:
            raise ValueError(
                f"{path}: dtype of {name} must be one of {', '.join(_BY_NAME)}, got {one.dtype[:40]!r}; {remedy}"
            )
    return {name: Stored(_BY_NAME[one.dtype], one.shape, one.parts) for name, one in record.tensors.items()}


def check_files(folder: Path, stored: Mapping[str, Stored]) -> None:
    """Refuse parts that are not each number of a tensor once, and shards that hold others than the record says.

    No tensor is read. Raises ValueError.
    """
    for name, one in stored.items():
        wrong = one.wrong()
        if wrong:
            raise ValueError(f"{folder / RECORD}: the parts of {name} {wrong}; {_remedy(folder)}")
    for process, parts in _by_process(stored).items():
        wanted = {name: (_DTYPES[stored[name].dtype], list(part.shape)) for name, part in parts.items()}
        with _opened(folder, process) as shard:
            names = shard.keys()
            slices = {name: shard.get_slice(name) for name in names}
            got = {name: (one.get_dtype(), list(one.get_shape())) for name, one in slices.items()}
        for name in sorted(got.keys() | wanted.keys()):
            if got.get(name) != wanted.get(name):
                raise ValueError(
                    f"{folder / _shard(process)} holds {name} as {got.get(name)}, and {RECORD} says "
                    f"{wanted.get(name)}; {_remedy(folder)}"
                )


def fill_(rooms: Mapping[str, Tensor], folder: Path, stored: Mapping[str, Stored]) -> None:
    """Read this process's parts into tensors of the stored shapes and dtypes, laid out in any way."""
    for process, parts in _by_process({name: stored[name] for name in rooms}).items():
        with _opened(folder, process) as shard, torch.no_grad():
            for name, part in parts.items():
                room = _own_part(rooms[name])
                both = room.overlap(part)
                if not both.is_empty:
                    _local(rooms[name])[both.within(room)] = shard.get_tensor(name)[both.within(part)]


@dataclass(frozen=True)
class _StoredRecord:
    """A `Stored` as the JSON file has it, its dtype by name."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class _Record:
    """The JSON file."""

    tensors: Mapping[str, _StoredRecord]


def _write(folder: Path, tensors: Mapping[str, Tensor], every: list[dict[str, Part]], processes: Processes) -> None:
    """This process's file, and of the first one the record."""
    stored = {name: _stored(x, [parts[name] for parts in every if name in parts]) for name, x in tensors.items()}
    for name, one in stored.items():
        wrong = f"are of {one.dtype}" if one.dtype not in _DTYPES else one.wrong()
        if wrong:
            raise ValueError(f"{name} cannot be kept in a checkpoint: its parts {wrong}; take another dtype or layout")
    parts_here = _by_process(stored).get(processes.rank)
    if parts_here:
        try:
            save_file(_apart({name: _local(tensors[name]) for name in parts_here}), folder / _shard(processes.rank))
        except SafetensorError as error:
            raise OSError(str(error)) from error
    if processes.is_first:
        record = _Record({name: _StoredRecord(_name(x.dtype), x.shape, x.parts) for name, x in stored.items()})
        write_json(folder / RECORD, {"kind": _KIND, "version": _VERSION, **to_json(record)})


def _is_written(x: Tensor, processes: Processes) -> bool:
    """Whether this process may write what it has of a tensor: what all have whole is the first one's to write."""
    return processes.is_first or isinstance(x, DTensor)


def _stored(x: Tensor, parts: list[Part]) -> Stored:
    """A tensor's place; of processes that hold the same part the first one writes it."""
    first = {(part.offset, part.shape): part for part in reversed(parts)}
    return Stored(x.dtype, tuple(x.shape), tuple(sorted(first.values(), key=lambda part: part.process)))


def _own_part(x: Tensor, process: int = 0) -> Part:
    """The box of a tensor that is on this process."""
    if isinstance(x, DTensor):
        (chunk,) = x.__create_chunk_list__()
        return Part(process, tuple(chunk.offsets), tuple(chunk.sizes))
    return Part(process, (0,) * x.ndim, tuple(x.shape))


def _local(x: Tensor) -> Tensor:
    """The numbers of a tensor that are on this process."""
    return x.to_local().detach() if isinstance(x, DTensor) else x.detach()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, copied where two share memory, as tied weights do: a file holds each by itself."""
    seen: set[int] = set()
    apart = {}
    for name, x in tensors.items():
        x = x.cpu().contiguous()
        place = x.untyped_storage().data_ptr()
        apart[name] = x.clone() if place in seen else x
        seen.add(place)
    return apart


def _by_process(stored: Mapping[str, Stored]) -> dict[int, dict[str, Part]]:
    """The parts in each process's file, by the tensor's name."""
    shards: dict[int, dict[str, Part]] = {}
    for name, one in stored.items():
        for part in one.parts:
            shards.setdefault(part.process, {})[name] = part
    return shards


@contextmanager
def _opened(folder: Path, process: int) -> Iterator[Any]:
    """A process's file; ValueError if it is missing, or none of safetensors."""
    path = folder / _shard(process)
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {_remedy(folder)}") from None


def _shard(process: int) -> str:
    """The name of a process's file: it comes from no file, so it leads nowhere else."""
    return f"shard-{process:05}.safetensors"


def _name(dtype: torch.dtype) -> str:
    """A dtype as a record has it."""
    return str(dtype).removeprefix("torch.")


def _remedy(folder: Path) -> str:
    """The end of an error about a checkpoint that cannot be read."""
    return f"remove {folder} to go on from the checkpoint before it"
