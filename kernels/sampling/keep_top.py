"""Min-p, top-k and top-p: which tokens of a row are kept, and the normaliser of their distribution.

    score of a token = logit / T                                                      T = 0: the logit
    keep_top        the tokens that min-p, top-k and top-p keep in every row          [M, V] -> Kept
    kept_scores     the scores, minus infinity for tokens that are not kept           Kept -> fp32 [M, V]
    scale           the scores of all tokens                                          [M, V] -> fp32 [M, V]

The result is exact: no threshold is approximate. Tokens are ordered by score, ties by the lowest id. Min-p keeps tokens at least
min_p times as likely as the likeliest; top-k keeps the first k. Of the tokens that both keep, top-p keeps a token if those before
it hold less than top_p of the mass. So all three keep the first tokens of one order, and the key of the last kept token
(`best_token.key_of`: score, then token), which is the lowest key, describes the whole set.

Nothing is sorted. One pass over the vocabulary finds the highest score of every group of tokens: where top-k keeps few tokens,
these scores say which groups hold them. Where many are kept, another pass makes a histogram of scores, with mass and number of
tokens per bin: it says which bin holds the last kept token, and lowest_key.py finds it there. Masses are whole numbers of units,
2^-40 of the likeliest token, so the order of a sum does not matter and a row's bits never depend on other rows. NaN counts as
minus infinity.

Letters: M rows, V vocabulary, G groups.
"""

from typing import NamedTuple

import torch

from ..jit import jit, on_triton, tl, triton
from .best_token import key_of, score_of
from .lowest_key import (
    bin_of,
    collect,
    hit_groups,
    likelihood,
    lowest_key,
    mass_from,
    mass_of,
    score_bin,
    scores_at,
    search,
    token_of,
)
from .sample import check_rows

_GROUP = 128  # tokens per group; the highest score of each group is found first
_CHUNK = 4096  # tokens per program of a pass over the vocabulary
_TILE = 1024  # tokens, or groups, that a row's program loads at once
_FEW = 256  # up to this many tokens, every one is compared with every other
_MOST = 8192  # up to this many tokens are listed and searched; beyond, the whole row is searched
_SCAN = 2048  # tokens loaded at once while tokens are listed
_SPAN = 8192  # tokens per program of the pass that adds masses
_BINS = 1024  # of the histogram
_UNITS = 2.0**40  # of mass in the likeliest token
LOWEST_KEY = -0x7F800001 << 32  # no token has a lower key


class Kept(NamedTuple):
    """The kept tokens of M rows, and their distribution: p(v) = exp(score(v) - top) / total for kept tokens, else 0.

    Rows of temperature 0 keep their likeliest token only; kept_scores has all of their scores.
    """

    logits: torch.Tensor  # [M, V] as given
    temperature: torch.Tensor  # [M] as given
    # int32 [M, V] the first `count` are the kept tokens, lowest id first; unset in rows that keep all; None on a CPU
    tokens: torch.Tensor | None
    count: torch.Tensor  # int32 [M]
    lowest: torch.Tensor  # int64 [M] token v is kept if key_of(score(v), v) >= lowest
    top: torch.Tensor  # fp32 [M] the highest score
    total: torch.Tensor  # fp32 [M]


def scaled_reference(logits, temperature):
    """logits / T in fp32 (T = 0: logits), NaN as minus infinity, minus zero as zero.  [M, V], [M] -> [M, V]"""
    scores = logits.float() / torch.where(temperature > 0, temperature.float(), 1)[:, None]
    return torch.where(scores.isnan(), -torch.inf, scores) + 0.0


def keys_reference(scores):
    """best_token.key_of of every token: orders like (score, then the lower token first).  fp32 [M, V] -> int64 [M, V]"""
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) + (0x7FFFFFFF - torch.arange(scores.shape[1], device=scores.device))


def keep_top_reference(logits, temperature, top_k, top_p, min_p):
    """The rule in plain torch."""
    scores, greedy = scaled_reference(logits, temperature), (temperature <= 0)[:, None]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    limit = torch.where(top_k > 0, top_k.long(), scores.shape[1])[:, None]
    # By softmax, which works row by row: the rounding of a bare exp depends on an element's place among all rows.
    likely = ordered.double().softmax(-1)
    likely = torch.where(
        ordered == ordered[:, :1], 1.0, (likely / likely[:, :1]).nan_to_num(0)
    )  # NaN: where the likeliest score is infinite
    keep = (rank < limit) & (likely >= min_p.double()[:, None]) & (ordered > -torch.inf)
    mass = torch.where(keep, likely * _UNITS, 0).long()
    before, share = mass.cumsum(-1) - mass, top_p.double()[:, None]
    keep &= (before < share * mass.sum(-1, keepdim=True).double()) | (share >= 1)
    keep = torch.where(greedy | (ordered[:, :1] == -torch.inf), rank == 0, keep)
    count = keep.sum(-1)
    top = torch.where(ordered[:, 0] > -torch.inf, ordered[:, 0], 0)
    total = torch.where(greedy[:, 0], 1.0, (mass * keep).sum(-1).double() / _UNITS).float()
    lowest = keys_reference(scores).gather(1, order.gather(1, count[:, None] - 1))[:, 0]
    nothing_asked = (limit >= scores.shape[1]) & (share >= 1) & (min_p[:, None] <= 0) & ~greedy
    nothing_asked = (nothing_asked & (ordered[:, :1] > -torch.inf))[:, 0]
    lowest = torch.where(nothing_asked, LOWEST_KEY, lowest)
    count = torch.where(nothing_asked, scores.shape[1], count).int()
    return Kept(logits, temperature, None, count, lowest, top, total)


def kept_scores_reference(kept):
    """The scores, minus infinity for tokens that are not kept, in plain torch."""
    scores = scaled_reference(kept.logits, kept.temperature)
    keep = (keys_reference(scores) >= kept.lowest[:, None]) | (kept.temperature <= 0)[:, None]
    return scores.masked_fill(~keep, -torch.inf)


@jit
def _heat(temperature, row):
    """The divisor of a row's logits."""
    heat = tl.load(temperature + row).to(tl.float32)
    return tl.where(heat > 0, heat, 1.0)


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
        score = tl.where(key_of(score, token) >= least, score, float("-inf"))
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
def _asked(temperature, top_k, top_p, min_p, row, vocab_size):
    """A row's parameters: divisor of its logits, number of tokens that top-k keeps (1 at temperature 0), top-p, min-p."""
    greedy = tl.load(temperature + row) <= 0
    k = tl.where(greedy, 1, tl.load(top_k + row).to(tl.int64))
    limit = tl.where((k > 0) & (k < vocab_size), k, vocab_size)
    share = tl.where(greedy, 1.0, tl.load(top_p + row).to(tl.float64))
    floor = tl.where(greedy, 0.0, tl.load(min_p + row).to(tl.float64))
    return _heat(temperature, row), limit, share, floor


@jit(do_not_specialize=["num_groups", "num_spans"])
def _masses_of_rows(
    logits, temperature, top_k, top_p, min_p, tops, masses, histogram, vocab_size, num_groups, num_spans,
    SPAN: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """For rows that may keep many tokens: the mass of every SPAN tokens, and a histogram of scores (mass and number per bin)."""
    row, span = (tl.program_id(0) // num_spans).to(tl.int64), tl.program_id(0) % num_spans
    heat, limit, share, floor = _asked(temperature, top_k, top_p, min_p, row, vocab_size)
    if 4 * limit > num_groups:
        top = _highest(tops + row * num_groups, num_groups, heat, TILE)
        histogram += row * 2 * BINS
        masses_ = tl.zeros((CHUNK,), tl.int64)
        for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, vocab_size), CHUNK):
            token = start + tl.arange(0, CHUNK)
            score = scores_at(logits + row * vocab_size, token, token < vocab_size, heat)
            there = (token < vocab_size) & (score > float("-inf"))
            mass = tl.where(there, mass_of(score, top, floor, UNITS), 0)
            masses_ += mass
            bin = score_bin(score, top, BINS)
            tl.atomic_add(histogram + bin, mass, mask=tl.where(share < 1, mass, 0) > 0, sem="relaxed")
            tl.atomic_add(histogram + BINS + bin, there.to(tl.int64), mask=there & (limit < vocab_size), sem="relaxed")
        tl.store(masses + row * num_spans + span, tl.sum(masses_, 0))


@jit(do_not_specialize=["num_groups", "num_spans"])
def _select(
    logits, temperature, top_k, top_p, min_p, tops, masses, histogram, hits, few, tokens, counts, lowest, top, total,
    vocab_size, num_groups, num_spans,
    GROUP: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr, SCAN: tl.constexpr, SPANS: tl.constexpr,
    BINS: tl.constexpr, UNITS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Find the kept tokens of one row."""
    row = tl.program_id(0).to(tl.int64)
    heat, limit, share, floor = _asked(temperature, top_k, top_p, min_p, row, vocab_size)
    logits += row * vocab_size
    tokens += row * vocab_size
    tops += row * num_groups
    hits += row * num_groups
    histogram += row * 2 * BINS
    few += row * MOST
    span = tl.arange(0, SPANS)
    spans = tl.load(masses + row * num_spans + span, mask=(span < num_spans) & (limit == vocab_size), other=0)
    mass, none = tl.sum(spans, 0), num_groups.to(tl.int64) * 0
    highest = _highest(tops, num_groups, heat, TILE)
    count, least = num_groups * 0 + vocab_size, none + LOWEST
    if highest == float("-inf"):
        count = num_groups * 0 + 1
        mass = none
        tl.store(tokens, 0)
    elif (limit < vocab_size) | (share < 1) | (floor > 0):
        bound, bin, before, listed = score_of(none + LOWEST), num_groups * 0 - 1, none, num_groups * 0
        if limit < vocab_size:
            if 4 * limit <= num_groups:
                # The scores of the best groups: a few groups too many cost less than a search for the exact last one.
                finite = tl.zeros((TILE,), tl.int64)
                for start in range(0, num_groups, TILE):
                    group = start + tl.arange(0, TILE)
                    finite += (scores_at(tops, group, group < num_groups, heat) > float("-inf")).to(tl.int64)
                least = search(
                    tops, hits, num_groups, num_groups < 0, heat, highest, floor, bound, bin, none, limit, limit + 16,
                    tl.sum(finite, 0), False, TILE, BINS, UNITS,
                )  # fmt: skip
                bound = score_of(least)
            else:
                bin, before = bin_of(histogram + BINS, limit, BINS)
            listed = collect(
                logits, tops, hits, few, heat, highest, bound, bin, vocab_size, num_groups, GROUP, MOST, SCAN, TILE, BINS
            )  # fmt: skip
            least = lowest_key(
                logits, few, listed, heat, highest, floor, bound, bin, before, limit, vocab_size,
                False, FEW, MOST, TILE, BINS, UNITS,
            )  # fmt: skip
            least = tl.where(bin == BINS, LOWEST, least)  # there are no more tokens than top-k keeps
        if share < 1:
            if limit < vocab_size:
                mass = mass_from(
                    logits, few, listed, heat, highest, floor, bound, bin, least, vocab_size, MOST, TILE, BINS, UNITS
                )
                index = tl.arange(0, BINS)
                mass += tl.sum(tl.load(histogram + index, mask=index < bin, other=0), 0)
            wanted = share * mass.to(tl.float64)
            before = none
            if 4 * limit > num_groups:
                bin, before = bin_of(histogram, wanted, BINS)
                listed = collect(
                    logits, tops, hits, few, heat, highest, bound, bin, vocab_size, num_groups, GROUP, MOST, SCAN, TILE, BINS
                )  # fmt: skip
            least = lowest_key(
                logits, few, listed, heat, highest, floor, bound, bin, before, wanted, vocab_size,
                True, FEW, MOST, TILE, BINS, UNITS,
            )  # fmt: skip
        everywhere = (4 * limit > num_groups) | (listed > MOST)  # else the kept tokens are all in the list
        if everywhere:
            bound = score_of(least)
            if floor > 0:  # a little below its value: rounding must not lose a token
                bound = tl.maximum(bound, (highest.to(tl.float64) + tl.log(floor) - 0.01).to(tl.float32))
            listed = GROUP * hit_groups(tops, hits, heat, highest, bound, num_groups * 0 - 1, num_groups, TILE, BINS)
        count = num_groups * 0
        first, masses_ = tl.full((SCAN,), 0x7FFFFFFFFFFFFFFF, tl.int64), tl.zeros((SCAN,), tl.int64)
        for start in range(0, listed, SCAN):
            i = start + tl.arange(0, SCAN)
            if everywhere:
                token = token_of(hits, i, listed, vocab_size, GROUP)
            else:
                token = tl.load(few + i, mask=i < listed, other=vocab_size)
            score = scores_at(logits, token, token < vocab_size, heat)
            key, likely = key_of(score, token), likelihood(score, highest)
            keep = (score > float("-inf")) & (key >= least) & (likely >= floor)
            place = count + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(tokens + place, token, mask=keep)
            count += tl.sum(keep.to(tl.int32), 0)
            first = tl.minimum(first, tl.where(keep, key, 0x7FFFFFFFFFFFFFFF))
            masses_ += tl.where(keep, likely * UNITS, 0.0).to(tl.int64)
        mass, least = tl.sum(masses_, 0), tl.min(first, 0)
    tl.store(counts + row, count)
    tl.store(lowest + row, least)
    tl.store(top + row, tl.where(highest == float("-inf"), 0.0, highest))
    greedy = tl.load(temperature + row) <= 0
    tl.store(total + row, tl.where(greedy, 1.0, mass.to(tl.float64) / UNITS).to(tl.float32))


def scale(logits, temperature):
    """Scores logits / T; rows of temperature 0 are not divided.  [M, V], [M] -> fp32 [M, V]; ValueError for other shapes"""
    check_rows("scale", logits, temperature)
    if not on_triton(logits):
        return scaled_reference(logits, temperature)
    return _all_scores(logits, temperature, None)


def kept_scores(kept):
    """The scores of a Kept, minus infinity for tokens not kept; rows of temperature 0 have all scores.  -> fp32 [M, V]"""
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
    """Find the tokens that min-p, top-k and top-p keep in every row.  logits [M, V] -> Kept

    temperature [M]: rows of 0 are not divided. top_k [M] integers: 0 keeps all. min_p [M] in [0, 1]: drops tokens less likely than
    min_p times the likeliest. top_p [M] in (0, 1]: of the tokens left, keeps a token if the likelier ones hold less than top_p of
    the mass. Raises ValueError for shapes that do not fit and for 2^21 tokens or more.
    """
    check_rows("keep_top", logits, temperature, top_k, top_p, min_p)
    rows, vocab_size = logits.shape
    if vocab_size >= 1 << 21:  # tokens are counted in 21 bits
        raise ValueError(f"keep_top takes logits of less than {1 << 21} tokens, got {vocab_size}")
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
        most, bins = (min(size, max(triton.next_power_of_2(vocab_size), 16)) for size in (_MOST, _BINS))
        few = torch.empty(rows, most, dtype=torch.int32, device=device)
        spans = triton.cdiv(vocab_size, _SPAN)
        masses = torch.empty(rows, spans, dtype=torch.int64, device=device)
        histogram = torch.zeros(rows, 2, bins, dtype=torch.int64, device=device)
        asked = logits, temperature, top_k, top_p, min_p
        _group_tops[(rows * chunks,)](logits, tops, vocab_size, groups, chunks, _GROUP, _CHUNK // _GROUP, num_warps=4)
        _masses_of_rows[(rows * spans,)](
            *asked, tops, masses, histogram, vocab_size, groups, spans, _SPAN, _CHUNK // 4, _TILE, bins, _UNITS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _select[(rows,)](
            *asked, tops, masses, histogram, hits, few, *kept[2:], vocab_size, groups, spans, _GROUP, _TILE, _FEW, most,
            _SCAN, triton.next_power_of_2(spans), bins, _UNITS, LOWEST_KEY, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return kept
