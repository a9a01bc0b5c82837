"""Soft caps, sinks and up to 64 query heads per key head, in every pass: trees, chains, prompts."""

import pytest
import torch

from headstart.kernels.attention import tree_attention
from headstart.kernels.attention.attention_fold import PAGE, AttentionOptions
from headstart.kernels.attention.kv_commit import kv_rows
from headstart.kernels.attention.prefill_attention import build_prefill_index
from headstart.kernels.attention.tree_attention import build_tree_index
from headstart.kernels.jit import on_triton
from headstart.tests.kernels.attention.options import KINDS, dense, given, mutants

NODES = 5


def passes(q, kv, table, start, hk, options):
    """{pass: attention of the positions start to start + N - 1}, keys in the order of positions.  q [N, HQ, D]"""
    device, num = q.device, len(q)
    step, committed = torch.arange(num, device=device), torch.tensor([start], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    alone = [build_tree_index(table, committed + i, zero, zero[None], hk, q.dtype) for i in range(num)]
    found = {
        "alone": torch.cat([one.attend(q[i : i + 1], kv, options) for i, one in enumerate(alone)]),
        "in a tree": build_tree_index(table, committed, step, step.expand(num, -1), hk, q.dtype).attend(q, kv, options),
    }
    if on_triton(q):
        found["in a prompt"] = build_prefill_index(table, [start], [num], hk, device).attend(q, kv, options)
        many = 200 if q.is_cuda else 3
        index = build_tree_index(
            table.repeat(many, 1), committed.repeat(many), step, step.expand(num, -1), hk, is_chain=True
        )
        with pytest.MonkeyPatch.context() as patch:
            if not q.is_cuda:  # the interpreter takes a tenth of a second for a request
                patch.setattr(tree_attention, "WALK_PROGRAMS", many)
            found["in a chain of many"] = index.attend(q.repeat(many, 1, 1), kv, options)[-num:]
    return found


def drawn(hq, hk, dim, length, dtype, device):
    """q [NODES, HQ, D], kv [2, rows, D], table [1, P], keys and values [2, length + NODES, HK, D]"""
    generator = torch.Generator().manual_seed(0)
    pages = -(-(length + NODES) // PAGE)
    table = torch.randperm(pages, generator=generator)[None] + 1
    kv = torch.randn(2, (pages + 1) * hk * PAGE, dim, generator=generator)
    q = 2 * torch.randn(NODES, hq, dim, generator=generator)
    rows = kv_rows(table, torch.arange(length + NODES)[None], hk)
    dense_kv = kv[:, rows.flatten()].view(2, -1, hk, dim)
    return (one.to(device, dtype) if one.is_floating_point() else one.to(device) for one in (q, kv, table, dense_kv))


def check(hq, hk, dim, length, dtype, device, what, near):
    q, kv, table, (k, v) = drawn(hq, hk, dim, length, dtype, device)
    options = given(what, q)
    position, key = length + torch.arange(NODES, device=device)[:, None], torch.arange(length + NODES, device=device)
    # A window that ends before the first position hides nothing.
    others = [one for one in mutants(options) if one.window == options.window or length > one.window]
    wanted, *wrong = (
        dense(q, k, v, (key <= position) & (key > position - (one.window or 1 << 30)), one)
        for one in (options, *others)
    )
    alone, *rest = passes(q, kv, table, length, hk, options).items()
    scale = wanted.norm()
    error = (alone[1].double() - wanted).norm() / scale
    assert error <= near
    for other in (
        wrong if dtype == torch.float32 else ()
    ):  # among thousands of keys a sink weighs less than rounding in 16 bits
        assert (other - wanted).norm() / scale > 3 * near
    for name, found in rest:
        if device == "cpu" and on_triton(q):  # the interpreter's products are numpy's: no bits
            torch.testing.assert_close(found, alone[1], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found, alone[1]), name


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize(("hq", "hk", "dim"), [(4, 2, 16), (24, 1, 20), (48, 1, 16)])
@pytest.mark.parametrize("length", [0, 70, 300])
def test_values_and_passes(device, hq, hk, dim, length, what):
    if device == "cuda" or length == 300 or hq == 48:
        check(hq, hk, dim, length, torch.float32, device, what, near=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hq", "hk", "dim", "length", "what"),
    [
        (48, 1, 128, 1000, None),
        (48, 1, 128, 8200, "all"),
        (64, 8, 64, 3000, "sinks"),
        (8, 4, 256, 5000, "softcap"),
        (16, 8, 256, 700, "all"),
        (64, 1, 64, 2500, "all"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_real_sizes(hq, hk, dim, length, what, dtype):
    check(hq, hk, dim, length, dtype, "cuda", what, near=1e-2)


def test_options_that_do_not_fit_are_refused():
    q, kv, table, _ = drawn(4, 2, 16, 3, torch.float32, "cpu")
    index = build_tree_index(table, torch.tensor([3]), torch.arange(1), torch.zeros(1, 1, dtype=torch.int64), 2)
    for options, said in (
        (AttentionOptions(softcap=0.0), "a soft cap above 0"),
        (AttentionOptions(sinks=torch.zeros(3)), "a sink for each of 4 heads"),
        (AttentionOptions(scale=-1.0), "a scale"),
    ):
        with pytest.raises(ValueError, match=said):
            index.attend(q[:1], kv, options)
