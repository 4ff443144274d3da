"""Figures of an audit: divergence, intervals, peaks, against the plain way to them."""

from __future__ import annotations

import math
import os
from collections import Counter

import pytest
import torch
from scipy import stats

from linattn_lab.kv_audit.divergence import divergence, tails
from linattn_lab.kv_audit.intervals import Ratio, paired_ratio, student_quantile
from linattn_lab.kv_audit.peak import peak_bytes
from linattn_lab.kv_audit.reading import same_beginning
from linattn_lab.kv_audit.texts import CODE, KINDS, MIXED, PROSE, audit_texts, calibration_text
from linattn_lab.report.memory.words import ratio_words


def logs(seed, rows=150, size=7):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=draw, dtype=torch.float64).mul(3).log_softmax(-1)


def test_divergence_is_that_of_torch():
    p, other = logs(1), logs(2)
    following = torch.arange(150) % 7
    apart = divergence(p, other, following)
    expected = torch.nn.functional.kl_div(other, p, log_target=True, reduction="none").sum(-1)
    # Float64 sums of seven terms.
    assert (apart.kl - expected).abs().max() < 1e-13
    assert torch.equal(apart.loss, torch.nn.functional.nll_loss(other, following, reduction="none"))
    assert float(divergence(p, p, following).kl.abs().max()) == 0.0


def test_tokens_that_never_follow_add_nothing():
    """Models mask what pads their vocabulary by a logit of -inf."""
    p, other, following = logs(1), logs(2), torch.arange(150) % 7
    masked = [torch.nn.functional.pad(x, (0, 2), value=-torch.inf) for x in (p, other)]
    # Float64 sums of seven terms.
    assert (divergence(*masked, following).kl - divergence(p, other, following).kl).abs().max() < 1e-13
    assert bool(divergence(p, p.index_fill(1, torch.tensor([3]), -torch.inf), following).kl.isinf().all())


def test_what_rounding_leaves_below_zero_is_zero():
    p = logs(1).float()
    assert bool((divergence(p, p + 1e-7, torch.zeros(150, dtype=torch.long)).kl >= 0).all())


def test_tails_are_quantiles():
    kl = torch.rand(501, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ordered = kl.sort().values
    found = tails(kl)
    assert found.median == float(ordered[250])
    assert found.high == float(ordered[495])
    assert found.largest == float(ordered[-1])


def test_texts_have_parted_once_they_differ():
    assert same_beginning(torch.tensor([3, 1, 4, 1]), torch.tensor([3, 1, 5, 1])) == 2
    assert same_beginning(torch.tensor([3, 1, 4]), torch.tensor([3, 1])) == 2


def test_a_paired_interval_does_not_see_what_passages_share():
    passages = [0.001, 0.1, 3.0]
    ratio = paired_ratio([2 * kl for kl in passages], passages)
    assert ratio is not None
    assert (ratio.low, ratio.high) == (pytest.approx(2.0), pytest.approx(2.0))


@pytest.mark.parametrize("number", [2, 3, 12])
def test_an_interval_covers_its_mean_as_often_as_it_says(number):
    """Of 2,000 intervals of log-normal ratios 95 % cover 1, of however few passages."""
    draw = torch.Generator().manual_seed(7)
    samples = torch.randn(2000, number, generator=draw, dtype=torch.float64).exp()
    ratios = [paired_ratio(sample.tolist(), [1.0] * number) for sample in samples]
    covered = sum(ratio.low <= 1.0 <= ratio.high for ratio in ratios)
    # A standard error of 2,000 such cases is 0.005; four of them.
    assert abs(covered / 2000 - 0.95) < 0.02


def test_a_single_passage_has_no_interval():
    assert paired_ratio([2.0], [1.0]) == Ratio(2.0, None, None)
    assert ratio_words(Ratio(2.0, None, None)) == "2.00 ×"


def test_quantiles_are_student_s():
    for degrees in (*range(1, 40), 200):
        # The grid's step, times the slope of the tangent at 0.95·π/2, 162 for one degree, over 12.7.
        assert student_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-4)


def test_a_ratio_wants_figures_with_a_logarithm():
    assert paired_ratio([0.0, 1.0], [1.0, 1.0]) is None
    for lost in (math.nan, math.inf):
        for figures in ([lost, 1.0], [1.0, lost], [lost]):
            assert paired_ratio(figures, [1.0] * len(figures)) is None
            assert paired_ratio([1.0] * len(figures), figures) is None
    assert paired_ratio([], []) is None
    with pytest.raises(ValueError, match="same passages"):
        paired_ratio([1.0], [])


def test_a_peak_counts_what_is_there_at_once():
    size = 1 << 20

    def run():
        first = torch.ones(size)
        second = first + 1
        del first
        return second * 2

    # Float32: two at a time, of three, and the scalars.
    assert 2 * 4 * size <= peak_bytes(run) < 2 * 4 * size + 100


def test_a_failing_call_leaves_the_standard_error(capfd):
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        peak_bytes(fail)
    os.write(2, b"still here")
    assert "still here" in capfd.readouterr().err


def test_texts_share_no_part():
    texts = audit_texts()
    assert tuple(texts) == KINDS
    assert "def " in texts[CODE].content
    assert "def " in texts[MIXED].content
    assert texts[PROSE].content[2000:2300] not in texts[MIXED].content
    assert texts[CODE].content[2000:2300] not in texts[MIXED].content
    assert audit_texts(kinds=(MIXED,)) == {MIXED: texts[MIXED]}
    with pytest.raises(ValueError, match="must be among prose, code, mixed; got poems"):
        audit_texts(kinds=("poems",))
    # Topics of the language reference hold one another word for word.
    prose = [line for text in (*texts.values(), calibration_text()) for line in text.content.split("\n\n")]
    long = Counter(line for line in prose if len(line) > 150 and "\n" not in line)
    assert len(long) > 500
    assert max(long.values()) == 1
    last = calibration_text().content
    assert all(last[place : place + 300] not in text.content for text in texts.values() for place in (0, 9000))
