"""A rank on a GPU that gathers and adds parts, and says which were wrong (test_gpu_ranks.py).

python -m headstart.tests.inference.ranks.gather_on_gpus FOLDER SIZE RANK peers|host      # over which memory
"""

import faulthandler
import sys

import torch

from headstart.inference.models.division import RowParallel, in_pairs
from headstart.inference.models.transport import GlooRanks
from headstart.inference.ranks.host_memory import shared_host_memory
from headstart.inference.ranks.peer_ranks import PeerRanks, shared_memory
from headstart.kernels.linear.linear import linear_sums
from headstart.kernels.peer_norm import peer_add_rms_norm
from headstart.kernels.rms_norm import add_rms_norm

SHAPES = [
    ((2, 3, 8), torch.float32),
    ((64, 4096), torch.float32),
    ((1, 7), torch.bfloat16),
    ((1000, 4096), torch.float32),
]
CAPACITY = 2**22  # bytes: the last of them takes pieces


def main(folder, size, rank, over):
    faulthandler.dump_traceback_later(110)  # a rank that waits for ever says where
    device = torch.device("cuda", rank % torch.cuda.device_count())
    host = GlooRanks(folder, rank, size)
    if over == "host":
        ranks = PeerRanks(host, shared_host_memory(host, device, CAPACITY), on_host=True)
    else:
        ranks = PeerRanks(host, shared_memory(host, device, CAPACITY))

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
        for num_rows in (512, 545, 700, 1500):  # of 545 a share of four ranks is less than a row tile
            add_products(ranks, num_rows)
        for shape in () if over == "host" else ((1, 4096), (5, 100), (3, 2304), (64, 4096), (128, 2048)):
            norm_rows(ranks, *shape)
        torch.cuda.synchronize()
    host.least(0)  # the others may still read this one's memory


def norm_rows(ranks, num_rows, width):
    """Norms that add the rows of all ranks, one after the other and after a gather, without a graph and in one."""
    generator = torch.Generator().manual_seed(num_rows)
    w = torch.rand(width, generator=generator).bfloat16().cuda()

    def drawn():
        parts = torch.randn(5, ranks.size, num_rows, width, generator=generator).cuda()
        return parts, torch.randn(num_rows, width, generator=generator).bfloat16().cuda()

    def norms(parts, residual):
        """parts [5, M, H] of this rank"""
        ranks.begin()
        found = []
        for turn, part in enumerate(parts):
            slot = ranks.slot(part.shape, part.dtype)
            if turn == 2:
                ranks.gather(slot.copy_(part))
                slot = ranks.slot(part.shape, part.dtype)
            normed, residual = peer_add_rms_norm(ranks.peer_parts(slot.copy_(part)), residual, w, 1e-5)
            found += [normed, residual]
        return found

    def check(found, parts, residual, when):
        expected = []
        for part in parts:
            normed, residual = add_rms_norm(in_pairs(part, 4), residual, w, 1e-5, in_pairs=True)
            expected += [normed, residual]
        assert all(map(torch.equal, found, expected)), f"rank {ranks.rank}, norms of {num_rows} rows, {when}"

    parts, residual = drawn()
    given = parts[:, ranks.rank].contiguous(), residual.clone()
    check(norms(*given), parts, residual, "without a graph")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = norms(*given)
    for turn in range(20):
        parts, residual = drawn()
        for static, new in zip(given, (parts[:, ranks.rank], residual)):
            static.copy_(new)
        graph.replay()
        check(found, parts, residual, f"replay {turn}")


def add_products(ranks, num_rows, width=256, depth=512):
    """The sums of many rows, and gathers between, without a graph and in one that is replayed with other rows."""
    generator = torch.Generator().manual_seed(num_rows)
    weights = (torch.randn(ranks.size, width, depth, generator=generator) / 16).bfloat16().cuda()
    product = RowParallel((weights[ranks.rank].contiguous(),), None, ranks)

    def drawn():
        return torch.randn(ranks.size, num_rows, depth, generator=generator).bfloat16().cuda()

    def expected(x):
        return added(torch.stack([linear_sums(*pair) for pair in zip(x, weights)]))

    def added(parts):
        return in_pairs(parts, 1)[0].bfloat16().clone()

    def three(rows):
        ranks.begin()
        found = [added(product.parts(rows)) for _ in range(2)]
        ranks.gather(rows[:1])
        return [*found, added(product.parts(rows))]

    def check(found, x, when):
        for result in found:
            assert torch.equal(result, expected(x)), f"rank {ranks.rank}, {num_rows} rows, {when}"

    x = drawn()
    static = x[ranks.rank].clone()
    check(three(static), x, "without a graph")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = three(static)
    for turn in range(20):
        x = drawn()
        static.copy_(x[ranks.rank])
        graph.replay()
        check(found, x, f"replay {turn}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
