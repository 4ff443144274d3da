"""The tensors of a training as a checkpoint holds them: whole on every process, or sharded (fully_shard) over all.

A checkpoint is one of torch.distributed.checkpoint, which knows no layout: sharded tensors are written by all processes
and read by any number of them, sharded or not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

_MODEL, _BEST, _OPTIMIZER, _RANDOM = "model.", "best.", "optimizer.", "random"


def is_sharded(model: nn.Module) -> bool:
    """Whether processes hold parts of the weights."""
    return any(isinstance(weight, DTensor) for weight in model.parameters())


def held(model: nn.Module, optimizer: torch.optim.Optimizer, best: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors by name: weights, best weights, what the optimiser keeps of each, and the random numbers' state."""
    # First, for it shards again what the last pass has gathered.
    weights = model.state_dict()
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        **{f"{_MODEL}{name}": x for name, x in weights.items()},
        **{f"{_BEST}{name}": x for name, x in best.items()},
        **{
            f"{_OPTIMIZER}{names[parameter]}.{what}": x
            for parameter, kept in optimizer.state.items()
            for what, x in kept.items()
        },
        _RANDOM: torch.get_rng_state(),
    }


def put(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Give a model and an optimiser what `held` took of them; the best weights."""
    model.load_state_dict(_under(_MODEL, tensors))
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for place, x in _under(_OPTIMIZER, tensors).items():
        name, _, what = place.rpartition(".")
        optimizer.state[parameters[name]][what] = x
    torch.set_rng_state(tensors[_RANDOM])
    return _under(_BEST, tensors)


def write(folder: Path, tensors: Mapping[str, Tensor], *, together: bool) -> None:
    """Write tensors into a folder, by all processes together or by this one.

    Raises:
        OSError: a file could not be written.
    """
    try:
        with _knowingly_alone():
            save(dict(tensors), checkpoint_id=folder, no_dist=not together)
    except CheckpointException as error:
        # No Exception, and what it is about is within.
        (cause, _), *_ = error.failures.values()
        raise OSError(f"{cause}") from error


def read(folder: Path, model: nn.Module, *, together: bool) -> dict[str, Tensor]:
    """The tensors that `write` wrote, laid out as those of this model are."""
    found, weights = {}, model.state_dict()
    for name, stored in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        found[name] = _room(name, stored, weights)
    with _knowingly_alone():
        load(found, checkpoint_id=folder, no_dist=not together)
    return found


def _room(name: str, stored: TensorStorageMetadata, weights: Mapping[str, Tensor]) -> Tensor:
    """A tensor to be filled, sharded where the weight that it belongs to is."""
    kind, _, place = name.partition(".")
    weight = weights.get(place, weights.get(place.rpartition(".")[0]))
    dtype = stored.properties.dtype
    # An optimiser's count of steps is a number, whatever the weight.
    if weight is None or weight.shape != stored.size:
        return torch.empty(stored.size, dtype=dtype)
    return torch.empty_like(weight, dtype=dtype, device="cpu" if kind == _BEST[:-1] else weight.device)


@contextmanager
def _knowingly_alone() -> Iterator[None]:
    """Without torch's warning that one process writes or reads alone, which it was told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _under(place: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(place): x for name, x in tensors.items() if name.startswith(place)}
