"""Attention of blocks in sliding layers against the formula on dense keys: how far a slot sees, in its block and before it."""

import pytest
import torch

from headstart.kernels.attention.attention_fold import AttentionOptions
from headstart.kernels.attention.tree_attention import PAGE, _launch, build_tree_index, tree_attention_reference
from headstart.tests.kernels.attention.test_tree_attention import DTYPES, draw_cache, error


def check_windows_of_blocks(device, dtype, committed, window):
    """Nodes that see their whole block or up to themselves, and windows that count from the node or from the first one."""
    size, pages = 6, max(committed) // PAGE + 2
    table = torch.randperm(len(committed) * pages, generator=torch.Generator().manual_seed(1)).view(-1, pages) + 1
    kv = draw_cache(table.numel(), 2, 32, dtype, device)
    q = torch.randn(len(committed), size, 4, 32, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    slots, lengths, table = torch.arange(size, device=device), torch.tensor(committed, device=device), table.to(device)
    places = torch.arange(max(committed) + size, device=device)
    rows = table.repeat_interleave(PAGE, 1)[:, : len(places)].long() * 2 * PAGE + places % PAGE
    k, v = (torch.stack([x[rows + head * PAGE] for head in range(2)], 2).double() for x in kv)  # [B, S, 2, D]
    path = slots.expand(size, size)
    for depths, counted in (
        (slots, torch.zeros_like(slots)),
        (slots * 0 + size - 1, slots),
        (slots * 0 + size - 1, slots * 0),
    ):
        index = build_tree_index(table, lengths, depths, path, 2, dtype, window_depths=counted)
        lowest = lengths[:, None, None] + counted[:, None] - window + 1
        mask = (places >= lowest) & (places <= lengths[:, None, None] + depths[:, None])
        exact = tree_attention_reference(q.double(), k, v, mask)
        options = AttentionOptions(None, window)
        found = [index.attend(q.flatten(0, 1), kv, options).view_as(q)]
        found += [_launch(q, kv, index, options, walks=walks) for walks in (False, True)] if kv.is_cuda else []
        assert all(error(one, exact) < (1e-6 if dtype == torch.float32 else 1e-2) for one in found), (depths, counted)


@pytest.mark.parametrize("window", [6, 16, 70])
def test_windows_of_blocks(window):
    check_windows_of_blocks("cpu", torch.float32, [0, 1, 5, 61, 64, 130], window)


@pytest.mark.interpreter
@pytest.mark.parametrize("window", [6, 70])
def test_windows_of_blocks_in_the_interpreter(window):
    check_windows_of_blocks("cpu", torch.float32, [0, 5, 61, 130], window)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [6, 70, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows_of_blocks_on_a_gpu(dtype, window):
    check_windows_of_blocks("cuda", dtype, [0, 1, 5, 61, 64, 130, 2047, 2500], window)
