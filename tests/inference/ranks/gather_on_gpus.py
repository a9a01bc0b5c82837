"""A rank of a group on GPUs that gathers parts, and says which were wrong: python -m ... FOLDER SIZE RANK (test_gpu_ranks.py)."""

import faulthandler
import sys

import torch

from headstart.inference.models.transport import GlooRanks
from headstart.inference.ranks.peer_ranks import PeerRanks, shared_memory

SHAPES = [
    ((2, 3, 8), torch.float32),
    ((64, 4096), torch.float32),
    ((1, 7), torch.bfloat16),
    ((1000, 4096), torch.float32),
]
CAPACITY = 2**22  # bytes: the last of them takes pieces


def main(folder, size, rank):
    faulthandler.dump_traceback_later(60)  # a rank that waits for ever says where
    device = torch.device("cuda", rank % torch.cuda.device_count())
    host = GlooRanks(folder, rank, size)
    ranks = PeerRanks(host, *shared_memory(host, device, CAPACITY))

    def parts_of(turn):
        generator = torch.Generator().manual_seed(turn)
        return [torch.randn(size, *shape, generator=generator).to(dtype) for shape, dtype in SHAPES[turn % 2 :]]

    def gather(parts):
        """One pass; a copy of each result, which holds until the second gather after it."""
        ranks.begin()
        found = []
        for part in parts:
            slot = ranks.slot(part.shape, part.dtype)
            found.append(ranks.gather(part if slot is None else slot.copy_(part)).clone())
        return found

    with torch.cuda.device(device):
        for turn in range(6):
            expected = parts_of(turn)
            mine = [part[rank].to(device) for part in expected]
            for found, part in zip(gather(mine), expected, strict=True):
                assert torch.equal(found.cpu(), part), f"rank {rank}, turn {turn}, {tuple(part.shape)}"
        given = [part[rank].to(device) for part in parts_of(0)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gather(given)
        for turn in range(0, 40, 2):
            for static, part in zip(given, parts_of(turn), strict=True):
                static.copy_(part[rank])
            graph.replay()
            for result, part in zip(found, parts_of(turn), strict=True):
                assert torch.equal(result.cpu(), part), f"rank {rank}, replay {turn}, {tuple(part.shape)}"
        torch.cuda.synchronize()
    host.least(0)  # the others may still read this one's memory


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
