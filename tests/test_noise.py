"""Philox against the published known answers; normals, layout and the torch-generator noise."""

import itertools
import math

import pytest
import torch
from scipy import stats
from torch import tensor

from upgd import noise
from upgd.noise import Purpose

# From the authors' Random123 distribution, file kat_vectors, philox4x32 with 10 and 7 rounds: counter, key, answer.
KNOWN_ANSWERS = [
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def _words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(rounds: int, counter: str, key: str, answer: str) -> None:
    assert [int(w) for w in noise.philox(_words(counter), _words(key), rounds)] == [int(w) for w in _words(answer)]


def test_layout_of_counter_and_key() -> None:
    seed, step = (7 << 32) + 5, (3 << 32) + 2
    drawn = noise.words(seed, Purpose.TASK, step, 10)
    by_hand = [
        int(noise.philox(_words(f"{i // 4:x} 2 3 {int(Purpose.TASK):x}"), _words("5 7"))[i % 4]) for i in range(10)
    ]
    assert drawn.tolist() == by_hand


def test_seed_and_step_broadcast_and_a_longer_draw_begins_with_the_shorter() -> None:
    seeds, steps = torch.arange(3)[:, None], torch.arange(100, 105)
    block = noise.words(seeds, Purpose.NOISE, steps, 11)
    assert block.shape == (3, 5, 11)
    for i in range(3):
        for j in range(5):
            assert torch.equal(block[i, j], noise.words(i, Purpose.NOISE, 100 + j, 40)[:11])


def test_purposes_do_not_share_numbers() -> None:
    draws = [noise.words(1, purpose, 1, 1000) for purpose in Purpose]
    assert len(torch.cat(draws).unique()) >= 1000 * len(draws) - 5


def test_uniforms_are_midpoints() -> None:
    words = noise.words(1, Purpose.NOISE, 1, 7).double()
    assert torch.equal(noise.uniforms(1, Purpose.NOISE, 1, 7), (words + 0.5) / 2**32)


def test_box_muller_by_hand() -> None:
    a, b = math.exp(-2), 0.125
    z = noise.box_muller(tensor([a, b], dtype=torch.float64))
    expected = tensor([2 * math.cos(math.pi / 4), 2 * math.sin(math.pi / 4)], dtype=torch.float64)
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=0)


def test_normals_are_normal() -> None:
    z = noise.normals(torch.arange(20)[:, None], Purpose.NOISE, torch.arange(50), 1001)
    assert z.shape == (20, 50, 1001)
    flat = z.flatten().numpy()
    n = flat.size
    assert abs(flat.mean()) < 4 / math.sqrt(n)
    assert abs(flat.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs(stats.skew(flat)) < 4 * math.sqrt(6 / n)
    assert abs(stats.kurtosis(flat)) < 4 * math.sqrt(24 / n)
    assert stats.kstest(flat, "norm").pvalue > 1e-3
    for neighbours in ((z[1:], z[:-1]), (z[:, 1:], z[:, :-1]), (z[..., 1:], z[..., :-1])):
        assert abs(float((neighbours[0] * neighbours[1]).mean())) < 4 / math.sqrt(neighbours[0].numel())


def test_white_noise_follows_its_generator() -> None:
    def draw(generator: torch.Generator | None) -> torch.Tensor:
        return noise.white_(torch.empty(1000), generator)

    first, second = draw(torch.Generator().manual_seed(3)), draw(torch.Generator().manual_seed(3))
    assert torch.equal(first, second)
    torch.manual_seed(5)
    first = draw(None)
    torch.manual_seed(5)
    assert torch.equal(first, draw(None))
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-3


def test_anticorrelated_noise_sums_to_its_last_draw() -> None:
    draws = [torch.zeros(5, dtype=torch.float64)] + [torch.randn(5, dtype=torch.float64) for _ in range(20)]
    xis = [noise.anticorrelated(now, last) for last, now in itertools.pairwise(draws)]
    torch.testing.assert_close(torch.stack(xis).sum(0), draws[-1])
