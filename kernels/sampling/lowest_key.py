"""Find the last token of a row that is kept: device functions for keep_top.py.

A *window* is the set of tokens in which the search takes place: all scores of at least `bound`, or one bin of a histogram of
scores. Its tokens are listed. If they are few, each is compared with every other. If they are many, the key is found by bisection:
the tokens, or their mass, at or above some key are counted. Amounts are integers, so the order of a sum does not matter.

Keys: best_token.key_of, which orders tokens by (score, then the lower token first), no two alike. Masses: whole units of 1 / UNITS
of the likeliest token's. heat: the divisor of a row's logits; top: the row's highest score; floor: min-p.
"""

from ..jit import jit, tl
from .best_token import key_of


@jit
def scores_at(row, token, inside, heat):
    """Scores of some tokens of a row whose temperature is `heat`; minus infinity outside."""
    x = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, tl.where(inside, heat, 1.0))
    return tl.where(x == x, tl.where(x == 0.0, 0.0, x), float("-inf"))


@jit
def score_bin(score, top, BINS: tl.constexpr):
    """The bin of the histogram that a score falls into. Bin 0 has the highest scores; a higher score never has a higher bin."""
    below = tl.where(score == top, 0.0, (top - score) * (BINS / 28))  # 2^-40 is e^-27.7
    return tl.minimum(below, BINS - 1.0).to(tl.int32)


@jit
def likelihood(score, top):
    """The probability of a token divided by that of the likeliest, in fp64."""
    return tl.where(score == top, 1.0, tl.exp(score.to(tl.float64) - top.to(tl.float64)))


@jit
def mass_of(score, top, floor, UNITS: tl.constexpr):
    """Whole units of mass; 0 for tokens less than `floor` times as likely as the likeliest."""
    likely = likelihood(score, top)
    return tl.where(likely >= floor, likely * UNITS, 0.0).to(tl.int64)


@jit
def search(
    row, listed, count, are_listed, heat, top, floor, bound, bin, before, wanted, enough, from_low,
    MASS: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The highest key such that the window's tokens with this key or a higher one, and what is `before` the window, reach `wanted`:
    in number, or in units of mass.

    The tokens are the first `count` of the row, or those of the list `listed`. A token is in the window if its score is at least
    `bound` and it is in `bin` (where that is not negative). from_low tokens are in the window, and together they reach `wanted`.
    Three keys are tried at a time, until one token is left between the lowest key that is too high and the highest that is not.
    The search also stops when no more than `enough` tokens have the key or a higher one: it is then not the highest such key.
    """
    low = key_of(tl.where(top == top, float("-inf"), top), count * 0 + 0x7FFFFFFF)
    high = key_of(top, count * 0) + 1
    from_high = from_low * 0
    while (from_low - from_high > 1) & (from_low > enough) & (high > low + 1):
        step = tl.maximum((high >> 2) - (low >> 2), 1)
        key_1, key_2, key_3 = low + step, low + 2 * step, low + 3 * step
        key_1, key_2, key_3 = tl.minimum(key_1, high), tl.minimum(key_2, high), tl.minimum(key_3, high)
        counts = tl.zeros((TILE,), tl.int64)
        mass_1, mass_2, mass_3 = counts, counts, counts
        for start in range(0, count, TILE):
            i = start + tl.arange(0, TILE)
            inside = i < count
            token = tl.where(are_listed, tl.load(listed + i, mask=inside & are_listed, other=0), i)
            score = scores_at(row, token, inside, heat)
            inside = in_window(score, top, bound, bin, BINS)
            key = key_of(score, token)
            in_1, in_2, in_3 = inside & (key >= key_1), inside & (key >= key_2), inside & (key >= key_3)
            counts += in_1.to(tl.int64) + (in_2.to(tl.int64) << 21) + (in_3.to(tl.int64) << 42)
            if MASS:
                mass = mass_of(score, top, floor, UNITS)
                mass_1 += tl.where(in_1, mass, 0)
                mass_2 += tl.where(in_2, mass, 0)
                mass_3 += tl.where(in_3, mass, 0)
        packed = tl.sum(counts, 0)
        from_1, from_2, from_3 = packed & 0x1FFFFF, (packed >> 21) & 0x1FFFFF, packed >> 42
        if MASS:
            enough_1 = (tl.sum(mass_1, 0) + before).to(tl.float64) >= wanted
            enough_2 = (tl.sum(mass_2, 0) + before).to(tl.float64) >= wanted
            enough_3 = (tl.sum(mass_3, 0) + before).to(tl.float64) >= wanted
        else:
            enough_1, enough_2, enough_3 = (
                from_1 + before >= wanted,
                from_2 + before >= wanted,
                from_3 + before >= wanted,
            )
        from_low = tl.where(enough_3, from_3, tl.where(enough_2, from_2, tl.where(enough_1, from_1, from_low)))
        low = tl.where(enough_3, key_3, tl.where(enough_2, key_2, tl.where(enough_1, key_1, low)))
        from_high = tl.where(enough_1, tl.where(enough_2, tl.where(enough_3, from_high, from_3), from_2), from_1)
        high = tl.where(enough_1, tl.where(enough_2, tl.where(enough_3, high, key_3), key_2), key_1)
    return low


@jit
def in_window(score, top, bound, bin, BINS: tl.constexpr):
    """Whether scores are at least `bound` and, if `bin` is not negative, in that bin."""
    own = tl.where(bin >= 0, score_bin(score, top, BINS), bin)
    return (score >= bound) & (score > float("-inf")) & (own == bin)


@jit
def hit_groups(tops, hits, heat, top, bound, bin, num_groups, TILE: tl.constexpr, BINS: tl.constexpr):
    """List the groups that may have tokens in a window.  -> their number"""
    count = num_groups * 0
    for start in range(0, num_groups, TILE):
        group = start + tl.arange(0, TILE)
        score = scores_at(tops, group, group < num_groups, heat)
        hit = (score >= bound) & (score > float("-inf"))
        hit = hit & (tl.where(bin >= 0, score_bin(score, top, BINS), bin) <= bin)
        place = count + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(hits + place, group, mask=hit)
        count += tl.sum(hit.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@jit
def token_of(hits, i, count, vocab_size, GROUP: tl.constexpr):
    """The i-th of the `count` tokens in the listed groups. From i = count on: vocab_size or more."""
    return tl.load(hits + i // GROUP, mask=i < count, other=vocab_size) * GROUP + i % GROUP


@jit
def collect(
    row, tops, hits, few, heat, top, bound, bin, vocab_size, num_groups,
    GROUP: tl.constexpr, MOST: tl.constexpr, SCAN: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """List the tokens in a window, the lowest id first, at most MOST of them.  -> the number of tokens in the window"""
    num_hits = hit_groups(tops, hits, heat, top, bound, bin, num_groups, TILE, BINS)
    count = num_groups * 0
    for start in range(0, num_hits * GROUP, SCAN):
        token = token_of(hits, start + tl.arange(0, SCAN), num_hits * GROUP, vocab_size, GROUP)
        score = scores_at(row, token, token < vocab_size, heat)
        found = in_window(score, top, bound, bin, BINS)
        place = count + tl.cumsum(found.to(tl.int32), 0) - 1
        tl.store(few + place, token, mask=found & (place < MOST))
        count += tl.sum(found.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@jit
def in_turn(row, few, start, count, heat, vocab_size, MOST: tl.constexpr, TILE: tl.constexpr):
    """The next tokens of the list, or of the whole row if the list would be too long; scores of minus infinity after the last."""
    i = start + tl.arange(0, TILE)
    token = tl.where(count <= MOST, tl.load(few + i, mask=(i < count) & (count <= MOST), other=0), i)
    return token, scores_at(row, token, i < tl.where(count <= MOST, count, vocab_size), heat)


@jit
def lowest_key(
    row, few, count, heat, top, floor, bound, bin, before, wanted, vocab_size,
    MASS: tl.constexpr, FEW: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The key of the last kept token: what is ahead of it in the window and what is `before` the window are less than `wanted`.

    Amounts are tokens or units of mass. The window has `count` tokens; few: the list of them, if there are no more than MOST."""
    if count <= FEW:
        # Few tokens: each is compared with every other.
        i = tl.arange(0, FEW)
        token = tl.load(few + i, mask=i < count, other=0)
        key, ahead = key_of(scores_at(row, token, i < count, heat), token), tl.zeros((FEW,), tl.int64)
        for start in range(0, count, 16):
            j = start + tl.arange(0, 16)
            other = tl.load(few + j, mask=j < count, other=0)
            score = scores_at(row, other, j < count, heat)
            amount = tl.where(j < count, mass_of(score, top, floor, UNITS) if MASS else 1, 0).to(tl.int64)
            ahead += tl.sum(tl.where(key_of(score, other)[None, :] > key[:, None], amount[None, :], 0), 1)
        keep = (i < count) & ((ahead + before).to(tl.float64) < wanted)
        least = tl.min(tl.where(keep, key, 0x7FFFFFFFFFFFFFFF), 0)
    else:
        # A search by number may stop at the wanted number of tokens; a search by mass goes on until one token is left.
        enough = (wanted - before).to(tl.int64) * (0 if MASS else 1)
        least = search(
            row, few, tl.where(count <= MOST, count, vocab_size), count <= MOST, heat, top, floor, bound, bin, before, wanted,
            enough, count.to(tl.int64), MASS, TILE, BINS, UNITS,
        )  # fmt: skip
        # The key found may lie below the token's own key, and then tokens below the window would be kept too.
        keys = tl.full((TILE,), 0x7FFFFFFFFFFFFFFF, tl.int64)
        for start in range(0, tl.where(count <= MOST, count, vocab_size), TILE):
            token, score = in_turn(row, few, start, count, heat, vocab_size, MOST, TILE)
            key = key_of(score, token)
            keys = tl.minimum(
                keys, tl.where(in_window(score, top, bound, bin, BINS) & (key >= least), key, 0x7FFFFFFFFFFFFFFF)
            )
        least = tl.min(keys, 0)
    return least


@jit
def mass_from(
    row, few, count, heat, top, floor, bound, bin, least, vocab_size,
    MOST: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The mass of the tokens of a window whose keys are at least `least`."""
    masses = tl.zeros((TILE,), tl.int64)
    for start in range(0, tl.where(count <= MOST, count, vocab_size), TILE):
        token, score = in_turn(row, few, start, count, heat, vocab_size, MOST, TILE)
        kept = in_window(score, top, bound, bin, BINS) & (key_of(score, token) >= least)
        masses += tl.where(kept, mass_of(score, top, floor, UNITS), 0)
    return tl.sum(masses, 0)


@jit
def bin_of(amounts, wanted, BINS: tl.constexpr):
    """The bin in which the amounts, added up from bin 0, reach `wanted`.  -> bin, the amount before it"""
    bin = tl.arange(0, BINS)
    amount = tl.load(amounts + bin)
    found = tl.min(tl.where(tl.cumsum(amount, 0).to(tl.float64) >= wanted, bin, BINS), 0)
    return found, tl.sum(tl.where(bin < found, amount, 0), 0)
