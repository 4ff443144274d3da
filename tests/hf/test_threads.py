"""Other threads call a model while it is probed: to the bit as before, and the probe sees its own calls alone."""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bounded_texts import ENOUGH, FEW, IDS, logits
from linattn.hf import (
    BoundedCache,
    LinearLMConfig,
    LinearLMForCausalLM,
    _attention_modules,
    _choosing,
    capture,
    intercept,
)
from linattn.hf.interception import answering
from linattn.hf.linearization import choose_layers

LOOKS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "first cache": lambda model: [str(row) for row in BoundedCache(model, config=FEW).report],
    "layers": lambda model: str(choose_layers(model)),
    "capture": lambda model: [call.query.shape for call in capture(model, {"input_ids": IDS[:, :7]}).calls],
}
CALLS: dict[str, Callable[[PreTrainedModel], torch.Tensor]] = {
    "plain": logits,
    "padded": lambda model: logits(model, attention_mask=torch.arange(24).expand(2, -1).ge(3).long()),
    "weights": lambda model: torch.stack(model(IDS, output_attentions=True).attentions).detach(),
}
# Seconds after which another thread is not waited for.
LONG = 60


class Meeting:
    """Calls of a model in another thread, begun or ended in the midst of passes of this one."""

    def __init__(self, model: PreTrainedModel, call: Callable[[PreTrainedModel], torch.Tensor], pool: Any) -> None:
        self.model, self.call, self.pool = model, call, pool
        self.main = threading.get_ident()
        self.is_waiting, self.may_go = threading.Event(), threading.Event()
        self.made: list[torch.Tensor] = []
        self.pending: Future[torch.Tensor] | None = None
        self.plan = ""

    def begin(self) -> None:
        """Another thread's call, as far as its second layer."""
        self.pending = self.pool.submit(self.call, self.model)
        assert self.is_waiting.wait(LONG)

    def end(self) -> None:
        """The rest of it."""
        self.may_go.set()
        if self.pending is not None:
            self.made.append(self.pending.result(LONG))

    def first(self, module: Any, args: Any) -> None:
        """Pre-hook of the first layer."""
        if threading.get_ident() != self.main:
            return
        if self.plan == "whole":
            self.made.append(self.pool.submit(self.call, self.model).result(LONG))
        elif self.plan == "out of it" and self.pending is None:
            self.begin()
        elif self.plan == "into it" and not self.made:
            self.end()

    def second(self, module: Any, args: Any) -> None:
        """Pre-hook of the second layer."""
        if threading.get_ident() != self.main and self.plan != "whole":
            self.is_waiting.set()
            assert self.may_go.wait(LONG)


def met(meeting: Meeting, model: PreTrainedModel, plan: str, look: Callable[[PreTrainedModel], object]) -> object:
    """What a look at a model gives while another thread calls it by a plan."""
    layers = model.model.layers
    with layers[0].register_forward_pre_hook(meeting.first), layers[1].register_forward_pre_hook(meeting.second):
        meeting.plan = plan
        if plan == "into it":
            meeting.begin()
        try:
            made = look(model)
        finally:
            meeting.may_go.set()
        if plan == "out of it":
            meeting.end()
    return made


@pytest.mark.parametrize("plan", ["whole", "into it", "out of it"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("look", LOOKS)
def test_calls_of_another_thread(language_model, look, call, plan):
    """Whole ones at every pass, some that begin before the first, and some that end after the last."""
    options = {"attn_implementation": "eager" if call == "weights" else "sdpa"}
    model, other = language_model("llama", **options), language_model("llama", **options)
    wanted, seen = CALLS[call](model), LOOKS[look](other)
    with ThreadPoolExecutor(1) as pool:
        meeting = Meeting(model, CALLS[call], pool)
        made = met(meeting, model, plan, LOOKS[look])
    assert made == seen
    assert meeting.made
    assert all(torch.equal(each, wanted) for each in meeting.made)
    assert torch.equal(CALLS[call](model), wanted)
    assert BoundedCache(model, config=FEW).report[0].config == FEW


@pytest.mark.parametrize("plan", ["whole", "into it", "out of it"])
def test_bounded_calls_of_another_thread(language_model, plan):
    """Caches of a probed model while it is captured."""
    model = language_model("llama")
    wanted, seen = logits(model, BoundedCache(model, config=FEW)), LOOKS["capture"](model)

    def bounded(model: PreTrainedModel) -> torch.Tensor:
        """Of a cache that was made before."""
        return logits(model, caches.pop())

    caches = [BoundedCache(model, config=FEW) for _ in range(4)]
    with ThreadPoolExecutor(1) as pool:
        meeting = Meeting(model, bounded, pool)
        assert met(meeting, model, plan, LOOKS["capture"]) == seen
    assert meeting.made
    assert all(torch.equal(each, wanted) for each in meeting.made)


def test_first_caches_of_several_threads(language_model):
    """Each is made, and none is told that the model is being intercepted."""
    model, pending = language_model("llama"), []
    with ThreadPoolExecutor(4) as pool:

        def ask(module: Any, args: Any) -> None:
            """For another cache, in the midst of a pass for the first, which it may not meet."""
            if not pending:
                pending.append(pool.submit(BoundedCache, model, config=FEW))
                wait(pending, 0.5)

        with model.model.layers[0].register_forward_pre_hook(ask):
            first = BoundedCache(model, config=FEW).report
        assert [row.config for row in first] == [FEW, FEW]
        assert pending[0].result(LONG).report == first
        assert all(pool.map(lambda _: BoundedCache(model, config=FEW).report == first, range(8)))


def test_a_refusal_is_not_kept(language_model, monkeypatch):
    """What spoke against every layer may have been another thread."""
    model = language_model("llama")
    with monkeypatch.context() as patch:
        patch.setattr(_choosing, "_refusals", lambda model, parts, *_: {part.number: "a refusal" for part in parts})
        with pytest.raises(ValueError, match="can be bounded: a refusal"):
            BoundedCache(model, config=FEW)
    assert [row.config for row in BoundedCache(model, config=FEW).report] == [FEW, FEW]


class Watched(dict[str, Any]):
    """What a module holds, which other threads read."""

    def clear(self) -> None:
        """None of their business."""
        raise AssertionError("a module was emptied under other threads")


@pytest.mark.parametrize("training", [False, True])
def test_modules_are_not_emptied(language_model, training):
    model = language_model("llama").train(training)
    held = {module: dict(vars(module)) for module in model.modules()}
    for module in model.modules():
        object.__setattr__(module, "__dict__", Watched(vars(module)))
    BoundedCache(model, config=FEW)
    assert all(vars(module) == before for module, before in held.items())


def test_layers_are_computed_again_in_threads_of_autograd(language_model, exact):
    """As on a GPU, where checkpointed layers are: by what answered them before."""
    model = language_model("llama")
    model.activation_checkpointing_enable()
    model.train()

    def doubled(call: Any) -> torch.Tensor:
        """Another output than the model's own."""
        return 2 * exact(call)

    def gradient(run: Callable[[Callable[[], None]], None]) -> torch.Tensor:
        """Of a loss under the handler, its backward pass run so."""
        model.zero_grad()
        with intercept(model, doubled):
            run(model(IDS, use_cache=False).logits.square().mean().backward)
        return model.model.embed_tokens.weight.grad.clone()

    def elsewhere(backward: Callable[[], None]) -> None:
        """In a thread that is none of Python's."""
        is_done = threading.Event()

        def run() -> None:
            """To its end, or its error."""
            try:
                backward()
            finally:
                is_done.set()

        start_new_thread(run, ())
        assert is_done.wait(LONG)

    assert torch.equal(gradient(elsewhere), gradient(lambda backward: backward()))


@torch.no_grad()
def test_a_model_with_a_cache_answers_by_its_own_eager_attention(language_model):
    """Which has learned sinks, as that of SDPA has not."""
    model = language_model("gpt_oss", num_experts_per_tok=1, sliding_window=8, attn_implementation="eager")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=3)
    wanted = logits(model)
    BoundedCache(model, config=ENOUGH)
    with answering(model, lambda call: call.by_former()[0]):
        assert torch.equal(logits(model), wanted)


@torch.no_grad()
def test_states_are_those_of_this_thread_alone() -> None:
    made = LinearLMForCausalLM(LinearLMConfig(hidden_size=16, num_hidden_layers=3, pattern="lls")).eval()
    wanted = made(IDS, output_hidden_states=True).hidden_states

    def meanwhile(*_: object) -> None:
        """Another thread calls the model, once."""
        hook.remove()
        other = threading.Thread(target=made, args=(IDS[:1, :3],))
        other.start()
        other.join()

    hook = made.model.blocks[0].mlp_norm.register_forward_pre_hook(meanwhile)
    states = made(IDS, output_hidden_states=True).hidden_states
    assert all(torch.equal(x, y) for x, y in zip(states, wanted, strict=True))


def test_a_class_is_looked_up_by_several_threads_at_once(monkeypatch, language_model):
    """While the first of them reads its source, none is told that it looks no attention function up."""
    model, found, source = language_model("llama"), [], _attention_modules._source
    kind = type(model.model.layers[0].self_attn)
    wanted = [part.name for part in _attention_modules.attention_modules(model)]
    with ThreadPoolExecutor(1) as pool:

        def read(function: Any) -> str:
            """The source, for which another thread asks meanwhile."""
            if not found:
                found.append(None)
                found[0] = pool.submit(lambda: [part.name for part in _attention_modules.attention_modules(model)])
                wait(found, LONG)
            return source(function)

        monkeypatch.delitem(_attention_modules._LOOKUPS, kind)
        monkeypatch.setattr(_attention_modules, "_source", read)
        assert [part.name for part in _attention_modules.attention_modules(model)] == wanted
        assert found[0].result(LONG) == wanted
