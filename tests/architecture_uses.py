"""Uses of linearized models, architecture by architecture: each works as softmax does, or is refused at once.

    python tests/architecture_uses.py

writes docs/architectures.json, from which docs/write_tables.py makes the table of docs/how_to/which_models.md.

The budget exceeds every text, so that merged keys are softmax attention and a model's own output is what is wanted;
under a small one the model is another, and is held against itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import ARCHITECTURES, Architecture, inputs_of
from linattn.hf import from_pretrained, linearize_, new_cache, restore_, save_pretrained

METHOD = "window 16 + merged 256"
SMALL = "window 4 + merged 6"
CLOSE = 1e-5
"""Of the largest logit: float32 sums of some hundred terms in another order, magnified by a few layers."""
TABLE = Path(__file__).parents[1] / "docs" / "architectures.json"
GREEDY = {"max_new_tokens": 6, "do_sample": False}

Use = Callable[[Architecture, PreTrainedModel, PreTrainedModel, Path], None]


def run(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """The first output of a forward pass."""
    output: Tensor = model(**inputs)[0]
    return output


def difference(ours: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((ours - wanted).abs().max() / wanted.abs().max())


def padded(architecture: Architecture, inputs: dict[str, Tensor], count: int = 5) -> dict[str, Tensor]:
    """The inputs with a row shorter by some tokens, padded on the left for decoders and on the right for encoders."""
    ids = inputs["input_ids"].clone()
    mask = torch.ones_like(ids)
    hidden = slice(0, count) if architecture.kind == "decoder" else slice(-count, None)
    ids[1, hidden], mask[1, hidden] = 0, 0
    return {**inputs, "input_ids": ids, "attention_mask": mask}


def prompt(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What generation begins with."""
    return {name: x for name, x in inputs.items() if not name.startswith("decoder_")}


def generated(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Token numbers of a text that goes on, drawn from one seed."""
    torch.manual_seed(5)
    tokens: Tensor = model.generate(**prompt(inputs), **options)
    return tokens


def assert_same_text(
    architecture: Architecture,
    model: PreTrainedModel,
    softmax: PreTrainedModel,
    inputs: dict[str, Tensor],
    **options: Any,
) -> None:
    """Tokens equal to those of the softmax model; where softmax itself refuses, so may this one."""
    try:
        wanted = generated(softmax, inputs, **options)
    except (ValueError, NotImplementedError, RuntimeError, AttributeError) as error:
        raise NotApplicableError(str(error)) from error
    assert torch.equal(generated(model, inputs, **options), wanted), "other tokens than softmax"


class NotApplicableError(Exception):
    """The softmax model itself does not do this."""


def forward(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """A forward pass without padding."""
    inputs = inputs_of(architecture, model)
    assert difference(run(model, inputs), run(softmax, inputs)) <= CLOSE, "other output than softmax"


def padding(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """A batch with padding equals softmax where there are tokens."""
    inputs = inputs_of(architecture, model)
    if "input_ids" not in inputs:
        raise NotApplicableError("no padding")
    inputs = padded(architecture, inputs)
    live = inputs["attention_mask"].bool() if "decoder_input_ids" not in inputs else slice(None)
    assert difference(run(model, inputs)[live], run(softmax, inputs)[live]) <= CLOSE, "other output than softmax"


def batch(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """A row of a batch equals the row alone."""
    inputs = inputs_of(architecture, model)
    alone = {name: x[1:] for name, x in inputs.items()}
    assert difference(run(model, inputs)[1:], run(model, alone)) <= CLOSE, "a row depends on its batch"


def greedy(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """Greedy decoding."""
    assert_same_text(architecture, model, softmax, inputs_of(architecture, model), **GREEDY)


def beams(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """Beam search."""
    assert_same_text(architecture, model, softmax, inputs_of(architecture, model), **GREEDY, num_beams=3)


def sampling(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """Sampling, from one seed."""
    options = {"max_new_tokens": 6, "do_sample": True, "top_k": 0}
    assert_same_text(architecture, model, softmax, inputs_of(architecture, model), **options)


def left_padding(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """Greedy decoding after prompts of several lengths."""
    inputs = inputs_of(architecture, model)
    if "input_ids" not in inputs:
        raise NotApplicableError("no padding")
    assert_same_text(architecture, model, softmax, padded(architecture, inputs), **GREEDY)


def prompt_lookup(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """Tokens guessed from the prompt: the greedy text."""
    inputs = {name: x[:1] for name, x in inputs_of(architecture, model).items()}
    try:
        generated(softmax, inputs, **GREEDY, prompt_lookup_num_tokens=3)
    except (ValueError, NotImplementedError, RuntimeError, AttributeError, IndexError, TypeError) as error:
        raise NotApplicableError(str(error)) from error
    ours = generated(model, inputs, **GREEDY, prompt_lookup_num_tokens=3)
    assert torch.equal(ours, generated(model, inputs, **GREEDY)), "other tokens than greedy decoding"


def small_budget(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """Within a budget that texts exceed: whole, in chunks, in a padded batch and by prompt lookup the same model."""
    linear = architecture.build()
    linearize_(linear, method=SMALL)
    inputs = inputs_of(architecture, linear)
    if architecture.kind != "decoder":
        assert difference(run(linear, inputs)[1:], run(linear, {name: x[1:] for name, x in inputs.items()})) <= CLOSE
        return
    ids, cache = inputs["input_ids"], new_cache(linear)
    whole = run(linear, inputs)
    parts = [linear(part, past_key_values=cache).logits for part in ids.split([7, 1, 1, 9, 6], dim=1)]
    assert difference(torch.cat(parts, 1), whole) <= CLOSE, "chunks are another model than the whole text"
    left = padded(architecture, inputs, 5)
    alone = generated(linear, {"input_ids": ids[1:, 5:]}, **GREEDY)
    assert torch.equal(generated(linear, left, **GREEDY)[1:, 5:], alone), "a padded row is another text"
    row = {"input_ids": ids[:1]}
    try:
        generated(softmax, row, **GREEDY, prompt_lookup_num_tokens=3)
    except ValueError:
        return
    guessed = generated(linear, row, **GREEDY, prompt_lookup_num_tokens=3)
    assert torch.equal(guessed, generated(linear, row, **GREEDY)), "guessed tokens change the text"


def saving(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """Saved and loaded, to the bit."""
    inputs = inputs_of(architecture, model)
    save_pretrained(model, folder / "saved")
    loaded = from_pretrained(folder / "saved").eval()
    assert type(loaded) is type(model)
    assert torch.equal(run(loaded, inputs), run(model, inputs)), "another output after loading"


def restoring(architecture: Architecture, model: PreTrainedModel, softmax: PreTrainedModel, folder: Path) -> None:
    """Restored, to the bit; the last use of a model."""
    inputs = inputs_of(architecture, model)
    restore_(model)
    assert torch.equal(run(model, inputs), run(softmax, inputs)), "another output after restore_"


FORWARD: dict[str, Use] = {"forward": forward, "padding": padding, "batch = alone": batch}
GENERATION: dict[str, Use] = {
    "greedy": greedy,
    "beams": beams,
    "sampling": sampling,
    "left padding": left_padding,
    "prompt lookup": prompt_lookup,
}
ENDS: dict[str, Use] = {"small budget": small_budget, "save and load": saving, "restore": restoring}


def cells(architecture: Architecture, folder: Path) -> Iterator[tuple[str, str]]:
    """Each use and "works", "-" where softmax has no such use, or "refused: …"; what is wrong, or crashes, raises."""
    softmax, model = architecture.build(), architecture.build()
    inputs = inputs_of(architecture, model)
    before = run(model, inputs)
    try:
        report = linearize_(model, method=METHOD)
    except ValueError as error:
        assert torch.equal(run(model, inputs), before), "a refused model was changed"
        yield "linearize_", f"refused: {error}"
        return
    replaced = len(report.replaced)
    assert replaced, "nothing was replaced, and nothing was said"
    yield "linearize_", "works" if not report.kept else f"works: {replaced} of {len(report.layers)} layers"
    uses = {**FORWARD, **(GENERATION if model.can_generate() else {}), **ENDS}
    for name, use in uses.items():
        try:
            use(architecture, model, softmax, folder)
        except NotApplicableError:
            yield name, "-"
        except ValueError as error:
            yield name, f"refused: {error}"
        else:
            yield name, "works"


def main() -> None:
    """Write the table of all architectures."""
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    table = {}
    for name, architecture in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            table[name] = {"class": architecture.model, "kind": architecture.kind}
            table[name] |= dict(cells(architecture, Path(folder)))
        sys.stdout.write(f"{name}: {table[name]['linearize_']}\n")
        sys.stdout.flush()
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
