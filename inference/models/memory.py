"""Free memory of a device, for checks before anything is allocated."""

import os

import torch


def free_bytes(device):
    """Bytes that can still be allocated: on a GPU the free bytes and those in torch's cache, else the system's available bytes."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: only the total is known
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(need, dtype, device):
    """ValueError if weights of so many bytes do not fit into the device's free memory."""
    free = free_bytes(device)
    if need > free:
        raise ValueError(
            f"the weights take {in_gib(need)} in {str(dtype).removeprefix('torch.')} and {in_gib(free)} are free on "
            f"{device}: free memory, choose a smaller dtype or a smaller model"
        )


def in_gib(num_bytes):
    """A number of bytes as text."""
    return f"{num_bytes / 2**30:.1f} GiB"
