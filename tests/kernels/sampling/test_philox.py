import math

import pytest
import torch

from headstart.kernels.sampling import philox
from headstart.kernels.sampling.philox import gumbel, philox4x32, random_words, salted, uniform


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # known answers published with the Random123 library
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(key, counter, expected):
    tensors = [torch.tensor(word) for word in (*key, *counter)]
    assert tuple(word.item() for word in philox4x32(tensors[:2], tensors[2:])) == expected


def words(seed=1, sample=0, position=0, count=40, purpose=0):
    return random_words(torch.tensor(seed), torch.tensor(sample), torch.tensor(position), count, purpose)


def test_every_part_of_the_key_matters():
    base = words()
    for change in (dict(seed=2), dict(seed=1 + 2**32), dict(sample=1), dict(position=1), dict(purpose=1)):
        assert not torch.equal(base, words(**change)), change


def test_a_tokens_word_depends_on_neither_vocabulary_size_nor_batch():
    assert torch.equal(words(count=40)[:7], words(count=7))
    batch = random_words(torch.tensor([9, 1, 5]), torch.tensor([1, 0, 2]), torch.tensor([4, 0, 6]), 40)
    assert torch.equal(batch[1], words())


def test_gumbel_noise_is_the_same_bits_in_any_company():
    positions = torch.arange(23)
    together = gumbel(torch.full((23,), 7), torch.zeros(23, dtype=torch.int64), positions, 101)
    for i in range(23):
        alone = gumbel(torch.tensor([7]), torch.tensor([0]), positions[i : i + 1], 101)[0]
        assert torch.equal(together[i], alone)


def test_gumbel_noise_follows_its_distribution():
    g = gumbel(torch.tensor(3), torch.tensor(0), torch.tensor(0), 400_000)
    assert g.isfinite().all()
    assert abs(g.mean().item() - 0.57722) < 4 * math.pi / math.sqrt(6 * 400_000)
    # P(G < x) = exp(-exp(-x)); with 400k draws the empirical distribution stays within 0.004 of it
    for x in (-1.0, 0.0, 1.0, 3.0):
        assert abs((g < x).double().mean().item() - math.exp(-math.exp(-x))) < 0.004


def coarse(words):
    """What is wrong: the 24 bits that fp32 would hold."""
    return (words >> 8).double() * 2.0**-24


def test_uniforms_have_32_bits(monkeypatch):
    word = torch.tensor([0, 1, 255, 256, 511, 2**31, 2**32 - 1])
    monkeypatch.setattr(philox, "random_words", lambda *key: word)
    u = uniform(None, None, None, 7)
    assert torch.equal(u * 2.0**32, word.double())
    assert u.max() < 1
    assert not torch.equal(coarse(word) * 2.0**32, word.double())


def test_a_token_of_ratio_2_to_the_minus_28_is_accepted_that_often(monkeypatch):
    """Of the 2^32 words 16 accept it; with 24 bits 256 would."""
    word = torch.arange(1024)
    monkeypatch.setattr(philox, "random_words", lambda *key: word)
    assert (uniform(None, None, None, 1024) < 2.0**-28).sum() == 16
    assert (coarse(word) < 2.0**-28).sum() == 256


def test_the_largest_gumbel_noise_is_that_of_32_bits(monkeypatch):
    """log(2^33); with 24 bits it would stop at log(2^25), and no token rarer than about e^-20 against another would ever win."""
    monkeypatch.setattr(philox, "random_words", lambda *key: torch.tensor([0, 2**32 - 1]))
    assert gumbel(None, None, None, 2).tolist() == pytest.approx(
        [-math.log(33 * math.log(2)), 33 * math.log(2)], rel=1e-6
    )
    assert -math.log(-math.log(coarse(torch.tensor(2**32 - 1)) + 2.0**-25)) < 18


def test_uniforms_follow_their_distribution_and_no_purpose_or_node_repeats_another():
    key = torch.tensor(3), torch.tensor(0), torch.tensor(0)
    rows = [
        uniform(*key, 100_000, salted(purpose, node)) for purpose in range(philox.NUM_PURPOSES) for node in (0, 1, 63)
    ]
    for i, row in enumerate(rows):
        assert abs(row.mean().item() - 0.5) < 5 / math.sqrt(12 * 100_000)
        assert abs((row**2).mean().item() - 1 / 3) < 5 * math.sqrt(4 / 45 / 100_000)
        for other in rows[:i]:
            assert abs(torch.corrcoef(torch.stack([row, other]))[0, 1].item()) < 5 / math.sqrt(100_000)


@pytest.mark.gpu
def test_integers_are_the_same_bits_on_the_gpu():
    arguments = [torch.tensor([5, 2**40 + 3]), torch.tensor([0, 3]), torch.tensor([17, 100_000])]
    on_cpu = random_words(*arguments, 32_003)
    on_gpu = random_words(*[a.cuda() for a in arguments], 32_003)
    assert torch.equal(on_cpu, on_gpu.cpu())


@pytest.mark.gpu
def test_gumbel_values_on_the_gpu_agree_within_two_ulp():
    arguments = [torch.tensor([5, 2**40 + 3]), torch.tensor([0, 3]), torch.tensor([17, 100_000])]
    on_cpu = gumbel(*arguments, 32_003)
    on_gpu = gumbel(*[a.cuda() for a in arguments], 32_003).cpu()
    ulp = torch.nextafter(on_cpu.abs(), torch.tensor(torch.inf)) - on_cpu.abs()
    assert ((on_cpu - on_gpu).abs() <= 2 * ulp).all()
