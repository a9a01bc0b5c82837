"""An all-gather in one kernel, over memory that every rank of a group can write: no host, no order of sums, any CUDA graph.

    peer_gather(part, place, peers)       # rank r's part stands at place + r * len(part) of every rank's buffer

Each program copies its pieces of the part into all buffers, raises a flag in every other rank's memory, and waits for the flags of
the others: what the same program of another rank has written is there then. All ranks launch the same calls in the same order. A
wait takes its flag down, and a rank raises a flag only when it is down, so flags need no numbers and graphs can be replayed.

A buffer must not be written while another rank may still read its last contents. Two buffers that take turns ensure it: a rank that
writes the first one again has seen the flags of the call between, which the others raised after they had read. The first call of a
pass follows `peer_barrier`, so passes may have any number of calls.

Where `stop` (one number in the host's memory) is not 0, nobody waits any more and results are void: a rank has ended.

Letters: R ranks, C words of a part.
"""

from typing import NamedTuple

import torch

from .jit import jit, tl, triton

BLOCK = 512  # words that a program copies at a time
PROGRAMS = 64  # at most; the same on all ranks, whatever their GPUs
LOOK_AGAIN = tl.constexpr(4096)  # looks at a flag between two looks at `stop`, which is across the bus
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Peers(NamedTuple):
    """Memory of a group of ranks, as one of them sees it. All on its device, but `stop`."""

    rank: int
    size: int
    buffers: torch.Tensor  # int64 [R] addresses of the ranks' buffers
    flags: torch.Tensor  # int64 [R] addresses of the ranks' flags: int32 [PROGRAMS, R], 0 before the first call
    stop: torch.Tensor  # int32 [1], pinned


@jit
def _turn(flag, was: tl.constexpr, now: tl.constexpr, stop, stopped, SEM: tl.constexpr):
    """Wait until a flag is `was`, and make it `now`.  -> whether waits have ended"""
    seen = tl.atomic_cas(flag, was, now, sem=SEM, scope="sys")
    looks = 0
    while (seen != was) & (stopped == 0):
        seen = tl.atomic_cas(flag, was, now, sem=SEM, scope="sys")
        looks += 1
        if looks % LOOK_AGAIN == 0:
            stopped = tl.load(stop, volatile=True)
    return stopped


@jit
def _raise_flags(flags, stop, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Tell this program of every other rank that this one's writes are done, and wait for theirs."""
    tl.debug_barrier()  # of all threads of the program
    own = tl.program_id(0) * SIZE
    stopped = tl.load(stop, volatile=True)
    for step in tl.static_range(1, SIZE):
        flag = tl.load(flags + (RANK + step) % SIZE).to(tl.pointer_type(tl.int32)) + own + RANK
        stopped = _turn(flag, 0, 1, stop, stopped, "release")
    for step in tl.static_range(1, SIZE):
        flag = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + own + (RANK + step) % SIZE
        stopped = _turn(flag, 1, 0, stop, stopped, "acquire")
    tl.debug_barrier()


@jit(do_not_specialize=["place", "count"])
def _peer_gather(part, buffers, flags, stop, place, count, IN_PLACE: tl.constexpr,
                 RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """part [C] -> words place + RANK C and on of every buffer; IN_PLACE: it is there already in its own"""
    words = part.dtype
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        found = tl.load(part + at, mask=at < count)
        for step in tl.static_range(1 if IN_PLACE else 0, SIZE):
            buffer = tl.load(buffers + (RANK + step) % SIZE).to(words) + place + RANK * count.to(tl.int64)
            tl.store(buffer + at, found, mask=at < count)
    _raise_flags(flags, stop, RANK, SIZE)


@jit
def _peer_barrier(flags, stop, RANK: tl.constexpr, SIZE: tl.constexpr):
    _raise_flags(flags, stop, RANK, SIZE)


def words_of(part):
    """A contiguous tensor as the widest words that fill it: on all ranks the same.  -> [C]"""
    flat = part.view(-1).view(torch.uint8)
    size = next(size for size in WORDS if flat.numel() % size == 0)
    return (flat if flat.data_ptr() % size == 0 else flat.clone()).view(WORDS[size])


def peer_gather(part, place, peers, in_place=False):
    """Write a part to its slot of every rank's buffer, and wait for the parts of the others.

    part: contiguous, of one shape and dtype on all ranks; place: byte of the buffers where the slots of all ranks begin, a multiple
    of 16; in_place: whether the part is its own slot of this rank's buffer
    """
    words = words_of(part)
    programs = min(triton.cdiv(words.numel(), BLOCK), PROGRAMS)
    if programs:
        _peer_gather[(programs,)](
            words, peers.buffers, peers.flags, peers.stop, place // words.element_size(), words.numel(), in_place,
            peers.rank, peers.size, BLOCK,
        )  # fmt: skip


def peer_barrier(peers):
    """Wait until every rank has come here, and with it all its kernels before."""
    _peer_barrier[(1,)](peers.flags, peers.stop, peers.rank, peers.size)
