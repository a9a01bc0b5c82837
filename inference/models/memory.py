"""How much memory a device has left, for checks before anything is allocated."""

import os

import torch


def free_bytes(device):
    """Bytes that can still be allocated: on a GPU free ones and those torch keeps cached, else what the system calls available."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the total is what can be asked for
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def in_gib(num_bytes):
    """A number of bytes as text."""
    return f"{num_bytes / 2**30:.1f} GiB"
