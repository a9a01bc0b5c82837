"""The paged KV cache: pages of 64 positions, shared by all layers' numbering.

kv [layers, 2, (pages + 1) * HK * 64, D]: keys and values; a page of one layer is [HK, 64, D]. Page 0 belongs to nobody: padding
in block tables points to it, so it must stay finite and its content is never used.
"""

import os

import torch

from ..kernels.tree_attention import PAGE

# Share of the free memory that the cache may take. What a pass needs besides (activations, logits) is small beside it.
GPU_SHARE, CPU_SHARE = 0.8, 0.5


class PagedCache:
    """Keys and values of all layers for `num_pages` pages."""

    def __init__(self, num_layers, num_pages, num_kv_heads, head_dim, dtype, device):
        self.num_pages, self.num_kv_heads = num_pages, num_kv_heads
        rows = (num_pages + 1) * num_kv_heads * PAGE
        # Zeros: memory fresh from the allocator may hold NaN, which a masked key's weight of 0 would not remove.
        self.kv = torch.zeros(num_layers, 2, rows, head_dim, dtype=dtype, device=device)

    def block_table(self, requests):
        """Page numbers of each request, padded with page 0.  -> int64 [B, longest]"""
        longest = max(len(request.pages) for request in requests)
        table = [request.pages + [0] * (longest - len(request.pages)) for request in requests]
        return torch.tensor(table, device=self.kv.device)


def pages_that_fit(num_layers, num_kv_heads, head_dim, dtype, device, wanted):
    """How many pages to allocate: what is wanted, or as many as memory allows. ValueError if not even two fit."""
    page_bytes = num_layers * 2 * num_kv_heads * PAGE * head_dim * dtype.itemsize
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] * GPU_SHARE
    else:
        budget = _free_host_bytes() * CPU_SHARE
    fit = int(budget // page_bytes)
    if fit < 2:
        raise ValueError(
            f"no memory for the KV cache: a page of {PAGE} tokens takes {page_bytes / 2**20:.1f} MiB and "
            f"{budget / 2**20:.1f} MiB may be used on {device}; free memory or use a smaller model"
        )
    return min(wanted, fit - 1)


def _free_host_bytes():
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the total is what can be asked for
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
