"""Prefill attention: by value against a dense fp64 reference, and the bits of decoding one by one, however a prompt is cut."""

import itertools

import pytest
import torch

from headstart.kernels.attention import prefill_attention
from headstart.kernels.attention.attention_fold import AttentionOptions
from headstart.kernels.attention.prefill_attention import (
    _launch,
    build_prefill_index,
    prefill_attention_reference,
)
from headstart.kernels.attention.tree_attention import PAGE
from headstart.tests.kernels.attention.options import given
from headstart.tests.kernels.attention.test_tree_attention import decode_one_by_one
from headstart.tests.kernels.mutants import mutated

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def draw_cache(num_pages, hk, dim, dtype, device):
    """kv [2, rows, D] of one layer, page 0 included."""
    generator = torch.Generator().manual_seed(num_pages)
    return torch.randn(2, (num_pages + 1) * hk * PAGE, dim, generator=generator).to(dtype).to(device)


def draw_table(lengths, device):
    """Pages for the given numbers of positions, shuffled, padded with page 0.  -> int64 [R, P]"""
    counts = [-(-length // PAGE) for length in lengths]
    pages = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)) + 1).split(counts)
    return torch.nn.utils.rnn.pad_sequence(pages, batch_first=True).to(device), sum(counts)


def dense_keys(kv, table, length, hk):
    """-> k, v [length, HK, D]"""
    return kv.view(2, -1, hk, PAGE, kv.shape[-1])[:, table].transpose(2, 3).flatten(1, 2)[:, :length]


def torch_attention(q, k, v, start, scale, window):
    """The same by torch's own kernel, in q's dtype."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
    position = start + torch.arange(q.shape[0], device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)
    mask = (key <= position) & (key > position - (window or 2**30))
    found = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, mask, scale=scale)
    return found.transpose(0, 1)


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


def check_values(device, dtype, hq, hk, dim, starts, counts, window=None, scale=None):
    lengths = [start + count for start, count in zip(starts, counts)]
    table, num_pages = draw_table(lengths, device)
    kv = draw_cache(num_pages, hk, dim, dtype, device)
    poisoned = kv.view(2, -1, hk, PAGE, dim)
    poisoned[:, 0] = torch.nan
    for r, length in enumerate(lengths):
        poisoned[:, table[r, (length - 1) // PAGE], :, (length - 1) % PAGE + 1 :] = torch.nan
    q = torch.randn(sum(counts), hq, dim, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    index = build_prefill_index(table, starts, counts, hk, device)
    found = index.attend(q, kv, AttentionOptions(scale, window))
    narrow = _launch(q, kv, index, AttentionOptions(scale, window), rows=16)  # as on GPUs with little shared memory
    assert found.dtype == dtype
    assert found.isfinite().all()
    exact, library = [], []
    for r, part in enumerate(q.split(counts)):
        k, v = dense_keys(kv, table[r], lengths[r], hk)
        exact.append(prefill_attention_reference(part.double(), k.double(), v.double(), starts[r], scale, window))
        library.append(torch_attention(part, k, v, starts[r], scale, window))
    exact, library = torch.cat(exact), torch.cat(library)
    assert all(error(each, exact) <= 2 * error(library, exact) + 1e-7 for each in (found, narrow))


@pytest.mark.interpreter
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize(("hq", "hk", "dim"), [(4, 2, 16), (7, 1, 20)])
def test_values_in_the_interpreter(hq, hk, dim, window):
    check_values("cpu", torch.float32, hq, hk, dim, [0, 250, 63], [5, 20, 1], window)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hq", "hk", "dim"), [(32, 8, 128), (8, 4, 64), (6, 2, 80), (7, 1, 32), (4, 4, 256), (16, 1, 96)]
)
def test_values(hq, hk, dim, dtype):
    check_values("cuda", dtype, hq, hk, dim, [0, 640], [513, 17], window=100, scale=0.2)
    if dtype == torch.float32 and dim > 64:
        return  # without tensor cores a kernel takes up to a minute to compile
    check_values("cuda", dtype, hq, hk, dim, [0], [1000])
    check_values("cuda", dtype, hq, hk, dim, [0, 64, 1, 300, 2040], [1, 63, 700, 17, 90])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 150, "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hq", "hk", "dim"), [(32, 8, 128), (8, 4, 64), (6, 2, 80), (4, 4, 256)])
def test_bits_are_those_of_decoding_one_by_one(hq, hk, dim, dtype, window):
    """Whole, cut at odd places, packed with others, in every block shape."""
    if dtype == torch.float32 and dim > 64:
        pytest.skip("slow without tensor cores, and nothing that 64 lanes do not show")
    length = 2700
    table, num_pages = draw_table([length, 500, 77], "cuda")
    kv = draw_cache(num_pages, hk, dim, dtype, "cuda")
    q = torch.randn(length, hq, dim, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    whole = build_prefill_index(table[:1], [0], [length], hk, "cuda").attend(q, kv, given(window, q))
    for start, count in ((0, 70), (200, 60), (500, 15), (1015, 12), (2040, 20), (2550, 30), (2690, 10)):
        part = slice(start, start + count)
        assert torch.equal(whole[part], decode_one_by_one(q[part], kv, table[:1], start, hk, window)), start
    for cuts in ((0, 1, 2, 65, 300, 301, 1777, length), (0, 256, 512, 2048, length), (0, 999, 2611, length)):
        for low, high in itertools.pairwise(cuts):
            index = build_prefill_index(table[:1], [low], [high - low], hk, "cuda")
            assert torch.equal(index.attend(q[low:high], kv, given(window, q)), whole[low:high]), (low, high)
    packed = build_prefill_index(table, [100, 3, 10], [600, 497, 67], hk, "cuda")
    others = torch.randn(497 + 67, hq, dim, generator=torch.Generator().manual_seed(2)).to(dtype).cuda()
    found = packed.attend(torch.cat((q[100:700], others)), kv, given(window, q))
    assert torch.equal(found[:600], whole[100:700])
    alone = build_prefill_index(table[1:2], [3], [497], hk, "cuda").attend(others[:497], kv, given(window, q))
    assert torch.equal(found[600:1097], alone)
    index = build_prefill_index(table[:1], [0], [length], hk, "cuda")
    narrow = dtype != torch.float32 and dim <= 128
    for choice in (dict(tensor_map=False), dict(rows=128), dict(rows=128, tensor_map=False))[: 1 + 2 * narrow]:
        assert torch.equal(_launch(q, kv, index, given(window, q), **choice), whole), choice


def check_fixed_number(module, device, window):
    """A graph's index: counts that fill the rows or not, chunks without a token; rows of no chunk are zero, not what lay there."""
    hq, hk, dim = 4, 2, 16
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    table, num_pages = draw_table([300, 200, 100, 64], device)
    kv = draw_cache(num_pages, hk, dim, dtype, device)
    for num_rows, starts, counts in (
        (90, [200, 3, 0, 0], [50, 40, 0, 0]),
        (90, [90, 0, 7, 0], [1, 64, 13, 2]),
        (90, [0] * 4, [90, 0, 0, 0]),
        (90, [0] * 4, [0] * 4),
        (63, [0], [33]),
    ):
        q = torch.randn(num_rows, hq, dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        used, requests = sum(counts), len(counts)
        on_device = (torch.tensor(x, device=device) for x in (starts, counts))
        out = torch.full_like(q, float("nan"))
        index = module.PrefillIndex(table[:requests], *on_device, None, hk, num_rows)
        found = index.attend(q, kv, given(window, q), out=out)
        assert found is out
        assert (found[used:] == 0).all()
        real = [i for i in range(requests) if counts[i]]
        if real:
            chunks = [starts[i] for i in real], [counts[i] for i in real]
            expected = build_prefill_index(table[real], *chunks, hk, device).attend(q[:used], kv, given(window, q))
            assert torch.equal(found[:used], expected)


@pytest.mark.parametrize("window", [None, 70])
def test_rows_of_a_fixed_number_take_any_chunks(kernel_device, window):
    check_fixed_number(prefill_attention, kernel_device, window)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("T - packed,", "T - packed - 1,"),
        ("triton.cdiv(self.num_rows, tokens)", "self.num_rows // tokens"),
        ("spare | (i < request)", "i < request"),
        ("tl.where(spare, 0.0, result)", "result"),
    ],
    ids=["a row left", "a program too few", "rows of a chunk too", "what nothing gives"],
)
def test_the_check_of_rows_fails_on_faults(before, after, tmp_path):
    with pytest.raises(AssertionError):
        check_fixed_number(mutated(prefill_attention, before, after, tmp_path), "cpu", None)


@pytest.mark.gpu
def test_the_index_is_made_without_waiting_for_the_device():
    table, num_pages = draw_table([300, 200], "cuda")
    kv = draw_cache(num_pages, 2, 64, torch.bfloat16, "cuda")
    q = torch.randn(400, 8, 64, device="cuda").bfloat16()
    expected = build_prefill_index(table, [0, 100], [300, 100], 2, "cuda").attend(q, kv)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = build_prefill_index(table, [0, 100], [300, 100], 2, "cuda").attend(q, kv)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


def test_chunks_without_tokens_are_refused():
    with pytest.raises(ValueError, match="count >= 1"):
        build_prefill_index(torch.zeros(2, 1), [0, 0], [1, 0], 1, "cpu")
    with pytest.raises(ValueError, match="each of 2 requests"):
        build_prefill_index(torch.zeros(2, 1), [0], [1], 1, "cpu")
