"""Faults of conversions."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "train on what is held out",
        "convert/samples.py",
        "if not (a or b)]",
        "if not b]",
        "tests/convert/test_samples.py",
    ),
    Fault(
        "read a paragraph every time it occurs",
        "convert/samples.py",
        "if paragraph in seen:",
        "if False:",
        "tests/convert/test_samples.py",
    ),
    Fault(
        "keep the last weights and not the best",
        "convert/training.py",
        "if loss < self.progress.best:",
        "if True:",
        "tests/convert/test_training.py",
    ),
    Fault(
        "raise an interrupt in the middle of a step",
        "convert/training.py",
        "signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))",
        "pass",
        "tests/convert/test_training.py",
    ),
    Fault(
        "draw the curves of lost steps twice",
        "convert/training.py",
        """{} if found is None else {"purge_step": found[0].step + 1}""",
        "{}",
        "tests/convert/test_training.py",
    ),
    Fault(
        "give a resumed training all its time anew",
        "convert/checkpoints.py",
        "return Progress(**values)",
        "return Progress(**{**values, 'seconds': 0.0})",
        "tests/convert/test_checkpoints.py tests/convert/test_training.py",
    ),
    Fault(
        "forget a checkpoint before the next is whole",
        "convert/checkpoints.py",
        "        with appearing(place) as draft:",
        "        shutil.rmtree(place.parent, ignore_errors=True)\n        with appearing(place) as draft:",
        "tests/convert/test_checkpoints.py",
    ),
    Fault(
        "go on with another conversion's work",
        "convert/checkpoints.py",
        "if found != now:",
        "if False:",
        "tests/convert/test_checkpoints.py",
    ),
    Fault(
        "fit maps to padding",
        "convert/calibration.py",
        "if call.key_mask is not None and",
        "if False and",
        "tests/convert/test_calibration.py",
    ),
    Fault(
        "transfer attention to padding",
        "convert/transfer.py",
        "if call.key_mask is None:",
        "if True:",
        "tests/convert/test_transfer.py",
    ),
    Fault(
        "count predictions by text",
        "convert/stages.py",
        "int(b.live.sum()))",
        "1)",
        "tests/convert/test_stages.py",
    ),
    Fault(
        "measure errors of squares",
        "convert/stages.py",
        "x.flatten(0, 1).unsqueeze(0)",
        "x.flatten(0, 1).unsqueeze(0).square()",
        "tests/convert/test_stages.py",
    ),
    Fault(
        "leave a half-converted model after an interrupt",
        "convert/conversion.py",
        "except BaseException:",
        "except ValueError:",
        "tests/convert/test_conversion.py",
    ),
    Fault(
        "let refused settings claim the work folder",
        "convert/conversion.py",
        "    model.train(False)\n    teacher",
        "    model.train(False)\n    folder and folder.claim()\n    teacher",
        "tests/convert/test_conversion.py",
    ),
    Fault(
        "write a converted model in its place",
        "lab/commands/convert.py",
        """draft = work / "result\"""",
        "draft = out",
        "tests/lab/commands/test_convert.py",
    ),
)
