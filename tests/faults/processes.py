"""Faults of work that several processes share, and of what they keep."""

from __future__ import annotations

from faults.fault import Fault

GROUP, STOPPED = "tests/processes/test_group.py", "tests/processes/test_stopped.py"
SHARED, LAYOUTS = "lab/tests/test_shared_work.py", "lab/tests/pretraining/test_layouts.py"
TRANSFORMERS = "tests/hf/test_context_parallel.py"

FAULTS = (
    Fault(
        "let Ctrl-C be swallowed while modules are loaded",
        "cli/__init__.py",
        "        signal.signal(signal.SIGINT, signal.SIG_DFL)",
        "        pass",
        "tests/cli/test_app.py",
    ),
    Fault(
        "end a work that has begun without its message",
        "cli/terminal.py",
        "        signal.signal(signal.SIGINT, signal.default_int_handler)",
        "        pass",
        "tests/cli/test_app.py",
    ),
    Fault(
        "take each process's own number for the first's",
        "processes.py",
        "        dist.broadcast_object_list(held, src=0)\n        return held[0]",
        "        return held[0]",
        GROUP,
    ),
    Fault(
        "give what was done in the order of the ranks",
        "processes.py",
        "return [every[place % self.size][place // self.size] for place in range(len(items))]",
        "return [found for own in every for found in own]",
        GROUP,
    ),
    Fault(
        "keep an error of the first process from the others",
        "processes.py",
        "self._raise(error, [failure])",
        "self._raise(error, [])",
        GROUP,
    ),
    Fault(
        "keep an error of one process from the others",
        "processes.py",
        "self._raise(error, self.gather(failure))",
        "self.gather(failure), self._raise(error, [])",
        GROUP,
    ),
    Fault(
        "wait half an hour for a stopped process",
        "processes.py",
        ", timeout=_TIMEOUT",
        "",
        STOPPED,
    ),
    Fault(
        "take times while others work",
        "lab/rounds.py",
        "        if unit.is_alone:\n            yield [unit]",
        "        if False:\n            yield [unit]",
        "lab/tests/test_rounds.py",
    ),
    Fault(
        "leave maps that others fitted as they were drawn",
        "convert/transfer.py",
        "        if name not in share:\n",
        "        if False:\n",
        SHARED,
    ),
    Fault(
        "weigh the texts of every process alike, whatever they hold",
        "processes.py",
        "        self.average_([mean])\n",
        "",
        SHARED,
    ),
    Fault(
        "train every process on the same texts",
        "convert/running.py",
        "x[processes.rank :: processes.size]",
        "x[: len(x) // processes.size]",
        SHARED,
    ),
    Fault(
        "forget the optimiser's moments",
        "training/tensors.py",
        "        optimizer.state[parameters[name]][what] = x\n",
        "        del x, what\n",
        "tests/training/test_checkpoints.py",
    ),
    Fault(
        "forget the state of random numbers",
        "training/tensors.py",
        "    torch.set_rng_state(tensors[_RANDOM])\n",
        "",
        "tests/training/test_checkpoints.py",
    ),
    Fault(
        "count windows that were read a second time",
        "lab/pretraining/sharing.py",
        "repeated.of(batch[:again]))))[: len(own)]",
        "repeated.of(batch[:again]))))",
        LAYOUTS,
    ),
    Fault(
        "begin every part of a transformer's text at position 0",
        "hf/context_parallel.py",
        "first = parts.num_before(tokens.unsqueeze(-1), None)",
        "first = torch.zeros(len(tokens), dtype=torch.long)",
        TRANSFORMERS,
    ),
    Fault(
        "number tokens from 0 whatever the model does",
        "hf/context_parallel.py",
        '    if not counts[arguments.get("attention_mask") is not None]:',
        "    if False:",
        TRANSFORMERS,
    ),
    Fault(
        "leave a model split after its block",
        "hf/context_parallel.py",
        "                layer.attend_to_parts = None",
        "                pass",
        TRANSFORMERS,
    ),
)
