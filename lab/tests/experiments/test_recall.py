"""Claims about recall: the networks, the bytes they keep, and what the figures say, or would if they were others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from linattn_lab.experiments import EXPERIMENTS
from linattn_lab.experiments.experiment import EXACT
from linattn_lab.experiments.inputs import generator
from linattn_lab.experiments.recall import a_fixed_state_bounds_recall as fixed
from linattn_lab.experiments.recall import a_gate_helps_after_overwriting as gate
from linattn_lab.experiments.recall import a_window_does_not_help_recall as window
from linattn_lab.experiments.recall._networks import (
    ALONE,
    BESIDE,
    HEAD_DIM,
    LARGE,
    METHODS,
    SMALL,
    TRAINED,
    TRAINED_GATED,
    WIDTH,
    _take_over,
    measured_bytes,
    state_bytes,
    untrained,
)
from linattn_lab.experiments.recall._task import Recall, sequences

NAMES = [name for name, one in EXPERIMENTS.items() if ".recall." in one.__name__]
TASK = Recall(32, 40, 8)
# A process takes each experiment's figures once.
IN_ONE_PROCESS = pytest.mark.xdist_group("figures of recall")


def network(method, run=0):
    """A network with random weights, in float64."""
    return untrained(method, TASK.vocab_size, run).double()


@pytest.mark.parametrize("method", METHODS)
def test_streams_cut_anywhere_give_what_the_whole_gives(method):
    shown = sequences(TASK, 2, generator("test", "streams"))
    one = network(method)
    with torch.no_grad():
        whole = one(shown.tokens, shown.places)
        logits, state = one.forward_with_state(shown.tokens[:, :13])
        parts = [logits]
        for token in shown.tokens[:, 13:].split(9, 1):
            logits, state = one.forward_with_state(token, state)
            parts.append(logits)
    found = torch.cat(parts, 1).gather(1, shown.places.unsqueeze(-1).expand_as(whole))
    # A thousand roundings of numbers of size one.
    assert (found - whole).abs().max() < 1e3 * 2**-52 * whole.abs().max().clamp(min=1)


def test_bytes_are_those_of_all_tensors_of_the_streams():
    tokens = sequences(TASK, 1, generator("test", "bytes")).tokens[:, : TASK.context_size]
    for method in (EXACT, SMALL, BESIDE):
        _, state = untrained(method, TASK.vocab_size, 0).forward_with_state(tokens)
        found = 0
        for layer in state:
            kept = layer.stream.kept
            held = [kept.key, kept.value] if method == EXACT else [kept.S, kept.z, kept.m]
            if method == BESIDE:
                held += kept.window.recent
            found += sum(x.numel() * x.element_size() for x in (*held, layer.before, layer.stream.num_tokens))
        assert state_bytes(state) == found == measured_bytes(method, TASK)


def test_a_cache_grows_with_the_context_and_a_state_does_not():
    longer = replace(TASK, num_tokens=80, num_pairs=12)
    # Two layers, a key and a value in float32 for each of the tokens more.
    more = 2 * 2 * HEAD_DIM * 4 * (longer.context_size - TASK.context_size)
    assert measured_bytes(EXACT, longer) - measured_bytes(EXACT, TASK) == more
    for method in (SMALL, TRAINED, TRAINED_GATED, ALONE):
        assert measured_bytes(method, longer) == measured_bytes(method, TASK)
    # S, z and m of 48 features more in both layers.
    assert measured_bytes(LARGE, TASK) - measured_bytes(SMALL, TASK) == 2 * 4 * 48 * (HEAD_DIM + 2)
    assert measured_bytes(TRAINED_GATED, TASK) == measured_bytes(TRAINED, TASK)


def test_nothing_from_beyond_the_reach_of_a_window_enters():
    one = network(ALONE)
    tokens = torch.arange(64).remainder(32).unsqueeze(0)
    held = []
    one.embedding.register_forward_hook(lambda module, inputs, out: held.append(out))
    for place in (41, 48, 63):
        (grad,) = torch.autograd.grad(one(tokens, torch.tensor([[place]])).square().sum(), held[-1])
        # What the map beside the window weighs is e^-400 of a key's weight.
        seen = (grad[0].abs().amax(-1) > 1e-100).nonzero()
        task = sequences(TASK, 1, generator("test", "reach"))
        for shown in range(place):
            asked = task._replace(places=torch.tensor([[place]]), shown=torch.tensor([[shown]]))
            assert window.reached(asked)[1].item() == (shown < seen.min().item())


def test_a_window_holds_its_own_block_and_the_one_before():
    task = sequences(TASK, 1, generator("test", "reach"))
    within = [
        window.reached(task._replace(places=torch.tensor([[place]]), shown=torch.tensor([[shown]])))[0].item()
        for place, shown in ((47, 32), (47, 31), (48, 40), (48, 39), (3, 0))
    ]
    assert within == [True, False, True, False, True]


def test_other_networks_weights_are_refused():
    with pytest.raises(ValueError, match="in maps and gates alone"):
        _take_over(network(EXACT), network(SMALL))
    begun = network(SMALL, run=1)
    _take_over(begun, network(EXACT))
    assert torch.equal(begun.embedding.weight, network(EXACT).embedding.weight)
    assert begun.embedding.weight.shape == (TASK.vocab_size, WIDTH)


@pytest.mark.parametrize("size", ["QUICK", "FULL"])
def test_all_claims_go_on_from_the_same_networks(size):
    trainings = [getattr(EXPERIMENTS[name], size).training for name in NAMES]
    assert len({replace(training, is_overwritten=False, tuning=0) for training in trainings}) == 1


def _falls_alike(row):
    """Softmax attention that loses as much."""
    return 0.5 if row.series in (fixed.LOST, fixed.EXACT_LOST) else None


def _more_recall_less(row):
    """More features that recall less."""
    return -0.5 if row.series == fixed.MORE else None


def _gate_forgets(row):
    """A gate that forgets what is asked for."""
    return -0.5 if row.series == gate.GAINED else None


def _gate_alike(row):
    """A gate that changes nothing."""
    return 0.0 if row.series == gate.GAINED else None


def _window_recalls_all(row):
    """A window under which the map recalls everything."""
    return {window.GAINED: 1.0, window.LACKED: 0.5}.get(row.series)


def _as_many_bytes(row):
    """Accuracy that follows the bytes."""
    return min(row.x / 1e5, 1.0)


# Experiment, its verdict, the verdict of doctored rows, how each value is doctored.
CASES = [
    ("a-fixed-state-bounds-recall", "holds", "fails", _falls_alike),
    ("a-fixed-state-bounds-recall", "holds", "fails", _more_recall_less),
    ("a-gate-helps-after-overwriting", "holds", "fails", _gate_forgets),
    ("a-gate-helps-after-overwriting", "holds", "undecided", _gate_alike),
    ("a-window-does-not-help-recall", "holds", "fails", _window_recalls_all),
    ("bytes-decide-recall", "fails", "undecided", _as_many_bytes),
]


@pytest.mark.claims
@IN_ONE_PROCESS
def test_the_figures_decide(taken, decided, doctored) -> None:
    # One test for all cases: they share networks, which every process trains for itself.
    found = [
        (name, decided(name, taken(name)), decided(name, doctored(taken(name), new_value)), new_value)
        for name, _, _, new_value in CASES
    ]
    assert found == CASES


@pytest.mark.claims
@IN_ONE_PROCESS
def test_a_law_of_bytes_is_seen(taken, decided) -> None:
    rows = [replace(row, value=row.x, standard_error=1.0) for row in taken("bytes-decide-recall")]
    assert decided("bytes-decide-recall", rows) == "holds"
