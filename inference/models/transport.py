"""What ranks of a tensor-parallel group tell each other: parts of tensors, in the order of the ranks.

    parts = ranks.gather(part)        # [size, ...]: the same bits on every rank
    number = ranks.least(number)      # the smallest that any rank gave

Every rank calls the same methods in the same order. Nothing is added here: a library's all-reduce chooses its order of sums, so
parts are gathered and the next kernel adds them, in order. A transport may keep its results in buffers of its own, which hold until
its next calls; `gather` waits for nothing on the host, where the transport's device allows it.

ALONE is the group of one. GlooRanks is the reference, for tensors on the CPU. Not here yet: a transport over GPUs.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

LONGEST = timedelta(hours=12)  # of a wait for another rank: ranks that end are noticed by others (inference/ranks)


class RankLost(RuntimeError):
    """Another rank of the group has ended, so nothing can be gathered any more."""


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def gather(self, part):
        """The parts of all ranks, in their order.  part [...], of one shape and dtype on all ranks -> [size, ...]"""
        return part[None]

    def least(self, number):
        """The smallest of the whole numbers that the ranks give."""
        return number


ALONE = Alone()


class GlooRanks:
    """A group over gloo, on loopback. Returns when all ranks have met.

    folder: an empty one of this host, the same for all, where the ranks meet; rank, size: of the group. Its process group is its
    own: torch.distributed's default group is neither used nor made.
    """

    def __init__(self, folder, rank, size):
        self.rank, self.size = rank, size
        self._store = dist.FileStore(f"{folder}/ranks", size)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = LONGEST
        self._group = dist.ProcessGroupGloo(self._store, rank, size, options)

    def gather(self, part):
        """See Alone.gather. Raises RankLost."""
        part = part.contiguous()
        parts = part.new_empty(self.size, *part.shape)
        if part.numel():
            bytes_of_parts = list(parts.view(self.size, -1).view(torch.uint8).unbind())
            try:
                self._group.allgather([bytes_of_parts], [part.view(-1).view(torch.uint8)]).wait()
            except RuntimeError as error:
                raise RankLost(f"rank {self.rank} of {self.size} cannot reach the others: {error}") from error
        return parts

    def least(self, number):
        """See Alone.least. Raises RankLost."""
        return int(self.gather(torch.tensor([number])).min())
