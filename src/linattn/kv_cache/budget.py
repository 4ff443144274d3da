"""How many merged keys fit into bytes, all that a stream keeps counted; letters as in kv_cache/__init__.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from linattn.kv_cache.codes import Layout, coded_bytes
from linattn.kv_cache.config import Bits, MergedKV, checked_bits
from linattn.kv_cache.levels import MOST_BITS
from linattn.kv_cache.query_sample import sample_size

NEAR = (0.15, 0.25, 0.5)
"""Shares of merged keys' room that the window takes with a block, of which one is measured each."""

BITS_BY_DEFAULT = 4
"""Of merged keys and values, where nothing is said."""

Recall = Literal["near", "middle", "far"]
"""Aim of a budget: the least median KL divergence, or recall of what was said long ago."""

RECALLS = get_args(Recall)

# Shares of merged keys' room that the two tiers before them take, and the bits of the first beyond theirs. Most
# attention is to the newest tokens, where rounding costs more than merging does among the oldest; the second tier is
# for recall.
_NEWEST, _NEXT, _FINER = 0.3, 0.2, 2
# For recall of what is farther back: the shares of the tiers, with their bits.
_RECALL_TIERS = {"middle": ((0.28, 6), (0.47, 4)), "far": ((0.1, 6), (0.85, 3))}

# What a window is best at on real text, its block included, and at most: more bytes are better spent on merged keys.
_WINDOW, _SHARE = 256, 0.5
# The window's share beside tiers: exact tokens are dear where as many in 6 bits lose next to nothing. But prefill goes
# block by block: shares that hold so many tokens are taken up to twice as large.
_TIERED_SHARE, _TOKENS = 0.08, 40
# Keys of a budget for each sink, of which there are four at most.
_KEYS_PER_SINK = 16
# Keys of a budget at most: no model has a text as long.
_MOST = 2**20


@dataclass(frozen=True)
class Sizes:
    """The widths of a layer's keys and values, and what a number takes."""

    head_dim: int  # D
    value_dim: int  # Dv
    number_bytes: int = 4  # of a number in keys and values
    num_groups: int = 1  # G

    @property
    def statistic_bytes(self) -> int:
        """Bytes of a number that sums many: never fewer than four."""
        return max(self.number_bytes, 4)

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value, the unit in which budgets are said."""
        return (self.head_dim + self.value_dim) * self.number_bytes


def check_budget(budget: int) -> None:
    """Refuse budgets of no key, and beyond any text."""
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= _MOST:
        raise ValueError(f"budget must be from 1 to {_MOST} keys, got {budget!r}")


def within_budget(budget: int, sizes: Sizes, bits: Bits | None = BITS_BY_DEFAULT, recall: Recall = "near") -> MergedKV:
    """`MergedKV.within`, for a layer of these sizes."""
    check_budget(budget)
    wanted = (sizes.head_dim, 1), (sizes.num_groups, 1), (sizes.value_dim, 0)
    if any(type(number) is not int or number < least for number, least in wanted):
        raise ValueError(f"head_dim and num_groups must be positive integers, value_dim an integer ≥ 0, got {sizes}")
    bits = checked_bits(bits)
    if recall not in RECALLS:
        raise ValueError(f"recall must be one of {', '.join(map(repr, RECALLS))}, got {recall!r}")
    num_bytes, tiered = budget * sizes.key_bytes, min(max(_TIERED_SHARE, _TOKENS / budget), 2 * _TIERED_SHARE)
    if recall != "near":
        # The default stands for bits that are left out.
        if bits != BITS_BY_DEFAULT:
            raise ValueError(f"bits must be left out beside recall={recall!r}, which has its own, got {bits!r}")
        return within_bytes(num_bytes, sizes, tiered, BITS_BY_DEFAULT, _RECALL_TIERS[recall])
    if bits is None:
        return within_bytes(num_bytes, sizes, min(_WINDOW / budget, _SHARE), bits, ())
    of_key, of_value = bits if isinstance(bits, tuple) else (bits, bits)
    finer = min(of_key + _FINER, MOST_BITS), min(of_value + _FINER, MOST_BITS)
    # One tier where no bits are finer.
    tiers = ((_NEWEST + _NEXT, bits),) if finer == (of_key, of_value) else ((_NEWEST, finer), (_NEXT, bits))
    return within_bytes(num_bytes, sizes, tiered, bits, tiers)


def within_bytes(
    num_bytes: int, sizes: Sizes, near: float, bits: Bits | None, tiers: Sequence[tuple[float, Bits]]
) -> MergedKV:
    """The most merged keys in so many bytes; tiers, each a share of what the window leaves, go until none is empty."""
    whole, budget = _near_bytes(sizes), num_bytes // sizes.key_bytes
    # Merged keys have the frames of a last tier in their bits.
    framed = [bits, *(few for _, few in tiers if few != bits)]
    room = num_bytes - sample_bytes(sizes) - sum(_frames_bytes(sizes, each) for each in framed)
    num_sinks, rest = min(budget // _KEYS_PER_SINK, MergedKV.num_sinks), _near(1) * whole + token_bytes(sizes, bits)
    # At last sinks give way: a budget fits where a smaller one does.
    num_sinks = num_sinks if tiers else max(min(num_sinks, (room - rest) // whole), 0)
    room -= num_sinks * whole
    widths = range(max(int(room * near / whole), 0), 0, -1)
    window = next((width for width in widths if _near(width) * whole <= room * near), 1)
    room = max(room - _near(window) * whole, 0)
    coded = tuple((int(room * share) // token_bytes(sizes, few), few) for share, few in tiers)
    number = (room - sum(number * token_bytes(sizes, few) for number, few in coded)) // token_bytes(sizes, bits)
    if tiers and (number < 1 or any(number < 1 for number, _ in coded)):
        return within_bytes(num_bytes, sizes, near, bits, tiers[1:])
    if number < 1:
        least = -(-(sample_bytes(sizes) + _frames_bytes(sizes, bits) + rest) // sizes.key_bytes)
        raise ValueError(
            f"a budget of {budget} keys is too small for keys of width {sizes.head_dim}: a window, merged keys and the "
            f"sampled queries take {least}; give a budget of {least} or more"
        )
    return MergedKV(window, number, bits, num_sinks, coded)


def kept_bytes(config: MergedKV, sizes: Sizes, num_tokens: int) -> int:
    """The most that a stream keeps per key/value head after so many tokens, everything counted."""
    blocks = config.blocks
    # Of a block so far: when it is most depends on whether merged keys are wider than those near.
    return max(_kept(config, sizes, blocks.window + number + 1, num_tokens) for number in range(blocks.size))


def _kept(config: MergedKV, sizes: Sizes, most_near: int, num_tokens: int) -> int:
    """Bytes where so many keys are near at most, and all others but the sinks are in tiers."""
    near = min(most_near, num_tokens)
    sinks = min(config.num_sinks, num_tokens - near)
    total, rest = (near + sinks) * _near_bytes(sizes) + sample_bytes(sizes), num_tokens - near - sinks
    for tier in (*config.tiers, config.merged_tier):
        number = min(tier.number, rest)
        bits = None if number <= tier.num_unquantized(sizes.statistic_bytes) else tier.bits
        total, rest = total + number * token_bytes(sizes, bits) + _frames_bytes(sizes, bits), rest - number
    return total


def _near(window: int | None) -> int:
    """Keys of a window and a block."""
    blocks = MergedKV(window, 1).blocks
    return blocks.window + blocks.size


def _near_bytes(sizes: Sizes) -> int:
    """A key and its value in the model's numbers, and a bias."""
    return sizes.key_bytes + sizes.statistic_bytes


def token_bytes(sizes: Sizes, bits: Bits | None) -> int:
    """A key and its value in so many bits, and the bias."""
    if bits is None:
        return (sizes.head_dim + sizes.value_dim + 1) * sizes.statistic_bytes
    of_key, of_value = bits if isinstance(bits, tuple) else (bits, bits)
    return coded_bytes(sizes.head_dim, of_key) + coded_bytes(sizes.value_dim, of_value) + sizes.statistic_bytes


def sample_bytes(sizes: Sizes) -> int:
    """A head's sampled queries, which are there."""
    return sample_size(sizes.num_groups) * (sizes.head_dim * sizes.statistic_bytes + 1)


def _frames_bytes(sizes: Sizes, bits: Bits | None) -> int:
    """In few bits the frames of keys and of values."""
    both = (frame_bytes(width, sizes.statistic_bytes) for width in (sizes.head_dim, sizes.value_dim))
    return 0 if bits is None else sum(both)


def frame_bytes(width: int, number_bytes: int) -> int:
    """Bytes that rows of a width are quantized relative to: means, deviations, an order in 16 bits, bits of blocks."""
    layout = Layout.of(width)
    return 2 * width * number_bytes + 2 * layout.size + layout.number
