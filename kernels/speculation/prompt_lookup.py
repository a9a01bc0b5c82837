"""Prompt lookup: drafts copied from an earlier place in the sequence that reads like its end.

    tokens [S, T] int32: the sequence of each seat from place 0 on; seats [B]; length [B]: how many of its tokens are known
    ->  drafts int64 [B, k], -1 where there is nothing to propose

    match(e) = how many tokens that end at e equal the newest ones,  x[e - j] = x[n - 1 - j] for j < match(e),  at most `longest`
    e        = of the places before n - 1 with the greatest match, the latest; less than `shortest`: nothing is proposed
    draft[i] = x[e + 1 + i mod (n - 1 - e)]

An occurrence may overlap the end that it equals. The latest is taken: it is the most like what is being written now. A copy that
reaches the end of the sequence goes on with what it has copied, with the period n - 1 - e, so no draft is short: its nodes are
computed anyway, a wrong token does no harm, and of a text that repeats itself, whose latest occurrence lies one period back, every
draft is whole. (vLLM takes the earliest occurrence, whose copy is long, and stops at the end.)

On a GPU a program per request and block of places leaves its best (match, place) as one key, and reads nothing of a block after
the sequence's end; a second launch copies from the greatest key of each request. Nothing is kept between launches, nothing read
back. `shortest` and `longest` are the same for all requests.

Letters: S seats, B requests, T places of a seat, n tokens known, C blocks, k tokens drafted.
"""

import torch

from ..jit import jit, on_triton, tl, triton

_BLOCK = 2048  # places per program


def prompt_lookup_reference(tokens, seats, length, shortest, longest, num_drafted):
    """The same in plain torch operations, for any device."""
    x = tokens[seats]  # [B, T]
    place, last = torch.arange(x.shape[1], device=x.device), length.long()[:, None] - 1
    equal = (place < last).expand(x.shape)
    match = torch.zeros_like(x, dtype=torch.int64)
    for ago in range(min(longest, x.shape[1])):
        wanted = x.gather(1, (last - ago).clamp(min=0))
        equal = equal & (place >= ago) & (x.roll(ago, 1) == wanted)
        match += equal
    key = (match << 32 | place).amax(1, keepdim=True)
    match, end = key >> 32, key & 0xFFFFFFFF
    found = (match >= shortest).expand(-1, num_drafted)
    period = (last - end).clamp(min=1)
    place = end + 1 + torch.arange(num_drafted, device=x.device) % period
    return torch.where(found, x.gather(1, place.where(found, 0)).long(), -1)


@jit(do_not_specialize=["longest"])
def _match_block(tokens, seats, length, keys, width, longest, BLOCK: tl.constexpr):
    """The best (match, place) of one block of one request's places; 0 where there is no match.  -> keys [B, C]"""
    block, request = tl.program_id(0), tl.program_id(1)
    last = tl.load(length + request).to(tl.int32) - 1
    best = last.to(tl.int64) * 0
    if block * BLOCK < last:
        row = tokens + tl.load(seats + request).to(tl.int64) * width
        place = block * BLOCK + tl.arange(0, BLOCK)
        equal = place < last
        match = tl.zeros((BLOCK,), tl.int32)
        ago = last * 0
        # Few places agree with more than the newest token or two: most blocks are done by then.
        while (ago < longest) & (tl.max(equal.to(tl.int32), 0) > 0):
            wanted = tl.load(row + tl.maximum(last - ago, 0))
            equal = equal & (place >= ago)
            equal = equal & (tl.load(row + place - ago, mask=equal, other=0) == wanted)
            match += equal.to(tl.int32)
            ago += 1
        best = tl.max(tl.where(match > 0, match.to(tl.int64) << 32 | place, 0), 0)
    tl.store(keys + request * tl.num_programs(0) + block, best)


@jit(do_not_specialize=["num_blocks", "shortest", "num_drafted"])
def _copy_match(
    tokens, seats, length, keys, drafts, width, num_blocks, shortest, num_drafted,
    BLOCKS: tl.constexpr, DRAFTED: tl.constexpr,
):  # fmt: skip
    """What followed the best match of one request.  keys [B, C] -> drafts [B, k]"""
    request = tl.program_id(0)
    block, i = tl.arange(0, BLOCKS), tl.arange(0, DRAFTED)
    best = tl.max(tl.load(keys + request * num_blocks + block, mask=block < num_blocks, other=0), 0)
    match, end = best >> 32, best & 0xFFFFFFFF
    period = tl.maximum(tl.load(length + request).to(tl.int64) - 1 - end, 1)
    row = tokens + tl.load(seats + request).to(tl.int64) * width
    here = i < num_drafted
    token = tl.load(row + end + 1 + i % period, mask=here & (match >= shortest), other=-1)
    tl.store(drafts + request * num_drafted + i, token.to(tl.int64), mask=here)


def prompt_lookup(tokens, seats, length, shortest, longest, num_drafted):
    """Drafts of `num_drafted` tokens per request; see above.  tokens [S, T], seats and length [B] -> int64 [B, num_drafted]

    length: at most T; less than 2 tokens repeat nothing. Raises ValueError for shapes that do not fit, and unless
    1 <= shortest <= longest and num_drafted >= 1.
    """
    if tokens.dim() != 2 or tokens.dtype != torch.int32 or seats.dim() != 1 or length.shape != seats.shape:
        raise ValueError(
            f"prompt_lookup takes tokens int32 [S, T], seats and length [B], got {tokens.dtype} {tuple(tokens.shape)}, "
            f"{tuple(seats.shape)} and {tuple(length.shape)}"
        )
    if not 1 <= shortest <= longest or num_drafted < 1:
        raise ValueError(
            f"prompt_lookup compares from `shortest` >= 1 to `longest` >= shortest tokens and drafts at least one, got {shortest}, "
            f"{longest} and {num_drafted}"
        )
    if not on_triton(tokens):
        return prompt_lookup_reference(tokens, seats, length, shortest, longest, num_drafted)
    batch, width = len(seats), tokens.shape[1]
    blocks = max(triton.cdiv(width, _BLOCK), 1)
    keys = torch.empty(batch, blocks, dtype=torch.int64, device=tokens.device)
    drafts = torch.empty(batch, num_drafted, dtype=torch.int64, device=tokens.device)
    if batch:
        tokens, seats, length = tokens.contiguous(), seats.contiguous(), length.contiguous()
        _match_block[blocks, batch](tokens, seats, length, keys, width, longest, _BLOCK, num_warps=4)
        _copy_match[(batch,)](
            tokens, seats, length, keys, drafts, width, blocks, shortest, num_drafted,
            triton.next_power_of_2(blocks), triton.next_power_of_2(num_drafted), num_warps=1,
        )  # fmt: skip
    return drafts
