"""`headstart bench kernel attention`, `prefill_attention`, `rotary` and `commit`: operations on the paged cache."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...evaluation.timing import release
from ...inference.speculation.tree_on_device import TreeOnDevice
from ...kernels.attention.kv_commit import kv_commit
from ...kernels.attention.prefill_attention import build_prefill_index
from ...kernels.attention.rotary_kv_write import rotary_kv_write
from ...kernels.attention.tree_attention import PAGE, build_tree_index
from ..library import LibraryAttention, rotate
from ..shape import best_tree


def paged_cache(bench, batch, positions):
    """Random keys and values of some layers, and the block table of `batch` requests.  kv [layers, 2, rows, D], [B, P]"""
    sizes = bench.sizes
    pages = -(-positions // PAGE)
    rows = (batch * pages + 1) * sizes.num_kv_heads * PAGE
    layers = min(sizes.layers, bench.copies(2 * rows * sizes.head_dim * 2))
    kv = bench.random(layers, 2, rows, sizes.head_dim)
    return kv, 1 + torch.arange(batch * pages, device=bench.device).view(batch, pages)


def bench_attention(bench):
    """Tree attention of `rows` nodes per request after a context; the library's has a mask over dense keys."""
    sizes, batch = bench.sizes, bench.settings.batch
    heads = dict(num_heads=sizes.num_heads, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim)
    for context in bench.settings.contexts:
        for rows in bench.settings.rows:
            if rows > PAGE:
                continue  # that is prefill
            release(bench.device)
            kv, table = paged_cache(bench, batch, context + rows)
            tree = TreeOnDevice.of(best_tree(rows), bench.device)
            committed = torch.full((batch,), context, device=bench.device)
            q = bench.random(batch * rows, sizes.num_heads, sizes.head_dim)
            arguments = (table, committed, tree.depths, tree.ancestors, sizes.num_kv_heads, bench.dtype)
            index = build_tree_index(*arguments)
            mask = None
            if rows > 1:
                own = torch.zeros(rows, rows, dtype=torch.bool, device=bench.device).scatter_(
                    1, tree.ancestors.long(), True
                )
                mask = torch.cat((torch.ones(rows, context, dtype=torch.bool, device=bench.device), own), 1)
            dense = bench.random(kv.shape[0], 2, batch, sizes.num_kv_heads, context + rows, sizes.head_dim)
            dense_q = q.view(batch, rows, sizes.num_heads, sizes.head_dim)
            attention = LibraryAttention(batch, rows, **heads, mask=mask, dtype=bench.dtype, device=bench.device)
            attention.choose(dense_q, dense)
            keys = batch * context
            bench.line(
                "attention",
                f"batch {batch}, {context} keys",
                rows,
                lambda q=q, kv=kv, index=index: [index.attend(q, layer) for layer in kv],
                lambda q=dense_q, kv=dense, run=attention: [run(q, *layer) for layer in kv],
                2 * keys * sizes.num_kv_heads * sizes.head_dim * kv.element_size(),
                4 * keys * rows * sizes.num_heads * sizes.head_dim,
                kv.shape[0],
            )


def bench_prefill_attention(bench):
    """A whole prompt at once; the library's is causal FlashAttention through scaled_dot_product_attention."""
    sizes = bench.sizes
    for tokens in bench.settings.tokens:
        release(bench.device)
        kv, table = paged_cache(bench, 1, tokens)
        q = bench.random(tokens, sizes.num_heads, sizes.head_dim)
        index = build_prefill_index(table, [0], [tokens], sizes.num_kv_heads, bench.device)
        dense_q = q.transpose(0, 1)[None].contiguous()
        dense = bench.random(2, 1, sizes.num_kv_heads, tokens, sizes.head_dim)

        def library(q=dense_q, kv=dense):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(q, kv[0], kv[1], is_causal=True, enable_gqa=True)

        operations = 2 * tokens * (tokens + 1) * sizes.num_heads * sizes.head_dim
        moved = 2 * dense_q.nbytes + dense.nbytes
        ours = lambda q=q, layer=kv[0], index=index: index.attend(q, layer)  # noqa: E731
        bench.line("prefill_attention", f"{tokens} tokens, causal", tokens, ours, library, moved, operations)


def bench_rotary(bench):
    """Rotation of q and k and the write of k and v."""
    sizes = bench.sizes
    hq, hk, dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    for rows in bench.settings.rows:
        kv, table = paged_cache(bench, 1, rows)
        width = (hq + 2 * hk) * dim
        projected = [bench.random(1, rows, width) for _ in range(len(kv))]
        positions = torch.arange(rows, device=bench.device)
        places = table[0, positions // PAGE] * PAGE + positions % PAGE
        cos, sin = torch.randn(2, rows, dim // 2, device=bench.device)
        dense = bench.random(2, rows, hk, dim)

        def ours(projected=projected, kv=kv, positions=positions, places=places, cos=cos, sin=sin):
            for qkv, layer in zip(projected, kv):
                rotary_kv_write(qkv, positions, cos, sin, places, layer, hq, hk)

        def library(projected=projected, dense=dense, cos=cos, sin=sin, rows=rows):
            for qkv in projected:
                qkv = qkv.view(rows, hq + 2 * hk, dim)
                qk = rotate(qkv[:, : hq + hk], cos[:, None], sin[:, None])
                dense[0].copy_(qk[:, hq:])
                dense[1].copy_(qkv[:, hq + hk :])

        moved = 2 * rows * width * dense.element_size()
        bench.line("rotary", f"{hq} + {hk} heads of {dim}", rows, ours, library, moved, calls=len(kv))


def bench_commit(bench):
    """Move keys and values of an accepted path to the places after the committed ones, in all layers."""
    sizes, batch = bench.sizes, bench.settings.batch
    for rows in bench.settings.rows:
        if not 1 < rows <= PAGE:
            continue
        tree = TreeOnDevice.of(best_tree(rows), bench.device)
        context = bench.settings.contexts[0]
        pages = -(-(context + rows) // PAGE)
        table = 1 + torch.arange(batch * pages, device=bench.device).view(batch, pages)
        kv = bench.random(sizes.layers, 2, (batch * pages + 1) * sizes.num_kv_heads * PAGE, sizes.head_dim)
        committed = torch.full((batch,), context, device=bench.device)
        path = tree.ancestors[tree.tree.deepest].expand(batch, -1).contiguous()
        accepted = torch.full((batch,), tree.max_depth, device=bench.device)
        moved = 2 * 2 * sizes.layers * batch * tree.max_depth * sizes.num_kv_heads * sizes.head_dim * kv.element_size()

        def ours(kv=kv, table=table, committed=committed, path=path, accepted=accepted):
            kv_commit(kv, table, committed, path, accepted, sizes.num_kv_heads)

        bench.line("commit", f"batch {batch}, {sizes.layers} layers", rows, ours, None, moved)
