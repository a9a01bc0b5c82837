"""Trees and prompts in one pass: the bits of two passes, in CUDA graphs between a kernel before and one after."""

import pytest
import torch

from headstart.kernels.attention.mixed_attention import MixedIndex
from headstart.kernels.attention.prefill_attention import PrefillIndex
from headstart.kernels.attention.rotary_kv_write import rotary_kv_write
from headstart.kernels.attention.tree_attention import PAGE, build_tree_index
from headstart.kernels.jit import jit, tl, triton
from headstart.kernels.linear.linear import linear
from headstart.kernels.overlap import await_previous, overlap, release_next
from headstart.tests.kernels.attention.options import given


def make(device, dtype, hk, dim, lengths, nodes, chain, chunks, size, width):
    """(index, table, kv) of requests with `lengths` committed tokens and of chunks (start, count) of further requests.

    Chunks may fill less than `size` rows; the trees' table is `width` pages wide; the cache holds whole random pages.
    """
    spans = [length + nodes for length in lengths] + [start + count for start, count in chunks]
    counts = [-(-span // PAGE) for span in spans]
    generator = torch.Generator().manual_seed(0)
    pages = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
    table = torch.zeros(len(spans), max(width, *counts), dtype=torch.int64)
    for row, some in zip(table, pages):
        row[: len(some)] = some
    table = table.to(device)
    kv = torch.randn(2, (sum(counts) + 1) * hk * PAGE, dim, generator=generator).to(dtype).to(device)
    committed = torch.tensor(lengths, device=device)
    ids = torch.arange(nodes, device=device)
    # A chain, or a root with children.
    depths, ancestors = (ids, ids.expand(nodes, -1)) if chain else (ids.clamp(max=1), torch.stack((ids * 0, ids), 1))
    trees = build_tree_index(table[: len(lengths), :width], committed, depths, ancestors, hk, is_chain=chain)
    starts, tokens = (torch.tensor(x, device=device) for x in zip(*chunks, (0, 0)))
    prompts = PrefillIndex(table[[*range(len(lengths), len(spans)), 0]], starts, tokens, None, hk, size)
    return MixedIndex(trees, prompts), table, kv


@jit
def _slow_copy(source, out, added, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """out = source + added, 20 microseconds after the kernels behind it may start."""
    await_previous(OVERLAP)
    release_next(OVERLAP)
    began = tl.extra.cuda.globaltimer()
    now = began
    while now - began < 20_000:
        now = tl.extra.cuda.globaltimer()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + i, mask=i < count, other=0.0).to(tl.float32) + added
    tl.store(out + i, x.to(out.dtype.element_ty), mask=i < count)


def slow_copy(source, added):
    """source + added, in time only for kernels that await those before them, however many have been launched since."""
    out = torch.empty_like(source)
    _slow_copy[triton.cdiv(out.numel(), 8192),](source, out, float(added), out.numel(), 8192, **overlap(out))
    return out


def one_after_the_other(index, q, kv, options):
    nodes = index.trees.num_rows
    return torch.cat((index.trees.attend(q[:nodes], kv, options), index.prompts.attend(q[nodes:], kv, options)))


def test_rows_of_both_kinds(kernel_device):
    dtype = torch.float32 if kernel_device == "cpu" else torch.bfloat16
    for chain in (True, False):
        index, _, kv = make(kernel_device, dtype, 1, 16, [70, 3, 128], 3, chain, [(60, 9), (0, 2)], 20, 4)
        q = torch.randn(9 + 20, 2, 16, generator=torch.Generator().manual_seed(1)).to(dtype).to(kernel_device)
        found = index.attend(q, kv)
        assert torch.equal(found, one_after_the_other(index, q, kv, given(None, q)))
        assert found[:20].all()
        assert not found[20:].any()  # rows of no chunk


CASES = {
    "chain": dict(lengths=[900, 3, 1800, 64] * 10, nodes=3, chain=True, width=30),
    "chain, far chunks": dict(lengths=[5000, 3, 2100, 700] * 10, nodes=3, chain=True, width=90),
    "one token each": dict(lengths=[900, 3, 1800, 64] * 16, nodes=1, chain=True, width=45),
    "few chains": dict(lengths=[900, 2000], nodes=5, chain=True, width=40),
    "few trees": dict(lengths=[900, 2000], nodes=7, chain=False, width=40),
    "many trees": dict(lengths=[900, 3, 1800, 64] * 10, nodes=4, chain=False, width=30),
}


@pytest.mark.gpu
@pytest.mark.parametrize("what", [None, 300, "all"])
@pytest.mark.parametrize("case", CASES)
def test_a_graph_gives_the_bits_of_two_passes(case, what):
    """Rotation, attention and a product, twice, replayed with other rows. The last chunk takes longer than all trees.

    What the rotation reads comes late, when attention has long been launched: its queries and keys are not there before.
    """
    case, size, hq, hk, dim = CASES[case], 192, 32, 8, 128
    chunks = [(30, 50), (20000, 100)]
    index, table, kv = make("cuda", torch.bfloat16, hk, dim, chunks=chunks, size=size, **case)
    requests, nodes = len(case["lengths"]), case["nodes"]
    rows, used = requests * nodes, sum(count for _, count in chunks)
    positions = [length + n for length in case["lengths"] for n in range(nodes)]
    positions += [start + i for start, count in chunks for i in range(count)] + [0] * (size - used)
    owner = [r for r in range(requests) for _ in range(nodes)] + [requests] * 50 + [requests + 1] * 100
    positions, owner = torch.tensor(positions, device="cuda"), torch.tensor(owner, device="cuda")
    places = torch.zeros_like(positions)
    places[: len(owner)] = table[owner, positions[: len(owner)] // PAGE] * PAGE + positions[: len(owner)] % PAGE
    qkv = torch.zeros(1, rows + size, (hq + 2 * hk) * dim, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2048, hq * dim, device="cuda").bfloat16()
    options = given(what, torch.empty(1, hq, dim, device="cuda", dtype=torch.bfloat16))

    def layers(attend):
        found = []
        for _ in range(2):
            q = rotary_kv_write(slow_copy(qkv, len(found)), None, None, None, places, kv, hq, hk)
            out = attend(q)
            found += [out, linear(out.flatten(1), w)]
        return found

    layers(lambda q: index.attend(q, kv, options))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers(lambda q: index.attend(q, kv, options))
    for seed in range(20):
        qkv.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        graph.replay()
        for seen, expected in zip(found, layers(lambda q: one_after_the_other(index, q, kv, options))):
            assert torch.equal(seen, expected), seed
