"""The tensors of a training as a checkpoint holds them: whole, in one safetensors file that the first process writes.

Processes have them whole, or sharded (fully_shard) over all. Numbers are plain bytes, and names, shapes and dtypes are
held against the model's before any is given: nothing in the file can run code.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from linattn.processes import Processes

FILE = "tensors.safetensors"
"""The file's name in a checkpoint's folder."""

_MODEL, _BEST, _OPTIMIZER, _RANDOM = "model.", "best.", "optimizer.", "random"
# AdamW's state of a weight, but for its count of steps.
_MOMENTS, _STEP = ("exp_avg", "exp_avg_sq"), "step"
# Names that an error repeats.
_SHOWN = 5


def held(model: nn.Module, optimizer: torch.optim.Optimizer, best: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors by name: weights, best weights, what the optimiser keeps of each, and the random numbers' state."""
    # First, for it shards again what the last pass has gathered.
    weights = model.state_dict()
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = ((names[weight], what, x) for weight, state in optimizer.state.items() for what, x in state.items())
    return {
        **{f"{_MODEL}{name}": x for name, x in weights.items()},
        **{f"{_BEST}{name}": x for name, x in best.items()},
        **{f"{_OPTIMIZER}{name}.{what}": x for name, what, x in moments},
        _RANDOM: torch.get_rng_state(),
    }


def put(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes
) -> dict[str, Tensor]:
    """Give a model and an optimiser what `held` took of them, or on no process any; the best weights."""
    processes.all_do(lambda: _check_values(tensors, model, optimizer))
    model.load_state_dict(_under(_MODEL, tensors))
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for place, x in _under(_OPTIMIZER, tensors).items():
        name, _, what = place.rpartition(".")
        optimizer.state[parameters[name]][what] = x
    torch.set_rng_state(tensors[_RANDOM])
    return _under(_BEST, tensors)


def read(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of a folder, or this process's parts of them, laid out as the model's; checked before they are."""
    path, alike = folder / FILE, _alike(model, optimizer)
    try:
        stored = load_file(path, device="cpu")
    # The last kind: dtypes that safetensors knows, and its reader for torch does not.
    except (SafetensorError, FileNotFoundError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove {folder} to go on from the one before it") from None
    _check(stored, alike, str(path))
    # The best weights wait where there is most memory.
    return {name: _laid_out(x, alike[name], "cpu" if name.startswith(_BEST) else None) for name, x in stored.items()}


def write(folder: Path, tensors: Mapping[str, Tensor], processes: Processes) -> None:
    """Write tensors into a folder, by the first process, which gathers those that are sharded; errors are all's."""
    # All make the same collectives; what all have whole is the first one's to write.
    whole = {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for name, x in tensors.items()}
    processes.first_does(lambda: _write(folder, whole))


def _write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """The file."""
    seen: set[int] = set()
    apart = {}
    for name, x in tensors.items():
        x = x.cpu().contiguous()
        place = x.untyped_storage().data_ptr()
        # Tied weights share memory; the file holds each by itself.
        apart[name] = x.clone() if place in seen else x
        seen.add(place)
    try:
        save_file(apart, folder / FILE)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    except KeyError as error:
        raise ValueError(f"no checkpoint keeps tensors of {error}; take another dtype") from error


def _laid_out(x: Tensor, like: Tensor, device: str | None) -> Tensor:
    """A copy of a tensor, or of this process's part of it, laid out as another is."""
    room = torch.empty_like(like, device=device or like.device)
    with torch.no_grad():
        if isinstance(room, DTensor):
            (chunk,) = room.__create_chunk_list__()
            at = (slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            room.to_local().copy_(x[tuple(at)])
        else:
            room.copy_(x)
    return room


def _alike(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A tensor of the shape, dtype and layout of each that `held` may take of a model and an optimiser."""
    weights = model.state_dict()
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: weight for name, weight in model.named_parameters() if weight in trained}
    count = torch.zeros((), dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32)
    return {
        **{f"{kind}{name}": x for kind in (_MODEL, _BEST) for name, x in weights.items()},
        **{f"{_OPTIMIZER}{name}.{what}": weight for name, weight in parameters.items() for what in _MOMENTS},
        **{f"{_OPTIMIZER}{name}.{_STEP}": count for name in parameters},
        _RANDOM: torch.get_rng_state(),
    }


def _check(tensors: Mapping[str, Tensor], alike: Mapping[str, Tensor], place: str) -> None:
    """Refuse other names, shapes and dtypes than a model's and an optimiser's."""
    # Of weights without a gradient so far the optimiser keeps nothing.
    begun = {name.rpartition(".")[0] for name in tensors if name.startswith(_OPTIMIZER)}
    wanted = {
        name: x for name, x in alike.items() if not name.startswith(_OPTIMIZER) or name.rpartition(".")[0] in begun
    }
    wrong = [f"{name} is missing" for name in wanted.keys() - tensors.keys()]
    wrong += [f"{name} is surplus" for name in tensors.keys() - wanted.keys()]
    for name in tensors.keys() & wanted.keys():
        got, want = ((x.dtype, tuple(x.shape)) for x in (tensors[name], wanted[name]))
        if got != want:
            wrong.append(f"{name} is {got[0]} {list(got[1])}, wanted {want[0]} {list(want[1])}")
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"{place} holds other tensors than this model and optimiser: {', '.join(sorted(wrong)[:_SHOWN])}{more}; go "
            "on with those that it was written of, or remove it to begin anew"
        )


def _check_values(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what a model, an optimiser or torch's random numbers would not take."""
    _check(tensors, _alike(model, optimizer), "the checkpoint")
    try:
        torch.Generator().set_state(tensors[_RANDOM])
    except RuntimeError as error:
        raise ValueError(
            f"the checkpoint's state of random numbers is none ({error}); remove it to go on from the one before"
        ) from None


def _under(place: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(place): x for name, x in tensors.items() if name.startswith(place)}
