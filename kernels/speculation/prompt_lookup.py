"""Prompt lookup: find an earlier occurrence of the newest tokens in the sequence and draft what followed it.

    tokens [S, T] int32: the sequence of each seat from place 0 on; seats [B]; length [B]: how many of its tokens are known
    ->  drafts int64 [B, k], -1 where there is nothing to propose

    match(e) = number of tokens up to e that equal the newest ones,  x[e - j] = x[n - 1 - j] for j < match(e),  at most `longest`
    e        = the latest of the places before n - 1 with the greatest match; nothing is proposed if it is less than `shortest`
    draft[i] = x[e + 1 + i mod (n - 1 - e)]

An occurrence may overlap the end that it equals. The latest one is taken, because it is the most like the text being written. A
copy that reaches the end of the sequence goes on with the tokens it has copied, with the period n - 1 - e, so no draft is short.
That costs nothing: the nodes are computed anyway, and a wrong token does no harm. It helps where a text repeats itself: its latest
occurrence lies only one period back. (vLLM takes the earliest occurrence, whose copy is long, and stops at the end.)

On a GPU one program per request and block of places writes its best (match, place) as one key. It reads nothing of blocks after
the sequence's end. A second launch copies from the greatest key of each request. Nothing is kept between launches, and nothing
is read back. `shortest` and `longest` are the same for all requests.

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
        # Few places match more than the newest token or two, so most blocks stop early.
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
    """Copy the tokens that followed the best match of one request.  keys [B, C] -> drafts [B, k]"""
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
    """Draft `num_drafted` tokens per request; see above.  tokens [S, T], seats and length [B] -> int64 [B, num_drafted]

    length: at most T; a sequence of less than 2 tokens has no match. Raises ValueError for shapes that do not fit, and unless
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
