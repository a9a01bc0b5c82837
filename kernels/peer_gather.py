"""An all-gather and an ordered sum over memory that every rank of a group can write: no host, any CUDA graph.

    peer_gather(part, place, peers)       # rank r's part stands at place + r * len(part) of every rank's buffer
    peer_sum(parts, own, place, peers)    # the sum of parts [R, C] stands in the slot `own` of this rank, and of all others

Each program copies its pieces of the part into all buffers. The last of them to end counts up a flag in every other rank's memory,
and waits until the others' flags have counted as far: what they have written is there then. All ranks launch the same calls in the
same order. Flags only ever count up, and each rank keeps its own count on the device, so graphs can be replayed.

A buffer must not be written while another rank may still read its last contents. Two buffers that take turns ensure it: a rank that
writes the first one again has seen the flags of the call between, which the others raised after they had read. The first call of a
pass follows `peer_barrier`, so passes may have any number of calls.

Where `stop` (one number in the host's memory) is not 0, nobody waits any more and results are void: a rank has ended.

GPUs that cannot write each other's memory share buffers in the host's. There a flag is stored, not added to: an atomic operation of
one GPU on the host's memory is not one for another GPU. No other rank writes that flag.

Letters: R ranks, C words of a part.
"""

from typing import NamedTuple

import torch

from .jit import INTERPRETED, jit, tl, triton
from .overlap import await_previous, overlap, release_next
from .rms_norm import sum_in_pairs

BLOCK = 512  # words that a program copies at a time
SUM_BLOCK = 2048
PROGRAMS = 128  # at most
LINE = 32  # int32 numbers from flag to flag, so that each has a line of the cache
ROWS = 128  # rows that can meet one by one
FLAG = tl.constexpr(LINE)
LOOK_AGAIN = tl.constexpr(4096)  # looks at a flag between two looks at `stop`, which is across the bus
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Peers(NamedTuple):
    """Memory of a group of ranks, as one of them sees it. All on its device, but `stop`."""

    rank: int
    size: int
    buffers: torch.Tensor  # int64 [R] addresses of the ranks' buffers
    flags: torch.Tensor  # int64 [R] addresses of the ranks' flags: int32 [1 + ROWS, R, LINE], 0 before the first call
    counts: (
        torch.Tensor
    )  # int32 [2 + ROWS] of this rank, 0 at first: calls, ended programs of this call, calls of each row
    stop: torch.Tensor  # int32 [1], pinned
    on_host: bool = False  # whether buffers, which all ranks share, and flags are in the host's memory

    @property
    def stored(self):
        """Whether flags are stored: the interpreter, where processes share memory, adds to all."""
        return self.on_host and not INTERPRETED


def flag_bytes(size):
    """Bytes of one rank's flags: a call's, then each row's."""
    return 4 * LINE * size * (1 + ROWS)


@jit
def _store_flag(flag, call):
    """A release by a store, for all other GPUs: what this program has written, or has been told of, comes before."""
    release: tl.constexpr = "fence.acq_rel.sys; st.relaxed.sys.global.b32 [$1], $2; mov.b32 $0, $2;"
    tl.inline_asm_elementwise(release, "=r,l,r", [flag, call], tl.int32, False, 1)


@jit
def _acquire(seen):
    """What other GPUs wrote before they stored the flag that was seen can be read from here on."""
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [seen], tl.int32, False, 1)


@jit
def meet(flags, counts, stop, first, RANK: tl.constexpr, SIZE: tl.constexpr, STORED: tl.constexpr):
    """Tell the other ranks that this one has come here, with all that it has written, and wait for them.

    first: of the ranks' flags that are used, counted in flags; counts: where this rank counts them; STORED: see Peers
    """
    call = tl.atomic_add(counts, 1, sem="relaxed", scope="gpu") + 1  # once for all warps; a load and a store would race
    for step in tl.static_range(1, SIZE):
        flag = tl.load(flags + (RANK + step) % SIZE).to(tl.pointer_type(tl.int32)) + (first + RANK) * FLAG
        if STORED:
            _store_flag(flag, call)
        else:
            tl.atomic_add(flag, 1, sem="release", scope="sys")
    stopped = 0
    for step in tl.static_range(1, SIZE):
        flag = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + (first + (RANK + step) % SIZE) * FLAG
        behind = call - tl.load(flag, volatile=True)  # right where counts have wrapped, too
        looks = 0
        while (behind > 0) & (stopped == 0):
            behind = call - tl.load(flag, volatile=True)
            looks += 1
            if looks % LOOK_AGAIN == 0:
                stopped = tl.load(stop, volatile=True)
        if STORED:
            _acquire(behind)
        else:
            tl.atomic_cas(flag, call, call, sem="acquire", scope="sys")  # its bits do not matter, its order does


@jit
def _end_part(flags, counts, stop, RANK: tl.constexpr, SIZE: tl.constexpr, STORED: tl.constexpr):
    """At the end of a program: the last one of the call meets the other ranks."""
    tl.debug_barrier()  # of all threads of the program
    ended = tl.atomic_add(counts + 1, 1, sem="acq_rel", scope="gpu")
    if ended == tl.num_programs(0) - 1:
        tl.store(counts + 1, 0)
        meet(flags, counts, stop, 0, RANK, SIZE, STORED)


@jit(do_not_specialize=["place", "count"])
def _peer_gather(part, buffers, flags, counts, stop, place, count, ALIGNED: tl.constexpr, IN_PLACE: tl.constexpr,
                 RANK: tl.constexpr, SIZE: tl.constexpr, BUFFERS: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr,
                 OVERLAP: tl.constexpr):  # fmt: skip
    """part [C] -> words place + RANK C and on of every buffer; ALIGNED: to 16 bytes; IN_PLACE: it is there already in its own"""
    await_previous(OVERLAP)  # its counts are those of the call before
    release_next(OVERLAP)  # which awaits the end of this one
    words = part.dtype
    num_bytes: tl.constexpr = words.element_ty.primitive_bitwidth // 8
    if ALIGNED:
        count = count * num_bytes // 16 * (16 // num_bytes)  # the same: so the compiler knows what divides it
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        found = tl.load(part + at, mask=at < count)
        for step in tl.static_range(1 if IN_PLACE else 0, BUFFERS):
            slot = tl.load(buffers + (RANK + step) % SIZE) + place + RANK * count.to(tl.int64) * num_bytes
            slot = slot.to(words)
            if ALIGNED:
                slot = tl.multiple_of(slot, 16)
            tl.store(slot + at, found, mask=at < count)
    _end_part(flags, counts, stop, RANK, SIZE, STORED)


@jit
def _peer_barrier(
    flags, counts, stop, RANK: tl.constexpr, SIZE: tl.constexpr, STORED: tl.constexpr, OVERLAP: tl.constexpr
):
    await_previous(OVERLAP)
    release_next(OVERLAP)
    meet(flags, counts, stop, 0, RANK, SIZE, STORED)


def words_of(part):
    """A contiguous tensor as the widest words that fill it: on all ranks the same.  -> [C]"""
    flat = part.view(-1).view(torch.uint8)
    size = next(size for size in WORDS if flat.numel() % size == 0)
    return (flat if flat.data_ptr() % size == 0 else flat.clone()).view(WORDS[size])


def peer_gather(part, place, peers, in_place=False):
    """Write a part to its slot of every rank's buffer, and wait for the parts of the others.

    part: contiguous, of one shape and dtype on all ranks; place: byte of the buffers where the slots of all ranks begin, a multiple
    of 16; in_place: whether the part is its own slot of this rank's buffer, which is not the host's
    """
    words = words_of(part)
    programs = min(triton.cdiv(words.numel(), BLOCK), PROGRAMS)
    if programs:
        _peer_gather[(programs,)](
            words, peers.buffers, peers.flags, peers.counts, peers.stop, place, words.numel(), words.nbytes % 16 == 0, in_place,
            peers.rank, peers.size, 1 if peers.on_host else peers.size, peers.stored, BLOCK, **overlap(part),
        )  # fmt: skip


def peer_barrier(peers):
    """Wait until every rank has come here, and with it all its kernels before."""
    _peer_barrier[(1,)](
        peers.flags, peers.counts, peers.stop, peers.rank, peers.size, peers.stored,
        num_warps=1, **overlap(peers.flags),
    )  # fmt: skip


@jit(do_not_specialize=["place", "count"])
def _peer_sum(parts, own, buffers, flags, counts, stop, place, count, RANK: tl.constexpr, SIZE: tl.constexpr,
              BLOCK: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """parts [SIZE, count] -> their sum in pairs, in own's dtype, to byte `place` of every buffer, a multiple of 16 as count is"""
    await_previous(OVERLAP)
    release_next(OVERLAP)
    count = count // 16 * 16  # the same: so the compiler knows what divides it
    length = count.to(tl.int64)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < count
        total = sum_in_pairs(parts, at, length, mask, SIZE)
        for step in tl.static_range(0, SIZE):
            slot = (tl.load(buffers + (RANK + step) % SIZE) + place).to(own.dtype)
            tl.store(tl.multiple_of(slot, 16) + at, total.to(own.dtype.element_ty), mask=mask)
    _end_part(flags, counts, stop, RANK, SIZE, False)


def peer_sum(parts, own, place, peers):
    """Add parts of R ranks in pairs, neighbours first, write the sum to every rank's buffer, and wait for the sums of the others.

    parts: float32 [R, C], C a multiple of 16, R 2, 4 or 8; own: where the sum goes in this rank's buffer, [C] of any float dtype;
    place: the byte of the buffer where `own` begins, a multiple of 16
    """
    count = parts[0].numel()
    programs = max(1, min(triton.cdiv(count, SUM_BLOCK), PROGRAMS))  # who has nothing to add meets the others, too
    _peer_sum[(programs,)](
        parts, own, peers.buffers, peers.flags, peers.counts, peers.stop, place, count, peers.rank, peers.size, SUM_BLOCK,
        num_warps=8, **overlap(parts),
    )  # fmt: skip
