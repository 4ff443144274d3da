"""Uses of models, architecture by architecture: each works as softmax does, or is refused at once.

    python tests/architecture_uses.py

writes docs/architectures.json, from which docs/write_tables.py makes the table of docs/how_to/which_models.md.

A window beside a map, and a bounded cache, exceed every text: attention is softmax, and a model's own output is what is
wanted. With small ones the model is another, and is held against itself. Encoders are linearized by merged keys.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from architectures import ARCHITECTURES, Architecture, inputs_of
from linattn import MergedKV
from linattn.hf import BoundedCache, from_pretrained, linearize_, new_cache, restore_, save_pretrained

METHOD, SMALL = "FavorPlus(num_features=16) + window 32", "FavorPlus(num_features=16) + window 4"
MERGED, FEW_MERGED = MergedKV(16, 256, None), MergedKV(4, 6, None)
CLOSE = 1e-5
"""Of the largest logit: float32 sums of some hundred terms in another order, magnified by a few layers."""
TABLE = Path(__file__).parents[1] / "docs" / "architectures.json"
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def method(architecture: Architecture, *, is_small: bool = False) -> str | MergedKV:
    """What takes the softmax's place in a kind of architectures."""
    if architecture.kind in ("decoder", "both sides"):
        return SMALL if is_small else METHOD
    return FEW_MERGED if is_small else MERGED


class Softmax:
    """A model with its softmax; a text is generated once, and then wanted of every other attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._texts: dict[str, Tensor] = {}

    def __call__(self, **inputs: Any) -> Any:
        """A forward pass."""
        return self.model(**inputs)

    def generate(self, **options: Any) -> Tensor:
        """A text; `generated` draws all from one seed."""
        key = repr({name: x.tolist() if isinstance(x, Tensor) else x for name, x in options.items()})
        if key not in self._texts:
            self._texts[key] = self.model.generate(**options)
        return self._texts[key]


Use = Callable[[Architecture, Any, Softmax, Path], None]
Model: TypeAlias = PreTrainedModel | Softmax


def run(model: Model, inputs: dict[str, Any]) -> Tensor:
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


def generated(model: Model, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Token numbers of a text that goes on, drawn from one seed."""
    torch.manual_seed(5)
    tokens: Tensor = model.generate(**prompt(inputs), **options)
    return tokens


def assert_same_text(
    architecture: Architecture,
    model: PreTrainedModel,
    softmax: Softmax,
    inputs: dict[str, Tensor],
    **options: Any,
) -> None:
    """Tokens equal to those of the softmax model; where softmax itself refuses, so may this one."""
    try:
        wanted = generated(softmax, inputs, **options)
    except (ValueError, NotImplementedError, RuntimeError, AttributeError) as error:
        raise NotApplicableError(str(error)) from error
    assert torch.equal(generated(model, inputs, **options), wanted), "other tokens than softmax"


def bounded(model: PreTrainedModel, config: MergedKV = MERGED) -> dict[str, Any]:
    """An empty bounded cache, as an option."""
    return {"past_key_values": BoundedCache(model, config=config)}


class BoundedModel:
    """A decoder whose every text is read into a bounded cache of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def generate(self, **options: Any) -> Tensor:
        """A text, from an empty cache."""
        tokens: Tensor = self.model.generate(**options, **bounded(self.model))
        return tokens


class NotApplicableError(Exception):
    """The softmax model itself does not do this."""


def forward(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """A forward pass without padding."""
    inputs = inputs_of(architecture, model)
    assert difference(run(model, inputs), run(softmax, inputs)) <= CLOSE, "other output than softmax"


def padding(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """A batch with padding equals softmax where there are tokens."""
    inputs = inputs_of(architecture, model)
    if "input_ids" not in inputs:
        raise NotApplicableError("no padding")
    inputs = padded(architecture, inputs)
    live = inputs["attention_mask"].bool() if "decoder_input_ids" not in inputs else slice(None)
    assert difference(run(model, inputs)[live], run(softmax, inputs)[live]) <= CLOSE, "other output than softmax"


def batch(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """A row of a batch equals the row alone."""
    inputs = inputs_of(architecture, model)
    alone = {name: x[1:] for name, x in inputs.items()}
    assert difference(run(model, inputs)[1:], run(model, alone)) <= CLOSE, "a row depends on its batch"


def greedy(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """Greedy decoding."""
    assert_same_text(architecture, model, softmax, inputs_of(architecture, model), **GREEDY)


def beams(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """Beam search."""
    assert_same_text(architecture, model, softmax, inputs_of(architecture, model), **GREEDY, num_beams=3)


def sampling(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """Sampling, from one seed."""
    options = {**GREEDY, "do_sample": True, "top_k": 0}
    assert_same_text(architecture, model, softmax, inputs_of(architecture, model), **options)


def left_padding(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """Greedy decoding after prompts of several lengths."""
    inputs = inputs_of(architecture, model)
    if "input_ids" not in inputs:
        raise NotApplicableError("no padding")
    assert_same_text(architecture, model, softmax, padded(architecture, inputs), **GREEDY)


def prompt_lookup(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """Tokens guessed from the prompt: the greedy text."""
    inputs = {name: x[:1] for name, x in inputs_of(architecture, model).items()}
    try:
        generated(softmax, inputs, **GREEDY, prompt_lookup_num_tokens=3)
    except (ValueError, NotImplementedError, RuntimeError, AttributeError, IndexError, TypeError) as error:
        raise NotApplicableError(str(error)) from error
    ours = generated(model, inputs, **GREEDY, prompt_lookup_num_tokens=3)
    assert torch.equal(ours, generated(model, inputs, **GREEDY)), "other tokens than greedy decoding"


def small_window(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """Beside a window that texts exceed: whole, in chunks, in a padded batch and by prompt lookup the same model."""
    linear = architecture.build()
    linearize_(linear, method(architecture, is_small=True))
    inputs = inputs_of(architecture, linear)
    if architecture.kind != "decoder":
        assert difference(run(linear, inputs)[1:], run(linear, {name: x[1:] for name, x in inputs.items()})) <= CLOSE
        return
    assert_one_model(linear, softmax, inputs, lambda: {"past_key_values": new_cache(linear)})


def small_budget(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """Within a budget that texts exceed: whole, in chunks, in a padded batch and by prompt lookup the same model."""
    caches = partial(bounded, model, FEW_MERGED)
    assert_one_model(model, softmax, inputs_of(architecture, model), caches)


def assert_one_model(
    model: PreTrainedModel, softmax: Softmax, inputs: dict[str, Tensor], caches: Callable[[], dict[str, Any]]
) -> None:
    """A decoder from a cache of a kind is one model, however a text is cut, padded or guessed."""
    ids, cache = inputs["input_ids"], caches()
    whole = model(**inputs, **caches()).logits
    parts = [model(part, **cache).logits for part in ids.split([7, 1, 1, 9, 6], dim=1)]
    assert difference(torch.cat(parts, 1), whole) <= CLOSE, "chunks are another model than the whole text"
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    left = {**inputs, "input_ids": ids * mask, "attention_mask": mask}
    alone = generated(model, {"input_ids": ids[1:, 5:]}, **GREEDY, **caches())
    texts = generated(model, left, **GREEDY, **caches())
    assert torch.equal(texts[1:, 5:], alone), "a padded row is another text"
    row = {"input_ids": ids[:1]}
    try:
        generated(softmax, row, **GREEDY, prompt_lookup_num_tokens=3)
    except ValueError:
        return
    guessed = generated(model, row, **GREEDY, prompt_lookup_num_tokens=3, **caches())
    assert torch.equal(guessed, texts[:1]), "guessed tokens, or a padded row beside it, change the text"


def saving(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
    """Saved and loaded, to the bit."""
    inputs = inputs_of(architecture, model)
    save_pretrained(model, folder / "saved")
    loaded = from_pretrained(folder / "saved").eval()
    assert type(loaded) is type(model)
    assert torch.equal(run(loaded, inputs), run(model, inputs)), "another output after loading"


def restoring(architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path) -> None:
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
ENDS: dict[str, Use] = {"small window": small_window, "save and load": saving, "restore": restoring}


def cells(architecture: Architecture, folder: Path) -> Iterator[tuple[str, str]]:
    """Each use and "works", "-" where softmax has no such use, or "refused: …"; what is wrong, or crashes, raises."""
    softmax, model = Softmax(architecture.build()), architecture.build()
    inputs = inputs_of(architecture, model)
    before = run(model, inputs)
    if architecture.kind == "decoder":
        yield from bounded_cells(architecture, model, softmax, folder)
    try:
        report = linearize_(model, method(architecture))
    except ValueError as error:
        assert torch.equal(run(model, inputs), before), "a refused model was changed"
        yield "linearize_", f"refused: {error}"
        return
    assert report.replaced, "nothing was replaced, and nothing was said"
    yield "linearize_", accepted(len(report.replaced), len(report.layers))
    for name, use in {**FORWARD, **(GENERATION if model.can_generate() else {}), **ENDS}.items():
        yield name, verdict(use, architecture, model, softmax, folder)


def bounded_cells(
    architecture: Architecture, model: PreTrainedModel, softmax: Softmax, folder: Path
) -> Iterator[tuple[str, str]]:
    """Those of a decoder that generates from a bounded cache; without one it stays as it was."""
    inputs = inputs_of(architecture, model)
    before = run(model, inputs)
    try:
        report = BoundedCache(model, config=MERGED).report
    except ValueError as error:
        yield "BoundedCache", f"refused: {error}"
        return
    finally:
        assert torch.equal(run(model, inputs), before), "the model was changed"
    yield "BoundedCache", accepted(sum(layer.config is not None for layer in report), len(report))
    for name, use in GENERATION.items():
        yield f"bounded {name}", verdict(use, architecture, BoundedModel(model), softmax, folder)
    yield "small budget", verdict(small_budget, architecture, model, softmax, folder)


def accepted(count: int, num_layers: int) -> str:
    """The cell of a model, so many of whose layers are served."""
    return "works" if count == num_layers else f"works: {count} of {num_layers} layers"


def verdict(use: Use, *models: Any) -> str:
    """The cell of a use."""
    try:
        use(*models)
    except NotApplicableError:
        return "-"
    except ValueError as error:
        return f"refused: {error}"
    return "works"


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
