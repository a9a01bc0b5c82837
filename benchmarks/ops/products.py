"""`headstart bench kernel linear`, `gated_mlp` and `res_block`: products with weights."""

import torch
import torch.nn.functional as F

from ...evaluation.timing import release
from ...kernels.linear.gated_mlp import gate_up_silu
from ...kernels.linear.linear import linear, linear_parts
from ...kernels.linear.res_block import add_silu
from ..shape import NUM_HEADS

# From this many rows on it is prefill, which computes lm_head only for a prompt's last token.
PREFILL_ROWS = 512


def bench_linear(bench):
    """linear, and linear_parts (whose sum is left to the next operation), for a layer's products and the lm_head."""
    for rows in bench.settings.rows:
        totals = []
        for name, (out, width) in bench.sizes.products.items():
            if name == "lm_head" and rows >= PREFILL_ROWS:
                continue
            weights = [bench.random(out, width, scale=width**-0.5) for _ in range(bench.copies(out * width * 2))]
            x = bench.random(rows, width)
            moved = (out * width + rows * (out + width)) * x.element_size()
            work = (2 * rows * out * width, len(weights))
            what = f"{name} {out} x {width}"
            times = bench.line(
                "linear",
                what,
                rows,
                lambda x=x, ws=weights: [linear(x, w) for w in ws],
                lambda x=x, ws=weights: [F.linear(x, w) for w in ws],
                moved,
                *work,
            )
            if linear_parts(x, weights[0]).shape[0] > 1:
                bench.line(
                    "linear_parts",
                    what,
                    rows,
                    lambda x=x, ws=weights: [linear_parts(x, w) for w in ws],
                    None,
                    moved,
                    *work,
                )
            if name != "lm_head":
                totals.append(times)
            del weights
            release(bench.device)
        ours, library = (sum(column) for column in zip(*totals))
        bench.report.note(
            f"         a layer's four products at {rows} rows: {ours * 1e3:.1f} us, library {library * 1e3:.1f} us: "
            f"{library / ours:.3f} of the library's rate"
        )
        bench.report.facts[f"layer_rate_of_library_at_{rows}_rows"] = round(library / ours, 4)


def bench_gated_mlp(bench):
    out, width = bench.sizes.products["gate_up"]
    weights = [bench.random(out, width, scale=width**-0.5) for _ in range(bench.copies(out * width * 2))]

    def library(x):
        for w in weights:
            gate, up = F.linear(x, w).chunk(2, -1)
            F.silu(gate) * up

    for rows in bench.settings.rows:
        x = bench.random(rows, width)
        moved = (out * width + rows * (out // 2 + width)) * x.element_size()
        ours = lambda x=x: [gate_up_silu(x, w) for w in weights]  # noqa: E731
        work = (2 * rows * out * width, len(weights))
        bench.line("gated_mlp", f"{out} x {width}", rows, ours, lambda x=x: library(x), moved, *work)


def bench_res_block(bench):
    """x + silu(product) of all Medusa heads."""
    heads, width = NUM_HEADS, bench.sizes.hidden
    for rows in bench.settings.rows:
        if rows >= PREFILL_ROWS:
            continue
        x, parts = bench.random(rows, width), torch.randn(2, rows, heads * width, device=bench.device)
        moved = parts.nbytes + (1 + heads) * x.nbytes
        library = lambda x=x, parts=parts: x[:, None] + F.silu(parts.sum(0).view(-1, heads, width).to(x.dtype))  # noqa: E731
        ours = lambda x=x, parts=parts: add_silu(x, parts, heads)  # noqa: E731
        bench.line("res_block", f"{heads} heads, 2 parts, {width}", rows, ours, library, moved)
