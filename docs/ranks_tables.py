"""Tables of the page on several machines: bytes that ranks send, their speed, and a simulation of more of them."""

from __future__ import annotations

import math

from benchmark_tables import claims_table
from benchmark_words import SETTINGS
from site_tables import Row, table

_BYTES, _SCALE = "ranks_send_states_of_constant_size", "sequences_split_over_ranks_scale"
# The simulated network, and what is measured: two heads of 256 features and 64 values, float32.
_BYTES_PER_SECOND, _SECONDS_PER_MESSAGE = 10e9, 20e-6
_STATE = 4 * 2 * 256 * (64 + 2)
_RANKS = (2, 8, 64, 256, 1024)
_FASTER = (1, 100)


def ranks_bytes(lines: list[Row]) -> str:
    """What each way of splitting sends, by length."""
    found = [line for line in lines if line["benchmark"] == _BYTES]
    lengths = list(found[0]["bytes"]) if found else []
    head = ("exchange, ranks", "collectives", *(f"{int(length):,} tokens per rank" for length in lengths))
    rows = []
    for line in found:
        _, kind, ranks, _ = (part.strip() for part in line["claim"].split(",", 3))
        sent = (f"{line['bytes'][length]:,}" for length in lengths)
        rows.append((f"{kind.removeprefix('exchange ')}, {ranks}", str(line["collectives"]), *sent))
    return f"{table(head, rows)}\n\n{SETTINGS[_BYTES]}"


def ranks_scale(lines: list[Row]) -> str:
    """Measured speed and work of two ranks."""
    return claims_table(lines, _SCALE)


def ranks_simulation(lines: list[Row]) -> str:
    """The share of its time that a rank computes, by their number, with processors as measured and faster ones."""
    rows = []
    for line in lines:
        if line["benchmark"] != _SCALE or " work over that of one process " not in line["claim"]:
            continue
        direction = line["claim"].split()[0]
        for faster in _FASTER:
            times = line["seconds"]["one"] / faster, line["seconds"]["one sequence"] / faster
            cells = (f"{times[0] / (times[1] + exchange(ranks)):.2f}" for ranks in _RANKS)
            rows.append((direction, "as measured" if faster == 1 else f"{faster} times as fast", *cells))
    return table(("direction", "processors", *(f"{ranks:,} ranks" for ranks in _RANKS)), rows)


def exchange(ranks: int) -> float:
    """Seconds of an all-gather and a reduce-scatter of one state.

    Latency is that of a tree, 2·log₂ P messages; every byte of the other ranks' states arrives by one link.
    """
    return 2 * (ranks - 1) * _STATE / _BYTES_PER_SECOND + 2 * math.log2(ranks) * _SECONDS_PER_MESSAGE
