"""Memory of the host that the GPUs of several processes read and write, for GPUs that do not reach each other's.

    ranks = PeerRanks(host, shared_host_memory(host, device), on_host=True)      # host: the GlooRanks of the same ranks

It has no name in a file system, so nothing of it outlasts the processes, and no limit but the host's memory and what a process may
lock of it.
"""

import mmap
import os

import torch

from ...kernels.peer_gather import flag_bytes

CAPACITY = 2**24  # bytes of a buffer; what is larger comes in pieces
LINUX = "GPUs without access to each other's memory work together on Linux alone"


class _Registered:
    """A mapping that the current GPU can address, until nobody holds it: torch.as_tensor makes a tensor of it."""

    def __init__(self, mapping):
        self._mapping = torch.frombuffer(mapping, dtype=torch.uint8)
        self._address, num_bytes = self._mapping.data_ptr(), len(self._mapping)
        # 3: mapped into the GPU's address space, of every context
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self._address, num_bytes, 3)))
        self.__cuda_array_interface__ = dict(
            shape=(num_bytes,), typestr="|u1", data=(self._address, False), strides=None, version=3
        )

    def __del__(self):
        if hasattr(self, "__cuda_array_interface__"):
            torch.cuda.cudart().cudaHostUnregister(self._address)


def shared_host_memory(host, device, capacity=CAPACITY):
    """Two buffers that all ranks share, and the flags of each; zeros. All ranks call this together.

    host: their GlooRanks  ->  uint8 [bytes] on `device`, as kernels read and write it
    """
    if not hasattr(os, "memfd_create"):
        raise RuntimeError(LINUX)
    num_bytes = 2 * capacity + host.size * flag_bytes(host.size)
    file = None
    if host.rank == 0:
        file = os.memfd_create("headstart")
        os.ftruncate(file, num_bytes)
        host.store.set("host memory", f"/proc/{os.getpid()}/fd/{file}")
    host.least(0)  # it is there
    try:
        if file is None:
            file = os.open(host.store.get("host memory").decode(), os.O_RDWR)
        mapping = mmap.mmap(file, num_bytes)
        host.least(0)  # all have it: rank 0 may close its own
    finally:
        if file is not None:
            os.close(file)
    with torch.cuda.device(device), torch.inference_mode(False):
        return torch.as_tensor(_Registered(mapping), device=device)
