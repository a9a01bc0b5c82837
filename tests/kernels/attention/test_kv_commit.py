"""Accepted nodes move to the committed positions, against a copy made position by position."""

import random

import pytest
import torch

from headstart.kernels.attention.kv_commit import kv_commit
from headstart.kernels.attention.tree_attention import PAGE


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize(("length", "dim", "kv_heads"), [(2, 8, 1), (6, 20, 3), (9, 16, 2), (64, 4, 2)])
def test_commit_reads_every_source_before_it_writes(device, length, dim, kv_heads, index):
    generator = random.Random(length)
    committed = [0, 62, 63, 64, 100]
    batch, pages = len(committed), 4
    kv = torch.randn(2, 2, (batch * pages + 1) * kv_heads * PAGE, dim)
    table = torch.randperm(batch * pages).view(batch, pages) + 1
    # Paths climb: sources lie at or after their destinations, and one step's source is another's destination.
    num_accepted = [0, length - 1, *(generator.randrange(length) for _ in range(batch - 2))]
    paths = [[0, *sorted(generator.sample(range(1, length + 40), length - 1))] for _ in range(batch)]
    paths[1] = list(range(length))  # a chain: nothing moves
    expected = kv.clone()
    at = lambda cache: cache.view(2, 2, -1, kv_heads, PAGE, dim)  # noqa: E731
    for b, start in enumerate(committed):
        for j in range(num_accepted[b] + 1):
            (page, offset), (source_page, source) = ((divmod(start + n, PAGE)) for n in (j, paths[b][j]))
            at(expected)[:, :, table[b, page], :, offset] = at(kv)[:, :, table[b, source_page], :, source]
    found = kv.to(device, copy=True)
    arguments = [torch.tensor(x, dtype=index, device=device) for x in (committed, paths, num_accepted)]
    kv_commit(found, table.to(device, index), *arguments, kv_heads)
    assert torch.equal(found.cpu(), expected)
    assert not torch.equal(expected, kv) or length == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "kv_heads", "dim"), [(8, 8, 128), (64, 8, 128), (64, 2, 256), (16, 4, 96)])
def test_large_commits_agree_with_the_cpu(length, kv_heads, dim):
    generator = torch.Generator().manual_seed(length)
    batch, pages = 16, 5
    kv = torch.randn(8, 2, (batch * pages + 1) * kv_heads * PAGE, dim, generator=generator).bfloat16()
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages) + 1
    committed = torch.randint(0, 4 * PAGE, (batch,), generator=generator)
    path = torch.stack([torch.randperm(63, generator=generator)[: length - 1].sort().values + 1 for _ in range(batch)])
    path = torch.cat((torch.zeros(batch, 1, dtype=torch.int64), path), 1)[:, :length]
    num_accepted = torch.randint(0, path.shape[1], (batch,), generator=generator)
    for _ in range(5):  # a race would not show every time
        found = kv.cuda()
        kv_commit(found, table.cuda(), committed.cuda(), path.cuda(), num_accepted.cuda(), kv_heads)
        expected = kv.clone()
        kv_commit(expected, table, committed, path, num_accepted, kv_heads)
        assert torch.equal(found.cpu(), expected)


def test_shapes_that_do_not_fit_are_refused():
    kv, row = torch.zeros(1, 2, 128, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="kv_commit takes"):
        kv_commit(kv, torch.zeros(1, 2, dtype=torch.int64), row, torch.zeros(2, 3, dtype=torch.int64), row, 1)
