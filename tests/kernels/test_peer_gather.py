"""peer_gather between processes that share memory, in the interpreter. On GPUs: tests/inference/ranks/test_gpu_ranks.py."""

import multiprocessing

import pytest
import torch

from headstart.kernels.peer_gather import LINE, ROWS, Peers, peer_barrier, peer_gather

SHAPES = [((3, 5), torch.float32), ((1, 7), torch.bfloat16), ((2, 700), torch.float32), ((5,), torch.int8)]
ROUNDS = 3  # so that both buffers take turns, and flags count on
CALLS = ROUNDS * (1 + len(SHAPES))


def part_of(rank, turn, shape, dtype):
    generator = torch.Generator().manual_seed(100 * rank + turn)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def place_of(turn):
    return turn % 2 * 2**16


def run_rank(rank, size, buffers, flags, first, stop, results):
    torch.set_num_threads(1)
    addresses = [torch.tensor([one.data_ptr() for one in them]) for them in (buffers, flags)]
    peers = Peers(rank, size, *addresses, torch.tensor([first, 0], dtype=torch.int32), stop)
    turn = 0
    for _ in range(ROUNDS):
        peer_barrier(peers)
        for shape, dtype in SHAPES:
            part, place = part_of(rank, turn, shape, dtype), place_of(turn)
            if turn % 3 == 2:  # it is in its slot already
                slot = buffers[rank][place + rank * part.nbytes :][: part.nbytes]
                slot.copy_(part.view(-1).view(torch.uint8))
                peer_gather(slot.view(dtype).view(shape), place, peers, in_place=True)
            else:
                peer_gather(part, place, peers)
            found = buffers[rank][place : place + size * part.nbytes].view(dtype).view(size, *shape)
            expected = torch.stack([part_of(other, turn, shape, dtype) for other in range(size)])
            if not torch.equal(found, expected):
                results.put(f"rank {rank}, turn {turn}: {found} for {expected}")
                return
            turn += 1
    results.put(peers.counts.tolist())


def shared(*shape, dtype):
    return torch.zeros(*shape, dtype=dtype).share_memory_()


@pytest.fixture
def start_ranks():
    """start_ranks(size, first=0, missing=()): processes of ranks but the missing ones, their flags, `stop`, what they say.

    first: the count of calls to begin with
    """
    context = multiprocessing.get_context("fork")
    started = []

    def start(size, first=0, missing=()):
        buffers = [shared(2**17, dtype=torch.uint8) for _ in range(size)]
        flags = [shared(1 + ROWS, size, LINE, dtype=torch.int32).fill_(first) for _ in range(size)]
        stop, results = shared(1, dtype=torch.int32), context.Queue()
        for rank in set(range(size)) - set(missing):
            arguments = rank, size, buffers, flags, first, stop, results
            started.append(context.Process(target=run_rank, args=arguments, daemon=True))
            started[-1].start()
        return started, flags, stop, results

    yield start
    for process in started:
        process.kill()


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("size", "first"), [(2, 0), (3, 0), (2, 2**31 - 1 - CALLS // 2)])
def test_every_rank_has_the_parts_of_all_in_order(start_ranks, size, first):
    """Also when the counts of calls wrap, after some days of serving."""
    processes, flags, _, results = start_ranks(size, first)
    last = (first + CALLS + 2**31) % 2**32 - 2**31
    assert [results.get(timeout=60) for _ in range(size)] == [[last, 0]] * size
    for process in processes:
        process.join(60)
    for rank, (own, *_) in enumerate(flags):
        assert own[:, 0].tolist() == [first if other == rank else last for other in range(size)]


@pytest.mark.interpreter
def test_nobody_waits_once_a_rank_has_ended(start_ranks):
    (process,), _, stop, results = start_ranks(2, missing=[1])
    process.join(1)
    assert process.is_alive()
    stop.fill_(1)
    assert "turn 0" in results.get(timeout=60)  # what it has is void
    process.join(60)
    assert process.exitcode == 0
