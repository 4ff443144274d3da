"""Jobs of ranks: layers and language models on parts of sequences, held against whole ones."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from layers import HEAD_DIM, LAYERS, VOCABULARY, hybrid, linear, softmax, text, tokens
from linattn.feature_maps import FavorPlus, LearnedExponential
from linattn.nn import Block, LinearLM, RedrawSchedule
from linattn.parallel import ContextParallel
from linattn.positions import ForgetGate, Rotary
from split_calls import difference, own_part, summed

LENGTH = 23


def layer_errors(
    mesh: DeviceMesh, kind: str, is_causal: bool, masked: bool, lengths: tuple[int, ...], **how: bool
) -> dict[str, float]:
    """How far a layer's rows and gradients on this rank's part are from the whole layer's."""
    layer = LAYERS[kind](is_causal=is_causal).double()
    x, grad = tokens(2, sum(lengths), seed=1).requires_grad_(), tokens(2, sum(lengths), seed=2)
    mask = (torch.arange(2 * sum(lengths)) * 7 % 11 < 8).view(2, -1) if masked else None
    split = parallelize_module(copy.deepcopy(layer), mesh, ContextParallel(**how))
    out = layer(x, key_mask=mask)
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    truths = torch.autograd.grad(out, [x, *weights], grad, materialize_grads=True)
    part = own_part(mesh, lengths)
    own = x[:, part].detach().clone().requires_grad_()
    found = split(own, key_mask=None if mask is None else mask[:, part])
    weights = [weight for weight in split.parameters() if weight.requires_grad]
    of_x, *grads = torch.autograd.grad(found, [own, *weights], grad[:, part], materialize_grads=True)
    errors = {"out": difference(found, out[:, part]), "x": difference(of_x, truths[0][:, part])}
    for number, (one, truth) in enumerate(zip(summed(grads, mesh), truths[1:], strict=True)):
        errors[f"weight {number}"] = difference(one, truth)
    return errors


def model() -> LinearLM:
    """A hybrid with every kind of exchange: states, a window's neighbours, gates, keys for softmax."""
    torch.manual_seed(5)
    layers = [
        linear(
            LearnedExponential(HEAD_DIM, 8).double(), positions=Rotary(HEAD_DIM, require_relative=False), is_causal=True
        ),
        linear(FavorPlus(HEAD_DIM, 8), window=2, gate=ForgetGate(12, 2).double(), is_causal=True),
        softmax(positions=Rotary(HEAD_DIM), is_causal=True),
    ]
    return LinearLM(VOCABULARY, [Block(layer) for layer in layers]).double()


def losses(
    mesh: DeviceMesh, over: str, steps: int, *, checkpointing: bool = False, sharded: bool = False
) -> list[float]:
    """The losses of a training over data, over sequences, over both, or of this rank alone."""
    parts = {"alone": (0, 1, 0, 1), "data": (*_place(mesh), 0, 1), "sequence": (0, 1, *_place(mesh))}
    if over == "both":
        parts["both"] = (*_place(mesh["data"]), *_place(mesh["sequence"]))
    row, rows, column, columns = parts[over]
    trained = model()
    trained.gradient_checkpointing = checkpointing
    if columns > 1:
        own = mesh["sequence"] if over == "both" else mesh
        parallelize_module(trained, own, {"blocks.*.attention": ContextParallel(equal_lengths=True)})
    if sharded:
        for block in trained.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(trained, mesh=mesh)
    optimizer, found = torch.optim.AdamW(trained.parameters(), lr=1e-2), []
    for step in range(steps):
        texts = text(2, 17, seed=step % 2)
        # Targets are shifted before they are split.
        inputs, targets = (x.chunk(rows)[row].chunk(columns, 1)[column] for x in (texts[:, :-1], texts[:, 1:]))
        logits = trained(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        whole = loss.detach().clone()
        if over != "alone":
            # fully_shard has averaged the gradients.
            averaged = [whole] if sharded else [whole, *(x.grad for x in trained.parameters())]
            for x, total in zip(averaged, summed(averaged, mesh), strict=True):
                x.copy_(total / mesh.size())
        optimizer.step()
        found.append(float(whole))
    return found


HEADS = ("q_proj", "k_proj", "v_proj")


def errors_of_split_heads(mesh: DeviceMesh, kind: str) -> dict[str, float]:
    """How far a layer whose heads torch's tensor parallelism splits is from the whole one, gradients too."""
    build = {"linear": lambda **how: linear(FavorPlus(HEAD_DIM, 8), **how), "softmax": softmax}[kind]
    torch.manual_seed(3)
    layer = build(positions=Rotary(HEAD_DIM), is_causal=True, qk_norm="rms").double()
    x, grad = tokens(2, LENGTH, seed=1).requires_grad_(), tokens(2, LENGTH, seed=2)
    plan = {**dict.fromkeys(HEADS, ColwiseParallel()), "o_proj": RowwiseParallel()}
    split = parallelize_module(copy.deepcopy(layer), mesh, plan)
    out, found = layer(x), split(x)
    truth, of_x = (torch.autograd.grad(y, x, grad)[0] for y in (out, found))
    return {"out": difference(found, out), "x": difference(of_x, truth)}


def refusal_of_heads_split_apart(mesh: DeviceMesh, kind: str, names: tuple[str, ...]) -> str:
    """Where some projections are split and others are not."""
    layer = {"linear": lambda **how: linear(FavorPlus(HEAD_DIM, 8), **how), "softmax": softmax}[kind]()
    split = parallelize_module(layer.double(), mesh, dict.fromkeys(names, ColwiseParallel()))
    try:
        split(tokens(2, LENGTH))
    except ValueError as error:
        return str(error)
    return "nothing refused"


def gradients_of_replicas(mesh: DeviceMesh) -> list[Tensor]:
    """Of torch's data parallelism over a hybrid, each rank with texts of its own, after a redraw of its maps."""
    trained = hybrid()
    torch.manual_seed(mesh.get_local_rank())
    parallel = nn.parallel.DistributedDataParallel(trained, process_group=mesh.get_group())
    texts = text(4, 9).chunk(mesh.size())[mesh.get_local_rank()]
    schedule = RedrawSchedule(parallel, every=1)
    for _ in range(2):
        parallel.zero_grad()
        nn.functional.cross_entropy(parallel(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten()).backward()
        schedule.step()
    # Copies: the reducer writes into these.
    return [parameter.grad.clone() for parameter in trained.parameters()]


def _place(mesh: DeviceMesh) -> tuple[int, int]:
    """Which of how many."""
    return (mesh.get_local_rank(), mesh.size()) if mesh.ndim == 1 else (0, 1)
