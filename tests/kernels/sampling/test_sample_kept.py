"""Draws from what min-p, top-k and top-p left: by the formula on every token's noise, and rows that keep to themselves."""

import pytest
import torch

from headstart.kernels.sampling import sample_kept as module
from headstart.kernels.sampling.keep_top import keep_top, kept_scores
from headstart.kernels.sampling.philox import gumbel
from headstart.kernels.sampling.sample_kept import sample_kept


def problem(rows, vocab_size, device="cpu"):
    """logits, temperature, top-k, top-p and min-p of rows that keep all, some and one, and (seed, sample, position)."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 2 * torch.randn(rows, vocab_size, generator=generator)
    row = torch.arange(rows)
    logits[row % 9 == 8] = logits[row % 9 == 8].round()  # ties
    logits[row % 9 == 7, 3:] = -torch.inf
    logits[row == 5] = -torch.inf
    logits[row == 6, ::3] = torch.nan
    logits[row == 10, 2:9] = torch.inf
    filters = (
        torch.tensor([1.0, 0.7, 0.0, 1.3, 1e-3])[row % 5],
        torch.tensor([0, 5, 50, 0, 1, vocab_size, 40])[row % 7],
        torch.tensor([1.0, 0.9, 0.5])[row % 3],
        torch.tensor([0.0, 0.0, 0.05, 0.0])[row % 4],
    )
    keys = 2**40 + row, row % 3, 100 + row
    return [x.to(device) for x in (logits, *filters)], [x.to(device) for x in keys]


def drawn_by_hand(logits, temperature, left, keys):
    """The highest of the scores that are left, each with its token's noise; the first of equals. left: bool [M, V]"""
    heat = torch.where(temperature > 0, temperature, 1)[:, None]
    noisy = logits.float() / heat + gumbel(*keys, logits.shape[1]) * (temperature > 0)[:, None]
    noisy = noisy.masked_fill(~left, -torch.inf)
    return [row.index(max(row)) for row in noisy.tolist()]


# Fewer than a block, a remainder, more than one block for some of a row's programs.
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 1), (24, 37), (12, 300)])
def test_a_draw_is_the_best_of_what_is_left(device, rows, vocab_size, monkeypatch):
    monkeypatch.setattr(module, "_PARTS", 2)
    monkeypatch.setattr(module, "_BLOCK", 64)
    given, keys = problem(rows, vocab_size)
    left = kept_scores(keep_top(*given)) > -torch.inf
    expected = drawn_by_hand(*given[:2], left, keys)
    found = sample_kept(keep_top(*[x.to(device) for x in given]), *[x.to(device) for x in keys])
    assert found.dtype == torch.int64
    assert found.tolist() == expected
    if rows > 1:
        counts = left.sum(1)
        kinds = counts == 1, counts == vocab_size, (counts > 1) & (counts < vocab_size)
        assert all(kind.any() for kind in kinds)


def test_the_default_sizes_give_the_same_draws(kernel_device, monkeypatch):
    given, keys = problem(5, 2500, kernel_device)
    kept = keep_top(*given)
    found = sample_kept(kept, *keys)
    monkeypatch.setattr(module, "_PARTS", 4)
    monkeypatch.setattr(module, "_BLOCK", 256)
    assert torch.equal(sample_kept(kept, *keys), found)


def test_indices_may_have_32_bits(device):
    given, (seed, sample, position) = problem(9, 37, device)
    kept, seed = keep_top(*given), seed % 1000
    expected = sample_kept(kept, seed, sample, position)
    assert torch.equal(sample_kept(kept, seed.int(), sample.int(), position.int()), expected)


@pytest.mark.parametrize("count", [1, 2, 7, 16, 33])
def test_rows_of_the_reference_depend_on_no_other_row(count):
    given, keys = problem(40, 111)
    whole = sample_kept(keep_top(*given), *keys)
    for start in (0, 40 - count):
        some = slice(start, start + count)
        assert torch.equal(sample_kept(keep_top(*[x[some] for x in given]), *[x[some] for x in keys]), whole[some])


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab_size", "dtype"), [(32_003, torch.float32), (128_256, torch.bfloat16)])
def test_rows_depend_on_no_other_row_and_agree_with_the_cpu(vocab_size, dtype):
    (logits, *filters), keys = problem(200, vocab_size, "cuda")
    given = logits.to(dtype), *filters
    whole = sample_kept(keep_top(*given), *keys)
    for count in (*range(1, 65, 9), 199):
        for start in (0, 200 - count):
            some = slice(start, start + count)
            few = sample_kept(keep_top(*[x[some] for x in given]), *[x[some] for x in keys])
            assert torch.equal(few, whole[some]), (count, start)
    expected = sample_kept(keep_top(*[x[:24].cpu() for x in given]), *[x[:24].cpu() for x in keys])
    assert whole[:24].tolist() == expected.tolist()


@pytest.mark.gpu
def test_it_can_be_captured_in_a_graph():
    given, keys = problem(9, 5000, "cuda")
    sample_kept(keep_top(*given), *keys)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample_kept(keep_top(*given), *keys)
    given[0].copy_(torch.randn(9, 5000))
    graph.replay()
    assert torch.equal(captured, sample_kept(keep_top(*given), *keys))


def test_no_rows_give_no_rows(device):
    given, keys = problem(1, 37, device)
    assert sample_kept(keep_top(*[x[:0] for x in given]), *[x[:0] for x in keys]).shape == (0,)


def test_shapes_that_do_not_fit_are_refused():
    given, keys = problem(4, 37)
    with pytest.raises(ValueError, match="sample_kept takes one entry per row"):
        sample_kept(keep_top(*given), *[key[:3] for key in keys])
