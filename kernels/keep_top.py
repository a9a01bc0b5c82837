"""Min-p, top-k and top-p: which tokens of a row are left, and the normaliser of their law.

    score of a token = logit / T                                                      T = 0: the logit
    keep_top        what min-p, top-k and top-p leave of every row                    [M, V] -> Kept
    kept_scores     the scores, minus infinity for what is left out                   Kept -> fp32 [M, V]
    scale           the scores of all tokens                                          [M, V] -> fp32 [M, V]

Exact, no approximate threshold. Tokens are ordered by score, ties by the lowest id. Min-p keeps those at least min_p times as likely
as the likeliest, top-k the first k. Of what both left, those stay before which less than top_p of the mass has been counted. So
all three keep the first tokens of one order, and one key (`sample._key`: score, then token) says which: the lowest one kept.

Nothing is sorted. One pass over the vocabulary leaves the highest score of every group of tokens. The k-th highest of those is no
higher than the k-th highest token, a token below (1 - top_p) / V of the mass cannot be within top_p, and what is above such
bounds is few: it is listed, and the lowest key kept is found by comparing each with each, or searched for by counting. Masses are
counted in whole units of 2^-40 of the likeliest token, so sums have no order and a row's bits never depend on other rows. NaN
counts as minus infinity.

Letters: M rows, V vocabulary, G groups.
"""

from typing import NamedTuple

import torch

from .jit import jit, on_triton, tl, triton
from .sample import _key, check_rows

_GROUP = 128  # tokens of which the highest score is looked at first
_CHUNK = 4096  # tokens per program where the vocabulary is walked over
_TILE = 1024  # tokens, or groups, that a row's program looks at together
_FEW = 256  # tokens that are each compared with each
_SPAN = 32768  # tokens per program that adds masses
_UNITS = 2.0**40  # of mass in the likeliest token
LOWEST_KEY = -0x7F800001 << 32  # no key of a token is lower


class Kept(NamedTuple):
    """What is left of M rows, and their law: p(v) = exp(score(v) - top) / total for what is kept, else 0.

    Rows of temperature 0 keep their likeliest token, in kept_scores all.
    """

    logits: torch.Tensor  # [M, V] as given
    temperature: torch.Tensor  # [M] as given
    tokens: (
        torch.Tensor | None
    )  # int32 [M, V] the first `count` are what is kept, lowest first. Not where all are; None on a CPU
    count: torch.Tensor  # int32 [M]
    lowest: torch.Tensor  # int64 [M] token v is kept if _key(score(v), v) is not lower
    top: torch.Tensor  # fp32 [M] the highest score
    total: torch.Tensor  # fp32 [M]


def scaled_reference(logits, temperature):
    """logits / T in fp32 (T = 0: logits), NaN as minus infinity, minus zero as zero.  [M, V], [M] -> [M, V]"""
    scores = logits.float() / torch.where(temperature > 0, temperature.float(), 1)[:, None]
    return torch.where(scores.isnan(), -torch.inf, scores) + 0.0


def keys_reference(scores):
    """sample._key of every token: orders like (score, then the lower token first).  fp32 [M, V] -> int64 [M, V]"""
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) + (0x7FFFFFFF - torch.arange(scores.shape[1], device=scores.device))


def keep_top_reference(logits, temperature, top_k, top_p, min_p):
    """The rule in plain torch."""
    scores, greedy = scaled_reference(logits, temperature), (temperature <= 0)[:, None]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    limit = torch.where(top_k > 0, top_k.long(), scores.shape[1])[:, None]
    # By way of softmax, which takes row by row: a bare exp rounds by an element's place among all rows.
    likely = ordered.double().softmax(-1)
    likely = torch.where(ordered == ordered[:, :1], 1.0, likely / likely[:, :1])
    keep = (rank < limit) & (likely >= min_p.double()[:, None]) & (ordered > -torch.inf)
    mass = torch.where(keep, likely * _UNITS, 0).long()
    before, share = mass.cumsum(-1) - mass, top_p.double()[:, None]
    keep &= (before < share * mass.sum(-1, keepdim=True).double()) | (share >= 1)
    keep = torch.where(greedy | (ordered[:, :1] == -torch.inf), rank == 0, keep)
    count = keep.sum(-1)
    top = torch.where(ordered[:, 0] > -torch.inf, ordered[:, 0], 0)
    total = torch.where(greedy[:, 0], 1.0, (mass * keep).sum(-1).double() / _UNITS).float()
    lowest = keys_reference(scores).gather(1, order.gather(1, count[:, None] - 1))[:, 0]
    nothing_asked = ((limit >= scores.shape[1]) & (share >= 1) & (min_p[:, None] <= 0) & ~greedy)[:, 0]
    lowest = torch.where(nothing_asked, LOWEST_KEY, lowest)
    count = torch.where(nothing_asked, scores.shape[1], count).int()
    return Kept(logits, temperature, None, count, lowest, top, total)


def kept_scores_reference(kept):
    """The scores with minus infinity for what is left out, in plain torch."""
    scores = scaled_reference(kept.logits, kept.temperature)
    keep = (keys_reference(scores) >= kept.lowest[:, None]) | (kept.temperature <= 0)[:, None]
    return scores.masked_fill(~keep, -torch.inf)


@jit
def scores_at(row, token, inside, heat):
    """Scores of some tokens of a row whose temperature is `heat`; minus infinity outside."""
    x = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, tl.where(inside, heat, 1.0))
    return tl.where(x == x, tl.where(x == 0.0, 0.0, x), float("-inf"))


@jit
def _heat(temperature, row):
    """What a row's logits are divided by."""
    heat = tl.load(temperature + row).to(tl.float32)
    return tl.where(heat > 0, heat, 1.0)


@jit
def _masses(score, top, floor, UNITS: tl.constexpr):
    """Whole units of mass, 0 for what is less than `floor` times as likely as the likeliest."""
    likely = tl.where(score == top, 1.0, tl.exp(score.to(tl.float64) - top.to(tl.float64)))
    return tl.where(likely >= floor, likely * UNITS, 0.0).to(tl.int64)


@jit(do_not_specialize=["num_chunks"])
def _scores(
    logits,
    temperature,
    scores,
    lowest,
    vocab_size,
    num_chunks,
    MASK: tl.constexpr,
    LOWEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    score = scores_at(logits + row * vocab_size, token, inside, _heat(temperature, row))
    if MASK:
        least = tl.where(tl.load(temperature + row) > 0, tl.load(lowest + row), LOWEST)
        score = tl.where(_key(score, token) >= least, score, float("-inf"))
    tl.store(scores + row * vocab_size + token, score, mask=inside)


@jit(do_not_specialize=["num_groups", "num_chunks"])
def _group_tops(logits, tops, vocab_size, num_groups, num_chunks, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The highest logit of every group of GROUP tokens.  -> fp32 [M, G]"""
    row, chunk = (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(0) % num_chunks
    group = chunk * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    tl.store(tops + row * num_groups + group, tl.max(x, 1), mask=group < num_groups)


@jit
def _highest(tops, num_groups, heat, TILE: tl.constexpr):
    """The highest score of a row."""
    highest = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(0, num_groups, TILE):
        group = start + tl.arange(0, TILE)
        highest = tl.maximum(highest, scores_at(tops, group, group < num_groups, heat))
    return tl.max(highest, 0)


@jit
def _limit(top_k, row, greedy, vocab_size):
    """How many tokens top-k leaves."""
    k = tl.where(greedy, 1, tl.load(top_k + row).to(tl.int64))
    return tl.where((k > 0) & (k < vocab_size), k, vocab_size)


@jit(do_not_specialize=["num_groups", "num_spans"])
def _row_masses(
    logits, temperature, top_k, min_p, tops, masses, vocab_size, num_groups, num_spans,
    SPAN: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The mass of every SPAN tokens, of rows without top-k: for others it is counted when their tokens are known."""
    row, span = (tl.program_id(0) // num_spans).to(tl.int64), tl.program_id(0) % num_spans
    greedy = tl.load(temperature + row) <= 0
    if _limit(top_k, row, greedy, vocab_size) == vocab_size:
        heat = _heat(temperature, row)
        top = _highest(tops + row * num_groups, num_groups, heat, TILE)
        floor = tl.load(min_p + row).to(tl.float64)
        mass = tl.zeros((CHUNK,), tl.int64)
        for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, vocab_size), CHUNK):
            token = start + tl.arange(0, CHUNK)
            inside = token < vocab_size
            score = scores_at(logits + row * vocab_size, token, inside, heat)
            mass += tl.where(inside, _masses(score, top, floor, UNITS), 0)
        tl.store(masses + row * num_spans + span, tl.sum(mass, 0))


@jit
def _search(
    row, listed, count, heat, top, floor, wanted, enough, low, high, from_low,
    LISTED: tl.constexpr, MASS: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The highest key from which on there are `wanted` tokens, or units of mass.

    As many have keys from `low` on and fewer from `high` on, none so far; from_low: how many tokens have keys from `low` on. The
    tokens are the first `count`, or the ones `listed`. Three keys in between are tried at a time, until one token is left there, or
    `enough` tokens from `low` on: then it is not the highest such key.
    """
    from_high = from_low * 0
    while (from_low - from_high > 1) & (from_low > enough):
        step = tl.maximum((high >> 2) - (low >> 2), 1)
        key_1, key_2, key_3 = (
            tl.minimum(low + step, high),
            tl.minimum(low + 2 * step, high),
            tl.minimum(low + 3 * step, high),
        )
        counts = tl.zeros((TILE,), tl.int64)
        mass_1, mass_2, mass_3 = counts, counts, counts
        for start in range(0, count, TILE):
            i = start + tl.arange(0, TILE)
            inside = i < count
            token = i
            if LISTED:
                token = tl.load(listed + i, mask=inside, other=0)
            score = scores_at(row, token, inside, heat)
            key = _key(score, token)
            in_1, in_2, in_3 = inside & (key >= key_1), inside & (key >= key_2), inside & (key >= key_3)
            counts += in_1.to(tl.int64) + (in_2.to(tl.int64) << 21) + (in_3.to(tl.int64) << 42)
            if MASS:
                mass = _masses(score, top, floor, UNITS)
                mass_1 += tl.where(in_1, mass, 0)
                mass_2 += tl.where(in_2, mass, 0)
                mass_3 += tl.where(in_3, mass, 0)
        packed = tl.sum(counts, 0)
        from_1, from_2, from_3 = packed & 0x1FFFFF, (packed >> 21) & 0x1FFFFF, packed >> 42
        if MASS:
            enough_1 = tl.sum(mass_1, 0).to(tl.float64) >= wanted
            enough_2 = tl.sum(mass_2, 0).to(tl.float64) >= wanted
            enough_3 = tl.sum(mass_3, 0).to(tl.float64) >= wanted
        else:
            enough_1, enough_2, enough_3 = from_1 >= wanted, from_2 >= wanted, from_3 >= wanted
        from_low = tl.where(enough_3, from_3, tl.where(enough_2, from_2, tl.where(enough_1, from_1, from_low)))
        low = tl.where(enough_3, key_3, tl.where(enough_2, key_2, tl.where(enough_1, key_1, low)))
        from_high = tl.where(enough_1, tl.where(enough_2, tl.where(enough_3, from_high, from_3), from_2), from_1)
        high = tl.where(enough_1, tl.where(enough_2, tl.where(enough_3, high, key_3), key_2), key_1)
    return low


@jit
def _candidates(row, tops, hits, listed, heat, bound, vocab_size, num_groups, GROUP: tl.constexpr, TILE: tl.constexpr):
    """List the tokens whose score is `bound` at least, the lowest first.  -> how many"""
    num_hits = num_groups * 0
    for start in range(0, num_groups, TILE):
        group = start + tl.arange(0, TILE)
        score = scores_at(tops, group, group < num_groups, heat)
        hit = (score.to(tl.float64) >= bound) & (score > float("-inf"))
        place = num_hits + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(hits + place, group, mask=hit)
        num_hits += tl.sum(hit.to(tl.int32), 0)
    tl.debug_barrier()
    count = num_groups * 0
    for start in range(0, num_hits * GROUP, TILE):
        i = start + tl.arange(0, TILE)
        token = tl.load(hits + i // GROUP, mask=i < num_hits * GROUP, other=vocab_size) * GROUP + i % GROUP
        score = scores_at(row, token, token < vocab_size, heat)
        found = (score.to(tl.float64) >= bound) & (score > float("-inf"))
        place = count + tl.cumsum(found.to(tl.int32), 0) - 1
        tl.store(listed + place, token, mask=found)
        count += tl.sum(found.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@jit
def _bound(
    tops, highest, heat, limit, share, floor, mass, vocab_size, num_groups, TILE: tl.constexpr, UNITS: tl.constexpr
):
    """A score that no token which is kept falls below, in fp64."""
    bound = share * 0.0 + float("-inf")
    if limit <= num_groups:
        low, high = _key(highest * 0.0 + float("-inf"), num_groups * 0 + 0x7FFFFFFF), _key(highest, num_groups * 0) + 1
        # A few groups too many cost less than telling the last ones apart.
        least = _search(
            tops, tops, num_groups, heat, highest, floor, limit, limit + 16, low, high, num_groups.to(tl.int64),
            False, False, TILE, UNITS,
        )  # fmt: skip
        lowest = tl.full((TILE,), float("inf"), tl.float32)
        for start in range(0, num_groups, TILE):
            group = start + tl.arange(0, TILE)
            score = scores_at(tops, group, group < num_groups, heat)
            lowest = tl.minimum(
                lowest, tl.where((group < num_groups) & (_key(score, group) >= least), score, float("inf"))
            )
        bound = tl.min(lowest, 0).to(tl.float64)
    # Both a little lower than they are: rounding must not lose a token.
    if (share < 1) & (limit == vocab_size):
        tail = tl.maximum(0.5 * (1.0 - share) * mass.to(tl.float64) / vocab_size, 0.5)
        bound = tl.maximum(bound, highest.to(tl.float64) + tl.log(tail / UNITS))
    if floor > 0:
        bound = tl.maximum(bound, highest.to(tl.float64) + tl.log(floor) - 0.01)
    return bound


@jit
def _least_of_few(
    row,
    listed,
    count,
    heat,
    highest,
    limit,
    share,
    floor,
    mass,
    end,
    vocab_size,
    FEW: tl.constexpr,
    UNITS: tl.constexpr,
):
    """The lowest key that is kept of at most FEW listed tokens: each is compared with each."""
    i = tl.arange(0, FEW)
    token = tl.load(listed + i, mask=i < count, other=0)
    score = scores_at(row, token, i < count, heat)
    key, mass_ = _key(score, token), _masses(score, highest, floor, UNITS)
    rank, before = tl.zeros((FEW,), tl.int32), tl.zeros((FEW,), tl.int64)
    for start in range(0, count, 16):
        j = start + tl.arange(0, 16)
        other = tl.load(listed + j, mask=j < count, other=0)
        score_j = scores_at(row, other, j < count, heat)
        above = (_key(score_j, other)[None, :] > key[:, None]) & (j < count)[None, :]
        rank += tl.sum(above.to(tl.int32), 1)
        before += tl.sum(tl.where(above, _masses(score_j, highest, floor, UNITS)[None, :], 0), 1)
    keep = (i < count) & (rank < limit)
    if limit < vocab_size:
        mass = tl.sum(tl.where(keep, mass_, 0), 0)
    keep = keep & (before.to(tl.float64) < tl.where(share < 1, share * mass.to(tl.float64), float("inf")))
    return tl.min(tl.where(keep, key, end), 0)


@jit
def _least_of_many(
    row,
    listed,
    count,
    heat,
    highest,
    limit,
    share,
    floor,
    mass,
    least,
    end,
    vocab_size,
    TILE: tl.constexpr,
    UNITS: tl.constexpr,
):
    """The same of any number, by two searches from the key `least` on."""
    from_least = count.to(tl.int64)
    if count > limit:
        least = _search(
            row, listed, count, heat, highest, floor, limit, limit, least, end, from_least, True, False, TILE, UNITS
        )
        from_least = limit
    if share < 1:
        if limit < vocab_size:
            masses = tl.zeros((TILE,), tl.int64)
            for start in range(0, count, TILE):
                i = start + tl.arange(0, TILE)
                token = tl.load(listed + i, mask=i < count, other=0)
                score = scores_at(row, token, i < count, heat)
                kept = (i < count) & (_key(score, token) >= least)
                masses += tl.where(kept, _masses(score, highest, floor, UNITS), 0)
            mass = tl.sum(masses, 0)
        least = _search(
            row, listed, count, heat, highest, floor, share * mass.to(tl.float64), 0, least, end, from_least,
            True, True, TILE, UNITS,
        )  # fmt: skip
    return least


@jit(do_not_specialize=["num_groups", "num_spans"])
def _select(
    logits, temperature, top_k, top_p, min_p, tops, masses, hits, tokens, counts, lowest, top, total,
    vocab_size, num_groups, num_spans,
    GROUP: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr, SPANS: tl.constexpr, UNITS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """What one row keeps."""
    row = tl.program_id(0).to(tl.int64)
    greedy = tl.load(temperature + row) <= 0
    heat, limit = _heat(temperature, row), _limit(top_k, row, greedy, vocab_size)
    share = tl.where(greedy, 1.0, tl.load(top_p + row).to(tl.float64))
    floor = tl.where(greedy, 0.0, tl.load(min_p + row).to(tl.float64))
    logits += row * vocab_size
    tops += row * num_groups
    tokens += row * vocab_size
    span = tl.arange(0, SPANS)
    spans = tl.load(masses + row * num_spans + span, mask=(span < num_spans) & (limit == vocab_size), other=0)
    mass = tl.sum(spans, 0)
    highest = _highest(tops, num_groups, heat, TILE)
    end = _key(highest, num_groups * 0) + 1  # no key is as high
    least = end * 0 + LOWEST
    count = num_groups * 0 + vocab_size.to(tl.int32)
    if highest == float("-inf"):
        count = num_groups * 0 + 1
        mass = end * 0
        tl.store(tokens, 0)
    elif (limit < vocab_size) | (share < 1) | (floor > 0):
        bound = _bound(tops, highest, heat, limit, share, floor, mass, vocab_size, num_groups, TILE, UNITS)
        listed = _candidates(
            logits, tops, hits + row * num_groups, tokens, heat, bound, vocab_size, num_groups, GROUP, TILE
        )
        if listed <= FEW:
            least = _least_of_few(
                logits, tokens, listed, heat, highest, limit, share, floor, mass, end, vocab_size, FEW, UNITS
            )
        else:
            least = _key(bound.to(tl.float32), num_groups * 0 + 0x7FFFFFFF)
            least = _least_of_many(
                logits, tokens, listed, heat, highest, limit, share, floor, mass, least, end, vocab_size, TILE, UNITS
            )
        count = num_groups * 0
        first = end + tl.zeros((TILE,), tl.int64)
        masses_ = tl.zeros((TILE,), tl.int64)
        for start in range(0, listed, TILE):
            i = start + tl.arange(0, TILE)
            token = tl.load(tokens + i, mask=i < listed, other=0)
            score = scores_at(logits, token, i < listed, heat)
            key, mass_ = _key(score, token), _masses(score, highest, floor, UNITS)
            likely = tl.exp(score.to(tl.float64) - highest.to(tl.float64))
            keep = (i < listed) & (key >= least) & ((score == highest) | (likely >= floor))
            place = count + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.debug_barrier()  # what is overwritten has been read
            tl.store(tokens + place, token, mask=keep)
            count += tl.sum(keep.to(tl.int32), 0)
            first = tl.minimum(first, tl.where(keep, key, end))
            masses_ += tl.where(keep, mass_, 0)
            tl.debug_barrier()
        mass, least = tl.sum(masses_, 0), tl.min(first, 0)
    tl.store(counts + row, count)
    tl.store(lowest + row, least)
    tl.store(top + row, tl.where(highest == float("-inf"), 0.0, highest))
    tl.store(total + row, tl.where(greedy, 1.0, mass.to(tl.float64) / UNITS).to(tl.float32))


def scale(logits, temperature):
    """Scores logits / T, those of rows of temperature 0 as they are.  [M, V], [M] -> fp32 [M, V]; ValueError for other shapes"""
    check_rows("scale", logits, temperature)
    if not on_triton(logits):
        return scaled_reference(logits, temperature)
    return _all_scores(logits, temperature, None)


def kept_scores(kept):
    """The scores of a Kept, minus infinity for what is left out; of rows of temperature 0 all.  -> fp32 [M, V]"""
    if not on_triton(kept.logits):
        return kept_scores_reference(kept)
    return _all_scores(kept.logits, kept.temperature, kept.lowest)


def _all_scores(logits, temperature, lowest):
    rows, vocab_size = logits.shape
    scores = torch.empty(rows, vocab_size, dtype=torch.float32, device=logits.device)
    if rows:
        chunks = triton.cdiv(vocab_size, _CHUNK)
        _scores[(rows * chunks,)](
            logits.contiguous(), temperature.contiguous(), scores, lowest, vocab_size, chunks,
            lowest is not None, LOWEST_KEY, _CHUNK, num_warps=4,
        )  # fmt: skip
    return scores


def keep_top(logits, temperature, top_k, top_p, min_p):
    """What min-p, top-k and top-p leave of every row.  logits [M, V] -> Kept

    temperature [M]: rows of 0 are not divided. top_k [M] integers: 0 keeps all. min_p [M] in [0, 1]: tokens less likely than that
    share of the likeliest go. top_p [M] in (0, 1]: of the likeliest tokens that are left, those stay before which less than top_p
    has been counted. Raises ValueError for shapes that do not fit and more than 2^21 tokens.
    """
    check_rows("keep_top", logits, temperature, top_k, top_p, min_p)
    rows, vocab_size = logits.shape
    if vocab_size > 1 << 21:
        raise ValueError(f"keep_top takes logits of at most {1 << 21} tokens, got {vocab_size}")
    if not on_triton(logits):
        return keep_top_reference(logits, temperature, top_k, top_p, min_p)
    logits, temperature, top_k, top_p, min_p = (x.contiguous() for x in (logits, temperature, top_k, top_p, min_p))
    groups, chunks, device = triton.cdiv(vocab_size, _GROUP), triton.cdiv(vocab_size, _CHUNK), logits.device
    kept = Kept(
        logits,
        temperature,
        tokens=torch.empty(rows, vocab_size, dtype=torch.int32, device=device),
        count=torch.empty(rows, dtype=torch.int32, device=device),
        lowest=torch.empty(rows, dtype=torch.int64, device=device),
        top=torch.empty(rows, dtype=torch.float32, device=device),
        total=torch.empty(rows, dtype=torch.float32, device=device),
    )
    if rows:
        tops = torch.empty(rows, groups, dtype=torch.float32, device=device)
        hits = torch.empty(rows, groups, dtype=torch.int32, device=device)
        spans = triton.cdiv(vocab_size, _SPAN)
        masses = torch.empty(rows, spans, dtype=torch.int64, device=device)
        _group_tops[(rows * chunks,)](logits, tops, vocab_size, groups, chunks, _GROUP, _CHUNK // _GROUP, num_warps=4)
        _row_masses[(rows * spans,)](
            logits, temperature, top_k, min_p, tops, masses, vocab_size, groups, spans, _SPAN, _CHUNK // 4, _TILE, _UNITS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _select[(rows,)](
            logits, temperature, top_k, top_p, min_p, tops, masses, hits, *kept[2:], vocab_size, groups, spans,
            _GROUP, _TILE, _FEW, triton.next_power_of_2(spans), _UNITS, LOWEST_KEY, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return kept
