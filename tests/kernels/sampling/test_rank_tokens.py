"""Ranks over the vocabulary: the order of top_tokens, ties, NaN, rows that keep to themselves."""

import pytest
import torch

from headstart.kernels.sampling import rank_tokens as module
from headstart.kernels.sampling.rank_tokens import rank_tokens, rank_tokens_reference
from headstart.kernels.sampling.sample import top_tokens


def rank_by_hand(row, token):
    """Place of `token` when Python sorts the row, likeliest first, ties by the lowest id."""
    values = [float("-inf") if x != x else x for x in row.float().tolist()]
    return 1 + sorted(range(len(values)), key=lambda v: (-values[v], v)).index(token)


def make_rows(vocab_size, dtype=torch.float32):
    """Random, rounded (ties), with holes, all equal, NaN.  -> logits [6, V], tokens [6]"""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(6, vocab_size, generator=generator) * 3
    logits[1] = logits[1].round()
    logits[2, vocab_size // 3 :] = -torch.inf
    logits[3] = 0.0
    logits[3, ::2] = -0.0
    logits[4, ::3] = torch.nan
    logits[5, -1] = torch.inf
    tokens = torch.randint(vocab_size, (6,), generator=generator)
    tokens[2], tokens[4], tokens[5] = vocab_size - 1, 0, vocab_size - 1
    return logits.to(dtype), tokens


@pytest.mark.parametrize("vocab_size", [1, 9, 4096, 5000])
def test_reference_ranks_as_sorting_does(vocab_size):
    logits, tokens = make_rows(vocab_size)
    expected = [rank_by_hand(row, token) for row, token in zip(logits, tokens.tolist())]
    assert rank_tokens_reference(logits, tokens).tolist() == expected
    assert rank_tokens(logits, tokens).tolist() == expected


def test_ranks_number_the_best_tokens():
    logits = (torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 2).round()
    best = top_tokens(logits, 40)
    for place in range(40):
        assert rank_tokens(logits, best[:, place]).tolist() == [place + 1] * 4


def test_without_ties_the_rank_counts_the_tokens_at_least_as_likely():
    """vLLM's definition; with ties it gives all tied tokens the rank of the last one, ours are all different."""
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([0, 5, 199, 77, 150])
    counted = (logits >= logits.gather(1, tokens[:, None])).sum(1)
    assert rank_tokens(logits, tokens).tolist() == counted.tolist()
    tied = torch.zeros(1, 8)
    assert [rank_tokens(tied, torch.tensor([t])).item() for t in range(8)] == list(range(1, 9))


@pytest.mark.parametrize("vocab_size", [1, 9, 4096, 5000])
def test_kernel_ranks_as_the_reference(kernel_device, vocab_size):
    for dtype in (torch.float32, torch.bfloat16)[: 2 if kernel_device == "cuda" else 1]:
        logits, tokens = make_rows(vocab_size, dtype)
        expected = rank_tokens_reference(logits, tokens)
        logits, tokens = logits.to(kernel_device), tokens.to(kernel_device)
        found = rank_tokens(logits, tokens)
        assert found.dtype == torch.int64
        assert found.tolist() == expected.tolist()
        assert rank_tokens(logits, tokens.int()).tolist() == expected.tolist()
        for row in range(len(logits)):
            assert rank_tokens(logits[row : row + 1], tokens[row : row + 1]).item() == expected[row]
        assert rank_tokens(logits[:0], tokens[:0]).shape == (0,)


@pytest.mark.parametrize("chunk", [16, 1024])
def test_the_size_of_the_chunks_changes_no_rank(kernel_device, chunk, monkeypatch):
    logits, tokens = make_rows(3000)
    expected = rank_tokens_reference(logits, tokens).tolist()
    monkeypatch.setattr(module, "_CHUNK", chunk)
    assert rank_tokens(logits.to(kernel_device), tokens.to(kernel_device)).tolist() == expected


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one entry per row"):
        rank_tokens(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"logits \[M, V\]"):
        rank_tokens(torch.zeros(5), torch.zeros(1, dtype=torch.int64))
