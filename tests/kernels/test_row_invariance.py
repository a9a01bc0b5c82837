"""Row r of every op's result is the same bits whatever the other rows are; and each op computes its formula."""

import pytest
import torch

from headstart.kernels.attention.rotary import rotary
from headstart.kernels.attention.tree_attention import PAGE, build_tree_index, tree_attention, tree_attention_reference
from headstart.kernels.linear.linear import linear
from headstart.kernels.rms_norm import add_rms_norm, rms_norm
from headstart.kernels.silu_mul import silu_mul

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = (1, 2, 7, 15, 16, 17, 33, 64)


def rows_agree(op, x):
    """op(x) row by row, in every count of rows and at several places, equals op of all rows."""
    whole = op(x)
    for count in COUNTS:
        for start in (0, 5, x.shape[0] - count):
            assert torch.equal(op(x[start : start + count].clone()), whole[start : start + count]), (count, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(97, 48), (512, 256), (33, 129), (1, 7)])
def test_linear_rows_do_not_depend_on_each_other(n, k, dtype):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(80, k, generator=generator).to(dtype)
    w, b = torch.randn(n, k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    rows_agree(lambda rows: linear(rows, w, b), x)
    exact = x.double() @ w.double().T + b.double()
    own = (linear(x, w, b).double() - exact).norm() / exact.norm()
    library = (torch.nn.functional.linear(x, w, b).double() - exact).norm() / exact.norm()
    assert own <= 2 * library + 1e-9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 31, 256, 704])
def test_norm_and_activation_rows_do_not_depend_on_each_other(width, dtype):
    x = torch.randn(80, 2 * width, generator=torch.Generator().manual_seed(width)).to(dtype)
    w = torch.rand(2 * width, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows_agree(lambda rows: rms_norm(rows, w, 1e-5), x)
    rows_agree(lambda rows: add_rms_norm(rows, rows.flip(-1), w, 1e-5)[0], x)
    rows_agree(silu_mul, x)
    gate, up = x.double().chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    assert (silu_mul(x).double() - exact).norm() <= (1e-6 if dtype == torch.float32 else 4e-3) * exact.norm()
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    assert (rms_norm(x, w, 1e-5).double() - exact).norm() <= (1e-6 if dtype == torch.float32 else 6e-3) * exact.norm()


def test_rotary_turns_pairs_by_the_positions_angle():
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    angle = torch.rand(5, 4, dtype=torch.float64)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    expected = torch.cat((pairs.real, pairs.imag), -1)
    torch.testing.assert_close(rotary(x, angle.cos(), angle.sin()), expected, rtol=1e-12, atol=1e-12)


def random_tree(num_nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(max(0, n - 3), n, (1,), generator=generator)) for n in range(1, num_nodes)]
    paths = [[0]]
    for n in range(1, num_nodes):
        paths.append([*paths[parents[n]], n])
    depth = max(map(len, paths))
    ancestors = torch.tensor([path + [path[-1]] * (depth - len(path)) for path in paths])
    return torch.tensor([len(path) - 1 for path in paths]), ancestors, paths


@pytest.mark.parametrize(("hq", "hk", "dim"), [(8, 4, 32), (6, 2, 20), (3, 3, 16), (8, 1, 64)])
@pytest.mark.parametrize("num_nodes", [1, 9, 40])
def test_tree_attention_computes_softmax_over_each_nodes_path(num_nodes, hq, hk, dim):
    torch.manual_seed(num_nodes)
    committed = [0, 5, 63, 64, 130]
    batch, pages_each = len(committed), 5
    kv = torch.randn(2, (batch * pages_each + 1) * hk * PAGE, dim, dtype=torch.float64)
    table = torch.randperm(batch * pages_each).view(batch, pages_each) + 1
    q = torch.randn(batch, num_nodes, hq, dim, dtype=torch.float64)
    depths, ancestors, paths = random_tree(num_nodes, seed=num_nodes)
    index = build_tree_index(table, torch.tensor(committed), depths, ancestors, hk, torch.float64)
    found = tree_attention(q, kv, index)
    # Dense: all seats of each request in order, and a mask of the committed ones and the node's own path.
    pages = kv.view(2, -1, hk, PAGE, dim)
    for b, length in enumerate(committed):
        dense = pages[:, table[b]].transpose(2, 3).reshape(2, 1, pages_each * PAGE, hk, dim)
        mask = torch.zeros(1, num_nodes, pages_each * PAGE, dtype=torch.bool)
        mask[:, :, :length] = True
        for n, path in enumerate(paths):
            mask[0, n, [length + m for m in path]] = True
        expected = tree_attention_reference(q[b : b + 1], *dense, mask)
        torch.testing.assert_close(found[b : b + 1], expected, rtol=1e-10, atol=1e-10)


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
        index = build_tree_index(table, torch.tensor([committed]), chain, chain.expand(count, -1), hk)
        results.append((committed + count, tree_attention(q[:, committed : committed + count], kv, index)[0]))
    final = [result[-1] for end, result in results if end == length]
    assert len(final) == 9
    assert all(torch.equal(one, final[0]) for one in final)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="linear takes"):
        linear(torch.randn(2, 3), torch.randn(4, 5))
    with pytest.raises(ValueError, match="odd width"):
        silu_mul(torch.randn(2, 3))
    with pytest.raises(ValueError, match="rms_norm takes"):
        rms_norm(torch.randn(2, 3), torch.ones(4), 1e-5)
