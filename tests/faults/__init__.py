"""Deliberate faults, room by room; `tests/mutations.py` commits them one at a time."""

from __future__ import annotations

from faults import (
    attention,
    biases,
    calls,
    compiled,
    constant_memory,
    convert,
    feature_maps,
    few_bits,
    lab,
    language_models,
    merged_keys,
    models,
    nn,
    parallel,
    positions,
    processes,
    records,
    training,
    triton,
    whole_models,
)

FAULTS = (
    *records.FAULTS,
    *feature_maps.FAULTS,
    *attention.FAULTS,
    *compiled.FAULTS,
    *few_bits.FAULTS,
    *merged_keys.FAULTS,
    *biases.FAULTS,
    *calls.FAULTS,
    *triton.FAULTS,
    *positions.FAULTS,
    *models.FAULTS,
    *nn.FAULTS,
    *parallel.FAULTS,
    *language_models.FAULTS,
    *processes.FAULTS,
    *training.FAULTS,
    *convert.FAULTS,
    *lab.FAULTS,
    *constant_memory.FAULTS,
    *whole_models.FAULTS,
)
