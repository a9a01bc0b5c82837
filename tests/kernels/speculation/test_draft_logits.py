"""Logits over a draft vocabulary as logits over the target's."""

import pytest
import torch

from headstart.kernels.speculation.draft_logits import places_of, whole_logits


@pytest.mark.parametrize(("rows", "draft_size", "vocab_size"), [(1, 3, 11), (6, 700, 5001), (0, 3, 11)])
def test_drafted_tokens_keep_their_logits(kernel_device, rows, draft_size, vocab_size):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if kernel_device == "cpu" else torch.bfloat16
    ids = torch.randperm(vocab_size, generator=generator)[:draft_size].to(kernel_device)  # in any order
    logits = torch.randn(rows, draft_size, generator=generator).to(kernel_device, dtype)
    found = whole_logits(logits, places_of(ids, vocab_size))
    expected = torch.full((rows, vocab_size), -torch.inf, dtype=dtype, device=kernel_device)
    assert torch.equal(found, expected.index_copy_(1, ids, logits))
