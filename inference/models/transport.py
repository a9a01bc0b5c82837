"""What ranks of a tensor-parallel group tell each other: parts of tensors, in the order of the ranks.

    parts = ranks.gather(part)        # [size, ...]: the same bits on every rank
    number = ranks.least(number)      # the smallest that any rank gave
    seconds = ranks.of_first(seconds) # what rank 0 gave

Every rank calls the same methods in the same order. Nothing is added here: a library's all-reduce chooses its order of sums, so
parts are gathered and the next kernel adds them, in order. A transport may keep its results in buffers of its own: they have to be
read before the next `gather` or `begin`, in the order of the device's stream.

ALONE is the group of one. GlooRanks is the reference, for tensors on the CPU. GPUs: inference/ranks/peer_ranks.py.
"""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

MEET = timedelta(seconds=60)  # for all ranks to meet: they are running by then
LONGEST = timedelta(hours=12)  # of a wait for another rank later on: one that ends is noticed at once


class RankLost(RuntimeError):
    """Another rank of the group has ended, so nothing can be gathered any more."""


class Alone:
    """A group of one.

    way: how the sums of several ranks reach a norm; each has its own kernels
    """

    rank, size, way = 0, 1, "gathered"

    def begin(self):
        """Before the first gather of a pass over the model."""

    def slot(self, shape, dtype):
        """Where the part of the next gather may be written, to save a copy. None: nowhere."""

    def gather(self, part):
        """The parts of all ranks, in their order.  part [...], of one shape and dtype on all ranks -> [size, ...]"""
        return part[None]

    def peer_parts(self, part):
        """The parts that `gather` would bring, for a norm that gathers them by itself (kernels/peer_norm.py); None: gather them.

        part [M, H]: this rank's, in the slot of its shape
        """
        return None

    def shares(self, num_rows, width, dtype):
        """Numbers of rows that each rank adds of a sum that the ranks share, [size]; None where one gather is quicker."""
        return None

    def sum_rows(self, product, num_rows, width, dtype):
        """The sums over ranks of products of many rows, added in pairs, neighbours first; None where `shares` is.

        product(rows, out, late): writes this rank's part of some rows, a slice, to out [rows, width] in float32; late: beside the
        product before.  -> [num_rows, width] of dtype
        """
        return None

    def least(self, number):
        """The smallest of the whole numbers that the ranks give."""
        return number

    def of_first(self, numbers):
        """The numbers that rank 0 gives, as floats, where each rank has measured its own."""
        return numbers

    def check(self):
        """RankLost if another rank is known to have ended. For long work between two calls; it waits for nothing."""


ALONE = Alone()


class GlooRanks(Alone):
    """A group over gloo, on loopback. Returns when all ranks have met.

    folder: an empty one of this host, the same for all, where the ranks meet; rank, size: of the group; has_ended: whether another
    rank is known to have ended. Its process group is its own: torch.distributed's default group is neither used nor made. Raises
    RankLost if they do not meet.
    """

    def __init__(self, folder, rank, size, has_ended=lambda: False):
        self.rank, self.size, self._has_ended = rank, size, has_ended
        self.name, self.store = Path(folder).name, dist.FileStore(f"{folder}/ranks", size)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = MEET
        try:
            self._group = dist.ProcessGroupGloo(self.store, rank, size, options)
        except RuntimeError as error:
            raise self._lost(error) from error
        self._options = distributed_c10d.AllgatherOptions()
        self._options.timeout = LONGEST

    def gather(self, part):
        """See Alone.gather. Raises RankLost."""
        part = part.contiguous()
        parts = part.new_empty(self.size, *part.shape)
        if part.numel():
            bytes_of_parts = list(parts.view(self.size, -1).view(torch.uint8).unbind())
            try:
                self._group.allgather([bytes_of_parts], [part.view(-1).view(torch.uint8)], self._options).wait()
            except RuntimeError as error:
                raise self._lost(error) from error
        return parts

    def least(self, number):
        """See Alone.least. Raises RankLost."""
        return int(self.gather(torch.tensor([number])).min())

    def of_first(self, numbers):
        """See Alone.of_first. Raises RankLost."""
        return self.gather(torch.tensor(numbers, dtype=torch.float64))[0].tolist()

    def check(self):
        """See Alone.check."""
        if self._has_ended():
            raise self._lost("one has ended")

    def _lost(self, error):
        return RankLost(f"rank {self.rank} of {self.size} cannot reach the others: {error}")
