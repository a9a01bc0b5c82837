"""Ranks on GPUs that write each other's memory: parts go straight to their places, by one kernel (kernels/peer_gather.py).

    ranks = PeerRanks(host, shared_memory(host, device))    # host: the GlooRanks of the same ranks (models/transport.py)
    ranks.begin()                                           # of a pass: it follows what another graph, or none, gathered
    parts = ranks.gather(part)
    total = ranks.sum_rows(product, ...)                    # of many rows: each rank adds some of them

    ranks = PeerRanks(host, shared_host_memory(host, device), on_host=True)    # GPUs that cannot: host_memory.py

Captured in CUDA graphs, as the rest of a pass. Two buffers take turns, so a result has to be read before the next gather, in the
order of the stream. Larger parts than a buffer holds are gathered in pieces, and copied.
"""

import functools
import os

import torch
import torch.distributed as dist

from ...kernels.linear.linear_table import DECODE_ROWS
from ...kernels.peer_gather import ROWS, Peers, flag_bytes, peer_barrier, peer_gather, peer_sum
from ...kernels.peer_norm import SIZES, PeerParts
from ..models.transport import MEET

CAPACITY = 2**27  # bytes of a buffer: the sums of 2,048 rows of 8,192 on two ranks
ALIGNMENT = 16
SUMMED_ROWS = 512  # from here on the ranks share the sums


class MeetingStore(dist.Store):
    """A store in which a rendezvous finds ranks that have been through fewer of them.

    torch numbers the exchanges of a rendezvous by what its process has exchanged before ("PREFIX/NUMBER/RANK"): rank 0 may have
    built LLMs, the others are new. Here a process's first number counts as 0.
    """

    def __init__(self, store):
        super().__init__()
        self._store, self._first = store, {}

    def set(self, key, value):
        self._store.set(self._named(key), value)

    def get(self, key):
        return self._store.get(self._named(key))

    def wait(self, keys, timeout=MEET):
        self._store.wait([self._named(key) for key in keys], timeout)

    def _named(self, key):
        prefix, number, rank = key.rsplit("/", 2)
        return f"{prefix}/{int(number) - self._first.setdefault(prefix, int(number))}/{rank}"


def shared_memory(host, device, capacity=CAPACITY):
    """Memory on every rank's GPU that all ranks can write; zeros. All ranks call this together.

    host: their GlooRanks  ->  uint8 [bytes] of each rank, as this one sees them
    """
    # Not every build of torch has them.
    from torch._C._distributed_c10d import (
        ProcessGroup,
        _register_process_group,
        _SymmetricMemory,
        _unregister_process_group,
    )

    # Multicast objects that a process leaves behind can keep others from the GPUs of this host; nothing here uses them.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    name, num_bytes = f"headstart-{host.name}", 2 * capacity + flag_bytes(host.size)
    # The rendezvous asks the group of this name for its rank, size and store; it needs no backend, and no default group.
    store = MeetingStore(dist.PrefixStore("peers", host.store))
    group = ProcessGroup(store, host.rank, host.size)
    host.least(0)  # all have come so far: the rendezvous would wait for long, and notice no end
    _register_process_group(name, group)
    try:
        with torch.cuda.device(device), torch.inference_mode(False):
            own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, name)
            own.zero_()
            torch.cuda.synchronize(device)
            host.least(0)  # and have found memory, which is zero before anybody writes
            shared = _SymmetricMemory.rendezvous(own)
            memory = [shared.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(host.size)]
            memory[host.rank] = own
    finally:
        _unregister_process_group(name)
    host.least(0)
    return memory


def _stop(number):
    with torch.inference_mode():  # also where the number was made in that mode
        number.fill_(1)


class PeerRanks:
    """host: GlooRanks of the same ranks, for what is on the CPU; memory: of shared_memory, or of shared_host_memory (on_host)

    The host's memory is for gathers alone: sums are computed elsewhere, and copied there.
    """

    def __init__(self, host, memory, on_host=False):
        self.rank, self.size, self._host = host.rank, host.size, host
        self._memory = memory = [memory] * host.size if on_host else memory
        self._own, self._on_host, self._turn = memory[self.rank], on_host, 0
        self.way = "gathered" if on_host or host.size not in SIZES else "sent by the norm"
        own, each = self._own, flag_bytes(host.size)
        self._capacity = (len(own) - each * (host.size if on_host else 1)) // 2
        starts = torch.tensor([one.data_ptr() for one in memory], dtype=torch.int64)
        flags = starts + 2 * self._capacity
        stop = torch.zeros(1, dtype=torch.int32)
        self._peers = Peers(
            rank=host.rank,
            size=host.size,
            buffers=starts.to(own.device),
            flags=(flags + each * torch.arange(host.size) if on_host else flags).to(own.device),
            counts=torch.zeros(2 + ROWS, dtype=torch.int32, device=own.device),
            stop=stop.pin_memory() if own.is_cuda else stop,
            on_host=on_host,
        )

    def begin(self):
        """Wait until all ranks have read what they gathered before: the first of a pass, so that it may be captured by itself."""
        self._turn = 0
        peer_barrier(self._peers)

    def slot(self, shape, dtype):
        """Where the part of the next gather may be written, which saves a copy; None if it is too large."""
        start, num_bytes = self._place(), torch.Size(shape).numel() * dtype.itemsize
        if self._on_host or self.size * num_bytes > self._capacity:
            return None
        start += self.rank * num_bytes
        return self._own[start : start + num_bytes].view(dtype).view(shape)

    def gather(self, part):
        """See Alone.gather. After a rank has ended its result is void, and `check` tells."""
        if part.device != self._own.device:
            return self._host.gather(part)
        flat = part.contiguous().view(-1)
        most = self._capacity // self.size // ALIGNMENT * ALIGNMENT // part.element_size()
        if flat.numel() <= most:
            return self._gather(flat).view(self.size, *part.shape)
        parts = part.new_empty(self.size, flat.numel())
        for start in range(0, flat.numel(), most):
            parts[:, start : start + most] = self._gather(flat[start : start + most])
        return parts.view(self.size, *part.shape)

    def peer_parts(self, part):
        """See Alone.peer_parts."""
        place = self._place()
        in_slot = part.data_ptr() == self._own.data_ptr() + place + self.rank * part.nbytes
        if self._on_host or not in_slot or len(part) > ROWS or self.size not in SIZES:
            return None
        parts = self._floats(self.rank, place, part.dtype, self.size * part.numel()).view(self.size, *part.shape)
        self._turn = 1 - self._turn
        return PeerParts(parts, place, self._peers)

    def shares(self, num_rows, width, dtype):
        """See Alone.shares. All but the last ranks add whole tiles of rows."""
        share = -(-num_rows // (self.size * DECODE_ROWS)) * DECODE_ROWS
        needed = max(self.size * share * width * torch.float32.itemsize, num_rows * width * dtype.itemsize)
        if (
            self._on_host
            or num_rows < SUMMED_ROWS
            or needed > self._capacity
            or width % ALIGNMENT
            or self.size not in SIZES
        ):
            return None
        return [max(0, min(num_rows - rank * share, share)) for rank in range(self.size)]

    def sum_rows(self, product, num_rows, width, dtype):
        """See Alone.sum_rows. Each rank computes the rows of another straight into its memory, its own last.

        A later product runs beside an earlier one, so what goes to another GPU is on its way while the next rows are computed.
        """
        shares = self.shares(num_rows, width, dtype)
        if shares is None:
            return None
        # The results have the other buffer, so that turns go on as they were.
        source, place = self._place(), self._capacity - self._place()
        late = False
        for rank in (*range(self.rank + 1, self.size), *range(self.rank + 1)):
            start, count = sum(shares[:rank]), shares[rank]
            rows = slice(start, start + count)
            parts = self._floats(rank, source, torch.float32, self.size * count * width).view(self.size, count, width)
            if count:
                product(rows, parts[self.rank], late)
                late = True
        peer_barrier(self._peers)  # all parts of this rank's rows are here
        total = self._floats(self.rank, place, dtype, num_rows * width).view(num_rows, width)
        peer_sum(parts.flatten(1), total[rows], place + rows.start * width * dtype.itemsize, self._peers)
        return total

    def least(self, number):
        """See Alone.least."""
        return self._host.least(number)

    def of_first(self, numbers):
        """See Alone.of_first."""
        return self._host.of_first(numbers)

    def check(self):
        """See Alone.check."""
        self._host.check()

    def stopper(self):
        """A function for any thread, once a rank has ended: no kernel of this one waits any more. It does not hold the group."""
        return functools.partial(_stop, self._peers.stop)

    def _floats(self, rank, start, dtype, count):
        """`count` elements of a rank's memory from a byte on."""
        return self._memory[rank][start : start + count * dtype.itemsize].view(dtype)

    def _place(self):
        return self._turn * self._capacity

    def _gather(self, part):
        """part [C] -> [R, C] in a buffer"""
        place = self._place()
        self._turn = 1 - self._turn
        own = self._own[place : place + self.size * part.nbytes]
        in_place = part.data_ptr() == own.data_ptr() + self.rank * part.nbytes
        peer_gather(part, place, self._peers, in_place)
        return own.view(part.dtype).view(self.size, -1)
