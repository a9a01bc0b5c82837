"""`headstart bench kernel rms_norm`, `layer_norm`, `embedding`, `sample`, `verify`, `block_convolution`: operations on rows."""

import math

import torch
import torch.nn.functional as F

from ...inference.speculation.tree_on_device import TreeOnDevice
from ...kernels.attention.tree_attention import PAGE
from ...kernels.block_convolution import block_convolution, block_convolution_reference
from ...kernels.embedding import embed
from ...kernels.layer_norm import add_layer_norm
from ...kernels.rms_norm import add_rms_norm
from ...kernels.sampling.sample import sample_tokens, top_tokens
from ...kernels.speculation.verify_strict import verify_strict
from ..shape import best_tree
from .products import PREFILL_ROWS


def bench_rms_norm(bench):
    """Residual and norm."""
    weight = bench.random(bench.sizes.hidden)
    _bench_norm(bench, "rms_norm", add_rms_norm, F.rms_norm, (weight, 1e-5))


def bench_layer_norm(bench):
    """Residual and LayerNorm."""
    weight, bias = bench.random(bench.sizes.hidden), bench.random(bench.sizes.hidden)
    _bench_norm(bench, "layer_norm", add_layer_norm, F.layer_norm, (weight, bias, 1e-5))


def _bench_norm(bench, name, add_norm, library_norm, parameters):
    """add_norm(x, residual, *parameters) beside an addition and library_norm(sum, (width,), *parameters)."""
    width = bench.sizes.hidden
    for rows in bench.settings.rows:
        pairs = [bench.random(2, rows, width) for _ in range(bench.copies(4 * rows * width * 2))]

        def ours(pairs=pairs):
            for x, residual in pairs:
                add_norm(x, residual, *parameters)

        def library(pairs=pairs):
            for x, residual in pairs:
                library_norm(x + residual, (width,), *parameters)

        moved = 4 * rows * width * parameters[0].element_size()
        bench.line(name, f"add + norm, {width}", rows, ours, library, moved, calls=len(pairs))


def bench_embedding(bench):
    table = bench.random(bench.sizes.vocab, bench.sizes.hidden)
    for rows in bench.settings.rows:
        tokens = [bench.integers(bench.sizes.vocab, rows) for _ in range(8)]
        moved = 2 * rows * bench.sizes.hidden * table.element_size()
        ours = lambda tokens=tokens: [embed(one, table) for one in tokens]  # noqa: E731
        library = lambda tokens=tokens: [F.embedding(one, table) for one in tokens]  # noqa: E731
        bench.line("embedding", f"{table.shape[0]} x {table.shape[1]}", rows, ours, library, moved, calls=len(tokens))


def bench_sample(bench):
    """The target's token per row, greedy and at temperature 1, and a drafter's ten best."""
    vocab = bench.sizes.vocab
    for rows in bench.settings.rows:
        if rows >= PREFILL_ROWS:
            continue
        logits = bench.random(rows, vocab, scale=3)
        ones, seeds = torch.ones(rows, device=bench.device), torch.arange(rows, device=bench.device)
        keys = (seeds, torch.zeros_like(seeds), seeds)

        def drawn(logits=logits):
            distribution = logits.float().softmax(-1)
            return (distribution / torch.empty_like(distribution).exponential_()).argmax(-1)

        cases = (
            ("greedy", lambda x=logits, k=keys, t=ones * 0: sample_tokens(x, t, *k), lambda x=logits: x.argmax(-1)),
            ("temperature 1", lambda x=logits, k=keys, t=ones: sample_tokens(x, t, *k), drawn),
            ("10 best", lambda x=logits, k=keys, t=ones * 0: top_tokens(x, 10, t, *k), lambda x=logits: x.topk(10)),
        )
        for what, ours, library in cases:
            bench.line("sample", f"{what}, {vocab}", rows, ours, library, logits.nbytes)


def bench_verify(bench):
    """The verdict on a tree, one program per request."""
    batch = bench.settings.batch
    for rows in bench.settings.rows:
        if not 1 < rows <= PAGE:
            continue
        tree = TreeOnDevice.of(best_tree(rows), bench.device)
        tokens, target = bench.integers(50, 2, batch, rows)
        limit = torch.full((batch,), 100, device=bench.device)

        def ours(tree=tree, tokens=tokens, target=target, limit=limit):
            return verify_strict(tree.parents, tree.depths, tokens, target, limit, tree.max_depth)

        bench.line("verify", f"batch {batch}, {tree.max_depth} deep", rows, ours, None, 2 * tokens.nbytes)


def bench_block_convolution(bench):
    """Two taps and corrections shared by 16 channels, as DFlash2 has them; all rows are one block."""
    width = bench.sizes.hidden
    groups, base = width // math.gcd(16, width), bench.random(2, width)
    for rows in bench.settings.rows:
        copies = bench.copies(2 * rows * width * base.element_size())
        pairs = [(bench.random(rows, width), bench.random(rows, 2, groups)) for _ in range(copies)]

        def ours(pairs=pairs, rows=rows):
            for x, corrections in pairs:
                block_convolution(x, base, corrections, rows)

        def library(pairs=pairs, rows=rows):
            for x, corrections in pairs:
                block_convolution_reference(x, base, corrections, rows)

        moved = rows * (2 * width + 2 * groups) * base.element_size()
        bench.line("block_convolution", f"{width} in {groups} groups", rows, ours, library, moved, calls=len(pairs))
