"""Tree attention on the CPU: by value against dense softmax in fp64, and a node's bits whatever stands around it."""

from dataclasses import replace

import pytest
import torch

from headstart.kernels.attention.attention_fold import PAGE, AttentionOptions
from headstart.kernels.attention.tile_attention import build_tile_rows, tile_attention


def draw_tree(num_nodes):
    """(depths [N], ancestors [N, A], paths) of a random tree whose nodes hang on one of the three before them."""
    generator = torch.Generator().manual_seed(num_nodes)
    paths = [[0]]
    for n in range(1, num_nodes):
        paths.append([*paths[int(torch.randint(max(0, n - 3), n, (1,), generator=generator))], n])
    width = max(map(len, paths))
    ancestors = torch.tensor([path + [path[-1]] * (width - len(path)) for path in paths])
    return torch.tensor([len(path) - 1 for path in paths]), ancestors, paths


def attend(q, kv, table, committed, depths, ancestors, hk, dtype=torch.float32, scale=0.3, window=None):
    """tile_attention of one tree that all requests share.  q [B, N, HQ, D] -> [B, N, HQ, D]"""
    batch = len(committed)
    depths = depths.expand(batch, -1)
    shared = depths, depths, ancestors.expand(batch, -1, -1)
    rows = build_tile_rows(table, torch.tensor(committed), *shared, hk, dtype)
    return tile_attention(q, kv, rows, AttentionOptions(scale, window))


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("hq", "hk", "dim"), [(8, 4, 32), (6, 2, 20), (3, 3, 16), (8, 1, 64)])
@pytest.mark.parametrize("num_nodes", [1, 9, 40])
def test_a_node_attends_to_the_committed_keys_and_to_its_own_path(num_nodes, hq, hk, dim, window):
    torch.manual_seed(num_nodes)
    committed = [0, 5, 63, 64, 130]
    batch, pages_each = len(committed), 5
    kv = torch.randn(2, (batch * pages_each + 1) * hk * PAGE, dim, dtype=torch.float64)
    table = torch.randperm(batch * pages_each).view(batch, pages_each) + 1
    q = torch.randn(batch, num_nodes, hq, dim, dtype=torch.float64)
    depths, ancestors, paths = draw_tree(num_nodes)
    found = attend(q, kv, table, committed, depths, ancestors, hk, torch.float64, window=window)
    pages = kv.view(2, -1, hk, PAGE, dim)
    for b, length in enumerate(committed):
        keys, values = (
            pages[:, table[b]].transpose(2, 3).flatten(1, 2).repeat_interleave(hq // hk, 2)
        )  # [positions, HQ, D]
        for n, path in enumerate(paths):
            seen = [*range(length), *(length + m for m in path)][-window if window else None :]
            weights = (torch.einsum("hd,shd->hs", q[b, n], keys[seen]) * 0.3).softmax(-1)
            expected = torch.einsum("hs,shd->hd", weights, values[seen])
            torch.testing.assert_close(found[b, n], expected, rtol=1e-10, atol=1e-10)


def test_sums_are_in_float32_whatever_the_cache_holds():
    torch.manual_seed(0)
    hk, committed = 2, [70]
    kv, q = torch.randn(2, 4 * hk * PAGE, 16).bfloat16(), torch.randn(1, 9, 4, 16).bfloat16()
    tree = torch.tensor([[2, 3]]), committed, *draw_tree(9)[:2], hk
    found = attend(q, kv, *tree)
    assert found.dtype == torch.float32
    exact = attend(q.double(), kv.double(), *tree, torch.float64)
    assert (found.double() - exact).norm() <= 1e-6 * exact.norm()


def test_a_nodes_bits_do_not_depend_on_what_is_already_committed():
    """The same path, with the last tokens committed or still in the tree, across tile and page borders."""
    torch.manual_seed(0)
    hk, dim, length = 2, 24, 150
    kv = torch.randn(2, 6 * hk * PAGE, dim)
    table = torch.tensor([[3, 1, 5, 2]])
    q = torch.randn(1, length, 6, dim)
    results = []
    for committed in (0, 100, 111, 112, 113, 127, 128, 129, 148, 149):
        count = min(length - committed, 60)
        chain = torch.arange(count)
        found = attend(q[:, committed : committed + count], kv, table, [committed], chain, chain.expand(count, -1), hk)
        results.append((committed + count, found[0]))
    final = [result[-1] for end, result in results if end == length]
    assert len(final) == 9
    assert all(torch.equal(one, final[0]) for one in final)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_nodes", [2, 5, 16, 60])
def test_the_nodes_of_a_chain_share_their_tiles_without_changing_a_bit(num_nodes, window):
    torch.manual_seed(2)
    hk, committed = 2, [5, 130, 64]
    kv, table = torch.randn(2, 16 * hk * PAGE, 24), torch.randperm(15).view(3, 5) + 1
    q, chain = torch.randn(3, num_nodes, 6, 24), torch.arange(num_nodes).expand(3, -1)
    ancestors = chain[:, None].expand(-1, num_nodes, -1)
    indexed = table, torch.tensor(committed), chain, chain, ancestors, hk, torch.float32
    rows = build_tile_rows(*indexed)
    assert rows.is_chain
    shared = tile_attention(q, kv, rows, AttentionOptions(0.3, window))
    own = tile_attention(q, kv, replace(build_tile_rows(*indexed), is_chain=False), AttentionOptions(0.3, window))
    assert shared.is_contiguous()
    assert torch.equal(shared, own)


@pytest.mark.parametrize("window", [None, 20])
def test_a_nodes_bits_depend_on_neither_the_tree_nor_the_company(window):
    torch.manual_seed(1)
    hk, committed = 2, [5, 130, 64]
    kv, table = torch.randn(2, 16 * hk * PAGE, 24), torch.randperm(15).view(3, 5) + 1
    q = torch.randn(3, 40, 6, 24)
    depths, ancestors, paths = draw_tree(40)
    whole = attend(q, kv, table, committed, depths, ancestors, hk, window=window)
    for b in range(3):
        alone = attend(q[b : b + 1], kv, table[b : b + 1], committed[b : b + 1], depths, ancestors, hk, window=window)
        assert torch.equal(alone[0], whole[b])
    # A part of the tree: its first nodes, whose paths hold no others.
    few = attend(
        q[:, :7], kv, table, committed, depths[:7], ancestors[:7, : max(map(len, paths[:7]))], hk, window=window
    )
    assert torch.equal(few, whole[:, :7])
