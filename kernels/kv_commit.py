"""Move the KV of accepted draft nodes to where the committed positions lie, all layers at once.

    kv [layers, 2, S * HK, D]     row (page * HK + head) * PAGE + offset
    block_table [B, pages], source and destination [B, J] logical slots; equal ones stay where they are

All sources are read before anything is written, because sources and destinations overlap. Moves bits, computes nothing.
"""

import torch

from .tree_attention import PAGE


def kv_rows(block_table, slots, num_kv_heads):
    """Rows of the cache that hold logical slots [B, J].  -> [B, J, HK]"""
    pages = block_table.gather(1, slots // PAGE)
    head = torch.arange(num_kv_heads, device=slots.device)
    return (pages[:, :, None] * num_kv_heads + head) * PAGE + (slots % PAGE)[:, :, None]


def kv_commit(kv, block_table, source, destination, num_kv_heads):
    """kv[destination] = kv[source], in place; destinations of one request must be distinct."""
    moved = kv.index_select(2, kv_rows(block_table, source, num_kv_heads).flatten())
    kv.index_copy_(2, kv_rows(block_table, destination, num_kv_heads).flatten(), moved)
