"""Tree attention: by value against a dense fp64 reference, and the same bits for a node in every tree, batch and commit."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from headstart.kernels.attention import attention_fold, tree_attention as attention_module
from headstart.kernels.attention.attention_fold import AttentionOptions, chunk_at, chunk_start, num_chunks, starts_chunk
from headstart.kernels.attention.prefill_attention import build_prefill_index, chain_attention
from headstart.kernels.attention.tree_attention import PAGE, _launch, build_tree_index, tree_attention_reference
from headstart.kernels.shared_memory import SharedMemory
from headstart.tests.kernels.attention.options import given

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(32, 8, 128), (8, 4, 64), (6, 2, 80), (7, 1, 32), (16, 1, 96), (4, 4, 256), (3, 3, 40)]


def draw_cache(num_pages, hk, dim, dtype, device, seed=0):
    """kv [2, rows, D] of one layer, page 0 included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, (num_pages + 1) * hk * PAGE, dim, generator=generator).to(dtype).to(device)


def draw_tree(num_nodes, seed=0, reach=3):
    """(depths [N], ancestors [N, A], paths) of a random tree whose nodes hang on one of the `reach` nodes before them."""
    generator = torch.Generator().manual_seed(seed)
    paths = [[0]]
    for n in range(1, num_nodes):
        parent = int(torch.randint(max(0, n - reach), n, (1,), generator=generator))
        paths.append([*paths[parent], n])
    width = max(map(len, paths))
    ancestors = torch.tensor([path + [0] * (width - len(path)) for path in paths])
    return torch.tensor([len(path) - 1 for path in paths]), ancestors, paths


def dense_attention(q, kv, table, committed, paths, hk, scale=None, window=None, attend=tree_attention_reference):
    """The same by a mask over all slots.  q [B, N, HQ, D] -> [B, N, HQ, D]"""
    pages = kv.view(2, -1, hk, PAGE, kv.shape[-1])
    found = []
    for b, length in enumerate(committed):
        dense = pages[:, table[b].long()].transpose(2, 3).flatten(1, 2)[:, None]  # [2, 1, slots, HK, D]
        positions = torch.arange(dense.shape[2], device=q.device)
        mask = torch.zeros(1, len(paths), dense.shape[2], dtype=torch.bool, device=q.device)
        for n, path in enumerate(paths):
            lowest = 0 if window is None else length + len(path) - window
            mask[0, n] = (positions >= lowest) & (positions < length)
            mask[0, n, [length + m for j, m in enumerate(path) if length + j >= lowest]] = True
        # Slots that no node reads may hold anything: NaN times 0 is NaN.
        dense = dense.masked_fill(~mask.any(1)[0][None, None, :, None, None], 0)
        found.append(attend(q[b : b + 1], *dense, mask, scale))
    return torch.cat(found)


def torch_attention(q, k, v, mask, scale):
    """The same by torch's own kernel, in q's dtype."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    found = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask[:, None], scale=scale)
    return found.transpose(1, 2)


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def check_values(device, dtype, hq, hk, dim, num_nodes, committed, window=None, scale=None, integers=torch.int64):
    pages_each = (max(committed) + num_nodes - 1) // PAGE + 2
    generator = torch.Generator().manual_seed(7)
    table = torch.randperm(len(committed) * pages_each, generator=generator).view(len(committed), -1) + 1
    kv = draw_cache(table.numel(), hk, dim, dtype, "cpu")
    # Slots after the last node of each request were never written.
    poisoned = kv.view(2, -1, hk, PAGE, dim)
    poisoned[:, 0] = torch.nan
    for b, length in enumerate(committed):
        slots = torch.arange(length + num_nodes, pages_each * PAGE)
        poisoned[:, table[b, slots // PAGE], :, slots % PAGE] = torch.nan
    kv = kv.to(device)
    table = table.to(device, integers)
    depths, ancestors, paths = draw_tree(num_nodes)
    q = torch.randn(len(committed), num_nodes, hq, dim, generator=generator).to(dtype).to(device)
    lengths = torch.tensor(committed, dtype=integers, device=device)
    index = build_tree_index(table, lengths, depths.to(device, integers), ancestors.to(device, integers), hk)
    found = index.attend(q.flatten(0, 1), kv, AttentionOptions(scale, window))
    assert found.dtype == dtype
    assert found.isfinite().all()
    exact = dense_attention(q.double(), kv.double(), table, committed, paths, hk, scale, window)
    library = dense_attention(q, kv, table, committed, paths, hk, scale, window, torch_attention)
    assert error(found.view_as(q), exact) <= 2 * error(library, exact) + 1e-7
    # The same tree given per request, under both choices of programs: the one that `attend` made gives its bits again.
    each = build_tree_index(
        table,
        lengths,
        depths.to(device).repeat(len(committed), 1),
        ancestors.to(device).repeat(len(committed), 1, 1),
        hk,
    )
    others = [_launch(q, kv, each, AttentionOptions(scale, window), walks=walks) for walks in (False, True)]
    assert any(torch.equal(other, found.view_as(q)) for other in others)
    # Blocks of 16 rows, as wide heads in float32 have them on GPUs with little shared memory.
    others.append(_launch(q, kv, each, AttentionOptions(scale, window), walks=False, rows=16, tail_rows=16))
    assert all(error(other, exact) <= 2 * error(library, exact) + 1e-7 for other in others)


def test_chunks_tile_the_positions():
    borders = [0, *range(256, 2048, 256), *range(2048, 8192, 512), *range(8192, 20000, 1024)]
    assert [num_chunks(x) for x in borders] == list(range(len(borders)))
    assert [num_chunks(x + 1) for x in borders] == list(range(1, len(borders) + 1))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("hq", "hk", "dim", "committed"),
    [(4, 2, 16, [0, 1, 63, 64, 255, 256, 300]), (7, 1, 20, [0, 64, 300]), (3, 3, 32, [1, 300])],
)
def test_values_in_the_interpreter(hq, hk, dim, committed):
    check_values("cpu", torch.float32, hq, hk, dim, 5, committed)


@pytest.mark.interpreter
def test_values_of_one_row_and_more_chunks_in_the_interpreter():
    check_values("cpu", torch.float32, 7, 1, 20, 1, [70, 600], integers=torch.int32)


@pytest.mark.interpreter
@pytest.mark.parametrize(("window", "hk"), [(1, 1), (30, 2), (64, 1), (200, 1)])
def test_windows_in_the_interpreter(window, hk):
    check_values("cpu", torch.float32, 2 * hk, hk, 16, 5, [0, 64, 250, 300], window, scale=0.3)


@pytest.mark.interpreter
@pytest.mark.parametrize("all_seen", [True, False])
def test_blocks_of_one_path_in_the_interpreter(all_seen):
    """Nodes that count as their path's deepest see all of it."""
    committed, table, nodes = [1, 61, 130], torch.arange(1, 10).view(3, 3), torch.arange(6)
    kv, q = draw_cache(9, 2, 32, torch.float32, "cpu"), torch.randn(3, 6, 4, 32)
    depths = torch.full_like(nodes, 5) if all_seen else nodes
    index = build_tree_index(table, torch.tensor(committed), depths, nodes.expand(6, -1), 2, is_chain=not all_seen)
    paths = [[*range(6 if all_seen else n + 1)] for n in range(6)]
    exact = dense_attention(q.double(), kv.double(), table, committed, paths, 2)
    assert error(index.attend(q.flatten(0, 1), kv).view_as(q), exact) < 1e-6


@pytest.mark.interpreter
def test_chunk_numbers_in_the_interpreter():
    import triton
    import triton.language as tl

    @triton.jit
    def fill(out, COUNT: tl.constexpr):
        x = tl.arange(0, COUNT)
        tl.store(out + x, chunk_at(x * 64))
        tl.store(out + COUNT + x, chunk_start(chunk_at(x * 64)))
        tl.store(out + 2 * COUNT + x, starts_chunk(x * 64).to(tl.int32))

    out = torch.empty(3, 512, dtype=torch.int32)
    fill[(1,)](out, 512)
    numbers, starts, firsts = out.tolist()
    assert numbers == [num_chunks(64 * i + 1) - 1 for i in range(512)]
    assert firsts == [int(i == 0 or numbers[i] != numbers[i - 1]) for i in range(512)]
    assert starts == [64 * numbers.index(number) for number in numbers]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hq", "hk", "dim"), SHAPES)
def test_values(hq, hk, dim, dtype):
    committed = [0, 1, 63, 64, 65, 130, 255, 256, 257, 1000, 2047, 2500]
    check_values("cuda", dtype, hq, hk, dim, 9, committed, window=100, integers=torch.int32)
    if dtype == torch.float32 and dim > 64:
        return  # without tensor cores a kernel takes up to a minute to compile
    for num_nodes in (1, 3, 17, 64):
        check_values("cuda", dtype, hq, hk, dim, num_nodes, committed)
    check_values("cuda", dtype, hq, hk, dim, 64, [9000, 300], scale=0.2)


def decode_one_by_one(q, kv, table, start, hk, window=None):
    """Plain decoding of consecutive positions start .. start + T - 1, all keys in place.  q [T, HQ, D] -> [T, HQ, D]"""
    zero = torch.zeros(1, dtype=torch.int64, device=q.device)
    lengths = torch.arange(start, start + q.shape[0]).to(
        q.device
    )  # copied: no kernel right before attention makes them
    indices = [build_tree_index(table, length, zero, zero[None], hk) for length in lengths.split(1)]
    return torch.cat([index.attend(row, kv, given(window, q)) for index, row in zip(indices, q.split(1))])


LENGTHS = [0, 1, 30, 63, 64, 65, 250, 255, 256, 257, 1000, 2030, 2048, 4095, 8150, 8192]


class Sequences:
    """Keys and queries of three sequences, and the attention of each position by plain decoding."""

    def __init__(self, hq, hk, dim, dtype, length, window):
        self.generator = torch.Generator("cuda").manual_seed(3)
        self.hk, self.window = hk, window
        num_pages = -(-length // PAGE)
        self.tables = torch.randperm(3 * num_pages, generator=self.generator, device="cuda").view(3, -1) + 1
        self.kv = draw_cache(3 * num_pages, hk, dim, dtype, "cuda")
        self.q = self.draw(3, length, hq, dim)
        self.plain = {}

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator, device="cuda").to(self.kv.dtype)

    def decode(self, b, start, count):
        """Attention of the positions start .. start + count - 1 of sequence b, each alone.  -> [count, HQ, D]"""
        for t in range(start, start + count):
            if (b, t) not in self.plain:
                one = decode_one_by_one(self.q[b, t : t + 1], self.kv, self.tables[b : b + 1], t, self.hk, self.window)
                self.plain[b, t] = one[0]
        return torch.stack([self.plain[b, t] for t in range(start, start + count)])

    def scatter(self, starts, num_nodes, spine):
        """A cache with junk in the slots of a tree but for the nodes of `spine`, which carry the sequence's keys; its queries."""
        kv = self.kv.clone()
        pages, source = (x.view(2, -1, self.hk, PAGE, x.shape[-1]) for x in (kv, self.kv))
        spine = torch.tensor(spine, device="cuda")
        q = self.draw(3, num_nodes, *self.q.shape[2:])
        for b, start in enumerate(starts):
            slots = start + torch.arange(num_nodes, device="cuda")
            junk = self.draw(num_nodes, 2, self.hk, kv.shape[-1])
            steps = start + torch.arange(len(spine), device="cuda")
            junk[spine] = source[:, self.tables[b, steps // PAGE], :, steps % PAGE]
            pages[:, self.tables[b, slots // PAGE], :, slots % PAGE] = junk
            q[b, spine] = self.q[b, steps]
        return kv, q


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 90, "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hq", "hk", "dim"), [(32, 8, 128), (8, 4, 64), (6, 2, 80), (4, 4, 256), (14, 2, 32)])
def test_a_nodes_bits_are_those_of_plain_decoding(hq, hk, dim, dtype, window):
    """Trees of 1 to 64 nodes, a path through them with the keys of a sequence: scattered in the tree or committed in order."""
    if dtype == torch.float32 and dim > 64:
        pytest.skip("slow without tensor cores, and nothing that 64 lanes do not show")
    lengths, counts = (LENGTHS, (1, 2, 8, 17, 33, 64)) if dim == 128 else (LENGTHS[1:15:4], (1, 9, 64))
    check_bits(Sequences(hq, hk, dim, dtype, max(lengths) + 130, window), lengths, counts)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 128), (torch.bfloat16, 256)])
def test_a_nodes_bits_hold_with_the_launches_of_a_small_gpu(dtype, dim, monkeypatch):
    """Blocks of 16 rows, and one tile in flight: what 99 KiB of shared memory leave."""
    monkeypatch.setattr(attention_fold, "shared_memory", lambda device: SharedMemory(99 << 10, 1))
    check_bits(Sequences(8, 4, dim, dtype, 500, None), [1, 100, 300], (1, 9, 64))


def check_bits(sequences, lengths, counts):
    """Every node of a path equals plain decoding; a batch equals its requests alone; every choice of programs agrees."""
    hk, window, dtype, dim = sequences.hk, sequences.window, sequences.kv.dtype, sequences.kv.shape[-1]
    choices = [dict(), dict(tensor_map=False), dict(overlap=False)]
    if dtype != torch.float32 and dim <= 128:
        choices += [dict(rows=128), dict(tail_rows=16)]
    for length in lengths:
        starts = [max(length - b, 0) for b in range(3)]
        committed = torch.tensor(starts, device="cuda")
        for num_nodes in counts:
            depths, ancestors, paths = draw_tree(num_nodes, seed=num_nodes, reach=2)
            depths, ancestors = depths.cuda(), ancestors.cuda()
            spine = max(paths, key=len)
            kv, q = sequences.scatter(starts, num_nodes, spine)
            index = build_tree_index(sequences.tables, committed, depths, ancestors, hk)
            found = index.attend(q.flatten(0, 1), kv, given(window, q)).view_as(q)
            for b, start in enumerate(starts):
                expected = sequences.decode(b, start, len(spine))
                assert torch.equal(found[b, spine], expected), (length, num_nodes, b)
                alone = build_tree_index(sequences.tables[b : b + 1], committed[b : b + 1], depths, ancestors, hk)
                assert torch.equal(alone.attend(q[b], kv, given(window, q)), found[b]), (length, num_nodes, b)
            for walks in (False, True):
                for choice in choices:
                    other = _launch(q, kv, index, given(window, q), walks=walks, **choice)
                    assert torch.equal(other, found), (length, num_nodes, walks, choice)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 90, "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hq", "hk", "dim"), [(32, 8, 128), (6, 2, 80), (14, 2, 32)])
def test_a_chain_in_one_pass_has_the_bits_of_two(hq, hk, dim, dtype, window):
    """In batches of three requests, of one block of nodes and of several, across borders of tiles and chunks."""
    if dtype == torch.float32 and dim > 64:
        pytest.skip("slow without tensor cores, and nothing that 64 lanes do not show")
    batch, far = 3, (30, 2040, 2047, 2048, 2111, 2112, 2560, 8200, 9400)
    for pages, lengths in ((32, (0, 1, 60, 63, 64, 250, 256, 2000)), (150, far)):
        kv = draw_cache(batch * pages + 1, hk, dim, dtype, "cuda")
        for num_nodes in (1, 5, 17, 40):
            for length in lengths:
                check_chain(kv, hk, pages, hq, num_nodes, [length, max(length - 7, 0), length // 2], window)


def check_chain(kv, hk, pages, hq, num_nodes, committed, window):
    """One pass gives what two passes give; where the table reaches far, chunks of long contexts come from programs of their own."""
    batch, dim, device = len(committed), kv.shape[-1], kv.device
    table = 1 + torch.arange(batch * pages, device=device).view(batch, pages)
    chain = torch.arange(num_nodes, device=device)
    q = torch.randn(batch, num_nodes, hq, dim, generator=torch.Generator().manual_seed(1)).to(device, kv.dtype)
    index = build_tree_index(table, torch.tensor(committed, device=device), chain, chain.expand(num_nodes, -1), hk)
    expected = _launch(q, kv, index, given(window, q), walks=False)
    found = _launch(q, kv, replace(index, is_chain=True), given(window, q), walks=True)
    assert torch.equal(found, expected), (num_nodes, committed, window)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50000])
def test_contexts_of_131072_tokens_beside_short_ones(window):
    """By value against the dense formula, and the same bits in one pass, in two, in a tree and in a prompt's chunk."""
    hq, hk, dim, pages, num_nodes = 8, 2, 64, 2050, 5
    committed = [131000, 300, 32767, 65536 - 2]
    kv = draw_cache(len(committed) * pages + 1, hk, dim, torch.bfloat16, "cuda")
    check_chain(kv, hk, pages, hq, num_nodes, committed, window)
    table = 1 + torch.arange(len(committed) * pages, device="cuda").view(-1, pages)
    starts, chain = torch.tensor(committed, device="cuda"), torch.arange(num_nodes, device="cuda")
    q = torch.randn(len(committed), num_nodes, hq, dim, generator=torch.Generator().manual_seed(1)).to(
        "cuda", torch.bfloat16
    )
    index = build_tree_index(table, starts, chain, chain.expand(num_nodes, -1), hk)
    found = index.attend(q.flatten(0, 1), kv, given(window, q)).view_as(q)
    prompt = build_prefill_index(table, committed, [num_nodes] * len(committed), hk, "cuda")
    assert torch.equal(prompt.attend(q.flatten(0, 1), kv, given(window, q)).view_as(q), found)
    for b, length in enumerate(committed):
        places = torch.arange(length + num_nodes, device="cuda")
        rows = table[b, places // PAGE].long() * hk * PAGE + places % PAGE
        k, v = (torch.stack([x[rows + head * PAGE] for head in range(hk)], 1).double() for x in kv)
        position = length + chain[:, None]
        mask = (places <= position) & (places > position - (window or 1 << 30))
        exact = tree_attention_reference(q[b : b + 1].double(), k[None], v[None], mask[None])
        assert error(found[b : b + 1], exact) < 4e-3, length


@pytest.mark.interpreter
@pytest.mark.parametrize("window", [None, 300])
def test_far_chunks_of_a_chain_in_the_interpreter(window):
    pages = 45
    kv = draw_cache(4 * pages + 1, 1, 16, torch.float32, "cpu")
    check_chain(kv, 1, pages, 2, 3, [2040, 700, 2112, 2820], window)


@pytest.mark.interpreter
@pytest.mark.parametrize("fault", ["none", "a key too many", "a key too few", "far chunks in another order"])
def test_the_check_of_chains_fails_on_faults(fault, monkeypatch):
    def faulty(q, kv, table, starts, hk, options, out, far, late):
        if fault == "far chunks in another order":
            far = [states.flip(2) for states in far]
        starts = starts + {"a key too many": 1, "a key too few": -1}.get(fault, 0)
        return chain_attention(q, kv, table, starts, hk, options, out, far, late)

    monkeypatch.setattr(attention_module, "chain_attention", faulty)
    kv = draw_cache(2 * 45 + 1, 1, 16, torch.float32, "cpu")
    with nullcontext() if fault == "none" else pytest.raises(AssertionError):
        check_chain(kv, 1, 45, 2, 3, [2700, 2820], None)


@pytest.mark.gpu
def test_bits_differ_if_siblings_keys_are_visible():
    hk, dim, length, device = 8, 128, 250, "cuda"
    kv = draw_cache(6, hk, dim, torch.bfloat16, device)
    table = torch.arange(1, 7, device=device)[None]
    q = torch.randn(20, 32, dim, device=device).bfloat16()
    depths, ancestors, _ = draw_tree(20)
    committed = torch.tensor([length], device=device)
    right = build_tree_index(table, committed, depths.to(device), ancestors.to(device), hk).attend(q, kv)
    chain = torch.arange(20, device=device)
    wrong = build_tree_index(table, committed, chain, chain.expand(20, -1), hk).attend(q, kv)
    assert torch.equal(right[:1], wrong[:1])
    assert not torch.equal(right, wrong)


@pytest.mark.gpu
def test_a_graph_replays_for_other_lengths():
    hk, dim, device = 8, 128, "cuda"
    kv = draw_cache(40, hk, dim, torch.bfloat16, device)
    table = torch.arange(1, 41, device=device).view(2, 20)
    q = torch.randn(2 * 16, 32, dim, device=device).bfloat16()
    depths, ancestors, _ = (x.to(device) if torch.is_tensor(x) else x for x in draw_tree(16))
    committed = torch.tensor([5, 9], device=device)
    index = build_tree_index(table, committed, depths, ancestors, hk)
    index.attend(q, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = index.attend(q, kv)
    for lengths in ([0, 1000], [63, 256], [700, 64]):
        committed.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, index.attend(q, kv))


def test_what_the_kernels_do_not_take_is_refused():
    kv = draw_cache(2, 1, 16, torch.float32, "cpu")
    zero = torch.zeros(1, dtype=torch.int64)
    index = build_tree_index(torch.tensor([[1, 2]]), zero, zero, zero[None], 1)
    with pytest.raises(ValueError, match="query heads per key head"):
        index.attend(torch.randn(1, 65, 16), kv)
    with pytest.raises(ValueError, match="window of 1 or more"):
        index.attend(torch.randn(1, 1, 16), kv, AttentionOptions(window=0))
    with pytest.raises(ValueError, match="rows of queries"):
        index.attend(torch.randn(2, 1, 16), kv)
    with pytest.raises(ValueError, match=r"takes kv \[2, rows, 8\]"):
        index.attend(torch.randn(1, 1, 8), kv)
