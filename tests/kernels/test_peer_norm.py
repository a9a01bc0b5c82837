"""peer_add_rms_norm between processes that share memory, in the interpreter. On GPUs: tests/inference/ranks/test_gpu_ranks.py."""

import multiprocessing

import pytest
import torch

from headstart.kernels.peer_gather import ROWS, Peers, flag_bytes, peer_barrier, peer_gather
from headstart.kernels.peer_norm import PeerParts, peer_add_rms_norm
from headstart.kernels.rms_norm import add_rms_norm

CAPACITY = 2**18  # bytes of each of two buffers
SHAPES = [(3, 48), (ROWS, 7), (1, 100), (2, 2304)]  # the last: a piece of a row that is not full
TURNS = {2: 16, 4: 8, 8: 4}  # by ranks: on few cores many wait for each other
WRAPS = 2**31 - 5  # calls until counts do


def drawn(turn, size):
    """Parts of all ranks, a residual and a weight."""
    generator = torch.Generator().manual_seed(turn)
    rows, width = SHAPES[turn % len(SHAPES)]
    parts = torch.randn(size, rows, width, generator=generator)
    return parts, torch.randn(rows, width, generator=generator).half(), torch.rand(width, generator=generator).half()


def expected_norm(parts, *others):
    while len(parts) > 4:
        parts = parts[0::2] + parts[1::2]
    return add_rms_norm(parts, *others, in_pairs=True)


def run_rank(rank, size, memory, first, stop, results):
    torch.set_num_threads(1)
    starts = torch.tensor([one.data_ptr() for one in memory])
    counts = torch.zeros(2 + ROWS, dtype=torch.int32)
    counts[2:] = first
    peers = Peers(rank, size, starts, starts + 2 * CAPACITY, counts, stop)
    peer_barrier(peers)
    for turn in range(TURNS[size]):
        parts, residual, w = drawn(turn, size)
        place = turn % 2 * CAPACITY
        held = memory[rank][place : place + parts.nbytes].view(torch.float32).view(parts.shape)
        multiplier = 0.3 if turn % 5 == 4 else 1.0
        if turn % 5 == 3:  # a gather takes its turn among the norms, of another shape each time
            peer_gather(parts[rank], place, peers)
            found, expected = [held], [parts]
        else:
            held[rank] = parts[rank]
            found = peer_add_rms_norm(PeerParts(held, place, peers), residual, w, 1e-5, multiplier)
            expected = expected_norm(parts, residual, w, 1e-5, multiplier)
        if not all(map(torch.equal, found, expected)):
            results.put(f"rank {rank}, turn {turn}")
            return
    results.put("equal")


@pytest.fixture
def start_ranks():
    """start_ranks(size, first=0, missing=()): processes of ranks but the missing ones, `stop`, what they say."""
    context, started = multiprocessing.get_context("fork"), []

    def start(size, first=0, missing=()):
        memory = [torch.zeros(2 * CAPACITY + flag_bytes(size), dtype=torch.uint8).share_memory_() for _ in range(size)]
        for one in memory:
            one[2 * CAPACITY :].view(torch.int32).view(1 + ROWS, -1)[1:] = first
        stop, results = torch.zeros(1, dtype=torch.int32).share_memory_(), context.Queue()
        for rank in set(range(size)) - set(missing):
            started.append(
                context.Process(target=run_rank, args=(rank, size, memory, first, stop, results), daemon=True)
            )
            started[-1].start()
        return started, stop, results

    yield start
    for process in started:
        process.kill()


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("size", "first"), [(2, 0), (4, 0), (8, 0), (2, WRAPS)])
def test_peer_add_rms_norm_gives_the_bits_of_the_norm_of_all_parts(start_ranks, size, first):
    """Of one row and of as many as can meet, between gathers, and when a row's calls wrap."""
    _, _, results = start_ranks(size, first)
    assert [results.get(timeout=60) for _ in range(size)] == ["equal"] * size


@pytest.mark.interpreter
def test_no_row_waits_once_a_rank_has_ended(start_ranks):
    (process,), stop, results = start_ranks(2, missing=[1])
    process.join(1)
    assert process.is_alive()
    stop.fill_(1)
    assert "turn 0" in results.get(timeout=60)  # what it has is void
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("size", "rows", "width"), [(3, 4, 8), (2, ROWS + 1, 8), (2, 4, 9)], ids=["ranks", "rows", "width"]
)
def test_what_does_not_fit_is_refused(size, rows, width):
    peers = Peers(0, size, *[None] * 4)
    sums = PeerParts(torch.zeros(size, rows, 8), 0, peers)
    with pytest.raises(ValueError, match="peer_add_rms_norm takes"):
        peer_add_rms_norm(sums, torch.zeros(rows, width), torch.ones(width), 1e-5)
