"""`headstart bench kernel trained-parts`: parts of an EAGLE head's layer, forward and backward, beside plain torch with autograd.

Norms of fp32 weights, the gated activation, the rotation of queries, attention to three own keys of a row. Floors: each pass reads
its inputs and the gradient that it is given, and writes what it makes. Inputs are not rotated past the cache: take 4096 rows.
"""

import torch

from ...kernels.attention.rotary import rotary, rotary_reference
from ...kernels.training.own_keys import attend_own_keys, attend_own_keys_reference
from ...kernels.training.trained_rms_norm import trained_rms_norm, trained_rms_norm_reference
from ...kernels.training.trained_silu_mul import trained_silu_mul, trained_silu_mul_reference

OWN_KEYS = 3


def bench_trained_parts(bench):
    """bench: kernel_bench.KernelBench"""
    sizes = bench.sizes
    heads, key_heads, dim, width = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.hidden
    for rows in bench.settings.rows:
        x, weight = bench.random(rows, width), torch.ones(width, device=bench.device)
        _line(
            bench, "trained_rms_norm", width, rows,
            lambda x, w: trained_rms_norm(x, w, 1e-5), lambda x, w: trained_rms_norm_reference(x, w, 1e-5), (x, weight),
            moved=5 * x.nbytes,
        )  # fmt: skip
        gate, up = bench.random(2, rows, sizes.intermediate)
        _line(
            bench, "trained_silu_mul", sizes.intermediate, rows,
            trained_silu_mul, trained_silu_mul_reference, (gate, up), moved=8 * gate.nbytes,
        )  # fmt: skip
        cos, sin = torch.randn(2, rows, dim // 2, device=bench.device)
        q = bench.random(rows, heads, dim)
        _line(
            bench, "rotary", f"{heads} heads of {dim}", rows,
            lambda q, angles=(cos, sin): rotary(q, *angles), lambda q, angles=(cos, sin): rotary_reference(q, *angles), (q,),
            moved=4 * q.nbytes,
        )  # fmt: skip
        out, q = (one.transpose(1, 2) for one in bench.random(2, 1, rows, heads, dim))
        before = torch.randn(1, heads, rows, device=bench.device)
        own = bench.random(2, OWN_KEYS, 1, rows, key_heads, dim).transpose(3, 4)

        def plain(out, before, q, keys, values):
            keys, values = (one.transpose(2, 3) for one in (keys, values))
            return attend_own_keys_reference(out, before, q, keys, values)

        _line(
            bench, "own_keys", f"{OWN_KEYS}, {heads} heads of {dim}", rows,
            lambda out, before, q, keys, values: attend_own_keys(out, before, q, keys.unbind(), values.unbind()),
            plain, (out, before, q, *own), moved=8 * q.nbytes + 3 * own.nbytes,
        )  # fmt: skip


def _line(bench, name, what, rows, ours, library, inputs, moved):
    leaves = [one.detach().requires_grad_() for one in inputs]
    with torch.enable_grad():
        gradient = torch.ones_like(ours(*leaves))

    def both_ways(function):
        with torch.enable_grad():
            torch.autograd.grad(function(*leaves), leaves, gradient)

    bench.line(name, what, rows, lambda: both_ways(ours), lambda: both_ways(library), moved)
