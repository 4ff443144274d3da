"""A training in words: its tables, for a terminal or a model card."""

from __future__ import annotations

from linattn.records.texts import Table
from linattn_lab.pretraining.pretraining import Pretraining


def score_table(found: Pretraining) -> Table:
    """Bits per byte on test documents, below both baselines."""
    test = found.test
    rows = (
        ("guessing among 256", f"{found.uniform_bits:.3f}"),
        ("frequencies of bytes", f"{found.frequency_bits:.3f}"),
        ("this model", f"{test.bits:.3f} ± {test.standard_error:.3f}".removesuffix(" ± nan")),  # of one window
    )
    return Table(("predicted by", "bits per byte"), rows, baselines=2)


def position_table(found: Pretraining) -> Table:
    """Bits per byte by how many bytes of the window stand before it."""
    rows = tuple((f"{first:,} to {end - 1:,}", f"{bits:.3f}") for first, end, bits in found.test.by_position)
    return Table(("bytes before", "bits per byte"), rows)


def training_in_words(found: Pretraining) -> str:
    """How long it went on, and how much it read: a sentence without its full stop."""
    trained, config = found.trained, found.config
    read = trained.steps * config.context * config.batch_size
    return (
        f"{found.num_parameters:,} parameters, trained in {trained.steps:,} steps of {config.batch_size} × "
        f"{config.context:,} bytes on {read:,} bytes ({read / found.num_training_bytes:.2f} times the training "
        f"documents' {found.num_training_bytes:,}), {trained.seconds / 60:.1f} minutes at "
        f"{found.tokens_per_second:,.0f} bytes a second"
    )


def model_card(found: Pretraining, attention: str) -> str:
    """The model card of a trained model, as Markdown; `attention` is its blocks' in words."""
    where = "documents that were not trained on" if found.is_split_by_file else "the last sixteenth of each document"
    parts = [
        "# A language model of bytes",
        f"{attention}. {training_in_words(found)}. Load it with `linattn.hf`: "
        "`AutoModelForCausalLM.from_pretrained` finds it once that is imported; `linattn generate` writes text.",
        f"Bits per byte on {found.test.num_bytes:,} bytes of {where}, each predicted from "
        f"those before it in a window of {found.config.context:,}; ± is the standard error over windows:",
        score_table(found).markdown(),
        "By the number of bytes before it:",
        position_table(found).markdown(),
    ]
    return "\n\n".join(parts) + "\n"
