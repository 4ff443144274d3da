"""Claim: at equal time on two cores a linear language model of bytes is as good as softmax, or better.

    python language_models_at_equal_time.py [--seed N …] [--only NAME …]

Six models of about a million parameters, context 4,096, learn from Python's own sources. First the steps per second of
all are measured in interleaved rounds with all of torch's threads, at 4,096 and at 16,384 tokens, after each model's
stream was verified against its parallel pass; from that follows how many steps each does in fifteen minutes. Then
`linattn train` does so many: a run that is cut off goes on, and what else the machine does changes no figure. Rows go
to language_models.jsonl, one for each rate and each run; a run whose row is there is not repeated. Not among what
run.py runs: three seeds take about five hours.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.hf import LinearLMConfig, LinearLMForCausalLM
from linattn_lab.pretraining.scoring import bits_per_byte
from measuring import ratios, record, relative_error, require, seconds, spread
from result_file import Row, put_in_place, read_rows, write_rows

HERE = Path(__file__).parent
ROWS, RUNS = HERE / "language_models.jsonl", HERE / "language_models"
CONTEXT, LONG_CONTEXT = 4_096, 16_384
BUDGET, LEARNING_RATE, REPEATS = 900.0, 4e-3, 3
SIZES = {"layers": "4", "width": "128", "heads": "4", "hidden": "448"}
ROTARY, LEARNED = "Rotary(require_relative=False)", "LearnedExponential"
GATED = {"gate": "ForgetGate", "gated": "l"}
MODELS: dict[str, dict[str, str]] = {
    "softmax": {"pattern": "s", "positions": "Rotary"},
    "FavorPlus": {"map": "FavorPlus", "positions": "Rotary", "gate": "none"},
    LEARNED: {"map": LEARNED, "positions": ROTARY, "gate": "none"},
    f"{LEARNED}, gate": {"map": LEARNED, "positions": ROTARY, **GATED},
    f"{LEARNED}, gate, window 64": {"map": f"{LEARNED} + window 64", "positions": ROTARY, **GATED},
    f"{LEARNED}, gate, softmax in every fourth block": {
        "map": LEARNED,
        "positions": ROTARY,
        "pattern": "llls",
        **GATED,
    },
}


def config_of(options: dict[str, str]) -> LinearLMConfig:
    """The model that `linattn train` builds from these options."""
    names = {"map": "method"}
    kept = {name: value for name, value in options.items() if value != "none"}
    return LinearLMConfig(
        hidden_size=int(SIZES["width"]),
        num_hidden_layers=int(SIZES["layers"]),
        num_attention_heads=int(SIZES["heads"]),
        intermediate_size=int(SIZES["hidden"]),
        **{names.get(name, name): value for name, value in kept.items()},
    )


def verified(model: LinearLMForCausalLM) -> float:
    """Relative error of the logits of a stream in pieces against one pass over the whole; refuses a wrong result."""
    tokens = torch.randint(0, 256, (1, 700), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model.eval()(input_ids=tokens, use_cache=False).logits
        cache, pieces = None, []
        for piece in tokens.split([300, 1, 199, 200], 1):
            found = model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            pieces.append(found.logits)
    error = relative_error(torch.cat(pieces, 1), whole)
    require(str(model.config.method), error, 1e-4)
    return error


def step_of(model: LinearLMForCausalLM, tokens: Tensor) -> Callable[[], object]:
    """A step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        bits_per_byte(model, tokens).mean().backward()
        optimizer.step()

    return step


def measure_rates(context: int) -> list[Row]:
    """Tokens per second of every model's training, repeats interleaved."""
    steps, errors = {}, {}
    for name, options in MODELS.items():
        model = LinearLMForCausalLM(config_of(options))
        errors[name] = verified(model)
        tokens = torch.randint(0, 256, (1, context + 1), generator=torch.Generator().manual_seed(1))
        steps[name] = step_of(model.train(), tokens)
    took = seconds(steps, repeats=REPEATS)
    for name in list(MODELS)[1:]:
        record(
            f"tokens per second in training, {name}, context {context:,}, over softmax's",
            figure=ratios(took["softmax"], took[name]),
            unit="×",
            bound=">= 4" if context == LONG_CONTEXT else ">= 1",
            error=errors[name],
            seconds=spread(took[name]),
        )
    return [
        {
            "rate of": name,
            "context": context,
            "tokens per second": context / statistics.median(took[name]),
            "machine": machine(),
        }
        for name in MODELS
    ]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.machine()),
    }


def put(rows: list[Row], keys: tuple[str, ...]) -> None:
    """Rows in the place of former ones of the same keys."""
    for row in rows:
        found = put_in_place(read_rows(ROWS), [row], lambda former, row=row: all(former.get(k) == row[k] for k in keys))
        write_rows(ROWS, found)
        print(json.dumps(row), flush=True)


def rates() -> dict[str, float]:
    """Tokens per second at the short context, by model."""
    found = {row["rate of"]: row for row in read_rows(ROWS) if row.get("context") == CONTEXT and "rate of" in row}
    return {name: row["tokens per second"] for name, row in found.items()}


def train(name: str, seed: int, steps: int) -> Row:
    """A run of `linattn train`, which goes on where it was cut off, and its row."""
    out = RUNS / f"{list(MODELS).index(name)}-{seed}"
    options = {
        **SIZES,
        **MODELS[name],
        "context": CONTEXT,
        "steps": steps,
        "learning-rate": LEARNING_RATE,
        "seed": seed,
    }
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    if not out.exists():
        subprocess.run([sys.executable, "-m", "linattn", "train", str(out), *words], check=True)
    report = json.loads((out / "training.json").read_text(encoding="utf-8"))
    row = {
        "run of": name,
        "seed": seed,
        "steps": steps,
        "bits per byte": report["test"]["bits"],
        "standard error": report["test"]["standard_error"],
        "by position": report["test"]["by_position"],
        "frequencies": report["frequency_bits"],
        "parameters": report["num_parameters"],
        "options": MODELS[name],
        "learning rate": LEARNING_RATE,
        "machine": machine(),
    }
    shutil.rmtree(out)
    return row


def main() -> None:
    """Rates where there are none, then every run that has no row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rates", action="store_true", help="measure the rates anew, and train nothing")
    words = parser.parse_args()
    if words.rates or rates().keys() != MODELS.keys():
        for context in (CONTEXT, LONG_CONTEXT):
            put(measure_rates(context), ("rate of", "context"))
    if words.rates:
        return
    for seed in words.seed:
        for name in words.only:
            steps = int(BUDGET * rates()[name] / CONTEXT)
            done = [row for row in read_rows(ROWS) if (row.get("run of"), row.get("seed")) == (name, seed)]
            if not done:
                put([train(name, seed, steps)], ("run of", "seed"))


if __name__ == "__main__":
    main()
