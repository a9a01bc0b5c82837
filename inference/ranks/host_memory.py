"""Memory of the host that the GPUs of several processes read and write, for GPUs that do not reach each other's.

    ranks = PeerRanks(host, shared_host_memory(host, device), on_host=True)      # host: the GlooRanks of the same ranks

It has no name in a file system, so nothing of it outlasts the processes, and no limit but the host's memory.
"""

import contextlib
import ctypes
import mmap
import os

import torch

from ...kernels.peer_gather import flag_bytes

CAPACITY = 2**24  # bytes of a buffer; what is larger comes in pieces
EVERYWHERE = 3  # cudaHostRegister: portable, and mapped into the GPU's addresses


class _Registered:
    """A mapping that a GPU can address, until nobody holds it: torch.as_tensor makes a tensor of it. The GPU is the current one."""

    def __init__(self, mapping, device):
        self._mapping, self._device = torch.frombuffer(mapping, dtype=torch.uint8), device
        address, num_bytes = self._mapping.data_ptr(), len(self._mapping)
        try:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, EVERYWHERE)))
        except RuntimeError as error:
            raise RuntimeError(
                f"{device} cannot map {num_bytes >> 20} MiB of the host's memory, over which ranks without peer access hand on "
                f"their sums (cudaHostRegister: {error}): check the host's free memory, and `ulimit -l`"
            ) from error
        self.__cuda_array_interface__ = dict(
            shape=(num_bytes,), typestr="|u1", data=(address, False), strides=None, version=3
        )

    def __del__(self):
        if hasattr(self, "__cuda_array_interface__") and not torch.cuda._is_in_bad_fork():
            with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):  # at exit the driver may be gone
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaHostUnregister(self._mapping.data_ptr())


def shared_host_memory(host, device, capacity=CAPACITY):
    """Two buffers that all ranks share, and the flags of each; zeros. All ranks call this together.

    host: their GlooRanks  ->  uint8 [bytes] on `device`, as kernels read and write it. RuntimeError if the GPU cannot map it
    """
    mapping = shared_mapping(host, 2 * capacity + host.size * flag_bytes(host.size))
    with torch.cuda.device(device), torch.inference_mode(False):
        memory = torch.as_tensor(_Registered(mapping, device), device=device)
    assert memory.data_ptr() == torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()  # it is no copy
    return memory


def shared_mapping(host, num_bytes):
    """Zeros that all ranks map: an mmap. All ranks call this together."""
    file = None
    try:
        if host.rank == 0:
            file = _anonymous_file()
            os.ftruncate(file, num_bytes)
            host.store.set("host memory", f"/proc/{os.getpid()}/fd/{file}")
        host.least(0)  # it is there
        if file is None:
            file = os.open(host.store.get("host memory").decode(), os.O_RDWR)
        mapping = mmap.mmap(file, num_bytes)
        host.least(0)  # all have it: rank 0 may close its own
        return mapping
    finally:
        if file is not None:
            os.close(file)


def _anonymous_file():
    """A file of memory alone. By the C library itself: some builds of Python leave out os.memfd_create."""
    library = ctypes.CDLL(None, use_errno=True)
    file = library.memfd_create(b"headstart", 1)  # 1: closed by exec
    if file < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    return file
