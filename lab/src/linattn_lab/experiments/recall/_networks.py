"""Small networks that recall, alike in all but what attends, and the bytes that their streams keep.

As Zoology's: two layers, no MLP, one head. As Based's linear layers, every layer has a causal convolution of width 3
before its attention, softmax layers too, so that keys can be told from the values after them without positions. The
embedding is also the head, and logits are computed where something is asked, nowhere else.

MQAR has a plateau, on which a network guesses among the values shown, and maps leave it late. So a softmax network is
trained first, on sequences of few and of many pairs in turn, and all others begin with its weights and are trained on
under their own attention, all for as many steps on the same sequences.

Letters: B sequences, P pairs, V size of the vocabulary, L tokens, E width of the network, D width of the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils import _pytree as pytree

from linattn.feature_maps import EluPlusOne, FavorPlus, FeatureMap, Hedgehog, LearnedExponential, Taylor
from linattn.nn import Attention, LinearAttention, SoftmaxAttention, Stream
from linattn.positions import ForgetGate
from linattn_lab.experiments.experiment import EXACT
from linattn_lab.experiments.inputs import generator, seed
from linattn_lab.experiments.recall._task import Recall, Sequences, sequences

WIDTH, HEAD_DIM, WINDOW, KERNEL = 32, 16, 8, 3
_BATCH, _TESTED = 32, 256
_RATE, _DECAY, _WARM_UP = 2e-2, 0.1, 20
# So small a factor on the weights of a map that nothing is left of them beside a key attended to exactly.
_NOTHING = -200.0


@dataclass(frozen=True)
class Training:
    """How networks are trained; of reduced size: Zoology's has V = 8,192, widths of 64 to 512 and 64 epochs.

    Attributes:
        vocab_size: V.
        pairs: numbers of pairs, of which each step takes the next; L is six times as many.
        steps: of softmax attention, from random weights.
        tuning: steps from its weights, of each network.
        runs: how often all of that is done, each time with other weights, maps and sequences.
        is_overwritten: whether half of the keys are given a second value; none is in the training of softmax attention.
    """

    vocab_size: int
    pairs: tuple[int, ...]
    steps: int
    tuning: int
    runs: int
    is_overwritten: bool = False

    def task(self, pairs: int) -> Recall:
        """The sequences of so many pairs: twice as many slots as queries."""
        updates = pairs // 2 if self.is_overwritten else 0
        return Recall(self.vocab_size, 6 * pairs + 2 * updates, pairs, updates)


QUICK_TRAINING = Training(64, (4, 8, 16), steps=350, tuning=80, runs=3)
FULL_TRAINING = Training(128, (4, 8, 16, 32), steps=800, tuning=400, runs=3)

Build = Callable[[int], Attention]


def _softmax(*, is_gated: bool = False) -> Build:
    """Exact attention."""

    def build(draw: int) -> Attention:
        """The layer."""
        gate = ForgetGate(WIDTH, 1) if is_gated else None
        return SoftmaxAttention(WIDTH, 1, head_dim=HEAD_DIM, is_causal=True, gate=gate)

    return build


def _linear(make: Callable[[int], FeatureMap], *, is_gated: bool = False, window: int | None = None) -> Build:
    """The attention of a map."""

    def build(draw: int) -> Attention:
        """The layer."""
        return LinearAttention(
            WIDTH,
            1,
            make(draw),
            head_dim=HEAD_DIM,
            is_causal=True,
            gate=ForgetGate(WIDTH, 1) if is_gated else None,
            window=window,
        )

    return build


def _favor(num_features: int) -> Callable[[int], FeatureMap]:
    """FAVOR+, which keeps its draw."""
    return lambda draw: FavorPlus(HEAD_DIM, num_features, seed=draw)


def _learned(num_features: int) -> Callable[[int], FeatureMap]:
    """The same, trained."""
    return lambda draw: LearnedExponential(HEAD_DIM, num_features, seed=draw)


def _nothing(draw: int) -> FeatureMap:
    """A map of one feature that weighs e^-400: what stands beside it is alone."""
    feature_map = LearnedExponential(HEAD_DIM, 1, seed=draw).requires_grad_(False)
    for exponents in (feature_map.of_query, feature_map.of_key):
        exponents.bias.fill_(_NOTHING)
    return feature_map


_SMALL = _learned(16)
PLAIN, TAYLOR = "EluPlusOne", "Taylor"
SMALL, LARGE, LARGEST = (f"LearnedExponential, {number} features" for number in (16, 64, 256))
BESIDE, ALONE = f"{SMALL}, window {WINDOW}", f"window {WINDOW} alone"
TRAINED, TRAINED_GATED = "Hedgehog", "Hedgehog, gated"
EXACT_GATED, HYBRID = f"{EXACT}, gated", f"softmax, then {SMALL}"
METHODS: dict[str, tuple[Build, Build]] = {
    EXACT: (_softmax(),) * 2,
    EXACT_GATED: (_softmax(is_gated=True),) * 2,
    PLAIN: (_linear(lambda draw: EluPlusOne(HEAD_DIM)),) * 2,
    "FavorPlus, 16 features": (_linear(_favor(16)),) * 2,
    "FavorPlus, 64 features": (_linear(_favor(64)),) * 2,
    "FavorPlus, 256 features": (_linear(_favor(256)),) * 2,
    SMALL: (_linear(_SMALL),) * 2,
    LARGE: (_linear(_learned(64)),) * 2,
    LARGEST: (_linear(_learned(256)),) * 2,
    TRAINED: (_linear(lambda draw: Hedgehog(HEAD_DIM)),) * 2,
    TRAINED_GATED: (_linear(lambda draw: Hedgehog(HEAD_DIM), is_gated=True),) * 2,
    TAYLOR: (_linear(lambda draw: Taylor(HEAD_DIM)),) * 2,
    f"{SMALL}, gated": (_linear(_SMALL, is_gated=True),) * 2,
    BESIDE: (_linear(_SMALL, window=WINDOW),) * 2,
    ALONE: (_linear(_nothing, window=WINDOW),) * 2,
    HYBRID: (_softmax(), _linear(_SMALL)),
}
"""What attends in both layers, by its name in the figures."""


class _Layer(nn.Module):
    """A convolution of each coordinate, then attention, added to what was given."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        # Begins as torch's own convolution, whose backward pass takes longer on a CPU than that of shifted sums.
        self.shifts, self.bias = (nn.Parameter(torch.empty(rows, WIDTH)) for rows in (KERNEL, 1))
        for parameter in (self.shifts, self.bias):
            nn.init.uniform_(parameter, -(KERNEL**-0.5), KERNEL**-0.5)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, E) -> (B, L, E)."""
        out: Tensor = x + self.attention(self._convolved(self.norm(x), None))
        return out

    def forward_with_state(self, x: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState]:
        """The next tokens of a stream, and what is kept after them."""
        normed = self.norm(x)
        before, stream = (None, None) if state is None else state
        attended = self.attention.forward_with_state(self._convolved(normed, before), stream)
        seen = normed if before is None else torch.cat((before, normed), 1)
        return x + attended.out, LayerState(seen[:, 1 - KERNEL :].clone(), attended.state)

    def _convolved(self, x: Tensor, before: Tensor | None) -> Tensor:
        """The convolution of tokens after two others, or after none."""
        seen = pad(x, (0, 0, KERNEL - 1, 0)) if before is None else torch.cat((before, x), 1)
        out: Tensor = self.bias
        for shift, weight in enumerate(self.shifts):
            out = out + weight * seen[:, shift : shift + x.shape[1]]
        return out


class LayerState(NamedTuple):
    """What a layer keeps of a stream: the last two tokens, for the convolution, and what attention keeps."""

    before: Tensor
    stream: Stream


class Network(nn.Module):
    """Tokens to logits of the values asked for."""

    def __init__(self, vocab_size: int, layers: tuple[Attention, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.layers = nn.ModuleList(map(_Layer, layers))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits after the tokens at some places: (B, L), (B, P) -> (B, P, V)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self._logits(x.gather(1, places.unsqueeze(-1).expand(-1, -1, WIDTH)))

    def forward_with_state(
        self, tokens: Tensor, state: tuple[LayerState, ...] | None = None
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """Logits (B, L, V) after a stream's next tokens (B, L), and what its layers keep."""
        x, after = self.embedding(tokens), []
        for place, layer in enumerate(self.layers):
            x, kept = cast(_Layer, layer).forward_with_state(x, None if state is None else state[place])
            after.append(kept)
        return self._logits(x), tuple(after)

    def _logits(self, x: Tensor) -> Tensor:
        """By the embedding."""
        return linear(self.norm(x), self.embedding.weight)


def state_bytes(state: tuple[LayerState, ...]) -> int:
    """Bytes of all tensors that a stream's layers keep."""
    return sum(x.nbytes for x in pytree.tree_leaves(state) if isinstance(x, Tensor))


@lru_cache(maxsize=128)
def measured_bytes(method: str, task: Recall) -> int:
    """Bytes kept after the context of one sequence: as many before training as after it."""
    shown = sequences(task, 1, generator("recall", "bytes")).tokens[:, : task.context_size]
    with torch.no_grad():
        _, state = untrained(method, task.vocab_size, 0).forward_with_state(shown)
    return state_bytes(state)


def named(method: str, task: Recall) -> str:
    """A method with the bytes it keeps."""
    return f"{method} ({measured_bytes(method, task):,} bytes)"


def untrained(method: str, vocab_size: int, run: int) -> Network:
    """A network with random weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed("recall", "weights", run))
        layers = (build(seed("recall", "map", run, place)) for place, build in enumerate(METHODS[method]))
        return Network(vocab_size, tuple(layers))


@lru_cache(maxsize=16)
def _pretrained(training: Training, run: int) -> Network:
    """The softmax network of a run."""
    network = untrained(EXACT, training.vocab_size, run)
    _train(network, training, training.steps, run, "pretraining")
    return network


@lru_cache(maxsize=256)
def right_answers(training: Training, method: str, run: int) -> dict[int, Tensor]:
    """Which of the test's queries a trained network answers, by the number of pairs: (sequences, P) bool."""
    # One softmax network for a run, whatever follows.
    pretrained = _pretrained(replace(training, is_overwritten=False, tuning=0), run)
    network = untrained(method, training.vocab_size, run)
    _take_over(network, pretrained)
    _train(network, training, training.tuning, run, "tuning")
    found = {}
    for pairs in training.pairs:
        test = held_out(training.task(pairs))
        with torch.no_grad():
            found[pairs] = network(test.tokens, test.places).argmax(-1) == test.answers
    return found


def held_out(task: Recall) -> Sequences:
    """The sequences that all networks are tested on."""
    return sequences(task, _TESTED, generator("recall", "test", repr(task)))


def _take_over(network: Network, pretrained: Network) -> None:
    """Begin with another network's weights; maps and gates keep their own."""
    missing, unexpected = network.load_state_dict(pretrained.state_dict(), strict=False)
    other = [name for name in missing if ".feature_map." not in name and ".gate." not in name]
    if unexpected or other:
        raise ValueError(f"networks are to differ in maps and gates alone, got {[*unexpected, *other]}")


def _train(network: Network, training: Training, steps: int, run: int, purpose: str) -> None:
    """So many steps of AdamW, the rate falling as a cosine; the numbers of pairs take turns."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY, fused=True)
    source = generator("recall", "sequences", run, purpose)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
        shown = sequences(training.task(training.pairs[step % len(training.pairs)]), _BATCH, source)
        loss = cross_entropy(network(shown.tokens, shown.places).flatten(0, 1), shown.answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
