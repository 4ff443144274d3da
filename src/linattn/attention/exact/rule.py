"""Which keys are attended to exactly: how many, chosen how, at which cost, and how they are written.

A rule of eviction is a subclass of `Exact` in a file of its own; letters as in exact/__init__.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from linattn.feature_maps import FeatureMap

# Blocks at whose beginnings a stream merges keys: a window has a few of them, of at least so many tokens.
_MOST_BLOCKS, _BLOCK = 4, 64
# Keys are numbered in 32 bits.
_MOST = 2**31
# The part of many merged keys that a merge leaves free.
_SPARE = 16
# The word of merged keys in a written form.
_MERGED = "merged"
_PART = re.compile(r"([a-z]+)\s+([1-9][0-9]*)(?:\s+in\s+([1-9][0-9]*)\s+bits)?", re.IGNORECASE)
BITS = (2, 4, 8)
"""What merged keys may be kept in: whole levels fit into a byte."""


class ExactCost(NamedTuple):
    """What an exact part adds to a call."""

    kept: int  # keys in a stream's state, merged ones included
    seen: int  # keys of a query
    map_folds: int  # how often the map's part is taken
    column_masses: bool  # whether the keys' masses are estimated


class Blocks(NamedTuple):
    """How a stream with merged keys is cut: those of a window are read as they are, and those of the current block."""

    size: int
    number: int  # in the window

    @property
    def window(self) -> int:
        """Keys before the current block that are read as they are."""
        return self.size * self.number


@dataclass(frozen=True)
class Exact:
    """Exact softmax attention on near and on heavy keys, the map for all others, or merged keys in place of a map.

        O(L·(3·window + num_heavy)·(D + Dv)) time more; 2·window + num_heavy keys in the state of a stream

    Without causality a window takes the map's part twice, before and after it, and heavy keys take the column masses.

    Merged keys take all keys that are not near, and there is no map: (k, v, β) adds exp(q·k + β) to the denominator,
    times v to the numerator. Keys are merged by what a sample of the queries attends to, m_i = Σ_s a_si: those of least
    Ward cost, in the metric of the queries' variances Σ and of the values, join the nearest heavier ones first. To a
    merged key the sample attends as much as to its members, and to the same mean value:

        k = Σ p_i k_i,   v = Σ p_i v_i,   p_i = m_i / Σ m,   β such that Σ_s a_s = Σ m
        cost = m₁m₂/(m₁ + m₂)·((k₁ - k₂)ᵀΣ(k₁ - k₂) + σ·|v₁ - v₂|²)

    What is lost is of second order in (q - q̄)·(k₁ - k₂); heavy keys are dear to merge and stay. With as many merged
    keys as tokens it is softmax attention. Causally keys are merged as blocks begin, of b tokens, by the latest
    max(16, 2·G) of the sampled queries before, for G query heads of a key/value head. With C merged keys a stream keeps
    window + b + C keys at most, C biases, and these queries; per token
    O((window + b + C)·(D + Dv) + (C + b)²/(b + s)·(D + Dv)) time. b is the window's width up to 64, and then 64 or a
    quarter of it; a window that is no multiple of it is rounded up. A merge leaves s places free, a sixteenth of C in
    whole blocks, and comes when there are none: of many keys not at every block.

    In few bits a stream keeps more merged keys in the same memory. Their numbers are rounded, relative to the mean and
    the deviation of their coordinate and in a basis in which none is far from the others, to 2^bits levels between the
    least and the largest of each 32. The window and the block stay as they are, and the first keys beyond them until
    they would take more memory than codes. For gradients rounding adds a constant.

    Without causality the sample is evenly spaced among all queries; O(L·(64 + C)·(D + Dv)) time. Up to 2,048 keys it
    has as many queries as keep 2¹⁷ logits, beyond 64. All is counted in a row's live tokens, a window's blocks too, and
    padding anywhere changes nothing: as many queries as keys are the same tokens, and a masked one's query is left out.
    Which keys are merged is a constant for gradients; they flow through merged keys, values and biases, and through
    what weighs them.

    A subclass that overrides `score` or `rank` is another rule of eviction: it says which keys are the heavy ones. It
    needs a `word` of its own for its written form, and nothing else: `torch.load` and `linattn.plan` know it then.

    Args:
        window: width of the blocks of tokens within which, and between neighbours of which, attention is exact: a power
            of two. A query sees its own block and both neighbours, causally its own up to itself and the one before.
            None for no window. Beside merged keys any positive number; causally a query sees so many keys before its
            block then.
        num_heavy: how many keys more every query attends to exactly: those of the largest column mass by the map's own
            estimate; causally, with a window, those of the largest score so far among the keys that have left the
            neighbourhood (`linattn.attention.exact.causal` has the score).
        num_merged: C, how many weighted keys stand for all that are not near, in place of a map: `feature_map=None`.
        bits: 2, 4 or 8 for merged keys and values in so many bits, causally; None for numbers of the state's dtype.

    Raises:
        ValueError: a size is negative or no integer, the window is no power of two beside a map, heavy keys are asked
            for beside merged ones, bits are others or of no merged keys, or there is nothing to be exact on: no exact
            part is `exact=None`.

    Example:
        >>> Exact(window=16, num_heavy=32)
        Exact(window=16, num_heavy=32, num_merged=0, bits=None)
        >>> Exact(window=16, num_heavy=32).label, Exact(window=64, num_merged=512, bits=4).label
        ('window 16 + heavy 32', 'window 64 + merged 512 in 4 bits')
        >>> import torch, linattn
        >>> q, k, v = torch.ones(1, 1, 6, 1), torch.zeros(1, 1, 6, 1), torch.arange(6.0).view(1, 1, 6, 1)
        >>> out = linattn.linear_attention(q, k, v, None, is_causal=True, exact=Exact(window=1, num_merged=2))
        >>> [round(x, 4) for x in out.flatten().tolist()]  # keys that are alike lose nothing by merging
        [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]

    Source: Chen et al. 2021 (Scatterbrain, arXiv 2110.15343); Zhang et al. 2023 (H2O, arXiv 2306.14048) for the choice
        of heavy keys; Ward 1963 (doi 10.1080/01621459.1963.10500845) for the cost of a merge; Liu et al. 2024 (KIVI,
        arXiv 2402.02750) and Ashkboos et al. 2024 (QuaRot, arXiv 2404.00456) for few bits.
    """

    word: ClassVar[str] = "heavy"

    window: int | None = None
    num_heavy: int = 0
    num_merged: int = 0
    bits: int | None = None

    def __init_subclass__(cls) -> None:
        """Enter a rule into the table of written forms and into the classes that torch.load may build."""
        super().__init_subclass__()
        if cls.word == Exact.word:
            raise TypeError(f"{cls.__name__} needs a word of its own for its written form, got {cls.word!r}")
        RULES[cls.word] = cls
        torch.serialization.add_safe_globals([cls])

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing."""
        window = 1 if self.window is None else self.window
        for name, size in (("window", window), ("num_heavy", self.num_heavy), ("num_merged", self.num_merged)):
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < _MOST:
                raise ValueError(f"{name} must be a non-negative integer below 2³¹, got {size!r}")
        if self.num_heavy and self.num_merged:
            raise ValueError(
                f"got {self!r}; heavy keys stay apart among merged ones, since merging them is dear: leave num_heavy "
                "out and raise num_merged"
            )
        if window < 1 or (window.bit_count() != 1 and not self.num_merged):
            raise ValueError(f"the window must be a power of two, as 16 or 32, got {self.window}; None is no window")
        if self.bits is not None and (type(self.bits) is not int or self.bits not in BITS):
            raise ValueError(f"bits must be {', '.join(map(str, BITS))} or None, got {self.bits!r}")
        if self.bits is not None and not self.num_merged:
            raise ValueError(f"only merged keys are kept in few bits, got {self!r}; give num_merged, or leave bits out")
        if self.window is None and not self.num_heavy and not self.num_merged:
            raise ValueError(f"got {self!r}, which attends to no key exactly; give a size, or exact=None")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take sizes that are read from a file, checked as the constructor's are."""
        self.__dict__.update(state)
        self.__post_init__()

    @property
    def label(self) -> str:
        """The written form, which `parse_exact` reads."""
        sizes = {"window": self.window, self.word: self.num_heavy, _MERGED: self.num_merged}
        label = " + ".join(f"{name} {size}" for name, size in sizes.items() if size)
        return label if self.bits is None else f"{label} in {self.bits} bits"

    @property
    def blocks(self) -> Blocks:
        """How a stream with merged keys is cut.

        Example:
            >>> Exact(32, num_merged=8).blocks, Exact(192, num_merged=8).blocks, Exact(400, num_merged=8).blocks
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
            >>> Exact(64, num_merged=500).num_left, Exact(64, num_merged=2000).num_left
            (500, 1936)
        """
        block = self.blocks.size
        return self.num_merged - self.num_merged // _SPARE // block * block

    @property
    def num_whole(self) -> int:
        """How many merged keys take no more memory as they are, 32 bits a number, than all of them in few bits."""
        return self.num_merged if self.bits is None else self.num_merged * self.bits // 32

    def score(self, mass: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What keys (B, H, n, D) are worth, (B, H, n), from how much queries attend to each; only comparisons count.

        Args:
            mass: (B, H, n): the column mass by the map's estimate; causally a key's mean weight in the softmax over the
                neighbourhoods that it was in, and its score as it leaves them is its score for good.
            key: (B, H, n, D).
            value: (B, H, n, Dv).
        """
        return mass

    def rank(self, score: Tensor, count: int | None = None) -> Tensor:
        """Numbers of the keys (B, H, n) by their claim to be exact, the best first; with `count`, only so many.

        Args:
            score: (B, H, n); -inf for masked keys and free places, which must come last. Causally, the heavy keys so
                far come first, then those that leave the neighbourhood, each from older to newer.
            count: how many are wanted; None for all.
        """
        if count is not None:
            return score.topk(count, dim=-1).indices
        return score.argsort(dim=-1, descending=True, stable=True)

    def cost(self, *, is_causal: bool) -> ExactCost:
        """What it adds to a call; `linattn.planning.costs` counts operations from it."""
        window = self.window or 0
        near, kept = (2 if is_causal else 3) * window, 2 * window
        if self.num_merged and window:
            kept = self.blocks.window + self.blocks.size
            near = kept if is_causal else near
        return ExactCost(
            kept=kept + self.num_heavy + self.num_merged,
            seen=near + self.num_heavy + self.num_merged,
            map_folds=0 if self.num_merged else 2 if window and not is_causal else 1,
            column_masses=self.num_heavy > 0 and not is_causal,
        )

    @staticmethod
    def takes(feature_map: FeatureMap) -> bool:
        """Whether a map's weights share the softmax kernel's scale and sum to a positive number."""
        return feature_map.softmax_kernel and feature_map.positive_normalizer

    def check_call(self, feature_map: FeatureMap | None, num_queries: int, num_keys: int, *, is_causal: bool) -> None:
        """Refuse a map or a call that cannot have this exact part."""
        if self.num_merged and feature_map is not None:
            raise ValueError(
                f"merged keys take every key that is not near and leave none to a map, got {self!r} beside "
                f"{type(feature_map).__name__}; give feature_map=None, or heavy keys in place of merged ones"
            )
        if feature_map is None and not self.num_merged:
            raise ValueError(
                f"without a map somebody must take the keys that are not exact, got {self!r} and feature_map=None; "
                "give num_merged too, or a map"
            )
        if feature_map is not None and not self.takes(feature_map):
            raise ValueError(
                f"window and heavy keys need a map whose weights share the softmax kernel's scale and sum to a "
                f"positive number, got {type(feature_map).__name__}; use Expansion, or FavorPlus, Hyperbolic, Oprf or "
                "Sderf"
            )
        if self.bits is not None and not is_causal:
            raise ValueError(
                f"bits say what a stream keeps of merged keys, and without causality nothing is kept, got {self!r}; "
                "leave bits out"
            )
        if is_causal and self.window is None:
            raise ValueError(
                f"causal heavy and merged keys are chosen among those that leave a window, got {self!r} without "
                "window; give window too"
            )
        if self.window is not None and (num_keys < num_queries if is_causal else num_keys != num_queries):
            wanted = "no more queries than keys" if is_causal else "as many queries as keys"
            raise ValueError(
                f"a window needs {wanted}, got {num_queries} queries and {num_keys} keys; leave it out where positions "
                "do not correspond"
            )


def check_exact(exact: object, feature_map: FeatureMap | None, query: Tensor, key: Tensor, *, is_causal: bool) -> None:
    """Refuse what is no exact part, and one that this map or this call cannot have."""
    if not isinstance(exact, Exact):
        raise TypeError(f"exact must be a linattn.Exact or None, got {exact!r}; write exact=Exact(window=32)")
    exact.check_call(feature_map, query.shape[2], key.shape[2], is_causal=is_causal)


# By the word of the written form; subclasses enter themselves.
RULES: dict[str, type[Exact]] = {Exact.word: Exact}
torch.serialization.add_safe_globals([Exact])


def begins_exact(text: str) -> bool:
    """Whether a part of a written form belongs to an exact part by its first word, and is no map's."""
    return text.strip().lower().partition(" ")[0] in exact_words()


def exact_words() -> tuple[str, ...]:
    """The words that begin an exact part."""
    return ("window", *RULES, _MERGED)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The known word that is nearest to a misspelt one, as an error asks for it; nothing where none is near.

    Example:
        >>> did_you_mean("windw", exact_words()), did_you_mean("Performer", exact_words())
        (", did you mean 'window'?", '')
    """
    exact = {name.lower(): name for name in known}
    nearest = get_close_matches(word.lower(), exact, 1)
    return f", did you mean {exact[nearest[0]]!r}?" if nearest else ""


def parse_exact(text: str) -> Exact:
    """An exact part's written form, read: "window W", "heavy G" (or another rule's word), "merged C", joined by plus.

    "merged C in 4 bits" is of merged keys in few bits.

    Raises:
        ValueError: a part is none of these or is written twice, two rules are named, the window is no power of two, or
            bits are others or are not of merged keys.
    """
    sizes: dict[str, int] = {}
    bits = None
    for part in text.split("+"):
        found = _PART.fullmatch(part.strip())
        name = "" if found is None else found[1].lower()
        if found is None or name not in exact_words():
            raise _no_part(part.strip())
        if name in sizes:
            raise ValueError(f"{text.strip()!r} has two parts {name!r}; write one")
        if found[3] and name != _MERGED:
            raise ValueError(f"{part.strip()!r}: only merged keys are kept in few bits; leave the bits out")
        sizes[name] = int(found[2])
        bits = int(found[3]) if found[3] else bits
    window, num_merged = sizes.pop("window", None), sizes.pop(_MERGED, 0)
    if len(sizes) > 1:
        raise ValueError(f"{text.strip()!r} has two rules, {' and '.join(sizes)}; write one")
    word, count = next(iter(sizes.items()), (Exact.word, 0))
    return RULES[word](window, count, num_merged, bits)


def _no_part(part: str) -> ValueError:
    """Say which known word a part may mean, or how parts are written."""
    word = part.partition(" ")[0]
    is_known = word.lower() in exact_words()
    why = (
        " (parts are a word and a positive whole number, joined by +)"
        if is_known
        else did_you_mean(word, exact_words())
    )
    words = " or ".join(("window W", *(f"{word} G" for word in RULES), f"{_MERGED} C, {_MERGED} C in 4 bits"))
    return ValueError(
        f"{part!r} is no exact part{why}; write {words}, as in Expansion + window 16 + heavy 32 or window 32 + "
        "merged 128"
    )
