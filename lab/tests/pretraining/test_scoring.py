"""Bits per byte: of known distributions, by position, against the baselines' closed forms."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from linattn_lab.pretraining import scoring
from linattn_lab.pretraining.card import score_table
from linattn_lab.pretraining.scoring import bits_per_byte, frequency_bits, score, windows


class Periodic:
    """Says that byte t + 1 is (byte t + 1) mod 4, with probability 1/2 in even places and 1/4 in odd ones."""

    device = torch.device("cpu")

    def __call__(self, input_ids, use_cache):
        assert use_cache is False
        likely = torch.where(torch.arange(input_ids.shape[1]) % 2 == 0, 0.5, 0.25).expand(input_ids.shape)
        p = ((1 - likely) / 255)[..., None].repeat(1, 1, 256)
        p.scatter_(-1, ((input_ids + 1) % 4)[..., None], likely[..., None])
        return SimpleNamespace(logits=p.log() + 3.0)


def test_bits_are_minus_log2_of_the_probability():
    batch = torch.arange(7).expand(2, 7) % 4
    expected = torch.tensor([1.0, 2, 1, 2, 1, 2]).expand(2, 6)
    torch.testing.assert_close(bits_per_byte(Periodic(), batch), expected)


def test_a_score_is_a_mean_with_its_error():
    batch = torch.arange(129).expand(3, 129) % 4
    batch = batch.clone()
    # A byte in 128 that the model holds for unlikely, in one window.
    batch[1, 128] = 9
    found = score(Periodic(), batch)
    surprise = math.log2(255 / 0.75) - 2
    rows = torch.tensor([1.5, 1.5 + surprise / 128, 1.5]).double()
    assert found.bits == pytest.approx(float(rows.mean()), abs=1e-6)
    assert found.standard_error == pytest.approx(float(rows.std() / math.sqrt(3)), abs=1e-6)
    assert [(first, end) for first, end, _ in found.by_position] == [(0, 64), (64, 128)]
    assert [bits for *_, bits in found.by_position] == pytest.approx([1.5, 1.5 + surprise / 192], abs=1e-6)
    assert found.num_bytes == 3 * 128


@pytest.mark.parametrize(("num_bytes", "passes"), [(1, 5), (64, 5), (128, 3), (1 << 20, 1)])
def test_windows_are_scored_together_as_alone(monkeypatch, num_bytes, passes):
    batch, model, calls = torch.arange(5 * 65).view(5, 65) % 7, Periodic(), []
    alone = torch.cat([bits_per_byte(model, window[None]) for window in batch])
    monkeypatch.setattr(scoring, "_PASS_BYTES", num_bytes)
    monkeypatch.setattr(scoring, "bits_per_byte", lambda *given: calls.append(given) or bits_per_byte(*given))
    assert torch.equal(scoring.bits(model, batch), alone.double())
    assert len(calls) == passes


@pytest.mark.parametrize(
    ("length", "edges"), [(10, [0, 10]), (64, [0, 64]), (65, [0, 64, 65]), (300, [0, 64, 128, 256, 300])]
)
def test_octaves_cover_every_position_once(length, edges):
    found = score(Periodic(), torch.zeros(1, length + 1, dtype=torch.long)).by_position
    assert [first for first, _, _ in found] == edges[:-1]
    assert [end for _, end, _ in found] == edges[1:]


def test_windows_do_not_overlap():
    text = torch.arange(250, dtype=torch.uint8)
    for num_bytes in (9, 40, 1000):
        found = windows(text, 9, num_bytes)
        assert found.shape[1] == 10
        assert len(found) * 9 <= max(num_bytes, 9)
        assert (found[1:, 0] > found[:-1, -1]).all()
        assert (found[:, 1:] - found[:, :-1] == 1).all()
    assert len(windows(text, 9, 1000)) == 25


def test_frequencies_of_bytes():
    """Laplace's rule: (n + 1) / (N + 256)."""
    training, text = torch.tensor([1, 1, 1, 2], dtype=torch.uint8), torch.tensor([1, 2, 3], dtype=torch.uint8)
    expected = -(math.log2(4 / 260) + math.log2(2 / 260) + math.log2(1 / 260)) / 3
    assert frequency_bits(training, text) == pytest.approx(expected, rel=1e-12)


def test_one_window_has_no_error_to_show():
    """Of one window there is no spread."""
    batch = torch.arange(65)[None] % 4
    shown = [
        score_table(SimpleNamespace(test=score(Periodic(), given), uniform_bits=8.0, frequency_bits=2.0)).rows[-1]
        for given in (batch, batch.repeat(2, 1))
    ]
    assert shown == [("this model", "1.500"), ("this model", "1.500 ± 0.000")]
