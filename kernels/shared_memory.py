"""Shared memory of a GPU, and how many tiles a pipeline of loads may keep in it.

Tiles and stages were measured on an H200. A GPU with less shared memory takes fewer stages, and smaller tiles where two would not
fit (linear/linear_table.py, attention/attention_fold.py). The choice looks at the GPU, never at rows in a way that changes bits.
"""

import functools
from typing import NamedTuple

import torch

RESERVED = 1024  # bytes for the barriers of a pipeline


class SharedMemory(NamedTuple):
    """What one block can have."""

    size: int  # bytes
    # Stages that take no shared memory: 1 where matrix instructions read registers (mma.sync), one stage ahead; 0 where they read
    # shared memory (compute capability 9.x and 10.x).
    held: int


H200 = SharedMemory(227 << 10, 0)


@functools.lru_cache
def shared_memory(device):
    """The SharedMemory of a device (in the interpreter: an H200's)."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    size = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    mma_sync = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] not in (9, 10)
    return SharedMemory(size, int(mma_sync))


def most_stages(memory, tile, other=0):
    """Stages of `tile` bytes each that fit beside `other` bytes."""
    return (memory.size - RESERVED - other) // tile + memory.held
