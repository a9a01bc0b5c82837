"""Ranks on GPUs that do not reach each other's memory: NCCL carries the parts, through the host where it has to.

    ranks = NcclRanks(host, device)       # host: the GlooRanks of the same ranks (models/transport.py)
    parts = ranks.gather(part)

Only what is carried is NCCL's. Nothing is added by it: an all-reduce would choose its own order of sums. So the bits are those of
PeerRanks, which is faster. Captured in CUDA graphs, as the rest of a pass.
"""

import functools
import os
import threading

import torch
import torch.distributed as dist

from ..models.transport import LONGEST, Alone


def _abort(group):
    # Kernels end at once. The call returns when graphs that were captured with the group are gone, too: not to be waited for.
    threading.Thread(target=group.abort, daemon=True).start()


class NcclRanks(Alone):
    """host: GlooRanks of the same ranks, for what is on the CPU; device: of this rank, another one for each.

    All ranks make theirs together. Results are new memory, and hold.
    """

    def __init__(self, host, device):
        self.rank, self.size, self._host, self._device = host.rank, host.size, host, device
        # Multicast objects that a process leaves behind can keep others from the GPUs of this host; nothing here uses them.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = LONGEST
        self._group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", host.store), host.rank, host.size, options)
        self._options = dist.distributed_c10d.AllgatherOptions()
        self._options.asyncOp = False  # in the current stream, so there is nothing to wait for
        host.least(0)  # all have come so far: the first gather would wait for long, and notice no end
        self.gather(torch.zeros(1, device=device))  # makes the connections, which no capture may
        torch.cuda.synchronize(device)

    def gather(self, part):
        """See Alone.gather. After a rank has ended its result is void, and `check` tells."""
        if part.device != self._device:
            return self._host.gather(part)
        part = part.contiguous()
        parts = part.new_empty(self.size, *part.shape)
        if part.numel():
            # Bytes: what NCCL carries need not be a number.
            flat = parts.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8)
            self._group._allgather_base(*flat, self._options)
        return parts

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
        """A function for any thread, once a rank has ended: no kernel of this one waits any more."""
        return functools.partial(_abort, self._group)
