"""Faults of the training loop, of language models from nothing, and of text streamed from them."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "score one window a pass, however short",
        "pretraining/scoring.py",
        "batch.split(max(1, _PASS_BYTES // length))",
        "batch.split(1)",
        "tests/pretraining/test_scoring.py",
    ),
    Fault(
        "leave out windows that do not fill a pass",
        "pretraining/scoring.py",
        "for some in passes if len(some)]",
        "for some in passes if len(some) == len(passes[0])]",
        "tests/pretraining/test_scoring.py",
    ),
    Fault(
        "keep the last weights and not the best",
        "training/loop.py",
        "if loss < self.progress.best:",
        "if True:",
        "tests/training/test_loop.py",
    ),
    Fault(
        "raise an interrupt in the middle of a step",
        "training/loop.py",
        "signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))",
        "pass",
        "tests/training/test_loop.py",
    ),
    Fault(
        "draw the curves of lost steps twice",
        "training/loop.py",
        """{} if found is None else {"purge_step": found[0].step + 1}""",
        "{}",
        "tests/training/test_loop.py",
    ),
    Fault(
        "give a resumed training all its time anew",
        "training/checkpoints.py",
        'reading.record(Progress, read_json(file, "progress", remedy))',
        "reading.record(Progress, {**read_json(file, 'progress', remedy), 'seconds': 0.0})",
        "tests/training/test_checkpoints.py tests/training/test_loop.py",
    ),
    Fault(
        "forget a checkpoint before the next is whole",
        "training/checkpoints.py",
        "        with _named(place),",
        "        shutil.rmtree(place.parent, ignore_errors=True)\n        with _named(place),",
        "tests/training/test_checkpoints.py",
    ),
    Fault(
        "go on with another conversion's work",
        "training/checkpoints.py",
        "if found != now:",
        "if False:",
        "tests/training/test_checkpoints.py",
    ),
    Fault(
        "keep no checkpoint but the last",
        "training/checkpoints.py",
        "_GENERATIONS = 2",
        "_GENERATIONS = 1",
        "tests/training/test_checkpoints.py",
    ),
    Fault(
        "go on from a damaged checkpoint",
        "training/checkpoints.py",
        "if _digest(checkpoint / name) != digest:",
        "if False:",
        "tests/training/test_checkpoints.py tests/training/test_loop.py",
    ),
    Fault(
        "pass over a damaged checkpoint without a word",
        "training/checkpoints.py",
        "_LOG.warning(",
        "_LOG.debug(",
        "tests/training/test_checkpoints.py",
    ),
    Fault(
        "cut a step budget by the clock",
        "training/budgets.py",
        "return progress.step % max(1, self.total // _LOOKS) == 0 or progress.step >= self.total",
        "return progress.seconds - looked.seconds >= 30 or progress.step >= self.total",
        "tests/training/test_loop.py",
    ),
    Fault(
        "keep a checkpoint at looks alone",
        "training/loop.py",
        "if is_look_due or self.progress.seconds - saved.seconds >= _SECONDS:",
        "if is_look_due:",
        "tests/training/test_loop.py",
    ),
    Fault(
        "draw windows by a generator that a kill resets",
        "pretraining/corpus.py",
        'draws = random.Random(f"{seed} {step}")',
        "draws = random",
        "tests/pretraining",
    ),
    Fault(
        "split documents by their place in the list",
        "pretraining/corpus.py",
        "place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % _PERIOD",
        "place = len(seen) % _PERIOD",
        "tests/pretraining/test_corpus.py",
    ),
    Fault(
        "read a copied document twice",
        "pretraining/corpus.py",
        "if content in seen:",
        "if False:",
        "tests/pretraining/test_corpus.py",
    ),
    Fault(
        "predict a byte from itself",
        "pretraining/scoring.py",
        "batch[:, 1:].flatten()",
        "batch[:, :-1].flatten()",
        "tests/pretraining/test_scoring.py",
    ),
    Fault(
        "call nats bits",
        "pretraining/scoring.py",
        "nats.view(batch[:, 1:].shape) / math.log(2)",
        "nats.view(batch[:, 1:].shape)",
        "tests/pretraining/test_scoring.py",
    ),
    Fault(
        "score the model on validation documents",
        "pretraining/pretraining.py",
        "test = windows(corpus.test,",
        "test = windows(corpus.validation,",
        "tests/pretraining/test_pretraining.py",
    ),
    Fault(
        "look at the validation loss under dropout",
        "pretraining/pretraining.py",
        """        model.train(False)
        return share.mean""",
        """        return share.mean""",
        "tests/pretraining/test_pretraining.py",
    ),
    Fault(
        "never redraw",
        "pretraining/pretraining.py",
        "if step // every != drawn:",
        "if False:",
        "tests/pretraining/test_pretraining.py",
    ),
    Fault(
        "read the drawn token twice",
        "hf/streaming.py",
        "logits = _step(model, token, cache)",
        "logits = _step(model, token.repeat(1, 2), cache)",
        "tests/hf/test_streaming.py",
    ),
    Fault(
        "draw at temperature 1 whatever was asked for",
        "hf/streaming.py",
        "if temperature != 1 else []",
        "if False else []",
        "tests/hf/test_streaming.py",
    ),
    Fault(
        "gate every block",
        "hf/language_model_config.py",
        "if config.gate is not None and kind in config.gated:",
        "if config.gate is not None:",
        "tests/hf/test_language_model.py",
    ),
    Fault(
        "pull back learned maps' last blocks never",
        "attention/backends/blocked/features.py",
        """        for waiting in (self._queries, self._keys):
            if waiting:
                self._follow(waiting)
""",
        "",
        "tests/laws/test_gradient.py",
    ),
    Fault(
        "give waiting blocks each other's gradients",
        "attention/backends/blocked/features.py",
        "for block, part in zip(waiting, found.split",
        "for block, part in zip(waiting[::-1], found.split",
        "tests/laws/test_gradient.py",
    ),
)
