"""Jobs of ranks, and of one process: audits and conversions, whose parts are dealt out where there are several."""

from __future__ import annotations

import copy
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from linattn.convert import Conversion, ConvertConfig, convert_
from linattn.convert.distilling import distil
from linattn.convert.samples import from_batches
from linattn.convert.transfer import transfer
from linattn.hf import LoadedModel, linearize_, load
from linattn.hf.layer_attention import attention_of
from linattn.methods.method import parse_method
from linattn.processes import Processes
from linattn.training import Steps, Training, train
from linattn_lab.audit.grid import AuditGrid
from linattn_lab.audit.measuring import Audit
from linattn_lab.audit.records import AuditRow, LengthsRow, TimeRow
from linattn_lab.kv_audit.measuring import MemoryAudit
from linattn_lab.kv_audit.records import MemoryRow
from linattn_lab.texts import Text

METHODS = ("FavorPlus", "Centred(Taylor(order=1))", "Expansion(num_centres=2) + window 4")


def audited(mesh: DeviceMesh | None, folder: Path, prose: str) -> list[AuditRow]:
    """The rows of an audit, but for times."""
    loaded, text = load(str(folder)), Text("a half", " ".join(prose.split()[:32]))
    grid = AuditGrid(tuple(map(parse_method, METHODS)), (8,), 2, 0)
    with mock.patch("linattn_lab.audit.paying._MOST_TOKENS", 64):
        rows = list(Audit(loaded, text, grid, num_tokens=32).rows())
    return [row for row in rows if not isinstance(row, TimeRow | LengthsRow)]


def memory_audited(
    mesh: DeviceMesh | None, loaded: LoadedModel, text: Text, budget: int, **sizes: Any
) -> list[MemoryRow]:
    """The rows of an audit of a bounded KV cache, without torch's profiler, and with short greedy texts."""
    figures = "linattn_lab.kv_audit.passage_figures"
    with mock.patch(f"{figures}.peak_bytes", return_value=0), mock.patch(f"{figures}.NUM_WRITTEN", 16):
        return list(MemoryAudit(loaded, {"text": text}, [budget], **sizes).rows())


def converted(mesh: DeviceMesh | None, folder: Path, written: str) -> tuple[Conversion, dict[str, Tensor]]:
    """A conversion by a clock that is looked at as often on every process, and the weights it leaves."""
    model, ticks = load(str(folder)).model, count(0.0, 0.5)
    draw = torch.Generator().manual_seed(1)
    batches = [{"input_ids": torch.randint(3, 40, (4, 12), generator=draw)} for _ in range(16)]
    config = ConvertConfig(written, minutes=0.2, learning_rate=1e-3)
    with mock.patch("linattn.training.loop.time", SimpleNamespace(perf_counter=lambda: next(ticks))):
        found = convert_(model, batches, config)
    return found, model.state_dict()


def step_gradients(mesh: DeviceMesh | None, folder: Path, name: str) -> dict[str, Tensor]:
    """The gradients of a step of a training in float64, averaged over the processes; texts of several lengths."""
    model, processes = load(str(folder)).model.double(), Processes.of_this_run()
    teacher = copy.deepcopy(model)
    layers = linearize_(model, method="LearnedExponential(num_features=8)").replaced
    maps = [attention_of(model.get_submodule(layer.module_name)).feature_map.double() for layer in layers]
    draw = torch.Generator().manual_seed(1)
    mask = (torch.arange(12) < torch.tensor([[12], [5], [9], [4]])).long()
    batches = [{"input_ids": torch.randint(3, 40, (4, 12), generator=draw), "attention_mask": mask} for _ in range(16)]
    samples = from_batches(batches, seed=0)
    if name == "transfer":
        training = transfer(model, maps, layers, teacher, samples, seconds=1.0, learning_rate=1.0)
    else:
        weights = list(model.parameters()), 1.0
        training = distil(model, weights, maps, teacher, samples, seconds=1.0, map_learning_rate=1.0)
    training.loss(0).backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    processes.average_(grads.values())
    return grads


def trained_apart(mesh: DeviceMesh | None) -> list[list[float]]:
    """Weights after a training in which each process's loss reaches another one, as an expert; the last early alone."""
    aims = 1.0, -2.0
    experts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (3, 2, 1)])
    processes = Processes.of_this_run()

    def loss(step: int) -> Tensor:
        shares = range(2) if processes.size == 1 else [processes.rank % 2]
        total = sum((experts[n] - aims[n]).square().sum() for n in shares) / len(shares)
        # Steps of a weight without a gradient are none, whatever those before were.
        return total + (experts[2] - 1).square().sum() if step < 20 else total

    def validate() -> float:
        return sum(float((experts[n].detach() - aims[n]).square().sum()) for n in range(2))

    train(Training("experts", experts, [(list(experts), 0.05)], loss, validate, Steps(40)), None, lambda *_: None)
    return [expert.tolist() for expert in experts]
