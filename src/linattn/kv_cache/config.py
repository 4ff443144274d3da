"""A KV cache's bounds: sinks, window, merged keys, their bits, and written form; letters as in kv_cache/__init__.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch

from linattn.softmax.checking import DTYPES, did_you_mean

# Blocks at whose beginnings a stream merges keys: a window has a few of them, of at least so many tokens.
_MOST_BLOCKS, _BLOCK = 4, 64
# Keys are numbered in 32 bits.
_MOST = 2**31
# The part of many merged keys that a merge leaves free.
_SPARE = 16
_SINKS, _WINDOW, _MERGED = "sinks", "window", "merged"
_WORDS = (_SINKS, _WINDOW, _MERGED)
_NUMBER = r"([0-9]+\.?[0-9]*)"
_BITS = rf"{_NUMBER}(?:\s*/\s*{_NUMBER})?"
_PART = re.compile(rf"(?:([a-z]+)\s+)?(0|[1-9][0-9]{{0,99}})(?:\s+in\s+{_BITS}\s+bits)?", re.IGNORECASE)
BITS = tuple(half / 2 for half in range(4, 17))
"""Bits that numbers may be quantized to, in the mean of a row: from 2 to 8 in halves."""
_SINKS_BY_DEFAULT = 4

Bits = float | tuple[float, float]
"""Bits of a number, or of keys' and of values'."""


class TierSize(NamedTuple):
    """How many tokens a tier keeps, and in how many bits."""

    number: int
    bits: Bits | None

    @property
    def both_bits(self) -> tuple[float, float]:
        """Bits of keys and of values, quantized ones."""
        assert self.bits is not None
        return self.bits if isinstance(self.bits, tuple) else (self.bits, self.bits)

    def num_unquantized(self, number_bytes: int) -> int:
        """How many tokens take no more memory in numbers of so many bytes than all of them in few bits."""
        return self.number if self.bits is None else int(self.number * min(self.both_bits)) // (8 * number_bytes)

    @property
    def in_bits(self) -> str:
        """Bits in their written form, that of keys first."""
        return "" if self.bits is None else f" in {'/'.join(f'{x:g}' for x in dict.fromkeys(self.both_bits))} bits"


class Blocks(NamedTuple):
    """How a stream is cut: the blocks of the window are read exactly, and so is the current one."""

    size: int
    number: int  # in the window

    @property
    def window(self) -> int:
        """Keys before the current block that are read exactly."""
        return self.size * self.number


@dataclass(frozen=True)
class MergedKV:
    """A KV cache of constant size: a sliding window of exact keys, all earlier ones merged.

    A merged key (k, v, β) stands for several: it adds exp(q·k + β) to the softmax's denominator, times v to the
    numerator. The mass of a key, m_i = Σ_s a_si, is the attention that it gets from a sample of the queries. The keys
    that are cheapest to merge join their nearest heavier key. The cost is Ward's; distances weigh coordinates by the
    queries' variances Σ (1 where queries are all alike), and count values too. The sample attends to a merged key as
    much as to its members, and reads the same mean value:

        k = Σ p_i k_i,   v = Σ p_i v_i,   p_i = m_i / Σ m,   β such that Σ_s a_s = Σ m
        cost = m₁m₂/(m₁ + m₂)·((k₁ - k₂)ᵀΣ(k₁ - k₂) + σ·|v₁ - v₂|²)

    The error is of second order in (q - q̄)·(k₁ - k₂). Unquantized, as many merged keys as tokens are softmax attention.

    Causally keys are merged as blocks begin, of b tokens, by the latest max(16, 2·G) of the sampled queries before, for
    G query heads of a key/value head. A stream keeps the sinks and w + b + C keys at most, C biases, and these queries;
    per token O((w + b + C)·(D + Dv) + (C + b)²/(b + s)·(D + Dv)) time. b is the window's width up to 64, beyond
    it the larger of 64 and about a quarter of the width; the window is rounded up to whole blocks. A merge comes when
    no place is free, and frees s: a sixteenth of C, in whole blocks. On a CPU, 768 keys and more in few bits are
    compared along the max(16, (D + Dv)/8) principal axes of keys and values.

    The first tokens of a stream stay exact and are never merged: attention sinks, far from all others.

    Quantized to few bits a stream keeps more merged keys in the same memory. Numbers are rounded, relative to the mean
    and the deviation of their coordinate and in a basis in which none is far from the others, to the 2^b levels of
    least mean square error for normal numbers, times one scale a row, the best of eight. Values have equal bits; keys
    have more where the sampled queries weigh a coordinate more, b_c of least Σ E[q_c²]·σ_c²·distortion(b_c) in the same
    sum. Means, deviations and bits are measured when codes begin, once more at three times as many keys, and again, of
    all keys, whenever their mean has moved further than they are spread, or a key exceeds 2¹⁴ deviations.
    The sinks, the window and the block stay exact, and so do the first keys between them until they would take more
    memory than codes. For gradients rounding adds a constant, and codes of earlier calls are constants.

    Without causality, in encoders, the sample is evenly spaced among all queries, and O(L·(64 + C)·(D + Dv)) time is
    taken. Up to 2,048 keys it has as many queries as keep 2¹⁷ logits, beyond 64. All is counted in a row's live tokens,
    so that padding anywhere changes nothing. Which keys are merged is a constant for gradients; they flow through
    merged keys, values and biases, and through what weighs them.

    Args:
        window: w > 0: a query sees so many keys before its block exactly, and its own block up to itself; without
            causality its own block of w tokens and both neighbours. None for no window, without causality alone.
        num_merged: C > 0, how many weighted keys stand for all that are not near.
        bits: of a number of merged keys and values in a stream, 2 to 8 in halves, or (of keys, of values); None for
            numbers of at least float32. Without causality nothing is kept, and nothing is quantized.
        coded: tiers between the window and the merged keys, the newest first: how many tokens, and in how many bits a
            number. A token is coded as it enters a tier, and keeps its code where merged keys have as many bits as the
            last one. With tiers `num_merged` may be 0: then the oldest are evicted.
        num_sinks: how many of a row's first live tokens stay exact in a stream. Without causality there are none.

    Raises:
        ValueError: a size is negative, 0 beside sinks, or no integer, or bits are others.

    Example:
        >>> MergedKV(window=64, num_merged=512, bits=(3, 4)).label
        'sinks 4 + window 64 + merged 512 in 3/4 bits'
        >>> import torch
        >>> from linattn import merged_attention
        >>> q, k, v = torch.ones(1, 1, 6, 1), torch.zeros(1, 1, 6, 1), torch.arange(6.0).view(1, 1, 6, 1)
        >>> config = MergedKV(window=1, num_merged=2, bits=None, num_sinks=0)
        >>> out = merged_attention(q, k, v, config, is_causal=True)
        >>> [round(x, 4) for x in out.flatten().tolist()]  # keys that are alike lose nothing by merging
        [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]

    Source: Ward 1963 (doi 10.1080/01621459.1963.10500845) for the cost of a merge; Lloyd 1982 (doi
        10.1109/TIT.1982.1056489) and Ashkboos et al. 2024 (QuaRot, arXiv 2404.00456) for few bits; Xiao et al. 2024
        (StreamingLLM, arXiv 2309.17453) for attention sinks.
    """

    window: int | None = 64
    num_merged: int = 512
    bits: Bits | None = 4
    num_sinks: int = _SINKS_BY_DEFAULT
    coded: tuple[tuple[int, Bits], ...] = ()

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing."""
        object.__setattr__(self, "coded", _checked_tiers(self.coded))
        least = {_WINDOW: 1, "num_merged": 0 if self.coded else 1, "num_sinks": 0}
        for name, size in ((name, getattr(self, name)) for name in least if name != _WINDOW or self.window is not None):
            if isinstance(size, bool) or not isinstance(size, int) or not least[name] <= size < _MOST:
                raise ValueError(f"{name} must be an integer from {least[name]} to 2³¹ - 1, got {size!r}")
        # Where none are merged they have no bits.
        object.__setattr__(self, "bits", checked_bits(self.bits if self.num_merged else None))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take sizes that are read from a file, checked as the constructor's are."""
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def label(self) -> str:
        """The written form, which `MergedKV.parse` reads."""
        window = "" if self.window is None else f"{_WINDOW} {self.window} + "
        sinks = "" if self.num_sinks == _default_sinks(self.window) else f"{_SINKS} {self.num_sinks} + "
        tiers = [f"{tier.number}{tier.in_bits}" for tier in map(TierSize._make, self.coded)]
        merged = [f"{_MERGED} {self.num_merged}{self.merged_tier.in_bits}"] if self.num_merged else []
        return f"{sinks}{window}{' + '.join(tiers + merged)}"

    @property
    def num_newest(self) -> int:
        """How many of the newest tokens among the merged keys are not merged: those of a last tier in their bits."""
        number, bits = self.coded[-1] if self.coded and self.num_merged else (0, None)
        return number if bits == self.bits else 0

    @property
    def tiers(self) -> tuple[TierSize, ...]:
        """The coded tiers whose tokens are not among the merged keys, the newest first."""
        return tuple(TierSize(*tier) for tier in (self.coded[:-1] if self.num_newest else self.coded))

    @property
    def merged_tier(self) -> TierSize:
        """The merged keys, and those of a last tier in their bits."""
        return TierSize(self.num_merged + self.num_newest, self.bits)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the written form: "sinks S", "window W", tiers as "N in 4 bits", and "merged C", joined by plus.

        Tiers come in their order, the newest first, all else in any. Bits may be two numbers, "in 3/4 bits": 3 of keys,
        4 of values. A window has no sinks where none are written.

        Raises:
            TypeError: `text` is no str.
            ValueError: a part is none of these, is written twice or has other bits; or no keys are merged or in tiers.

        Example:
            >>> MergedKV.parse("window 32 + 800 in 4 bits + 3400 in 2 bits + Merged 128 in 3.5 bits").coded
            ((800, 4), (3400, 2))
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {text!r}; give a written form, as MergedKV(64, 512).label")
        sizes: dict[str, int] = {}
        coded: list[tuple[int, Bits]] = []
        bits: Bits | None = None
        for part in text.split("+"):
            match = _PART.fullmatch(part.strip())
            name = "" if match is None or match[1] is None else match[1].lower()
            if match is None or (name not in _WORDS if name else match[3] is None):
                raise _no_part(part.strip())
            both = [float(x) for x in match.groups()[2:] if x is not None]
            in_bits = None if not both else both[0] if len(both) == 1 else (both[0], both[1])
            if not name and in_bits is not None:
                coded.append((int(match[2]), in_bits))
                continue
            if name in sizes:
                raise ValueError(f"{text.strip()!r} has two parts {name!r}; write one")
            if in_bits is not None and name != _MERGED:
                raise ValueError(
                    f"{part.strip()!r}: only tiers and merged keys are quantized; leave the bits out, or the word"
                )
            sizes[name] = int(match[2])
            bits = bits if in_bits is None else in_bits
        if _MERGED not in sizes and not coded:
            raise ValueError(f"{text.strip()!r} merges no keys; write, for example, {text.strip()} + merged 128")
        window = sizes.get(_WINDOW)
        return cls(window, sizes.get(_MERGED, 0), bits, sizes.get(_SINKS, _default_sinks(window)), tuple(coded))

    @classmethod
    def within(
        cls,
        budget: int,
        *,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        num_groups: int = 1,
        bits: Bits | None = 4,
        recall: Literal["near", "middle", "far"] = "near",
    ) -> MergedKV:
        """The sinks, the window and the most merged keys in the bytes of so many exact keys and values, all counted.

        Args:
            budget: N, in exact keys and values of one key/value head, from 1 to 2²⁰.
            head_dim: D.
            value_dim: Dv; D if None.
            dtype: of the model's keys and values.
            num_groups: query heads of a key/value head, whose sampled queries are counted.
            bits: of merged keys and values; of the tokens before them the newest have 2 more, 8 at most, and the next
                as many. None for 32 and no tiers.
            recall: "near" for the least median KL divergence; "middle" for more tokens one by one; "far" for the most.

        Raises:
            ValueError: if the budget is out of range, or leaves no room beside the sampled queries; another
                `recall`, or bits beside another than "near".

        Example:
            >>> MergedKV.within(512, head_dim=64).label
            'sinks 4 + window 19 + 674 in 6 bits + 649 in 4 bits + merged 1624 in 4 bits'
        """
        # Imported here: budgets are said of what this file defines.
        from linattn.kv_cache.budget import Sizes, within_budget

        if dtype not in DTYPES:
            raise TypeError(f"dtype must be a float of 16 bits or more, got {dtype!r}; give that of the model's keys")
        sizes = Sizes(head_dim, head_dim if value_dim is None else value_dim, dtype.itemsize, num_groups)
        return within_budget(budget, sizes, bits, recall=recall)

    @property
    def blocks(self) -> Blocks:
        """How a stream is cut.

        Example:
            >>> MergedKV(32, 8).blocks, MergedKV(192, 8).blocks, MergedKV(400, 8).blocks
            (Blocks(size=32, number=1), Blocks(size=64, number=3), Blocks(size=100, number=4))
        """
        window = self.window or 1
        number = min(-(-window // _BLOCK), _MOST_BLOCKS)
        return Blocks(-(-window // number), number)

    @property
    def num_left(self) -> int:
        """How many merged keys a merge in a stream leaves: a sixteenth less than C, in whole blocks.

        A merge compares all keys with each other; so it is made every few blocks where they are many, and its cost per
        token is linear in C.

        Example:
            >>> MergedKV(64, 500).num_left, MergedKV(64, 2000).num_left
            (500, 1936)
        """
        block = self.blocks.size
        return self.num_merged - self.num_merged // _SPARE // block * block

    def check_call(self, num_queries: int, num_keys: int, *, is_causal: bool) -> None:
        """Refuse calls of numbers of tokens or directions that it has no meaning for."""
        if not is_causal and self.num_merged == 0:
            raise ValueError(f"tiers are those of a stream, got {self.label!r} without causality; give merged keys")
        if is_causal and self.window is None:
            raise ValueError(
                f"causal merged keys are those that leave a window, got {self!r} without window; give window too"
            )
        if self.window is not None and (num_keys < num_queries if is_causal else num_keys != num_queries):
            wanted = "no more queries than keys" if is_causal else "as many queries as keys"
            got = f"{num_queries} queries and {num_keys} keys"
            raise ValueError(f"a window needs {wanted}, got {got}; leave it out where positions do not correspond")


def begins_merged(text: str) -> bool:
    """Whether a written form is of merged keys or tiers: a part begins with their word, or is N in few bits."""
    parts = [part.strip().lower().split() for part in text.split("+")]
    return any(words[:1] == [_MERGED] or (words[1:2] == ["in"] and words[0].isdecimal()) for words in parts)


def _default_sinks(window: int | None) -> int:
    """How many sinks there are where none are written: those of a window are."""
    return _SINKS_BY_DEFAULT if window is None else 0


def checked_bits(bits: object) -> Bits | None:
    """Bits in their simplest form; ValueError for others."""
    both = bits if isinstance(bits, tuple) else (bits, bits)
    if bits is None:
        return None
    if len(both) != 2 or any(type(x) not in (int, float) or x not in BITS for x in both):
        raise ValueError(
            f"bits must be from 2 to 8 in halves, or two of these, of keys and of values, or None, got {bits!r}"
        )
    of_key, of_value = (int(x) if x == int(x) else x for x in both)
    return of_key if of_key == of_value else (of_key, of_value)


def _checked_tiers(tiers: object) -> tuple[tuple[int, Bits], ...]:
    """Numbers of tokens and bits in their simplest form; ValueError for others."""
    checked = []
    for tier in tiers if isinstance(tiers, tuple | list) else (tiers,):
        number, bits = tier if isinstance(tier, tuple | list) and len(tier) == 2 else (None, None)
        if type(number) is not int or not 0 < number < _MOST or bits is None:
            raise ValueError(
                f"coded must be tiers of a positive number of tokens and their bits, the newest first, as "
                f"((800, 4), (3400, 2)), got {tiers!r}"
            )
        checked.append((number, checked_bits(bits)))
    return tuple((number, bits) for number, bits in checked if bits is not None)


def _no_part(part: str) -> ValueError:
    """Say which known word a part may mean, or how parts are written."""
    word = part.partition(" ")[0]
    is_known = word.lower() in _WORDS
    why = " (a word and a positive whole number)" if is_known else did_you_mean(word, _WORDS)
    return ValueError(
        f"{part!r} is no part of merged keys{why}; write sinks S, window W, {_MERGED} C or {_MERGED} C in 4 bits, as "
        "in 'sinks 4 + window 32 + merged 128'"
    )


torch.serialization.add_safe_globals([MergedKV])
